"""Plots of the modeled wafer: speedup over sparsity, and the roofline."""

from typing import Any

import numpy as np

from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer import cost as costs
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.runs import style

LAYER = Product(65 * 2048, 12288, 12288)
"""A matrix of GPT-3, with the tokens of the vendor's micro-batch of 65."""

_VENDOR = 1e18 / 120e15  # Printed "AI" FLOP/s over dense FLOP/s of Andromeda.
_PHASES = {'forward': 'o', 'backward': 'x', 'recompute': '+'}


def speedups(device: wafer.WaferDevice, sparsities: Any) -> np.ndarray:
  """Returns the training speedup of a layer of GPT-3 by sparsity.

  Args:
    device: Device, see `WaferDevice.as_kernel`.
    sparsities: Fractions of zeros [N].

  Returns:
    Time of forward, dX and dW of the dense layer over that of the sparse layer,
    [N].

  Example:
    >>> ideal = wafer.create_device('cs2', 'ideal')
    >>> speedups(ideal, [0.5, 0.75]).round(6).tolist()
    [2.0, 4.0]
  """

  def cycles(sparsity):
    forward = LAYER._replace(sparsity=sparsity)
    # The matrix is square, so dX costs as much as the forward product.
    works = forward, forward, forward._replace(sampled=True)
    return sum(float(costs.cost_of(work, device).cycles) for work in works)

  return np.array([cycles(0.0) / cycles(s) for s in sparsities])


def plot_appendix_c(name: str = 'cs2') -> Any:
  """Plots the predictions of the wafer model as Figure 1 of SPDF's Appendix C.

  The theoretical speedup is exactly n at a sparsity of 1 - 1/n, n from 1 to 10.
  The measured series of that figure is not plotted, as its numbers are not
  printed.

  Args:
    name: Name of the device.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ValueError: the device is unknown.
    ImportError: matplotlib is not installed.

  References:
    Thangarasa et al. 2023, "SPDF", appendix C, after Lie 2021.

  Example:
    >>> len(plot_appendix_c().axes)
    1
  """
  theory = np.arange(1, 11)
  fine = np.linspace(1, 10, 181)
  curve = lambda band, at: speedups(
      wafer.create_device(name, band).as_kernel(), 1 - 1 / at
  )
  figure = style.new_figure(7.4, 4.6)
  ax = figure.subplots()
  low, high = curve('pessimistic', fine), curve('optimistic', fine)
  blue, orange = style.COLORS[:2]
  ax.fill_between(fine, low, high, color=blue, alpha=0.16, linewidth=0)
  ax.plot(
      theory, theory, 'o-', color=style.GREY, markersize=4, linewidth=1.2
  )
  ax.plot(fine, curve('default', fine), color=blue, linewidth=1.8)
  ax.plot(theory, curve('default', theory), 'o', color=blue, markersize=4)
  ax.axhline(_VENDOR, color=orange, linewidth=1.2, linestyle='--')
  ax.set(
      xlim=(1, 10.15), ylim=(0.6, 10.6),
      xlabel='Sparsity, 1 − 1/n',
      ylabel='Speedup over dense',
  )
  ax.set_xticks(theory, [f'{1 - 1 / n:.2g}' for n in theory])
  ax.set_yticks(range(1, 11))
  style.polish(ax)
  ax.set_title(
      'Forward and both gradients of a 12,288 × 12,288 matrix, 133,120 tokens',
      loc='left', fontsize=10,
  )
  notes = (
      (6.1, 6.45, 'theory, 1 to 10', style.GREY, 'right'),
      (10, 5.4, 'wafer model, default', blue, 'right'),
      (10, 4.9, '(calibrated; band: optimistic to pessimistic)', blue,
       'right'),
      (1.2, _VENDOR + 0.2, f'printed by the vendor: {_VENDOR:.1f} × '
       '("AI" over dense peak)', orange, 'left'),
      (1.2, 7.55, 'measured series of Appendix C: not available',
       style.PALE, 'left'),
  )
  for x, y, text, color, side in notes:
    ax.text(x, y, text, color=color, ha=side, fontsize=8.5)
  return figure


def plot_roofline(report: wafer.Report) -> Any:
  """Plots the products of a report below the rooflines of its device.

  Args:
    report: Report of a program with products of weights.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ValueError: the report has no products of weights.
    ImportError: matplotlib is not installed.

  Example:
    >>> report = wafer.simulate(lambda x, w: x @ w, wafer.create_device('cs2'))
    >>> len(plot_roofline(report(np.ones((9, 9)), np.ones((9, 9)))).axes)
    1
  """
  device, systems = report.device, report.systems
  rows = [r for r in report.rows if isinstance(r.operation.work, Product)]
  if not rows:
    raise ValueError('the report has no products of weights to draw.')
  per_system = np.array([r.cost.flops for r in rows], float) / systems
  # FLOPs per streamed byte: weights are streamed once for all tokens.
  intensity = per_system / [r.cost.streamed_bytes for r in rows]
  rate = per_system / [r.cost.cycles / device.clock for r in rows]
  figure = style.new_figure(7.4, 4.6)
  ax = figure.subplots()
  io = device.io_bandwidth / 8
  ridge = device.peak_flops / io
  limits = min(intensity.min(), ridge) / 8, max(intensity.max(), ridge) * 4
  x = np.geomspace(*limits, 200)
  ax.plot(
      x, np.minimum(device.peak_flops, x * io), color=style.GREY,
      linewidth=1.4,
  )
  roof = device.peak_flops * device.efficiency
  ax.plot(
      x, np.minimum(roof, x * io), color=style.PALE, linewidth=1.2,
      linestyle='--',
  )
  for (phase, marker), color in zip(_PHASES.items(), style.COLORS):
    chosen = [r.operation.phase == phase for r in rows]
    if any(chosen):
      ax.plot(
          intensity[chosen], rate[chosen], marker, color=color, markersize=6,
          label=phase,
      )
  ax.set(
      xscale='log', yscale='log', xlim=limits,
      ylim=(min(rate.min(), roof) / 3, device.peak_flops * 3),
      xlabel='FLOPs per byte streamed', ylabel='FLOP/s per system',
  )
  style.polish(ax)
  right = limits[1] / 1.1
  peak = device.peak_flops
  for height, text, color in (
      (peak, f'peak, {peak / 1e15:.2f} PF', style.GREY),
      (roof, f'{device.efficiency:.3g} of peak (calibrated)', style.PALE),
  ):
    ax.text(right, height * 1.1, text, color=color, ha='right', fontsize=8.5)
  ax.legend(frameon=False, fontsize=8.5, loc='lower right')
  ax.set_title(
      f'Products of weights on {systems} × {device.name}, modeled',
      loc='left', fontsize=10,
  )
  return figure
