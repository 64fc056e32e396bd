# SPDX-License-Identifier: Apache-2.0
"""spdf_jax: sparse pre-training and dense fine-tuning in JAX.

This namespace holds the sparsity transforms and `skip_zeros`, which need only
jax, optax and numpy. Models, data, training, evaluation, costs and runs are
imported by name, e.g. `from spdf_jax import models`.
"""

import importlib.util

from spdf_jax.accelerator import skip_zeros
from spdf_jax.sparsity import *  # noqa: F403
from spdf_jax.sparsity import __all__ as _transforms

__all__ = [*_transforms, 'skip_zeros']  # noqa: PLE0604

__version__ = '0.1.0'


def __getattr__(name: str) -> object:
  """Names the import that a module of the library needs."""
  hint = ''
  if importlib.util.find_spec(f'spdf_jax.{name}'):
    hint = f'; import it with `from spdf_jax import {name}`'
  raise AttributeError(f"module 'spdf_jax' has no attribute {name!r}{hint}.")
