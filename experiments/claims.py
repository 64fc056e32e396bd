"""The papers' claims at a scale: the pool of runs, and what it found."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
from typing import Any

from experiments import arms as arms_lib
from experiments import pool_data
from experiments import pool_runs
from experiments.machine import describe_machine
from experiments.scales import Scale
from spdf_jax.analysis import claim_plots
from spdf_jax.analysis import claim_report
from spdf_jax.analysis.claims import judge
from spdf_jax.analysis.paper_claims import CLAIMS
from spdf_jax.analysis.pool import Arm
from spdf_jax.analysis.pool import count_jobs
from spdf_jax.analysis.pool import Job
from spdf_jax.analysis.pool import next_jobs
from spdf_jax.analysis.pool import run_all
from spdf_jax.training.metrics import write_atomically
from spdf_jax.training.progress import format_seconds

SELECTION_SEED = 0
"""Grids are run on it; claims are judged on seeds 1, 2, …"""


def reproduce(
    name: str, scale: Scale, data: str, workdir: pathlib.Path,
    output: pathlib.Path, workers: int,
) -> str:
  """Trains all runs of a scale that are not there yet, and judges its claims.

  Args:
    name: The scale's.
    scale: What is run.
    data: The folder of the data.
    workdir: Where the runs go.
    output: Where `table.md`, `results.json` and `claims.png` go.
    workers: How many runs at a time; 0: one for each core, or one in all where
      they are not pinned.

  Returns:
    The report.

  Raises:
    ValueError: a claim is unknown, data are missing, or the runs that are
      there are of another scale.
    InterruptedError: a signal came; everything is saved.
  """
  arms = arms_lib.arms_of(scale.claims, scale)
  seeds = range(1, scale.seeds + 1)
  prepared = pool_data.prepare(scale, data, workdir)
  check_same(workdir / 'scale.json', scale, prepared.fingerprints)
  runs = workdir / 'runs'
  runner = pool_runs.Runner(scale, str(runs), prepared.corpus, prepared.tasks)
  cores = sorted(os.sched_getaffinity(0))
  workers = workers or (len(cores) if scale.pinned else 1)
  done = pool_runs.read_outcomes(runs)
  done = run_pool(
      runner, arms, seeds, done, cores if scale.pinned else [], workers
  )
  return write_results(name, scale, arms, seeds, done, prepared, output)


def run_pool(
    runner: Callable[[Job], Mapping[str, Any]],
    arms: Sequence[Arm],
    seeds: Sequence[int],
    done: Mapping[str, Mapping[str, Any]],
    cores: Sequence[int],
    workers: int,
) -> dict[str, Mapping[str, Any]]:
  """Runs what is not done, in processes; prints each run and the time left."""
  total = sum(count_jobs(arm, seeds) for arm in arms)
  progress = _Progress(arms, seeds, workers)
  print(f'{len(done)} of {total} runs are done', flush=True)
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  for i in range(workers if cores else 0):
    queue.put(cores[i % len(cores)])
  with concurrent.futures.ProcessPoolExecutor(
      workers, context, pool_runs.start_worker, (queue, os.getpid())
  ) as executor:
    return run_all(
        lambda done: next_jobs(arms, seeds, SELECTION_SEED, done),
        runner, done, executor, workers, progress,
    )


class _Progress:
  """Prints finished runs, how many are left, and for how long."""

  def __init__(self, arms: Sequence[Arm], seeds: Sequence[int], workers: int):
    self._counts = {arm.name: count_jobs(arm, seeds) for arm in arms}
    self._metrics = {arm.name: arm.metric for arm in arms}
    self._workers = workers

  def __call__(self, job: Job, done: Mapping[str, Mapping[str, Any]]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in self._counts}
    for name, outcome in done.items():
      arm = name.partition('/')[0]
      if arm in seconds:
        seconds[arm].append(outcome['seconds'])
    known = [x for values in seconds.values() for x in values]
    mean = sum(known) / len(known)
    left = sum(
        (self._counts[arm] - len(values))
        * (sum(values) / len(values) if values else mean)
        for arm, values in seconds.items()
    )
    finished, total = len(known), sum(self._counts.values())
    outcome = done[job.name]
    loss = outcome.get(self._metrics[job.arm])
    print(
        f'{finished}/{total} {job.name}: '
        + ('' if loss is None else f'{self._metrics[job.arm]} {loss:.4f}, ')
        + f'{outcome["seconds"]:.0f} s; {total - finished} left, about '
        f'{format_seconds(left / self._workers)}',
        flush=True,
    )


def write_results(
    name: str,
    scale: Scale,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    done: Mapping[str, Mapping[str, Any]],
    prepared: pool_data.Prepared,
    output: pathlib.Path,
) -> str:
  """Judges the claims; writes table, numbers and figure; returns the table."""
  found = claim_report.measured(arms, seeds, SELECTION_SEED, done)
  findings = judge([CLAIMS[key] for key in scale.claims], found)
  machine = describe_machine() | {
      library: importlib.metadata.version(library)
      for library in ('flax', 'numpy', 'optax', 'orbax-checkpoint')
  }
  seconds = sum(outcome['seconds'] for outcome in done.values())
  facts = {
      'scale': name, 'seeds': list(seeds), 'runs': len(done),
      'core seconds of all runs': round(seconds),
  } | {k: machine[k] for k in ('processor', 'device', 'jax', 'python')}
  report = claim_report.format_report(
      f"The papers' claims at scale {name}", facts, findings, {
          'Arms': claim_report.format_arms(arms, SELECTION_SEED, done, found),
          'Chosen by validation': claim_report.format_choices(
              arms, SELECTION_SEED, done
          ),
      },
  )
  output.mkdir(parents=True, exist_ok=True)
  write_atomically(output / 'table.md', report)
  results = {
      'scale': name, 'config': scale._asdict(), 'seeds': list(seeds),
      'selection_seed': SELECTION_SEED, 'machine': machine,
      'data': prepared.fingerprints,
      'claims': claim_report.describe_findings(findings), 'runs': dict(done),
  }
  write_atomically(
      output / 'results.json', json.dumps(results, indent=1) + '\n'
  )
  with contextlib.suppress(ImportError):  # The tables are whole without it.
    figure = claim_plots.plot_claims(arms, found, findings)
    figure.savefig(output / 'claims.png')
  return report


def check_same(
    path: pathlib.Path, scale: Scale, fingerprints: Mapping[str, str]
) -> None:
  """Claims a folder for a scale and its data; more seeds go on with it.

  Raises:
    ValueError: it has runs of another scale, or of other data.
  """
  config = scale._asdict()
  for field in ('claims', 'seeds', 'pinned'):  # More of them is the same pool.
    del config[field]
  asked = json.loads(json.dumps(config | {'data': fingerprints}))
  if not path.exists():
    write_atomically(path, json.dumps(asked, indent=2) + '\n')
    return
  found = json.loads(path.read_text('utf-8'))
  different = [k for k in asked if asked[k] != found.get(k)]
  if different:
    raise ValueError(
        f'workdir {str(path.parent)!r} has runs of another scale or other '
        f'data: {", ".join(different)} differ; give another workdir.'
    )
