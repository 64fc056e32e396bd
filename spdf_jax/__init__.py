# SPDX-License-Identifier: Apache-2.0
"""spdf_jax: sparse pre-training and dense fine-tuning in JAX.

This namespace holds the sparsity transforms, which need only jax, optax and
numpy. Models, data, training, evaluation, costs and runs are imported by name,
e.g. `from spdf_jax import models`.
"""

import importlib.util

from spdf_jax.sparsity import *  # noqa: F403
from spdf_jax.sparsity import __all__ as __all__

__version__ = '0.1.0'

_MOVED = {
    'check': 'check_zeros',
    'convolutions': 'where.convolutions',
    'cosine': 'sparsity.schedules.cosine',
    'create_algorithm': 'sparsity.algorithms.create_algorithm',
    'given_mask': 'init.given',
    'hidden_matrices': 'where.hidden_matrices',
    'magnitude_mask': 'init.magnitude',
    'map_like_params': 'sparsity.like_params.map_like_params',
    'mask_changes': 'sparsity.statistics.mask_changes',
    'mask_from_scores': 'sparsity.masks.mask_from_scores',
    'MaskTrackingState': 'sparsity.tracking.MaskTrackingState',
    'matrices': 'where.matrices',
    'nonzero_mask': 'init.nonzero',
    'overlap': 'sparsity.statistics.mask_changes',
    'pack_state': 'sparsity.storage.pack_state',
    'per_head': 'where.per_head',
    'random_mask': 'init.random',
    'round_starts': 'sparsity.algorithms.iterative.round_starts',
    'saliency_mask': 'init.saliency',
    'scored_mask': 'init.scored',
    'stacked': 'where.stacked',
    'state_shardings': 'sparsity.like_params.state_shardings',
    'stored_mask': 'sparsity.state.stored_mask',
    'track_masks': 'sparsify(..., track=True)',
    'unpack_state': 'sparsity.storage.unpack_state',
    'update_times': 'sparsity.schedules.update_times',
}


def __getattr__(name: str) -> object:
  """Names what replaces a public name of the last version."""
  found = f'; use spdf_jax.{_MOVED[name]}' if name in _MOVED else ''
  if importlib.util.find_spec(f'spdf_jax.{name}'):
    found = f'; import it with `from spdf_jax import {name}`'
  raise AttributeError(f"module 'spdf_jax' has no attribute {name!r}{found}.")
