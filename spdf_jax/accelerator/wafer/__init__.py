# SPDX-License-Identifier: Apache-2.0
"""The modeled wafer: programs costed on a CS-2 or CS-3, or executed on it."""

from spdf_jax.accelerator.wafer.cost_rules import register_cost
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.execute import lowering
from spdf_jax.accelerator.wafer.execute import record
from spdf_jax.accelerator.wafer.simulate import Report
from spdf_jax.accelerator.wafer.simulate import report_on
from spdf_jax.accelerator.wafer.simulate import simulate
from spdf_jax.accelerator.wafer.trace import trace_program

__all__ = [
    'Report',
    'WaferDevice',
    'create_device',
    'lowering',
    'record',
    'register_cost',
    'report_on',
    'simulate',
    'trace_program',
]
