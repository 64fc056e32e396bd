"""The modeled wafer: what a program would take on a CS-2 or CS-3."""

from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.report import Report
from spdf_jax.accelerator.wafer.report import report_on
from spdf_jax.accelerator.wafer.rules import register_cost
from spdf_jax.accelerator.wafer.simulate import simulate
from spdf_jax.accelerator.wafer.simulate import trace_program

__all__ = [
    'Report',
    'WaferDevice',
    'create_device',
    'register_cost',
    'report_on',
    'simulate',
    'trace_program',
]
