# SPDX-License-Identifier: Apache-2.0
"""The interpreter of `skip_zeros`: it follows weights to their products."""

from spdf_jax.accelerator.interpreter.evaluation import Evaluation
from spdf_jax.accelerator.interpreter.values import Masks
from spdf_jax.accelerator.interpreter.values import Value

__all__ = ['Evaluation', 'Masks', 'Value']
