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

from absl import app
from absl import flags
from absl import logging

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
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  console.prepare()
  try:
    written = figures.write_figures(
        _FIGURE.value, _RUNS.value, _OUTPUT.value
    )
  except (ValueError, OSError, ImportError) as error:
    logging.error('%s', error)
    return 1
  for path in written.paths:
    print(path)
  for name, reason in written.left_out.items():
    print(f'left out {name}: {reason}')
  for note in written.notes[:_MOST]:
    print(f'not shown: {note}')
  if len(written.notes) > _MOST:
    print(f'not shown: and {len(written.notes) - _MOST} more')
  return 0


if __name__ == '__main__':
  flags.mark_flags_as_required(['figure', 'output'])
  console.start(main)
