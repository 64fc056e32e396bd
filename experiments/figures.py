"""Draws the papers' figures: diagrams, FLOPs, and plots of finished runs.

  python -m experiments.figures --figure=flops-bars --output=figures/
  python -m experiments.figures --figure=all --runs=runs/,sweeps/ \\
    --output=figures/

Runs, and the scores that experiments.evaluate and sweeps wrote, are found at
any depth of the folders. Seeds of one config are averaged. Of configs that
differ only in a learning rate or a schedule, the figures show the one with the
most seeds, and of those the one with the lowest loss. `all` draws every figure
that these runs suffice for, and prints which it left out, and why.
"""

from collections.abc import Iterator

from absl import flags

from experiments.launch import console
from experiments.papers import figures

_FIGURE = flags.DEFINE_string(
    'figure', None, f'{figures.ALL}, or one of:\n' + '\n'.join(
        f'{name}: {figure.shows}'
        + (f' (needs {figure.needs})' if figure.needs else '')
        for name, figure in figures.FIGURES.items()
    ),
)
_RUNS = flags.DEFINE_list(
    'runs', [], 'Workdirs, or folders that contain some, separated by commas.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for FIGURE.png.')
_MOST = 20
"""Number of notes that are printed at most."""


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _draw)


def _draw() -> Iterator[str]:
  written = figures.write_figures(_FIGURE.value, _RUNS.value, _OUTPUT.value)
  yield from map(str, written.paths)
  for name, reason in written.left_out.items():
    yield f'left out {name}: {reason}'
  for note in written.notes[:_MOST]:
    yield f'not shown: {note}'
  if len(written.notes) > _MOST:
    yield f'not shown: and {len(written.notes) - _MOST} more'


if __name__ == '__main__':
  flags.mark_flags_as_required(['figure', 'output'])
  console.start(main)
