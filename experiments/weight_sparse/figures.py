"""Figures of weight-sparse GPTs: losses over kept weights, circuits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.weight_sparse import circuits
from experiments.weight_sparse import model as models
from experiments.weight_sparse import tasks
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
  widths = sorted({row['width'] for row in rows})
  for i, width in enumerate(widths):
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
    # Names are above the lines, and below the lowest one, that of most width.
    below = width == widths[-1]
    for row in first:
      name = 'dense' if row['kept'] == 1 else f'1/{row["kept"]}'
      ax.annotate(
          name, (row['kept_weights'], row['loss']), fontsize=6,
          textcoords='offset points', xytext=(-3, -9) if below else (3, 4),
          ha='right' if below else 'left', color=look['color'],
      )
  ax.set(
      xscale='log', xlabel='kept weights of sparsified leaves',
      ylabel='validation loss',
  )
  style.polish(ax)
  style.log_ticks(ax)
  ax.legend(frameon=False)
  return figure


_ROWS = {
    'attn_in': 'attention reads', 'attn_q': 'queries, keys, values',
    'attn_k': 'queries, keys, values', 'attn_v': 'queries, keys, values',
    'attn_out': 'attention writes', 'mlp_in': 'MLP reads',
    'mlp_neuron': 'neurons', 'mlp_out': 'MLP writes',
}
_RESIDUAL = 'attn_in', 'attn_out', 'mlp_in', 'mlp_out', 'resid_final'
_LABELED = 60  # Edges; more have no numbers.


def plot_circuit(
    model: models.WeightSparseGPT,
    params: Any,
    circuit: circuits.Circuit,
    prompts: tasks.Prompts,
    decode: Callable[[Sequence[int]], str],
) -> Any:
  """Draws a circuit from the tokens up to the answers.

  A node has the number of its channel, and one of attention its head before
  it. Blue weights are positive and red ones negative, the wider the larger; a
  dotted line joins the nodes of one residual channel.

  Args:
    model: The model.
    params: Parameters of the model.
    circuit: The circuit.
    prompts: Prompts of the task.
    decode: Function from tokens to a text.

  Returns:
    The figure. Tokens are the marks in which prompts of a pair differ.
  """
  drawn = _with_tokens(model, params, circuit, prompts)
  nodes = [
      (name, channel) for name, channels in circuit.nodes.items()
      for channel in channels
  ]
  marks = [('token', token) for token in tasks.marks_of(prompts)]
  answers = [('answer', token) for token in np.unique(prompts.answers).tolist()]
  rows: dict[str, list[tuple[str, int]]] = {'token': marks}
  for node in nodes:
    rows.setdefault(_row_of(node[0]), []).append(node)
  rows['answer'] = answers
  widest = max(map(len, rows.values()))
  figure = style.new_figure(2.4 + 0.62 * widest, 0.5 + 0.8 * len(rows))
  ax = figure.subplots()
  places = _places(rows, drawn)
  most = max((abs(edge.weight) for edge in drawn), default=1.0)
  for edge in drawn:
    (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
    color = '#2166AC' if edge.weight > 0 else '#B2182B'
    ax.plot(
        [x0, x1], [y0, y1], color=color, alpha=0.8, zorder=1,
        linewidth=0.5 + 2.5 * abs(edge.weight) / most,
    )
    if len(drawn) <= _LABELED:
      # Apart from those of the other edges of the node.
      ends = sorted(places[e.target][0] for e in drawn if e[0] == edge.source)
      share = 0.3 + 0.4 * ends.index(x1) / max(len(ends) - 1, 1)
      ax.annotate(
          f'{edge.weight:+.2g}',
          (x0 + share * (x1 - x0), y0 + share * (y1 - y0)), fontsize=6,
          color=color, ha='center', va='center', zorder=2,
          bbox=dict(facecolor='white', edgecolor='none', pad=0.3),
      )
  for (x0, y0), (x1, y1) in _carried(circuit, places):
    ax.plot(
        [x0, x1], [y0, y1], color=style.GREY, linewidth=0.9, linestyle=':',
        zorder=0,
    )
  for node, place in places.items():
    is_text = node[0] in ('token', 'answer')
    ax.annotate(
        _label_of(model, node, decode), place, ha='center', va='center',
        fontsize=10 if is_text else 7, zorder=3, bbox=dict(
            boxstyle='round,pad=0.25', facecolor='white',
            edgecolor=style.GREY, linewidth=0.8,
        ),
    )
  ax.set_yticks(range(len(rows)), list(rows))
  ax.tick_params(axis='y', labelsize=7, length=0)
  ax.set_xticks([])
  ax.set_xlim(-widest / 2 - 0.2, widest / 2 + 0.2)
  ax.set_ylim(-0.4, len(rows) - 0.6)
  ax.spines[:].set_visible(False)
  ax.set_title(
      f'{circuit.size} nodes, {circuit.edges} weights\n'
      f'loss {circuit.loss:.2f}, {circuit.accuracy:.0%} right', fontsize=8,
  )
  return figure


def _row_of(location: str) -> str:
  """Returns the name of the row of a location."""
  if location == 'resid_final':
    return 'output reads'
  block, name = location.split('/')
  return f'layer {block[2:]}: {_ROWS[name]}'


def _label_of(
    model: models.WeightSparseGPT, node: tuple[str, int],
    decode: Callable[[Sequence[int]], str],
) -> str:
  location, channel = node
  if location in ('token', 'answer'):
    return decode([channel]).replace('\n', '\\n')
  for name in 'qkv':
    if location.endswith(f'attn_{name}'):
      return f'{name} {channel // model.head_size}.{channel % model.head_size}'
  return str(channel)


def _with_tokens(
    model: models.WeightSparseGPT, params: Any, circuit: circuits.Circuit,
    prompts: tasks.Prompts,
) -> list[circuits.Edge]:
  """Returns the edges from marks, those of the circuit, and those to answers.

  A mark leads to where its channels are read first.
  """
  wte = np.asarray(params['wte']['embedding'])
  head = wte.T if model.tied else np.asarray(params['head']['kernel'])
  first: dict[int, tuple[str, int]] = {}
  for name in circuits.locations(model):
    if name.endswith(('attn_in', 'mlp_in', 'resid_final')):
      for channel in circuit.nodes[name]:
        first.setdefault(channel, (name, channel))
  return [
      circuits.Edge(('token', token), node, float(wte[token, channel]))
      for token in tasks.marks_of(prompts) for channel, node in first.items()
      if wte[token, channel]
  ] + circuits.edges(model, params, circuit.nodes) + [
      circuits.Edge(
          ('resid_final', channel), ('answer', token),
          float(head[channel, token]),
      )
      for channel in circuit.nodes['resid_final']
      for token in np.unique(prompts.answers).tolist() if head[channel, token]
  ]


def _places(
    rows: Mapping[str, Sequence[tuple[str, int]]],
    drawn: Sequence[circuits.Edge],
) -> dict[tuple[str, int], tuple[float, float]]:
  """Returns x and y of all nodes; a node is above those that lead to it."""
  places: dict[tuple[str, int], tuple[float, float]] = {}
  for y, row in enumerate(rows.values()):
    def wanted(node):
      below = [
          places[e.source][0] for e in drawn
          if e.target == node and e.source in places
      ] + [
          place[0] for (name, channel), place in places.items()
          if channel == node[1] and name.endswith(_RESIDUAL)
          and node[0].endswith(_RESIDUAL)
      ]
      return sum(below) / len(below) if below else 0.0

    ordered = sorted(row, key=wanted)
    for i, node in enumerate(ordered):
      places[node] = i - (len(row) - 1) / 2, float(y)
  return places


def _carried(
    circuit: circuits.Circuit,
    places: Mapping[tuple[str, int], tuple[float, float]],
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
  """Returns lines between nodes that follow each other in a channel."""
  lines, last = [], {}
  for name, channels in circuit.nodes.items():
    if not name.endswith(_RESIDUAL):
      continue
    for channel in channels:
      if channel in last:
        lines.append((last[channel], places[name, channel]))
      last[channel] = places[name, channel]
  return lines
