"""Fills the papers' results tables from finished runs.

  python -m experiments.reproduce --table=spdf --runs=sweeps/,runs/

A run's config, and those of the runs it started from, say which cells it fills;
what it scored is read from the JSON of experiments.evaluate --output, wherever
it lies in these folders, and from the test.json of sweeps. Each cell has the
mean over seeds ± their deviation beside the printed value, or why it is empty.
"""

from absl import app
from absl import flags
from absl import logging

from experiments import console
from spdf_jax.analysis import paper_tables

_TABLE = flags.DEFINE_string(
    'table', None, f'One of {", ".join(paper_tables.RESULTS)}.'
)
_RUNS = flags.DEFINE_list(
    'runs', None, 'Workdirs of runs, or folders that hold some, by commas.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  console.prepare()
  try:
    print(paper_tables.report(_TABLE.value, _RUNS.value))
  except (ValueError, OSError) as error:
    logging.error('%s', error)
    return 1
  return 0


if __name__ == '__main__':
  flags.mark_flags_as_required(['table', 'runs'])
  app.run(main)
