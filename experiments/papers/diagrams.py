"""Diagrams of a mask, of SPDF and of Variable SPDF on small networks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spdf_jax.runs import style

KEPT, GROWN, PRUNED = 'kept', 'newly grown', 'pruned: held at zero'
_LINES = {  # In drawing order: kept weights on top.
    PRUNED: {'color': '#D3E3F0', 'linewidth': 0.7},
    GROWN: {'color': style.COLORS[2], 'linewidth': 1.0},
    KEPT: {'color': style.COLORS[0], 'linewidth': 1.3},
}
WIDTHS = (4, 6, 6, 4)
"""Neurons in the layers of the networks."""
_PITCH = 4.6
"""Distance between the left edges of networks; a network is 3 wide."""
_HEIGHT = 0.62
"""Distance between neurons of a layer."""


class Network(NamedTuple):
  """A small network.

  Attributes:
    title: Text above the network.
    note: Text below the network.
    masks: bool [inputs, outputs] between each two layers: the kept weights.
    before: Masks of the previous network in the diagram; weights that only
      `masks` keeps are drawn as newly grown.
  """

  title: str
  note: str
  masks: Sequence[np.ndarray]
  before: Sequence[np.ndarray] | None = None


def draw_masks(sparsity: float, seed: int) -> list[np.ndarray]:
  """Draws masks between the layers of `WIDTHS`.

  Args:
    sparsity: Fraction of zeros, rounded to a count in each mask.
    seed: Seed of the masks; masks of one seed are nested.

  Returns:
    bool [inputs, outputs] for each two layers.

  Example:
    >>> [int(mask.sum()) for mask in draw_masks(0.75, seed=0)]
    [6, 9, 6]
  """
  rng = np.random.default_rng(seed)
  masks = []
  for shape in zip(WIDTHS, WIDTHS[1:]):
    ranks = rng.permutation(np.prod(shape)).reshape(shape)
    masks.append(ranks < ranks.size - round(sparsity * ranks.size))
  return masks


def plot_mask_diagram(sparsity: float = 0.75, seed: int = 2) -> Any:
  """Draws a dense network, a mask, and their product, the sparse network.

  Args:
    sparsity: Sparsity of the masks.
    seed: Seed of the masks.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    After Cerebras 2022, "Creating sparse GPT-3 models with iterative
    pruning", figure 1.

  Example:
    >>> len(plot_mask_diagram().axes)
    1
  """
  masks = draw_masks(sparsity, seed)
  networks = [
      Network('Dense network', 'every weight is kept', draw_masks(0, seed)),
      Network('Mask', 'of the middle weights', []),
      Network('Sparse network', f'{_percent(masks)} of weights are 0', masks),
  ]
  figure, ax = _canvas(networks, (KEPT, PRUNED), ('×', '='))
  _draw_matrix(ax, _PITCH, masks[1])
  return figure


def plot_spdf_diagram(sparsity: float = 0.75, seed: int = 2) -> Any:
  """Draws sparse pre-training and dense fine-tuning.

  Args:
    sparsity: Sparsity of pre-training.
    seed: Seed of the masks.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    After Thangarasa et al. 2023, "SPDF", figure 1.

  Example:
    >>> len(plot_spdf_diagram().axes)
    1
  """
  dense, sparse = draw_masks(0, seed), draw_masks(sparsity, seed)
  figure, _ = _canvas([
      Network('Initial weights', 'dense', dense),
      Network(
          'Sparse pre-training', f'{_percent(sparse)} zeros, on a corpus',
          sparse,
      ),
      Network(
          'Dense fine-tuning', 'all weights learn, on a task', dense, sparse
      ),
  ], (KEPT, GROWN, PRUNED))
  return figure


def plot_variable_diagram(sparsity: float = 0.9, seed: int = 2) -> Any:
  """Draws Variable SPDF: two stages of pre-training, and fine-tuning.

  Args:
    sparsity: Sparsity of the first stage.
    seed: Seed of the masks.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    After Cerebras 2023, "Variable Sparse Pre-training and Dense
    Fine-tuning", figure 3.

  Example:
    >>> len(plot_variable_diagram().axes)
    1
  """
  dense, sparse = draw_masks(0, seed), draw_masks(sparsity, seed)
  figure, ax = _canvas([
      Network(
          'Stage 1: sparse', f'{_percent(sparse)} zeros, on a corpus', sparse
      ),
      Network('Stage 2: dense', 'all weights learn, same corpus', dense,
              sparse),
      Network('Dense fine-tuning', 'all weights learn, on a task', dense),
  ], (KEPT, GROWN, PRUNED))
  top = 0.5 * _HEIGHT * max(WIDTHS) + 0.75
  ax.plot([0, 0, _PITCH + 3, _PITCH + 3], [top - 0.1, top, top, top - 0.1],
          color=style.GREY, linewidth=1)
  ax.text(_PITCH / 2 + 1.5, top + 0.08, 'pre-training', ha='center',
          va='bottom', fontsize=9, color=style.GREY)
  return figure


def _percent(masks: Sequence[np.ndarray]) -> str:
  zeros = 1 - sum(m.sum() for m in masks) / sum(m.size for m in masks)
  return f'{100 * zeros:.0f}%'


def _canvas(
    networks: Sequence[Network],
    states: Sequence[str],
    signs: Sequence[str] = (),
) -> tuple[Any, Any]:
  """Draws networks in a row, with arrows or signs between, and a legend."""
  figure = style.new_figure(3.1 * len(networks), 3.6)
  ax = figure.subplots()
  ax.set_axis_off()
  ax.set(xticks=[], yticks=[])
  ax.set_aspect('equal')
  reach = 0.5 * _HEIGHT * (max(WIDTHS) - 1)
  for i, network in enumerate(networks):
    _draw_network(ax, i * _PITCH, network)
    middle = i * _PITCH + 1.5
    ax.text(middle, reach + 0.4, network.title, ha='center', va='bottom',
            fontsize=11, fontweight='bold')
    ax.text(middle, -reach - 0.4, network.note, ha='center', va='top',
            fontsize=9, color=style.GREY)
    if i and signs:
      ax.text(middle - _PITCH / 2, 0, signs[i - 1], ha='center', va='center',
              fontsize=22, color=style.GREY)
    elif i:
      ax.annotate(
          '', (middle - 1.85, 0), (middle - _PITCH + 1.85, 0),
          arrowprops={
              'arrowstyle': '-|>', 'color': style.GREY, 'linewidth': 1.6
          },
      )
  entries = [ax.plot([], [], label=s, **_LINES[s])[0] for s in states]
  figure.legend(
      handles=entries, loc='outside lower center', ncols=3, frameon=False,
      fontsize=9,
  )
  return figure, ax


def edges_of(network: Network) -> dict[str, list[tuple[int, int, int]]]:
  """Sorts the weights of a network by the way they are drawn.

  Args:
    network: The network.

  Returns:
    Layer, input and output of each weight, by `KEPT`, `GROWN` and `PRUNED`.

  Example:
    >>> mask = np.array([[True, False]])
    >>> edges_of(Network('', '', [mask]))[PRUNED]
    [(0, 0, 1)]
  """
  edges: dict[str, list[tuple[int, int, int]]] = {s: [] for s in _LINES}
  for layer, mask in enumerate(network.masks):
    earlier = mask if network.before is None else network.before[layer]
    for (i, j), kept in np.ndenumerate(mask):
      state = PRUNED if not kept else KEPT if earlier[i, j] else GROWN
      edges[state].append((layer, i, j))
  return edges


def _draw_network(ax: Any, left: float, network: Network) -> None:
  if not network.masks:
    return
  height = lambda layer, i: _HEIGHT * ((WIDTHS[layer] - 1) / 2 - i)
  for order, (state, edges) in enumerate(edges_of(network).items()):
    for layer, i, j in edges:
      ax.plot(
          [left + layer, left + layer + 1],
          [height(layer, i), height(layer + 1, j)],
          zorder=1 + order, solid_capstyle='round', **_LINES[state],
      )
  for layer, width in enumerate(WIDTHS):
    ax.plot(
        [left + layer] * width, [height(layer, i) for i in range(width)], 'o',
        color='white', markeredgecolor=style.GREY, markersize=9, zorder=5,
    )


def _draw_matrix(ax: Any, left: float, mask: np.ndarray) -> None:
  """Draws a mask as a matrix of ones and zeros, inputs downwards."""
  rows, columns = mask.shape
  corners = 0.23 * np.array([[-1, 1, 1, -1], [-1, -1, 1, 1]])
  for (i, j), kept in np.ndenumerate(mask):
    x = left + 1.5 + 0.5 * (j - (columns - 1) / 2)
    y = 0.5 * ((rows - 1) / 2 - i)
    color = _LINES[KEPT if kept else PRUNED]['color']
    ax.fill(x + corners[0], y + corners[1], color=color, linewidth=0)
    ax.text(x, y, '1' if kept else '0', ha='center', va='center', fontsize=9,
            color='white' if kept else style.GREY)
