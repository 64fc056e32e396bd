r"""Trains a grid of configs and chooses the best by a validation metric.

  python -m experiments.sweep --config=configs/quickstart.py \
    --workdir=sweeps/a --metric=target/loss --seeds=3 \
    --grid=phases.finetune.learning_rate.peak=1e-3,2e-3 \
    --grid=phases.finetune.batch_size=8,16

Every point of the grid is trained with seeds 0, 1, …, each run in a folder
named after the fields it changes; --config.init_from=RUN@PHASE fine-tunes one
pre-trained model in all of them. If killed, the same command continues;
finished runs are not trained again. sweep.jsonl has a line for each run in the
folder, sweep.md the mean of each point of this grid over seeds ± its standard
deviation. --test_tasks has the form of --tasks of experiments.evaluate: the
runs of the best point are scored once on these tasks, in test.json and test.md,
with the answers in the runs' folders.

--executor=ray trains the runs on the nodes of a Ray cluster; if a node is lost,
its runs continue on another. --index=N trains only the Nth run, as a job of an
array does; without it the same command then ranks the points.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import pathlib
from typing import Any

from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from experiments.launch import executors
from experiments.launch import grid as grids
from experiments.scores import language_models
from experiments.scores import scoring_flags
from experiments.scores import sheets
from experiments.scores import task_scores
from spdf_jax import files
from spdf_jax.training.configs import early_stop
from spdf_jax.training.loop import metrics as metric_files

FLAGS = flags.FlagValues()
_CONFIG = config_file.define(FLAGS)
flags.mark_flag_as_required('config', FLAGS)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for all runs.', required=True, flag_values=FLAGS
)
_GRID = flags.DEFINE_multi_string(
    'grid', [],
    'Field of the config and its values, field=value,value; repeatable.',
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 1, 'Number of seeds for each point.', lower_bound=1,
    flag_values=FLAGS,
)
_METRIC = flags.DEFINE_string(
    'metric', 'validation/loss',
    f'Metric that chooses the best point: {", ".join(early_stop.METRICS)}.',
    flag_values=FLAGS,
)
_TEST_TASKS = flags.DEFINE_list(
    'test_tasks', [], 'Tasks to score the best point on, NAME=PATH.',
    flag_values=FLAGS,
)
_INDEX = flags.DEFINE_integer(
    'index', None,
    'Number of the only run to train, from 1, e.g. $SLURM_ARRAY_TASK_ID.',
    lower_bound=1, flag_values=FLAGS,
)
_SETTINGS = scoring_flags.define(FLAGS)
_RESOURCES = executors.define(FLAGS)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  compilation_cache.prepare()
  return console.run(argv, _sweep)


def _sweep() -> Iterator[str]:
  config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
  how = dict(
      seeds=_SEEDS.value, metric=_METRIC.value, test_tasks=_TEST_TASKS.value
  )
  if _INDEX.value is not None:
    if _RESOURCES() is not None:
      raise ValueError('index trains a run on this machine; omit --executor.')
    yield from train_one(config, workdir, _GRID.value, _INDEX.value, **how)
    return
  with executors.opened(_RESOURCES()) as executor:
    yield from run_sweep(
        config, workdir, _GRID.value, **how,
        settings=_SETTINGS(None, config.model.max_length),
        executor=executor,
    )


def run_sweep(
    config: Any,
    workdir: pathlib.Path,
    grid: Sequence[str],
    *,
    seeds: int,
    metric: str,
    settings: sheets.Settings,
    test_tasks: Sequence[str] = (),
    executor: concurrent.futures.Executor | None = None,
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

  Yields:
    The name of each run before it starts, or with an executor when it has
    ended, and the tables at the end.

  Raises:
    ValueError: the metric or a task is unknown, the config of a run is
      invalid, or another process runs a sweep in this folder.
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  files.refuse_url(workdir, 'workdir')
  runs = grids.plan_runs(config, grid, seeds, metric, test_tasks)
  workdir.mkdir(parents=True, exist_ok=True)
  files.lock_folder(workdir, 'workdir')  # Held until the process ends.
  names = {grids.run_name(fields, changed.seed) for fields, changed in runs}
  path = workdir / 'sweep.jsonl'
  earlier = metric_files.read_json_lines(path) if path.exists() else []
  with files.reading(path, 'remove its faulty lines.'):
    earlier = [row for row in earlier if row['workdir'] not in names]
  result_of: dict[int, grids.Result] = {}
  for item in _train_all(runs, workdir, executor):
    if isinstance(item, str):
      yield item
      continue
    number, result = item
    result_of[number] = result
    results = [result_of[key] for key in sorted(result_of)]
    grids.rank([result], metric)  # Raises if the metric was not measured.
    rows = [*earlier, *(result._asdict() for result in results)]
    lines = ''.join(json.dumps(row) + '\n' for row in rows)
    files.write_atomically(path, lines)
  choices = grids.rank(results, metric)
  table = grids.format_choices(choices, metric)
  files.write_atomically(workdir / 'sweep.md', table + '\n')
  yield table
  if not math.isfinite(choices[0].mean):
    raise ValueError('a run of every point diverged; lower the learning rate.')
  if test_tasks:
    best = [r for r in results if r.fields == choices[0].fields]
    yield score(workdir, best, test_tasks, settings)


def train_one(
    config: Any,
    workdir: pathlib.Path,
    grid: Sequence[str],
    index: int,
    *,
    seeds: int,
    metric: str,
    test_tasks: Sequence[str] = (),
) -> Iterator[str]:
  """Trains one run of a sweep, while other machines may train others.

  Args:
    config: A ConfigDict.
    workdir: Folder of the runs.
    grid: A text `'field=value,value'` for each field.
    index: Number of the run, from 1, in the order in which `run_sweep` trains.
    seeds: Number of runs of each point.
    metric: Metric of the sweep.
    test_tasks: Tasks of the sweep.

  Yields:
    The name of the run before it starts.

  Raises:
    ValueError: there is no such run, `run_sweep` would raise it, or another
      process trains the run.
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  files.refuse_url(workdir, 'workdir')
  runs = grids.plan_runs(config, grid, seeds, metric, test_tasks)
  if index > len(runs):
    raise ValueError(
        f'index is {index} and the sweep has {len(runs)} runs; give a number '
        f'from 1 to {len(runs)}.'
    )
  fields, changed = runs[index - 1]
  name = grids.run_name(fields, changed.seed)
  yield f'run {index} of {len(runs)}: {name}'
  with _named(name):
    grids.train(changed, workdir / name)


