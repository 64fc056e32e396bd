"""Exact top-k masks, of layers and of whole models."""

from spdf_jax.sparsity.topk.layers import chosen_by_kernels
from spdf_jax.sparsity.topk.layers import keep_largest
from spdf_jax.sparsity.topk.layers import keep_random
from spdf_jax.sparsity.topk.model import keep_largest_of_all

__all__ = [
    'chosen_by_kernels',
    'keep_largest',
    'keep_largest_of_all',
    'keep_random',
]
