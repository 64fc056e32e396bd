# SPDX-License-Identifier: Apache-2.0
"""Style of all plots: figures, axes, colours and labels of lines."""

from collections.abc import Sequence
import importlib
import math
import os
from typing import Any

import numpy as np

from spdf_jax import extras
from spdf_jax import files

# Okabe and Ito's palette, which readers with colour vision deficiency can
# distinguish; without yellow, which is too pale for lines on white.
COLORS = (
    '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000',
)
GREY = '#666666'
PALE = '#8A8A8A'


def new_figure(width: float, height: float) -> Any:
  """Creates a figure outside of pyplot's global state.

  Args:
    width: Width, inches.
    height: Height, inches.

  Returns:
    A `matplotlib.figure.Figure`; `savefig` needs no display.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> len(new_figure(4, 3).subplots(2))
    2
  """
  module = extras.require('matplotlib.figure', 'viz')
  return module.Figure(figsize=(width, height), dpi=150, layout='constrained')


def check_backend() -> None:
  """Raises ValueError if `MPLBACKEND` keeps matplotlib from being imported.

  It is raised before training, which ends with figures.
  """
  try:
    importlib.import_module('matplotlib')
  except ModuleNotFoundError:
    pass  # Reports are then left out, with a warning.
  except ValueError as error:
    raise ValueError(
        'environment variable MPLBACKEND is '
        f'{os.environ.get("MPLBACKEND")!r}, which matplotlib does not know '
        f'({error}); unset it.'
    ) from error


def save(figure: Any, path: str | os.PathLike[str]) -> None:
  """Saves a figure in the format of the suffix of its path, atomically.

  Args:
    figure: A `matplotlib.figure.Figure`.
    path: The file, e.g. `'loss.png'` or `'loss.svg'`.

  Raises:
    OSError: the file cannot be written.
    ValueError: matplotlib does not write the format.

  Example:
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(new_figure(1, 1), os.path.join(folder, 'a.png'))
    >>> os.listdir(folder)
    ['a.png']
  """
  with files.replacing(path) as temporary:
    figure.savefig(temporary)


def line_style(index: int) -> dict[str, Any]:
  """Returns colour, line style and marker of one of several lines.

  Args:
    index: Index of the line; after seven lines colours repeat, with another
      line style.

  Returns:
    Keyword arguments of `Axes.plot`.

  Example:
    >>> line_style(0)['color'] == line_style(7)['color']
    True
    >>> line_style(0)['linestyle'], line_style(7)['linestyle']
    ('-', '--')
  """
  again = index // len(COLORS)
  return {
      'color': COLORS[index % len(COLORS)],
      'linestyle': ('-', '--', ':')[again % 3],
      'marker': ('o', 's', '^')[again % 3],
  }


def polish(ax: Any) -> None:
  """Removes the upper and right spine of axes and adds a light grid.

  Args:
    ax: Axes to change.

  Example:
    >>> ax = new_figure(4, 3).subplots()
    >>> polish(ax)
    >>> ax.spines['top'].get_visible()
    False
  """
  ax.spines[['top', 'right']].set_visible(False)
  ax.grid(True, which='major', color='#E4E4E4', linewidth=0.8)
  ax.set_axisbelow(True)
  ax.margins(y=0.08)


