# SPDX-License-Identifier: Apache-2.0
"""CPU kernels that skip pruned weights: `lowering='native'`."""

from spdf_jax.accelerator.native import lowering  # noqa: F401  (registers)
from spdf_jax.accelerator.native.library import has_matrix_unit
from spdf_jax.accelerator.native.library import is_available
from spdf_jax.accelerator.native.library import kernels
from spdf_jax.accelerator.native.library import Unavailable
from spdf_jax.lowerings import NATIVE

__all__ = [
    'NATIVE', 'Unavailable', 'has_matrix_unit', 'is_available', 'kernels',
]
