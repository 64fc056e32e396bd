"""Figures of experiments.rates: coordinates, densities, a dense transition."""

import collections
import statistics
from typing import Any

from experiments.papers import coordinates
from spdf_jax.runs import style

NAMES = {'standard': 'Standard', 'sparse-mup': 'Sparse muP'}

BEFORE, AFTER = 10, 50
"""Steps before and after the transition of which losses are kept."""

_TOLERANCE = 0.1


def plot_coordinates(rows: list[dict[str, Any]]) -> Any:
  """Plots changes over those at the base, over the width.

  A row of panels for each parameterization and a column for each step; a line
  for each kind of layer in the colour of its density, and a band of 10 %.
  """
  rows = coordinates.relative(rows)
  names = list(dict.fromkeys(row['parameterization'] for row in rows))
  densities = list(dict.fromkeys(row['density'] for row in rows))
  figure = style.new_figure(8.4, 0.5 + 2.5 * len(names))
  panels = figure.subplots(
      len(names), len(coordinates.STEPS), sharex=True, sharey=True,
      squeeze=False,
  )
  for (name, step), ax in zip(
      ((n, str(s)) for n in names for s in coordinates.STEPS), panels.ravel()
  ):
    ax.axhspan(1 - _TOLERANCE, 1 + _TOLERANCE, color='#E4E4E4', zorder=0)
    for i, density in enumerate(densities):
      chosen = [
          row for row in rows
          if (row['parameterization'], row['density']) == (name, density)
      ]
      for j, layer in enumerate(chosen[0]['changes'][step]):
        ax.plot(
            [row['width'] for row in chosen],
            [row['changes'][step][layer] for row in chosen],
            color=style.COLORS[i % len(style.COLORS)], linewidth=1,
            marker='o', markersize=2.5,
            label=None if j else f'density {density:g}',
        )
    widths = sorted({row['width'] for row in rows})
    ax.set(xscale='log', yscale='log')
    ax.set_xticks(widths, map(str, widths))
    ax.minorticks_off()
    ax.set_yticks([1 / 16, 1 / 4, 1, 4, 16], ['1/16', '1/4', '1', '4', '16'])
    style.polish(ax)
    ax.set_title(
        f'{NAMES.get(name, name)}, step {step}', loc='left',
        fontweight='bold', fontsize=9,
    )
  for ax in panels[-1]:
    ax.set_xlabel('Width')
  for ax in panels[:, 0]:
    ax.set_ylabel('Change over that of the base')
  panels[0, 0].legend(frameon=False, fontsize=8)
  return figure


def plot_densities(results: list[dict[str, Any]]) -> Any:
  """Plots mean losses over rates, a panel per parameterization.

  A star marks the best rate of each density.
  """
  losses = collections.defaultdict(list)
  for r in results:
    losses[r['name'], r['density'], r['rate']].append(r['loss'])
  means = {key: statistics.fmean(values) for key, values in losses.items()}
  figure = style.new_figure(8.4, 3.6)
  panels = figure.subplots(1, len(NAMES), sharey=True)
  for ax, (name, title) in zip(panels, NAMES.items()):
    densities = sorted({d for n, d, _ in means if n == name}, reverse=True)
    for i, density in enumerate(densities):
      line = sorted(
          (rate, loss) for (n, d, rate), loss in means.items()
          if (n, d) == (name, density)
      )
      look = style.line_style(i)
      ax.plot(*zip(*line), label=f'density {density:g}', markersize=4, **look)
      best = min(line, key=lambda point: point[1])
      ax.plot(*best, '*', color=look['color'], markersize=13)
    ax.set(xscale='log', xlabel='Peak learning rate')
    ax.set_title(title, loc='left', fontweight='bold', fontsize=10)
    style.polish(ax)
  panels[0].set_ylabel('Validation loss (nats per token)')
  panels[0].legend(frameon=False, fontsize=8)
  return figure


def plot_transition(results: list[dict[str, Any]]) -> Any:
  """Plots mean losses over steps from the transition, with bands of seeds."""
  figure = style.new_figure(7.2, 3.8)
  ax = figure.subplots()
  steps = range(-BEFORE, AFTER)
  for i, way in enumerate(dict.fromkeys(r['way'] for r in results)):
    columns = list(zip(*(r['losses'] for r in results if r['way'] == way)))
    color = style.COLORS[i]
    ax.plot(steps, [*map(statistics.fmean, columns)], label=way, color=color)
    ax.fill_between(
        steps, [*map(min, columns)], [*map(max, columns)], color=color,
        alpha=0.2, linewidth=0,
    )
  ax.axvline(0, color=style.GREY, linewidth=0.8)
  ax.set(
      xlabel='Steps after the transition',
      ylabel='Training loss (nats per token)',
  )
  ax.legend(frameon=False, fontsize=8)
  style.polish(ax)
  return figure
