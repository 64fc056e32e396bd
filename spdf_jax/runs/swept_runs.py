# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep: planning, training, and scoring of the best."""

from collections.abc import Iterator
from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import pathlib
from typing import Any

import jax

from spdf_jax import training
from spdf_jax.evaluation import scorecard
from spdf_jax.files import FolderInUse
from spdf_jax.files import lock_folder
from spdf_jax.files import refuse_url
from spdf_jax.names import lookup
from spdf_jax.runs import lifecycle
from spdf_jax.runs.open_models import open_run
from spdf_jax.runs.sweeps import format_choices
from spdf_jax.runs.sweeps import parse_grid
from spdf_jax.runs.sweeps import points
from spdf_jax.runs.sweeps import rank
from spdf_jax.runs.sweeps import Result
from spdf_jax.runs.sweeps import run_name
from spdf_jax.training.config import parse
from spdf_jax.training.early_stop import METRICS
from spdf_jax.training.metrics import last_values
from spdf_jax.training.metrics import read_json_lines
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.metrics import write_atomically

logger = logging.getLogger('spdf_jax')


def run_sweep(
    config: Any,
    workdir: pathlib.Path,
    grid: Sequence[str],
    *,
    seeds: int,
    metric: str,
    settings: scorecard.Settings,
    test_tasks: Sequence[str] = (),
    executor: concurrent.futures.Executor | None = None,
    is_shared: bool = False,
) -> Iterator[str]:
  """Trains every point of a grid and selects the best by a validation metric.

  A second call after an interruption resumes the sweep.

  Args:
    config: A ConfigDict.
    workdir: Folder of the runs, of `sweep.jsonl` and of `sweep.md`. Runs of
      other points and seeds that were trained there before keep their lines in
      `sweep.jsonl`, and are not ranked.
    grid: A text `'field=value,value'` for each field.
    seeds: Number of runs of each point, with seeds 0, 1, …
    metric: One of `METRICS`, by which the best point is selected.
    settings: Settings for scoring the best point, see `score`.
    test_tasks: Tasks on which the best point is scored, see `score`; empty: it
      is not scored.
    executor: Executor that trains the runs, several at a time; `None`: they are
      trained one after another in this process.
    is_shared: Whether other machines run the same sweep in this folder.

  Yields:
    The name of each run before it starts, or with an executor when it has
    ended, and the tables at the end.

  Raises:
    ValueError: The metric or a task is unknown, the config of a run is
      invalid, or another process runs a sweep in this folder.
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  refuse_url(workdir, 'workdir')
  runs = plan_runs(config, grid, seeds, metric, test_tasks)
  workdir.mkdir(parents=True, exist_ok=True)
  if not is_shared:
    lock_folder(workdir, 'workdir')  # Held until the process ends.
  names = {run_name(fields, changed.seed) for fields, changed in runs}
  path = workdir / 'sweep.jsonl'
  earlier = [
      row for row in (read_json_lines(path) if path.exists() else [])
      if row['workdir'] not in names
  ]
  found: dict[int, Result] = {}
  for item in _train_all(runs, workdir, executor):
    if isinstance(item, str):
      yield item
      continue
    number, result = item
    found[number] = result
    results = [found[key] for key in sorted(found)]
    rank([result], metric)  # Raises if the metric was not measured.
    # Another machine may have written more results than are known here.
    if not is_shared or len(results) == len(runs):
      rows = [*earlier, *(result._asdict() for result in results)]
      write_atomically(path, ''.join(json.dumps(row) + '\n' for row in rows))
  choices = rank(results, metric)
  table = format_choices(choices, metric)
  write_atomically(workdir / 'sweep.md', table + '\n')
  yield table
  if not math.isfinite(choices[0].mean):
    raise ValueError('a run of every point diverged; lower the learning rate.')
  if test_tasks:
    try:
      lock_folder(workdir, 'workdir')
    except FolderInUse:
      yield f'another machine scores the best point, in {workdir}'
      return
    best = [r for r in results if r.fields == choices[0].fields]
    yield score(workdir, best, test_tasks, settings)


def plan_runs(
    config: Any,
    grid: Sequence[str],
    seeds: int,
    metric: str,
    test_tasks: Sequence[str] = (),
) -> list[tuple[dict[str, Any], Any]]:
  """Returns the changed values and the config of every run, after checks.

  Args:
    config: A ConfigDict.
    grid: A text `'field=value,value'` for each field.
    seeds: Number of runs of each point, with seeds 0, 1, …
    metric: One of `METRICS`.
    test_tasks: `NAME` or `NAME=PATH` of each task.

  Returns:
    Pairs (changed values, config), one for each run.

  Raises:
    ValueError: The grid is not of this form or has a run twice, the config has
      no such field, the config of a run is invalid, or the metric or a task is
      unknown or not measured.
  """
  lookup('metric', metric, METRICS)
  scorecard.parse_tasks(test_tasks)
  runs = []
  for fields in points(parse_grid(grid)):
    for seed in range(seeds):
      changed = config.copy_and_resolve_references()
      changed.seed = seed
      try:
        changed.update_from_flattened_dict(fields)
      except (KeyError, TypeError) as error:
        raise ValueError(f'grid: {error}; name fields of the config.') from None
      runs.append((fields, changed))
  seen = set()
  for fields, changed in runs:
    name = run_name(fields, changed.seed)
    if name in seen:
      raise ValueError(
          f'grid has the run {name!r} twice; give every value once, and seeds '
          'either in the grid or as their number.'
      )
    seen.add(name)
  for _, changed in runs[::seeds]:
    parse(changed).check_metric(metric, 'the sweep ranks by')
    training.create_recipe(changed)
  return runs


def _train_all(
    runs: Sequence[tuple[dict[str, Any], Any]],
    workdir: pathlib.Path,
    executor: concurrent.futures.Executor | None,
) -> Iterator[str | tuple[int, Result]]:
  """Trains runs; yields what to print, and results with their numbers."""
  names = [run_name(fields, changed.seed) for fields, changed in runs]
  futures: dict[concurrent.futures.Future[dict[str, float]], int] = {}
  for number, (fields, changed) in enumerate(runs):
    name = names[number]
    if executor is not None:
      future = executor.submit(train, changed, workdir / name)
      futures[future] = number
      continue
    yield f'run {number + 1} of {len(runs)}: {name}'
    with _named(name):
      metrics = train(changed, workdir / name)
    yield number, Result(fields, changed.seed, name, metrics)
  for count, future in enumerate(
      concurrent.futures.as_completed(futures), start=1
  ):
    number = futures[future]
    with _named(names[number]):
      metrics = future.result()
    fields, changed = runs[number]
    yield f'{count} of {len(runs)} runs are done: {names[number]}'
    yield number, Result(fields, changed.seed, names[number], metrics)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """Adds the name of a run to its errors."""
  try:
    yield
  except InterruptedError:
    raise
  except (ValueError, OSError, ImportError) as error:
    raise ValueError(f'{name}: {error}') from error


def train(config: Any, workdir: pathlib.Path) -> dict[str, float]:
  """Trains one run to its end and returns its last metrics.

  A phase with an early stop ends with its best weights, so that its metrics are
  those of the weights that `score` scores. If the loss or gradients are not
  finite, the run ends and its metrics are infinite, so that it ranks last; so
  is a metric that is not finite at the end. All compiled programs are released,
  since no other run uses those of this one.

  Raises:
    FolderInUse: Another process trains the run.
  """
  worst = {
      name: -math.inf if larger_is_better else math.inf
      for name, larger_is_better in METRICS.items()
  }
  workdir.mkdir(parents=True, exist_ok=True)
  # Before the data is read, since a run in use is retried every few seconds.
  release = lock_folder(workdir, 'workdir')
  try:
    session = training.open_session(training.create_recipe(config), workdir)
    lifecycle.run(session, workdir.name)
  except training.NotFinite as error:
    logger.warning('%s: %s', workdir.name, error)
    return worst
  finally:
    release()
    jax.clear_caches()  # A process that trains many runs would keep them all.
  last = last_values(read_rows(workdir / 'metrics.jsonl'), METRICS)
  return {
      name: value if math.isfinite(value) else worst[name]
      for name, value in last.items()
  }


def score(
    workdir: pathlib.Path,
    best: Sequence[Result],
    tasks: Sequence[str],
    settings: scorecard.Settings,
) -> str:
  """Scores runs on test splits, unless they have been scored before.

  `test.json` records the tasks and settings too.

  Args:
    workdir: Folder of the sweep, in which `test.json` and `test.md` are
      written.
    best: Results of the runs to score.
    tasks: `NAME` or `NAME=PATH` of each task.
    settings: Settings of generation and scoring; answers are written to the
      folders of the runs.

  Returns:
    A table of means over the runs.

  Raises:
    ValueError: `test.json` has scores of other runs, tasks or settings, or a
      task is invalid.
  """
  path = workdir / 'test.json'
  how = {'tasks': [*tasks], 'settings': settings.as_dict()}
  if path.exists():
    found = json.loads(path.read_text('utf-8'))
    same = [pathlib.Path(run['model']).name for run in found] == [
        result.workdir for result in best
    ]
    if not same or any(run != {**run, **how} for run in found):
      raise ValueError(
          f'{path} has the test scores of other runs, tasks or settings; the '
          'test split is for one choice: move the file away to score again.'
      )
  else:
    found = []
    for source in (workdir / result.workdir for result in best):
      candidate = open_run(str(source))
      scores = itertools.chain.from_iterable(scorecard.score_tasks(
          candidate, tasks,
          dataclasses.replace(settings, generations=source / 'test'),
      ))
      entry = scorecard.to_json(candidate, list(scores), settings)
      found.append({**entry, **how})
    write_atomically(path, json.dumps(found, indent=2) + '\n')
  table = scorecard.format_means(found)
  write_atomically(workdir / 'test.md', table + '\n')
  return table
