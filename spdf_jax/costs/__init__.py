# SPDX-License-Identifier: Apache-2.0
"""Costs of a recipe: FLOPs, dry runs, plans and time on the modeled wafer."""

from spdf_jax.costs.flops import effective_sparsity
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import ModelShape
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.simulation import simulate_inference
from spdf_jax.costs.simulation import simulate_recipe
from spdf_jax.costs.simulation_text import format_estimate
from spdf_jax.costs.sparsity_spans import Span
from spdf_jax.costs.wafer_memory import advise_batch

__all__ = [
    'ModelShape',
    'Span',
    'advise_batch',
    'effective_sparsity',
    'format_estimate',
    'forward_flops',
    'shape_of',
    'simulate_inference',
    'simulate_recipe',
    'training_flops',
]
