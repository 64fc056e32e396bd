# SPDX-License-Identifier: Apache-2.0
"""Sparse-training algorithms, and their construction by name."""

from spdf_jax.sparsity.algorithms.from_config import ALGORITHMS
from spdf_jax.sparsity.algorithms.from_config import create_algorithm
from spdf_jax.sparsity.algorithms.from_config import initial_masks_of
from spdf_jax.sparsity.algorithms.from_config import member_specs
from spdf_jax.sparsity.algorithms.from_config import resolve
from spdf_jax.sparsity.algorithms.from_config import user_functions
from spdf_jax.sparsity.algorithms.from_config import with_default_init

__all__ = [
    'ALGORITHMS', 'create_algorithm', 'initial_masks_of', 'member_specs',
    'resolve', 'user_functions', 'with_default_init',
]
