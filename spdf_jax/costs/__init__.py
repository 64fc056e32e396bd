# SPDX-License-Identifier: Apache-2.0
"""Costs of a run: FLOPs, those of a plan, and time on the modeled wafer."""

from spdf_jax.costs.flops import effective_sparsity
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.costs.plan_costs import Span
from spdf_jax.costs.wafer_costs import advise_batch
from spdf_jax.costs.wafer_costs import simulate_inference
from spdf_jax.costs.wafer_costs import simulate_run
from spdf_jax.costs.wafer_costs import training_step

__all__ = [
    'Span',
    'advise_batch',
    'describe_plan',
    'effective_sparsity',
    'forward_flops',
    'simulate_inference',
    'simulate_run',
    'training_flops',
    'training_step',
]
