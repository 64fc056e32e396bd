# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels that skip pruned blocks, as lowerings on GPUs and TPUs.

The kernels neither read nor multiply a block of weights without a kept weight,
so a mask of whole blocks, `structures.block(128, 128)`, can save time; for any
other mask the results are the same. XLA masks the whole matrix before them. No
device has measured them yet, so that `config.matmul='auto'` never chooses them.
"""

from spdf_jax.accelerator.pallas import lowering  # noqa: F401  (registers)
