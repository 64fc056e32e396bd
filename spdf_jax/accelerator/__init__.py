# SPDX-License-Identifier: Apache-2.0
"""Sparse compute as JAX primitives, and their lowerings."""

from spdf_jax.accelerator import pallas  # noqa: F401  (registers)
from spdf_jax.accelerator.listed_matrix import list_matrix
from spdf_jax.accelerator.listed_matrix import list_params
from spdf_jax.accelerator.listed_matrix import listed_matmul
from spdf_jax.accelerator.listed_matrix import ListedMatrix
from spdf_jax.accelerator.native import NATIVE
from spdf_jax.accelerator.primitives import matmuls_saveable
from spdf_jax.accelerator.primitives import sampled_matmul_p
from spdf_jax.accelerator.primitives import sparse_matmul
from spdf_jax.accelerator.primitives import sparse_matmul_p
from spdf_jax.accelerator.skip_zeros import explain
from spdf_jax.accelerator.skip_zeros import skip_zeros
from spdf_jax.lowerings import register_lowering

__all__ = [
    'NATIVE',
    'ListedMatrix',
    'explain',
    'list_matrix',
    'list_params',
    'listed_matmul',
    'matmuls_saveable',
    'register_lowering',
    'sampled_matmul_p',
    'skip_zeros',
    'sparse_matmul',
    'sparse_matmul_p',
]
