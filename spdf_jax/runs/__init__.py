# SPDX-License-Identifier: Apache-2.0
"""Runs: launching runs, reading finished ones, reports and plots."""

from spdf_jax.runs.curves import Comparison
from spdf_jax.runs.curves import dense_flops_at
from spdf_jax.runs.curves import flops_at
from spdf_jax.runs.curves import losses_at_equal
from spdf_jax.runs.curves import pretraining_curve
from spdf_jax.runs.curves import seconds_at
from spdf_jax.runs.curves import tokens_at
from spdf_jax.runs.lifecycle import launch
from spdf_jax.runs.plots import plot_layer_sparsity
from spdf_jax.runs.plots import plot_loss_over_flops
from spdf_jax.runs.plots import plot_loss_over_steps
from spdf_jax.runs.plots import plot_loss_over_tokens
from spdf_jax.runs.plots import plot_mask_updates
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import read_run
from spdf_jax.runs.read import RunRecord
from spdf_jax.runs.report import write_report

__all__ = [
    'Comparison',
    'PhaseRecord',
    'RunRecord',
    'dense_flops_at',
    'flops_at',
    'launch',
    'losses_at_equal',
    'plot_layer_sparsity',
    'plot_loss_over_flops',
    'plot_loss_over_steps',
    'plot_loss_over_tokens',
    'plot_mask_updates',
    'pretraining_curve',
    'read_run',
    'seconds_at',
    'tokens_at',
    'write_report',
]
