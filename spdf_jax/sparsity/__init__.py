# SPDX-License-Identifier: Apache-2.0
"""Sparsity for optax: masks in the optimizer state, algorithms, statistics."""

from spdf_jax.sparsity import structures
from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms.gmp import gmp
from spdf_jax.sparsity.algorithms.granet import granet
from spdf_jax.sparsity.algorithms.iterative import iterative
from spdf_jax.sparsity.algorithms.iterative import Round
from spdf_jax.sparsity.algorithms.iterative import round_starts
from spdf_jax.sparsity.algorithms.iterative import rounds_to
from spdf_jax.sparsity.algorithms.rigl import rigl
from spdf_jax.sparsity.algorithms.sparse_evolution import sparse_evolution
from spdf_jax.sparsity.algorithms.static import dense
from spdf_jax.sparsity.algorithms.static import static
from spdf_jax.sparsity.combinators import join
from spdf_jax.sparsity.combinators import partition
from spdf_jax.sparsity.counts import sparsities_of
from spdf_jax.sparsity.distributions import by_pattern
from spdf_jax.sparsity.distributions import erk
from spdf_jax.sparsity.distributions import model_wide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.initial_masks import given_mask
from spdf_jax.sparsity.initial_masks import nonzero_mask
from spdf_jax.sparsity.initial_masks import saliency_mask
from spdf_jax.sparsity.initial_masks import scored_mask
from spdf_jax.sparsity.like_params import map_like_params
from spdf_jax.sparsity.like_params import state_shardings
from spdf_jax.sparsity.masks import apply_mask
from spdf_jax.sparsity.masks import magnitude_mask
from spdf_jax.sparsity.masks import map_masked
from spdf_jax.sparsity.masks import mask_from_scores
from spdf_jax.sparsity.masks import random_mask
from spdf_jax.sparsity.reset_state import reset_state
from spdf_jax.sparsity.rewinding import rewind_schedule
from spdf_jax.sparsity.rewinding import rewind_weights
from spdf_jax.sparsity.schedules import cosine
from spdf_jax.sparsity.schedules import cubic
from spdf_jax.sparsity.schedules import periodic
from spdf_jax.sparsity.schedules import update_times
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.selectors import convolutions
from spdf_jax.sparsity.selectors import hidden_matrices
from spdf_jax.sparsity.selectors import matrices
from spdf_jax.sparsity.selectors import per_head
from spdf_jax.sparsity.selectors import stacked
from spdf_jax.sparsity.sparsify import scaled_normal
from spdf_jax.sparsity.sparsify import sparsify
from spdf_jax.sparsity.state import check
from spdf_jax.sparsity.state import densify
from spdf_jax.sparsity.state import get_dense_grads
from spdf_jax.sparsity.state import get_mask
from spdf_jax.sparsity.state import SparsifyState
from spdf_jax.sparsity.state import stored_mask
from spdf_jax.sparsity.statistics import mask_changes
from spdf_jax.sparsity.statistics import overlap
from spdf_jax.sparsity.statistics import summarize
from spdf_jax.sparsity.storage import pack_state
from spdf_jax.sparsity.storage import unpack_state
from spdf_jax.sparsity.tracking import mask_statistics
from spdf_jax.sparsity.tracking import MaskTrackingState
from spdf_jax.sparsity.tracking import track_masks

__all__ = [
    'Algorithm',
    'MaskTrackingState',
    'MatrixAxes',
    'Round',
    'SparsifyState',
    'apply_mask',
    'by_pattern',
    'check',
    'convolutions',
    'cosine',
    'create_algorithm',
    'cubic',
    'dense',
    'densify',
    'erk',
    'get_dense_grads',
    'get_mask',
    'given_mask',
    'gmp',
    'granet',
    'hidden_matrices',
    'iterative',
    'join',
    'magnitude_mask',
    'map_like_params',
    'map_masked',
    'mask_changes',
    'mask_from_scores',
    'mask_statistics',
    'matrices',
    'model_wide',
    'nonzero_mask',
    'overlap',
    'pack_state',
    'partition',
    'per_head',
    'periodic',
    'random_mask',
    'reset_state',
    'rewind_schedule',
    'rewind_weights',
    'rigl',
    'round_starts',
    'rounds_to',
    'saliency_mask',
    'scaled_normal',
    'scored_mask',
    'sparse_evolution',
    'sparsify',
    'sparsities_of',
    'stacked',
    'state_shardings',
    'static',
    'stored_mask',
    'structures',
    'summarize',
    'track_masks',
    'uniform',
    'unpack_state',
    'update_times',
]
