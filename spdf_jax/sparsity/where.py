# SPDX-License-Identifier: Apache-2.0
"""Which leaves to sparsify, and the axes of their matrices: for `where=`."""

from spdf_jax.sparsity.selection import layer_shapes
from spdf_jax.sparsity.selectors import any_of
from spdf_jax.sparsity.selectors import convolutions
from spdf_jax.sparsity.selectors import hidden_matrices
from spdf_jax.sparsity.selectors import matrices
from spdf_jax.sparsity.selectors import per_head
from spdf_jax.sparsity.selectors import stacked

__all__ = [
    'any_of', 'convolutions', 'hidden_matrices', 'layer_shapes', 'matrices',
    'per_head', 'stacked',
]
