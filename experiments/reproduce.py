"""Tests the papers' claims by runs, or fills their tables from finished runs.

  python -m experiments.reproduce --scale=fair --data=DIR
  python -m experiments.reproduce --scale=context-64 --data=DIR
  python -m experiments.reproduce --scale=growth --data=DIR
  python -m experiments.reproduce --table=spdf --runs=sweeps/,runs/

--scale: `fair` takes a night on two cores; `context-64`, sparse against dense
at equal FLOPs, some 26 core-hours; `growth`, moving masks against static ones,
some 6; `smoke` takes minutes and gives no verdicts.
DIR contains books/, e2e/, webnlg17/ and wikitext2/, which you provide; smoke
reads Python's standard library. The files PROTOCOL*.md in experiments/results,
written before the runs, define the comparisons and when a claim holds; the
scales of closed protocols are there as records and tables. Runs are written to
--workdir and trained one on each core; if stopped or killed, the same command
continues, and finished runs are not trained again. The table, results.json and
figures are written to --output. --report writes them from the runs finished so
far.

--table: the configs of a run and of the runs it started from decide which cells
it fills. Scores are read from the JSON files of experiments.evaluate --output
at any depth of these folders, and from the test.json of sweeps. Each cell has
the mean over seeds ± its standard deviation beside the printed value, or the
reason why it is empty. With --model, runs of another model fill the rows of the
table's first one.
"""

import os
import pathlib

from absl import app
from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.papers import paper_tables
from experiments.papers import published_results
from experiments.papers import reproduction
from experiments.papers import scales

FLAGS = flags.FlagValues()
_TABLE = flags.DEFINE_string(
    'table', None, f'Paper: {", ".join(published_results.RESULTS)}.',
    flag_values=FLAGS,
)
_RUNS = flags.DEFINE_list(
    'runs', None,
    'With --table: workdirs, or folders that contain some, separated by '
    'commas.',
    flag_values=FLAGS,
)
_MODEL = flags.DEFINE_string(
    'model', '',
    'With --table: model of your runs, as the list of unused runs names it; '
    "fills the rows of the table's first model with them.",
    flag_values=FLAGS,
)
_SCALE = flags.DEFINE_string(
    'scale', None, f'Scale of the tests: {", ".join(scales.SCALES)}.',
    flag_values=FLAGS,
)
_CLAIMS = flags.DEFINE_list(
    'claims', [], 'Keys of the claims whose runs are trained; by default all.',
    flag_values=FLAGS,
)
_DATA = flags.DEFINE_string(
    'data', os.environ.get('SPDF_DATA', ''),
    'Folder that contains books/, e2e/, webnlg17/ and wikitext2/; by default '
    '$SPDF_DATA.',
    flag_values=FLAGS,
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for runs; by default runs/claims-SCALE.',
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'Folder for results; by default experiments/results/claims-SCALE.',
    flag_values=FLAGS,
)
_REPORT = flags.DEFINE_bool(
    'report', False, 'Train nothing; write the results of finished runs.',
    flag_values=FLAGS,
)
_WORKERS = flags.DEFINE_integer(
    'workers', 0, 'Number of runs at a time; 0: one on each core.',
    lower_bound=0, flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if bool(_TABLE.value) == bool(_SCALE.value):
    raise app.UsageError('give --scale, or --table with --runs.')
  if _MODEL.value and not _TABLE.value:
    raise app.UsageError('--model is for --table.')
  if bool(_TABLE.value) != bool(_RUNS.value):
    raise app.UsageError('--table and --runs go together.')
  of_scales = _CLAIMS, _DATA, _WORKDIR, _OUTPUT, _REPORT, _WORKERS
  given = [f'--{flag.name}' for flag in of_scales if flag.present]
  if given and not _SCALE.value:
    raise app.UsageError(f'leave out {", ".join(given)}: for --scale only.')
  if _TABLE.value:
    return console.run(
        argv, paper_tables.report, _TABLE.value, _RUNS.value, _MODEL.value
    )
  compilation_cache.prepare()
  name = f'claims-{_SCALE.value}'
  return console.run(
      argv, reproduction.check_claims, _SCALE.value, _CLAIMS.value,
      _DATA.value, pathlib.Path(_WORKDIR.value or f'runs/{name}'),
      pathlib.Path(_OUTPUT.value or f'experiments/results/{name}'),
      _REPORT.value, _WORKERS.value,
  )


if __name__ == '__main__':
  console.start(main, FLAGS)