def _train_all(
    runs: Sequence[tuple[dict[str, Any], Any]],
    workdir: pathlib.Path,
    executor: concurrent.futures.Executor | None,
) -> Iterator[str | tuple[int, grids.Result]]:
  """Trains runs; yields what to print, and results with their numbers."""
  names = [grids.run_name(fields, changed.seed) for fields, changed in runs]
  futures: dict[concurrent.futures.Future[dict[str, float]], int] = {}
  for number, (fields, changed) in enumerate(runs):
    name = names[number]
    if executor is not None:
      future = executor.submit(grids.train, changed, workdir / name)
      futures[future] = number
      continue
    yield f'run {number + 1} of {len(runs)}: {name}'
    with _named(name):
      metrics = grids.train(changed, workdir / name)
    yield number, grids.Result(fields, changed.seed, name, metrics)
  for count, future in enumerate(
      concurrent.futures.as_completed(futures), start=1
  ):
    number = futures[future]
    with _named(names[number]):
      metrics = future.result()
    fields, changed = runs[number]
    yield f'{count} of {len(runs)} runs are done: {names[number]}'
    yield number, grids.Result(fields, changed.seed, names[number], metrics)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """Adds the name of a run to the message of its errors."""
  try:
    yield
  except InterruptedError:
    raise
  except (ValueError, OSError, ImportError) as error:
    raise ValueError(f'{name}: {error}') from error


def score(
    workdir: pathlib.Path,
    best: Sequence[grids.Result],
    tasks: Sequence[str],
    settings: sheets.Settings,
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
    with files.reading(path, 'move it away to score it again.'):
      entries = json.loads(path.read_text('utf-8'))
      same = [pathlib.Path(run['model']).name for run in entries] == [
          result.workdir for result in best
      ] and all(run == {**run, **how} for run in entries)
    if not same:
      raise ValueError(
          f'{path} has the test scores of other runs, tasks or settings; the '
          'test split is scored once, for chosen runs: move the file away to '
          'score it again.'
      )
  else:
    entries = []
    for source in (workdir / result.workdir for result in best):
      model = language_models.open_run(str(source))
      scores = task_scores.score_tasks(
          model, tasks,
          dataclasses.replace(settings, generations=source / 'test'),
      )
      entry = sheets.to_json(model.name, list(scores), settings)
      entries.append({**entry, **how})
    files.write_atomically(path, json.dumps(entries, indent=2) + '\n')
  table = sheets.format_means(entries)
  files.write_atomically(workdir / 'test.md', table + '\n')
  return table


if __name__ == '__main__':
  console.start(main, FLAGS)