def log_ticks(ax: Any) -> None:
  """Labels a logarithmic x axis at round numbers, at least three if it can.

  These are powers of ten, or also 3 times them, or 2 and 5, or 1.5, 2, 3, 4, 6
  and 8: the first of these with three ticks on the axes. Axes with fewer than
  two of the last are widened to the next ones.

  Args:
    ax: Axes with final limits, which this function may widen.

  Example:
    >>> ax = new_figure(4, 3).subplots()
    >>> ax.set(xscale='log', xlim=(4e11, 7e12))[1]
    (400000000000.0, 7000000000000.0)
    >>> log_ticks(ax)
    >>> ax.get_xticks().tolist()
    [500000000000.0, 1000000000000.0, 2000000000000.0, 5000000000000.0]
  """
  low, high = ax.get_xlim()
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  value = lambda place: place[0] * 10.0 ** place[1]
  for steps in ([1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 6, 8]):
    places = [(step, power) for power in powers for step in steps]
    inside = [place for place in places if low <= value(place) <= high]
    if len(inside) >= 3:
      break
  if len(inside) < 2:
    low = max((value(p) for p in places if value(p) <= low), default=low)
    high = min((value(p) for p in places if value(p) >= high), default=high)
    inside = [place for place in places if low <= value(place) <= high]
  ax.set_xlim(low, high)
  names = [
      f'$\\mathdefault{{{"" if m == 1 else f"{m} × "}10^{{{n}}}}}$'
      for m, n in inside
  ]
  ax.set_xticks([value(place) for place in inside], names)
  minor = [m * 10.0**n for n in powers for m in range(1, 10)]
  ax.set_xticks([x for x in minor if low <= x <= high], minor=True)
  ax.tick_params(axis='x', which='minor', labelbottom=False)


def spread(places: Sequence[float], gap: float) -> list[float]:
  """Moves increasing positions apart so that neighbours keep a distance.

  Args:
    places: Preferred positions of labels, increasing, from 0 to 1.
    gap: Minimum distance between neighbours.

  Returns:
    The positions, moved up to keep the distance and then down to stay within 1;
    increasing.

  Example:
    >>> spread([0.0, 0.5, 0.5, 1.0, 1.0], 0.25)
    [0.0, 0.25, 0.5, 0.75, 1.0]
  """
  moved: list[float] = []
  for place in places:
    moved.append(max(place, moved[-1] + gap) if moved else place)
  highest = 1.0
  for i in reversed(range(len(moved))):
    moved[i] = min(moved[i], highest)
    highest = moved[i] - gap
  return moved


def label_ends(
    ax: Any, ends: Sequence[tuple[float, float, str, str]], gap: float
) -> None:
  """Writes the names of lines to the right of the axes, level with their ends.

  Args:
    ax: Axes with final limits.
    ends: Last x and y, name and colour of each line.
    gap: Minimum distance between two names, as a fraction of the axes.

  Example:
    >>> ax = new_figure(4, 3).subplots()
    >>> label_ends(ax, [(1.0, 0.5, 'dense', COLORS[0])], gap=0.05)
    >>> [text.get_text() for text in ax.texts]
    ['dense']
  """
  right = ax.get_xlim()[1]
  ends = sorted(ends, key=lambda end: end[1])
  to_axes = ax.transData + ax.transAxes.inverted()  # Includes the axes' scale.
  places = spread([to_axes.transform((x, y))[1] for x, y, _, _ in ends], gap)
  for place, (x, y, name, color) in zip(places, ends):
    # A dotted line connects the end of a line with its name.
    ax.hlines(y, x, right, color=color, linewidth=0.8, linestyle=':')
    ax.annotate(
        name,
        (1.015, place),
        xycoords='axes fraction',
        color=color,
        va='center',
        fontsize=9,
        annotation_clip=False,
    )


