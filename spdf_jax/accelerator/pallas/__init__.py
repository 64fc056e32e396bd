# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels that skip pruned blocks, as lowerings on GPUs and TPUs.

A block of weights without a kept weight is neither read nor multiplied, so a
mask of whole blocks, `structures.block(128, 128)`, saves time; for any other
mask the results are the same. No device has measured them yet, so that
`config.matmul='auto'` never chooses them.
"""

from spdf_jax.accelerator.pallas import lowering  # noqa: F401  (registers)
