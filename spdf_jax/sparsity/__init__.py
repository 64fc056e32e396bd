# SPDX-License-Identifier: Apache-2.0
"""Sparsity for optax: masks in the optimizer state, algorithms, statistics."""

from spdf_jax.sparsity import init
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import where
from spdf_jax.sparsity.adapters import create_adapters
from spdf_jax.sparsity.adapters import lora
from spdf_jax.sparsity.adapters import merge_adapters
from spdf_jax.sparsity.age import with_age
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.algorithms.combinators import join
from spdf_jax.sparsity.algorithms.combinators import partition
from spdf_jax.sparsity.algorithms.gmp import gmp
from spdf_jax.sparsity.algorithms.granet import granet
from spdf_jax.sparsity.algorithms.iterative import iterative
from spdf_jax.sparsity.algorithms.iterative import Round
from spdf_jax.sparsity.algorithms.rigl import rigl
from spdf_jax.sparsity.algorithms.sparse_evolution import sparse_evolution
from spdf_jax.sparsity.algorithms.static import dense
from spdf_jax.sparsity.algorithms.static import static
from spdf_jax.sparsity.density import scale_by_density
from spdf_jax.sparsity.density import scale_init
from spdf_jax.sparsity.distributions import by_pattern
from spdf_jax.sparsity.distributions import erk
from spdf_jax.sparsity.distributions import igq
from spdf_jax.sparsity.distributions import model_wide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.hard_threshold import hard_threshold
from spdf_jax.sparsity.masks import apply_mask
from spdf_jax.sparsity.masks import map_masked
from spdf_jax.sparsity.reset_state import reset_state
from spdf_jax.sparsity.revival import scaled_normal
from spdf_jax.sparsity.rewinding import rewind_schedule
from spdf_jax.sparsity.rewinding import rewind_weights
from spdf_jax.sparsity.schedules import cubic
from spdf_jax.sparsity.schedules import periodic
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.sparsify import sparsify
from spdf_jax.sparsity.state import check_zeros
from spdf_jax.sparsity.state import densify
from spdf_jax.sparsity.state import get_dense_grads
from spdf_jax.sparsity.state import get_mask
from spdf_jax.sparsity.state import get_masks
from spdf_jax.sparsity.state import SparsifyState
from spdf_jax.sparsity.statistics import summarize
from spdf_jax.sparsity.tracking import mask_statistics

__all__ = [
    'Algorithm',
    'MatrixAxes',
    'Round',
    'SparsifyState',
    'apply_mask',
    'by_pattern',
    'check_zeros',
    'create_adapters',
    'cubic',
    'dense',
    'densify',
    'erk',
    'get_dense_grads',
    'get_mask',
    'get_masks',
    'gmp',
    'granet',
    'hard_threshold',
    'igq',
    'init',
    'iterative',
    'join',
    'lora',
    'map_masked',
    'mask_statistics',
    'merge_adapters',
    'model_wide',
    'partition',
    'periodic',
    'reset_state',
    'rewind_schedule',
    'rewind_weights',
    'rigl',
    'scale_by_density',
    'scale_init',
    'scaled_normal',
    'sparse_evolution',
    'sparsify',
    'static',
    'structures',
    'summarize',
    'uniform',
    'where',
    'with_age',
]