def label_spans(
    ax: Any, spans: Sequence[tuple[float, float, str]]
) -> int:
  """Writes names above spans of the x axis, in several rows to avoid overlaps.

  Args:
    ax: Axes with final limits, about six inches wide.
    spans: Two ends and name of each span; a name may have line breaks.

  Returns:
    Number of rows of names.

  Example:
    >>> ax = new_figure(7, 3).subplots()
    >>> label_spans(ax, [(0.0, 0.5, 'a'), (0.5, 0.51, 'b'), (0.51, 1.0, 'c')])
    1
    >>> label_spans(ax, [(0.5, 0.51, 'sparse'), (0.51, 0.52, 'dense')])
    2
  """
  low, high = ax.get_xlim()
  taken: list[float] = []
  for start, end, name in spans:
    lines = name.split('\n')
    middle = ((start + end) / 2 - low) / (high - low)
    # Half of the name's width as a fraction of the axes, at a size of 8 points.
    half = 0.0065 * max(map(len, lines)) + 0.005
    rights = [*taken, -1.0]
    row = next(i for i, x in enumerate(rights) if middle - half >= x)
    taken[row : row + 1] = [middle + half]
    ax.annotate(
        name,
        (middle, 1.0),
        (0, 3 + 21 * row),
        xycoords='axes fraction',
        textcoords='offset points',
        ha='center',
        va='bottom',
        fontsize=8,
        color=GREY,
    )
  return len(taken)


def title_above(
    ax: Any,
    title: str,
    spans: Sequence[tuple[float, float, str]],
    pad: float = 8,
    **style: Any,
) -> None:
  """Writes names above spans of the x axis, and a title above all of them.

  Args:
    ax: Axes with final limits.
    title: Text of the title.
    spans: Two ends and name of each span, see `label_spans`.
    pad: Distance between the names and the title, in points.
    **style: Keyword arguments of `Axes.set_title`.
  """
  height = 21 if any('\n' in name for _, _, name in spans) else 12
  rows = label_spans(ax, spans)
  ax.set_title(
      title, loc='left', fontweight='bold', pad=pad + height * rows, **style
  )


def label_points(
    ax: Any, points: Sequence[tuple[float, float, str, str]]
) -> None:
  """Writes names beside points, avoiding other texts and lines.

  A name is placed at the corner of its point, of four, that is inside the axes,
  free of other text and covers the least of any line. A name without such a
  corner is omitted.

  Args:
    ax: Axes with final limits, lines and other texts.
    points: Coordinates x and y, name and colour of each point.

  Example:
    >>> ax = new_figure(4, 3).subplots()
    >>> label_points(ax, [(0.99, 0.5, 'end of sparse', COLORS[0])])
    >>> [(text.get_text(), text.get_ha()) for text in ax.texts]
    [('end of sparse', 'right')]
  """
  notes = [
      ax.annotate(
          name,
          (x, y),
          (8, 8),
          textcoords='offset points',
          fontsize=8,
          color=color,
          bbox={'fc': 'white', 'ec': 'none', 'alpha': 0.8, 'pad': 1},
      )
      for x, y, name, color in points
  ]
  for note in notes:
    note.set_in_layout(False)  # Names must not shrink the axes.
  ax.figure.draw_without_rendering()
  drawn = np.concatenate([np.zeros((0, 2)), *map(_drawn, ax.get_lines())])
  taken = [text.get_window_extent() for text in ax.texts if text not in notes]
  for note in notes:
    best = None
    for dx, dy in ((8, 8), (-8, -8), (-8, 8), (8, -8)):
      note.set(
          position=(dx, dy),
          ha='left' if dx > 0 else 'right',
          va='bottom' if dy > 0 else 'top',
      )
      box = note.get_window_extent()
      inside = ax.bbox.count_contains(box.corners()) == 4
      if not inside or box.count_overlaps(taken):
        continue
      covered = box.count_contains(drawn)
      if best is None or covered < best[0]:
        best = covered, box, note.get_position(), note.get_ha(), note.get_va()
    if best is None:
      note.remove()
      continue
    _, box, position, ha, va = best
    note.set(position=position, ha=ha, va=va)
    taken.append(box)


def _drawn(line: Any) -> np.ndarray:
  """Returns dense samples of a line, in pixels [N, 2]."""
  corners = line.get_transform().transform(line.get_xydata())
  dense = np.linspace(0, len(corners) - 1, 64 * len(corners))
  places = np.arange(len(corners))
  return np.stack([np.interp(dense, places, c) for c in corners.T], axis=1)
