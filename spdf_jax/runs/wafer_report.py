# SPDX-License-Identifier: Apache-2.0
"""Reports of simulations: the cost of a config on the modeled wafer."""

from collections.abc import Iterator
from typing import Any

from spdf_jax import training
from spdf_jax.accelerator.wafer import what_if
from spdf_jax.accelerator.wafer.comparisons import comparison_table
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.simulate import Report
from spdf_jax.accelerator.wafer.validation import validation_table
from spdf_jax.accelerator.wafer.views import format_report
from spdf_jax.accelerator.wafer.views import sensitivity_table
from spdf_jax.accelerator.wafer.views import write_trace
from spdf_jax.costs.simulation import simulate_inference
from spdf_jax.costs.simulation import simulate_recipe
from spdf_jax.costs.simulation_text import format_estimate
from spdf_jax.costs.simulation_text import format_inference
from spdf_jax.costs.simulation_text import Rate
from spdf_jax.runs.wafer_plots import plot_appendix_c
from spdf_jax.runs.wafer_plots import plot_roofline

MODES = ['train', 'forward', 'decode']
"""Modes of a simulation: all phases of the plan, or inference."""

FIGURES = ['appendix_c', 'roofline']
"""Figures of a simulation; only `'roofline'` needs a config."""


def describe(
    config: Any | None,
    device: str,
    band: str,
    *,
    systems: int,
    mode: str,
    batch_size: int,
    figure: str | None,
    out: str | None,
    trace: str | None,
    validate: bool,
    audit: bool,
    sensitivities: bool,
    price: tuple[float | None, str],
    carbon: tuple[float | None, str],
) -> Iterator[str]:
  """Describes a device, and the cost of a config on it.

  Args:
    config: A ConfigDict; `None`: only the device is described.
    device: `'cs2'` or `'cs3'`.
    band: A key of `BANDS`, the overhead in addition to multiply-adds.
    systems: Number of systems of the cluster.
    mode: One of `MODES`.
    batch_size: Number of sequences, for `'forward'` and `'decode'`.
    figure: One of `FIGURES` to plot; `None`: no figure.
    out: Path of the figure; `None`: the figure's name, as PNG.
    trace: Path of a Perfetto trace; `None`: no trace.
    validate: Whether to compare the wafer model with published numbers.
    audit: Whether to list every constant of the device.
    sensitivities: Whether to list the effect of each constant.
    price: Price per hour of a system and its source; `None` and `''` for none.
    carbon: kg of CO2 per kWh and its source; `None` and `''` for none.

  Yields:
    Texts of the report, and the paths of written files.

  Raises:
    ValueError: The device is unknown, the config is invalid, or a rate has no
      source.
    ImportError: A figure is plotted and matplotlib is not installed.
  """
  wafer = create_device(device, band)
  if audit:
    yield wafer.audit()
  if validate:
    yield validation_table()
  if figure == 'appendix_c':
    yield _save(plot_appendix_c(device), out or 'appendix_c.png')
  if config is None:
    return
  rates = {
      'price': Rate.checked('price_per_hour', *price),
      'carbon': Rate.checked('carbon_per_kwh', *carbon),
  }
  recipe = training.create_recipe(config, planning=True)
  if mode == 'train':
    text, report = _describe_training(recipe, wafer, systems, rates)
  else:
    found = simulate_inference(
        recipe, wafer, systems, batch_size=batch_size,
        length=recipe.plan.phases[0].length, decode=mode == 'decode',
    )
    text = format_inference(found, decode=mode == 'decode')
    report = found[0].report
  yield text
  yield '\n' + format_report(report)
  if sensitivities:
    effects = what_if.sensitivities(report.program, wafer, systems=systems)
    yield '\n' + sensitivity_table(effects)
  if trace:
    yield f'{write_trace(report, trace)} is written: ui.perfetto.dev'
  if figure == 'roofline':
    yield _save(plot_roofline(report), out or 'roofline.png')


def _describe_training(
    recipe: training.Recipe, device: WaferDevice, systems: int,
    rates: dict[str, Rate | None],
) -> tuple[str, Report]:
  """Returns the cost of a plan as text, and the report of its first step."""
  estimate = simulate_recipe(recipe, device, systems)
  text = format_estimate(estimate, recipe, **rates)
  table = comparison_table(estimate.report.program)
  return f'{text}\n\nfirst step: {table}', estimate.report


def _save(figure: Any, path: str) -> str:
  figure.savefig(path)
  return f'{path} is written'
