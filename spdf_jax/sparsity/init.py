# SPDX-License-Identifier: Apache-2.0
"""Initial masks by one contract, `(key, params, sparsities) -> mask`."""

from spdf_jax.sparsity.initial_masks import given
from spdf_jax.sparsity.initial_masks import nonzero
from spdf_jax.sparsity.initial_masks import saliency
from spdf_jax.sparsity.initial_masks import scored
from spdf_jax.sparsity.masks import magnitude
from spdf_jax.sparsity.masks import random

__all__ = ['given', 'magnitude', 'nonzero', 'random', 'saliency', 'scored']
