# SPDX-License-Identifier: Apache-2.0
"""Costs of a run: FLOPs, by formula and of a plan."""

from spdf_jax.costs.flops import effective_sparsity
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.costs.plan_costs import Span

__all__ = [
    'Span',
    'describe_plan',
    'effective_sparsity',
    'forward_flops',
    'training_flops',
]
