"""The papers' claims at a scale: the pool of runs, and what it found."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import subprocess
import time
from typing import Any
from typing import NamedTuple

from experiments.benchmarks.machine import describe_machine
from experiments.papers import claim_plots
from experiments.papers import claim_report
from experiments.papers import cost_plots
from experiments.papers import gates as gates_lib
from experiments.papers import pool_data
from experiments.papers import pool_runs
from experiments.papers import replica_groups
from experiments.papers.claims import judge
from experiments.papers.paper_claims import CLAIMS
from experiments.papers.pool import all_jobs
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import next_jobs
from experiments.papers.pool import Outcome
from experiments.papers.pool import run_all
from experiments.papers.pool import SELECTION_SEED
from experiments.papers.scales import Scale
from spdf_jax.runs.sweeps import points
from spdf_jax.training.metrics import write_atomically
from spdf_jax.training.progress import format_seconds

PROTOCOL = pathlib.Path(__file__).parents[1] / 'results' / 'PROTOCOL.md'


class Reproduction(NamedTuple):
  """A scale and where its runs and results go.

  Attributes:
    name: Name of the scale.
    scale: What is run.
    workdir: Folder of the runs.
    output: Folder of `table.md`, `results.json` and `claims.png`.
  """

  name: str
  scale: Scale
  workdir: pathlib.Path
  output: pathlib.Path

  @property
  def entries(self) -> list[Entry]:
    """What is run, in order."""
    claims = [CLAIMS[key] for key in self.scale.claims]
    arms = [arm for claim in claims for arm in claim.arms]
    return self.scale.entries(arms + gates_lib.arms_of_gates(claims))


def reproduce(
    reproduction: Reproduction,
    data: str,
    workers: int,
    report_only: bool,
    limits: replica_groups.Limits = replica_groups.UNLIMITED,
) -> str:
  """Trains all runs of a scale that are not there yet, and judges its claims.

  Outcomes that the results in the output folder hold, of the same protocol, are
  not run again. Results are written whenever this ends, also by a signal.

  Args:
    reproduction: What is run, and where.
    data: The folder of the data.
    workers: How many runs at a time; 0: one on each core.
    report_only: Only writes the results of what has finished.
    limits: Limits on a scale whose runs train together.

  Returns:
    The report.

  Raises:
    ValueError: a claim is unknown, data are missing, the runs that are there
      are of another protocol, or an arm cannot train together with others.
    InterruptedError: a signal came or the time is over; everything is saved.
  """
  scale, workdir = reproduction.scale, reproduction.workdir
  entries = reproduction.entries
  if scale.vmapped:
    replica_groups.check_arms(entries)
  claimed = workdir / 'scale.json'
  if claimed.exists():
    # First, as the tasks of another scale would replace those in the folder.
    identity = identify(scale, {})
    del identity['data']
    check_same(claimed, identity)
  prepared = pool_data.prepare(scale, data, workdir)
  identity = identify(scale, prepared.fingerprints)
  check_same(claimed, identity)
  runs = workdir / 'runs'
  # What was written before counts: a parent that is trained again, on another
  # machine, may differ in its last digits.
  known = read_results(reproduction.output / 'results.json', identity)
  done = pool_runs.read_outcomes(runs) | known
  if report_only:
    return write_results(reproduction, identity, done)
  runner = pool_runs.Runner(scale, str(runs), prepared.corpus, prepared.tasks)
  cores = sorted(os.sched_getaffinity(0))
  workers = workers or len(cores)
  try:
    if scale.vmapped:
      run_replicas(runner, entries, done, cores, workers, limits)
    else:
      run_pool(runner, entries, done, cores, workers)
  finally:
    report = write_results(
        reproduction, identity, pool_runs.read_outcomes(runs) | known
    )
  return report


def run_pool(
    runner: pool_runs.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
    select: Callable[[list[Job]], Iterable[Job]] = lambda jobs: jobs,
) -> dict[str, Outcome]:
  """Runs what is not done, in processes; prints each run and the time left.

  Args:
    runner: Runs a job.
    entries: What is run.
    done: Outcomes of finished runs.
    cores: Cores that workers are pinned to; empty: they are not.
    workers: How many runs at a time.
    select: Chooses and orders those that are started, of the runs that can
      start.

  Returns:
    All outcomes.

  Raises:
    OSError: a worker was killed.
  """
  progress = _Progress(entries, workers)
  print(f'{progress.counts(done)} runs are done', flush=True)

  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  for i in range(workers if cores else 0):
    queue.put(cores[i % len(cores)])
  with concurrent.futures.ProcessPoolExecutor(
      workers, context, pool_runs.start_worker, (queue, os.getpid())
  ) as executor:
    try:
      return run_all(
          lambda done: select(next_jobs(entries, done, runner.is_there)),
          runner, done, executor, workers, progress,
      )
    except concurrent.futures.process.BrokenProcessPool as error:
      raise OSError(
          'a worker process was killed; finished runs are kept, give the same '
          'command again.'
      ) from error


def run_replicas(
    runner: pool_runs.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
    limits: replica_groups.Limits,
) -> dict[str, Outcome]:
  """Trains what is not done, in groups; prints each run and the time left.

  Initial weights, and the n-grams of gate G1, are computed before, by
  processes on the CPU.

  Args:
    runner: Makes the recipes.
    entries: What is run, checked by `replica_groups.check_arms`.
    done: Outcomes of finished runs.
    cores: Cores that processes are pinned to.
    workers: How many processes.
    limits: When to stop, and the most runs in one program.

  Returns:
    All outcomes.

  Raises:
    InterruptedError: a signal came or the time is over; everything is saved.
    OSError: a process was killed.
  """
  is_initial = lambda job: job.arm.method == 'init'
  waiting = lambda done: any(
      is_initial(job) for job in next_jobs(entries, done, runner.is_there)
  )
  in_time = lambda: time.monotonic() < limits.deadline
  if waiting(done):
    with _processes_on_cpu():
      done = run_pool(
          runner, entries, done, cores, workers,
          select=lambda jobs: filter(is_initial, jobs if in_time() else ()),
      )
    if waiting(done):
      raise InterruptedError('the time is over; give the same command again.')
  progress = _Progress(entries, workers=1)
  print(f'{progress.counts(done)} runs are done', flush=True)
  return replica_groups.run_groups(runner, entries, done, limits, progress)


@contextlib.contextmanager
def _processes_on_cpu() -> Iterator[None]:
  """Lets processes that start meanwhile use no accelerator."""
  before = os.environ.get('JAX_PLATFORMS')
  os.environ['JAX_PLATFORMS'] = 'cpu'
  try:
    yield
  finally:
    if before is None:
      del os.environ['JAX_PLATFORMS']
    else:
      os.environ['JAX_PLATFORMS'] = before


class _Progress:
  """Prints finished runs, how many are left, and for how long."""

  def __init__(self, entries: Sequence[Entry], workers: int):
    self._entries = entries
    self._workers = workers

  def _names(self, done: Done) -> dict[str, str]:
    """Returns the kind of each run that is known or expected, by its name."""
    names = {
        job.name: job.arm.folder for job in all_jobs(self._entries, done)
    }
    for entry in self._entries:  # Seeds whose rate is not chosen yet.
      if entry.arm.rate_of is None:
        count = sum(kind == entry.arm.folder for kind in names.values())
        for i in range(count, entry.seeds + len(points(entry.grid))):
          names[f'{entry.arm.folder}/{i}'] = entry.arm.folder
    return names

  def counts(self, done: Done) -> str:
    """Says how many runs are done, of how many."""
    names = self._names(done)
    return f'{len(names.keys() & done.keys())} of {len(names)}'

  def __call__(self, job: Job, done: Done) -> None:
    names = self._names(done)
    seconds: dict[str, list[float]] = {}
    for name, outcome in done.items():
      seconds.setdefault(name.partition('/')[0], []).append(outcome['seconds'])
    known = [x for values in seconds.values() for x in values]
    mean = sum(known) / len(known)
    left = [kind for name, kind in names.items() if name not in done]
    total = sum(
        sum(seconds[kind]) / len(seconds[kind]) if kind in seconds else mean
        for kind in left
    )
    outcome = done[job.name]
    loss = outcome.get(job.arm.metric)
    print(
        f'{self.counts(done)}: {job.name}: '
        + ('' if loss is None else f'{job.arm.metric} {loss:.4f}, ')
        + f'{outcome["seconds"]:.0f} s; {len(left)} left, about '
        f'{format_seconds(total / self._workers)}',
        flush=True,
    )


def write_results(
    reproduction: Reproduction, identity: Mapping[str, Any], done: Done
) -> str:
  """Judges the claims; writes table, numbers and figure; returns the table."""
  scale, entries = reproduction.scale, reproduction.entries
  claims = [CLAIMS[key] for key in scale.claims]
  found = claim_report.measured(entries, done)
  gates = gates_lib.check(scale, claims, entries, done, found)
  findings = judge(claims, found, gates_lib.failures(gates, claims))
  machine = describe_machine() | {
      library: importlib.metadata.version(library)
      for library in ('flax', 'numpy', 'optax', 'orbax-checkpoint')
  }
  jobs = all_jobs(entries, done)
  expected = {job.name for job in jobs}
  kernels = [o['kernels'] for o in done.values() if 'kernels' in o]
  facts = {
      'scale': reproduction.name,
      'protocol': f'commit {protocol_commit()}',
      'runs': f'{len(expected & done.keys())} of {len(expected)} that are '
              'known to be needed',
      'core seconds of all runs': round(sum(
          outcome['seconds'] for outcome in done.values()
      )),
      'runs with native kernels': f'{sum(kernels)} of {len(kernels)}',
  } | {k: machine[k] for k in ('processor', 'device', 'jax', 'python')}
  report = claim_report.format_report(
      f"The papers' claims at scale {reproduction.name}", facts, findings, {
          'Gates': claim_report.format_gates(gates),
          'Arms': claim_report.format_arms(entries, done, found),
          'Chosen by validation': claim_report.format_choices(entries, done),
      },
  )
  output = reproduction.output
  output.mkdir(parents=True, exist_ok=True)
  results = {
      'scale': reproduction.name, 'identity': identity,
      'protocol_commit': protocol_commit(), 'selection_seed': SELECTION_SEED,
      'machine': machine, 'gates': claim_report.describe_gates(gates),
      'claims': claim_report.describe_findings(findings), 'runs': dict(done),
  }
  write_atomically(
      output / 'results.json', json.dumps(results, indent=1) + '\n'
  )
  write_atomically(output / 'table.md', report)
  with contextlib.suppress(ImportError):  # The tables are whole without it.
    figure = claim_plots.plot_claims(entries, found, findings)
    figure.savefig(output / 'claims.png')
  return report


def draw_costs(reproduction: Reproduction, data: str) -> None:
  """Times the steps of the arms and writes `costs.png` beside the results.

  Raises:
    ValueError: no pre-training is finished, or data are missing.
  """
  scale = reproduction.scale
  prepared = pool_data.prepare(scale, data, reproduction.workdir)
  identity = identify(scale, prepared.fingerprints)
  done = read_results(reproduction.output / 'results.json', identity)
  found = claim_report.measured(reproduction.entries, done)
  arms = cost_plots.shown_arms(
      found, [size for size in scale.sizes if size != 'small']
  )
  if not arms:
    raise ValueError(
        f'output {str(reproduction.output)!r} has no finished pre-training; '
        'run the scale first.'
    )
  seconds = cost_plots.training_seconds(scale, arms, prepared)
  figure = cost_plots.plot_costs(scale, found, seconds)
  figure.savefig(reproduction.output / 'costs.png')
  costs = {arm.name: round(value, 1) for arm, value in seconds.items()}
  write_atomically(
      reproduction.output / 'costs.json', json.dumps(costs, indent=1) + '\n'
  )


def protocol_commit() -> str:
  """Returns the commit that last changed the protocol, `'unknown'` without git.
  """
  found = None
  with contextlib.suppress(OSError):
    found = subprocess.run(
        ['git', 'log', '-1', '--format=%H', '--', PROTOCOL.name],
        cwd=PROTOCOL.parent, capture_output=True, text=True, check=False,
    )
  return (found.stdout.strip() if found else '') or 'unknown'


def identify(
    scale: Scale, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
  """Returns what must be equal for runs to belong to one pool.

  Args:
    scale: The scale: what its runs have in common, not which are run.
    fingerprints: Fingerprints of the data.

  Returns:
    Sizes, data and a digest of the protocol, JSON-able.
  """
  names = (
      'layers', 'length', 'batch_size', 'micro_batches', 'tokens_per_parameter',
      'rounds', 'round_share', 'tune_batch', 'tune_steps', 'batches', 'speeds',
  )
  return json.loads(json.dumps({
      **{name: getattr(scale, name) for name in names},
      'widths': {name: size.width for name, size in scale.sizes.items()},
      'data': fingerprints,
      'protocol': hashlib.sha256(PROTOCOL.read_bytes()).hexdigest(),
  }))


def check_same(path: pathlib.Path, identity: Mapping[str, Any]) -> None:
  """Claims a folder for a protocol, a scale and its data.

  Raises:
    ValueError: it has runs of others.
  """
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(identity, indent=2) + '\n')
    return
  found = json.loads(path.read_text('utf-8'))
  different = [k for k in identity if identity[k] != found.get(k)]
  if different:
    raise ValueError(
        f'workdir {str(path.parent)!r} has runs of another scale, protocol or '
        f'other data: {", ".join(different)} differ; give another workdir.'
    )


def read_results(
    path: pathlib.Path, identity: Mapping[str, Any]
) -> dict[str, Outcome]:
  """Reads the outcomes of results that were written before.

  Args:
    path: A `results.json`.
    identity: From `identify`.

  Returns:
    Outcomes by the names of runs; none where there is no file, or it is of
    another protocol.
  """
  if not path.exists():
    return {}
  found = json.loads(path.read_text('utf-8'))
  return found['runs'] if found.get('identity') == identity else {}
