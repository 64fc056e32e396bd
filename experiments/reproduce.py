"""Tests the papers' claims by runs, or fills their tables from finished runs.

  python -m experiments.reproduce --scale=fair --data=DIR
  python -m experiments.reproduce --scale=context-64 --data=DIR
  python -m experiments.reproduce --scale=growth --data=DIR
  python -m experiments.reproduce --table=spdf --runs=sweeps/,runs/

--scale: `fair` takes a night on two cores; `context-64`, sparse against dense
at equal FLOPs, some 26 core-hours; `fine-tuning-64`, fine-tuning of those
models, some 6; `growth`, moving masks against static ones, some 12; `smoke`
takes minutes and gives no verdicts.
DIR contains data that you provide: books/; for all but `growth` e2e/; for
`fair` webnlg17/; for context 64 wikitext2/. `smoke` reads Python's standard
library. The file PROTOCOL*.md in a folder of results, written before the runs,
defines the comparisons and when a claim holds; scales of closed protocols are
there as records and tables. Runs are written to --workdir and trained one on
each core; if stopped or killed, the same command continues, and finished runs
are not trained again. The table, results.json and figures are written to
--output. --report writes them from the runs finished so far.

--table: the configs of a run and of the runs it started from decide which cells
it fills. Scores are read from the JSON files of experiments.evaluate --output
at any depth of these folders, and from the test.json of sweeps. Each cell has
the mean over seeds ± its standard deviation beside the printed value, or the
reason why it is empty. With --model, runs of another model fill the rows of the
table's first one.
"""

from collections.abc import Iterator, Sequence
import functools
import os
import pathlib
from typing import NamedTuple

from absl import app
from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.papers import gates
from experiments.papers import paper_claims
from experiments.papers import paper_tables
from experiments.papers import published_results
from experiments.papers import scales
from experiments.papers.scale import Scale
from experiments.pool import data as pool_data
from experiments.pool import identity as pool_identity
from experiments.pool import processes as pool_processes
from experiments.pool import results as pool_results
from experiments.pool import worker as pool_worker
from experiments.pool.pool import Entry
from spdf_jax import files
from spdf_jax import names

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
      argv, check_claims, _SCALE.value, _CLAIMS.value,
      _DATA.value, pathlib.Path(_WORKDIR.value or f'runs/{name}'),
      pathlib.Path(_OUTPUT.value or f'experiments/results/{name}'),
      _REPORT.value, _WORKERS.value,
  )


class Reproduction(NamedTuple):
  """A scale, and the folders of its runs and results.

  Attributes:
    name: Name of the scale.
    scale: The scale.
    workdir: Folder of the runs.
    output: Folder of `table.md`, `results.json` and `claims.png`.
    claims: Keys of the claims whose runs are trained; empty: all of the scale.
      All claims of the scale are judged, since they share the correction of
      their families.
  """

  name: str
  scale: Scale
  workdir: pathlib.Path
  output: pathlib.Path
  claims: Sequence[str] = ()

  @property
  def entries(self) -> list[Entry]:
    """Entries of the scale, in order."""
    return self._entries(self.scale.claims)

  @property
  def trained(self) -> list[Entry]:
    """Those entries that are trained."""
    return self._entries(self.claims or self.scale.claims)

  def _entries(self, keys: Sequence[str]) -> list[Entry]:
    claims = [paper_claims.CLAIMS[key] for key in keys]
    arms = [arm for claim in claims for arm in claim.arms]
    return self.scale.entries(arms + gates.arms_of_gates(self.scale, claims))


def check_claims(
    name: str,
    claims: Sequence[str],
    data: str,
    workdir: pathlib.Path,
    output: pathlib.Path,
    report_only: bool,
    workers: int,
) -> Iterator[str]:
  """Reproduces claims at a scale; yields the report and the files' names.

  Args:
    name: A key of `SCALES`.
    claims: Keys of the claims whose runs are trained; empty: all of the scale.
    data: Folder of the data.
    workdir: Folder of the runs.
    output: Folder of the results.
    report_only: Whether only the results of finished runs are written.
    workers: Number of runs at a time; 0: one on each core.

  Raises:
    ValueError: the scale or a claim is unknown, or `run_scale` raises it.
    InterruptedError: a signal arrived; everything is saved.
  """
  scale = names.lookup('scale', name, scales.SCALES)
  for key in claims:
    names.lookup(
        'claim', key, {name: paper_claims.CLAIMS[name] for name in scale.claims}
    )
  reproduction = Reproduction(name, scale, workdir, output, claims)
  yield run_scale(reproduction, data, workers, report_only)
  written = sorted(path.name for path in output.glob('*.png'))
  yield f'{output}: {", ".join(["table.md", "results.json", *written])}'


def run_scale(
    reproduction: Reproduction,
    data: str,
    workers: int,
    report_only: bool,
) -> str:
  """Trains all unfinished runs of a scale, and judges its claims.

  Runs whose outcomes are in the results of the output folder, with the same
  identity, are not repeated. Results are written in any case, also after a
  signal or an error.

  Args:
    reproduction: The scale and its folders.
    data: Folder of the data.
    workers: Number of runs at a time; 0: one on each core.
    report_only: Whether only the results of finished runs are written.

  Returns:
    The report.

  Raises:
    ValueError: data are missing; the workdir or the output has runs of another
      protocol, or another process trains there.
    InterruptedError: a signal arrived; everything is saved.
  """
  name, scale, workdir, output, _ = reproduction
  files.refuse_url(workdir, 'workdir')
  entries = reproduction.trained
  identity_file = workdir / 'scale.json'
  if identity_file.exists():
    # Checked first, since preparing data takes minutes.
    identity = pool_identity.identify(scale, {})
    del identity['data']
    pool_identity.check_same(identity_file, identity)
  prepared = pool_data.prepare(scale, data, workdir)
  if not report_only:
    workdir.mkdir(parents=True, exist_ok=True)
    files.lock_folder(workdir, 'workdir')  # Held until the process ends.
  identity = pool_identity.identify(scale, prepared.fingerprints)
  pool_identity.check_same(identity_file, identity)
  runs = workdir / 'runs'
  known = pool_results.read_results(output, identity)
  read = lambda: pool_results.join_outcomes(
      known, pool_worker.read_outcomes(runs)
  )
  write = functools.partial(
      pool_results.write_results, output, name, scale, reproduction.entries,
      identity
  )
  done = read()
  if report_only:
    return write(done)
  tasks = pool_data.write_tasks(scale, prepared.tasks, workdir)
  runner = pool_worker.Runner(
      scale, str(runs), prepared.corpus, tasks, prepared.domains
  )
  cores = sorted(os.sched_getaffinity(0))
  workers = workers or len(cores)
  try:
    pool_processes.run_pool(
        runner, entries, done, cores, workers, scale.work
    )
  finally:
    report = write(read())
  return report


if __name__ == '__main__':
  console.start(main, FLAGS)
