"""Sparse-training algorithms, and their construction by name."""

from spdf_jax.sparsity.algorithms.specs import ALGORITHMS
from spdf_jax.sparsity.algorithms.specs import create_algorithm

__all__ = ['ALGORITHMS', 'create_algorithm']
