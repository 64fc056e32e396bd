# SPDX-License-Identifier: Apache-2.0
"""Runs: launching runs, reading finished ones, reports and plots."""

from spdf_jax.runs.curves import flops_at
from spdf_jax.runs.lifecycle import launch
from spdf_jax.runs.read import read_run
from spdf_jax.runs.report import write_report

__all__ = [
    'flops_at',
    'launch',
    'read_run',
    'write_report',
]
