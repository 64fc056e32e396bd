"""Draws the papers' figures: from arithmetic, by hand of code, or from runs.

  python -m experiments.figures --figure=flops-bars --output=figures/
  python -m experiments.figures --figure=all --runs=runs/,sweeps/ \\
    --output=figures/

Runs are found at any depth of the folders, with what experiments.evaluate and
sweeps scored. Seeds of one config are averaged; of configs that differ in a
rate or a schedule only, the one with the most seeds, and then the lowest loss,
is shown. `all` draws what these runs allow and says what it left out, and why.
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
    'runs', [], 'Workdirs of runs, or folders that hold some, by commas.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for FIGURE.png.')
_MOST = 20  # Notes that are printed.


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
  app.run(main)
