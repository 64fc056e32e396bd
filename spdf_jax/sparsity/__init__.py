"""Sparsity for optax: masks in the optimizer state, algorithms, statistics."""

from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms.static import dense
from spdf_jax.sparsity.algorithms.static import static
from spdf_jax.sparsity.combinators import join
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.masks import apply_mask
from spdf_jax.sparsity.masks import magnitude_mask
from spdf_jax.sparsity.masks import mask_from_scores
from spdf_jax.sparsity.masks import random_mask
from spdf_jax.sparsity.restart import restart
from spdf_jax.sparsity.selection import hidden_matrices
from spdf_jax.sparsity.sparsify import Algorithm
from spdf_jax.sparsity.sparsify import densify
from spdf_jax.sparsity.sparsify import get_dense_grads
from spdf_jax.sparsity.sparsify import get_mask
from spdf_jax.sparsity.sparsify import sparsify
from spdf_jax.sparsity.sparsify import SparsifyState
from spdf_jax.sparsity.state_matching import map_like_params
from spdf_jax.sparsity.statistics import summarize

__all__ = [
    'Algorithm',
    'SparsifyState',
    'apply_mask',
    'create_algorithm',
    'dense',
    'densify',
    'get_dense_grads',
    'get_mask',
    'hidden_matrices',
    'join',
    'magnitude_mask',
    'map_like_params',
    'mask_from_scores',
    'random_mask',
    'restart',
    'sparsify',
    'static',
    'summarize',
    'uniform',
]
