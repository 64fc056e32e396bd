"""Sparse-training algorithms, and their names."""

from spdf_jax.sparsity.algorithms.specs import ALGORITHMS
from spdf_jax.sparsity.algorithms.specs import create_algorithm

__all__ = ['ALGORITHMS', 'create_algorithm']
