# SPDX-License-Identifier: Apache-2.0
"""The modeled wafer: the cost of a program on a CS-2 or CS-3."""

from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.interpret import trace_program
from spdf_jax.accelerator.wafer.rules import register_cost
from spdf_jax.accelerator.wafer.simulate import Report
from spdf_jax.accelerator.wafer.simulate import report_on
from spdf_jax.accelerator.wafer.simulate import simulate

__all__ = [
    'Report',
    'WaferDevice',
    'create_device',
    'register_cost',
    'report_on',
    'simulate',
    'trace_program',
]
