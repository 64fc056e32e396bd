"""Figures of weight-sparse GPTs: losses over kept weights, circuits."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.weight_sparse import circuits
from experiments.weight_sparse import model as models
from spdf_jax.runs import style


def plot_losses(rows: Sequence[Mapping[str, Any]]) -> Any:
  """Plots the validation loss over the kept weights, a line for each width.

  Args:
    rows: Rows of `losses.json`: `width`, `kept`, `seed`, `kept_weights` and
      `loss`. Lines are those of seed 0; dots are other seeds.

  Returns:
    The figure.
  """
  figure = style.new_figure(5.6, 3.8)
  ax = figure.subplots()
  for i, width in enumerate(sorted({row['width'] for row in rows})):
    look = style.line_style(i)
    own = sorted(
        (row for row in rows if row['width'] == width),
        key=lambda row: row['kept_weights'],
    )
    first = [row for row in own if not row['seed']]
    ax.plot(
        [row['kept_weights'] for row in first], [row['loss'] for row in first],
        label=f'width {width}', markersize=4, **look,
    )
    others = [row for row in own if row['seed']]
    ax.plot(
        [row['kept_weights'] for row in others],
        [row['loss'] for row in others], linestyle='none', marker='o',
        markersize=3, color=look['color'], alpha=0.5,
    )
    for row in first:
      name = 'dense' if row['kept'] == 1 else f'1/{row["kept"]}'
      ax.annotate(
          name, (row['kept_weights'], row['loss']), fontsize=6,
          textcoords='offset points', xytext=(3, 4), color=style.GREY,
      )
  ax.set(
      xscale='log', xlabel='kept weights of sparsified leaves',
      ylabel='validation loss',
  )
  style.polish(ax)
  style.log_ticks(ax)
  ax.legend(frameon=False)
  return figure


def plot_circuit(
    model: models.WeightSparseGPT, params: Any, circuit: circuits.Circuit
) -> Any:
  """Draws a circuit from left to right: nodes, and the weights between them.

  Blue weights are positive and red ones negative, the wider the larger; a
  dotted line joins the nodes of one residual channel, from where it is written
  to where it is read next.

  Args:
    model: The model.
    params: Parameters of the model.
    circuit: The circuit.

  Returns:
    The figure.
  """
  names = [n for n in circuits.locations(model) if circuit.nodes[n]]
  figure = style.new_figure(
      1.2 + 1.1 * len(names),
      1.0 + 0.22 * max(map(len, circuit.nodes.values()), default=0),
  )
  ax = figure.subplots()
  places = {}
  for x, name in enumerate(names):
    channels = circuit.nodes[name]
    for y, channel in enumerate(channels):
      places[name, channel] = x, y - (len(channels) - 1) / 2
  drawn = circuits.edges(model, params, circuit.nodes)
  most = max((abs(edge.weight) for edge in drawn), default=1.0)
  for edge in drawn:
    (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
    ax.plot(
        [x0, x1], [y0, y1], color='#2166AC' if edge.weight > 0 else '#B2182B',
        linewidth=0.4 + 2.2 * abs(edge.weight) / most, alpha=0.7, zorder=1,
    )
  for (x0, y0), (x1, y1) in _carried(names, circuit.nodes, places):
    ax.plot(
        [x0, x1], [y0, y1], color=style.PALE, linewidth=0.7, linestyle=':',
        zorder=0,
    )
  for (_, channel), (x, y) in places.items():
    ax.plot(x, y, marker='o', markersize=9, color='white',
            markeredgecolor=style.GREY, zorder=2)
    ax.annotate(str(channel), (x, y), ha='center', va='center', fontsize=5,
                zorder=3)
  ax.set_xticks(range(len(names)), [n.replace('/', '\n') for n in names])
  ax.tick_params(axis='x', labelsize=7, length=0)
  ax.set_yticks([])
  ax.spines[:].set_visible(False)
  ax.set_title(
      f'{circuit.size} nodes, {circuit.edges} weights; loss '
      f'{circuit.loss:.2f}, {circuit.accuracy:.0%} right', fontsize=8,
  )
  return figure


_WRITTEN, _READ = ('attn_out', 'mlp_out'), ('attn_in', 'mlp_in', 'resid_final')


def _carried(
    names: Sequence[str],
    nodes: Mapping[str, Sequence[int]],
    places: Mapping[tuple[str, int], tuple[float, float]],
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
  """Returns the lines of residual channels, from writing to reading."""
  lines = []
  for i, name in enumerate(names):
    if not name.endswith(_WRITTEN):
      continue
    for channel in nodes[name]:
      reader = next((
          other for other in names[i + 1:]
          if other.endswith(_READ) and channel in nodes[other]
      ), None)
      if reader is not None:
        lines.append((places[name, channel], places[reader, channel]))
  return lines
