# SPDX-License-Identifier: Apache-2.0
"""Costs of a run: FLOPs, by formula and of a plan."""

from spdf_jax.costs.flops import training_flops

__all__ = [
    'training_flops',
]
