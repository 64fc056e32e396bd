"""Trains a grid of configs, and chooses the best by validation.

  python -m experiments.sweep --config=configs/quickstart.py \\
    --workdir=sweeps/a --metric=target/loss --seeds=3 \\
    --grid=phases.finetune.learning_rate.peak=1e-3,2e-3 \\
    --grid=phases.finetune.batch_size=8,16

Every point of the grid is trained with seeds 0, 1, …, each run in a folder of
its own, named by what it changed; --config.init_from=RUN@PHASE fine-tunes one
pre-trained model in all of them. Killed, the same command goes on; finished
runs are not trained again. sweep.jsonl has a line for each run, and the table
at the end, sweep.md, the mean over seeds ± their deviation. With --test_tasks,
as experiments.evaluate takes --tasks and the flags beside it, the best point's
runs are scored once: test.json and test.md, answers in the runs' folders.
"""

import json
import pathlib
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from experiments import scoring
from experiments.launch import compilation_cache
from experiments.launch import console
from spdf_jax import training
from spdf_jax.evaluation import scorecard
from spdf_jax.names import lookup
from spdf_jax.runs import lifecycle
from spdf_jax.runs import open_models as candidates
from spdf_jax.runs import sweeps
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.metrics import write_atomically
from spdf_jax.training.phases import METRICS

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file, with its argument: path.py:argument.'
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where all runs go.')
_GRID = flags.DEFINE_multi_string(
    'grid', [], 'field=value,value of the config; may be given several times.'
)
_SEEDS = flags.DEFINE_integer('seeds', 1, 'Runs of a point.', lower_bound=1)
_METRIC = flags.DEFINE_string(
    'metric', 'validation/loss', f'Chosen by: one of {", ".join(METRICS)}.'
)
_TEST_TASKS = flags.DEFINE_list(
    'test_tasks', [], 'NAME=PATH: what the best point is scored on.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  console.prepare()
  compilation_cache.prepare()
  workdir = pathlib.Path(_WORKDIR.value)
  try:
    lookup('metric', _METRIC.value, METRICS)
    runs = plan_runs(_CONFIG.value, sweeps.parse_grid(_GRID.value))
  except ValueError as error:
    logging.error('%s', error)
    return 1
  results = []
  for number, (fields, config) in enumerate(runs, start=1):
    name = sweeps.run_name(fields, config.seed)
    print(f'run {number} of {len(runs)}: {name}', flush=True)
    try:
      metrics = train(config, workdir / name)
      results.append(sweeps.Result(fields, config.seed, name, metrics))
      sweeps.rank(results, _METRIC.value)
    except training.Interrupted as interrupted:
      logging.warning('%s', interrupted)
      return 128 + interrupted.signal
    except (ValueError, OSError, ImportError, training.NotFinite) as error:
      logging.error('%s: %s', name, error)
      return 1
    lines = [json.dumps(result._asdict()) + '\n' for result in results]
    write_atomically(workdir / 'sweep.jsonl', ''.join(lines))
    jax.clear_caches()  # Of this run's programs.
  choices = sweeps.rank(results, _METRIC.value)
  table = sweeps.format_choices(choices, _METRIC.value)
  print(table)
  write_atomically(workdir / 'sweep.md', table + '\n')
  if _TEST_TASKS.value:
    best = [r for r in results if r.fields == choices[0].fields]
    try:
      print(score(workdir, best, _TEST_TASKS.value))
    except (ValueError, OSError, ImportError) as error:
      logging.error('%s', error)
      return 1
  return 0


def plan_runs(
    config: Any, grid: dict[str, list[Any]]
) -> list[tuple[dict[str, Any], Any]]:
  """Returns the changes and the config of every run, all of them checked.

  Raises:
    ValueError: the config has no such field, or a run cannot be.
  """
  runs = []
  for fields in sweeps.points(grid):
    for seed in range(_SEEDS.value):
      changed = config.copy_and_resolve_references()
      changed.seed = seed
      try:
        changed.update_from_flattened_dict(fields)
      except (KeyError, TypeError) as error:
        raise ValueError(f'grid: {error}; name fields of the config.') from None
      runs.append((fields, changed))
  for _, changed in runs[::_SEEDS.value]:
    training.create_recipe(changed)
  return runs


def train(config: Any, workdir: pathlib.Path) -> dict[str, float]:
  """Trains one run to its end; returns what its last evaluation found."""
  session = training.open_session(training.create_recipe(config), workdir)
  lifecycle.run(session, workdir.name)
  last: dict[str, float] = {}
  for row in read_rows(workdir / 'metrics.jsonl'):
    last |= {name: row[name] for name in METRICS if name in row}
  return last


def score(
    workdir: pathlib.Path, best: list[sweeps.Result], tasks: list[str]
) -> str:
  """Scores runs on test splits, once; returns a table of means.

  Raises:
    ValueError: others have been scored there, or a task cannot be.
  """
  path = workdir / 'test.json'
  sources = [str(workdir / result.workdir) for result in best]
  if path.exists():
    found = json.loads(path.read_text('utf-8'))
    if [run['model'] for run in found] != sources:
      raise ValueError(
          f'{path} has the test scores of other runs, of another grid; the '
          'test split is for one choice: move the file away to score again.'
      )
  else:
    found = []
    for source in sources:
      candidate = candidates.open_run(source)
      settings = scoring.settings(pathlib.Path(source) / 'test')
      scores = []
      for task in tasks:
        name, _, files = task.partition('=')
        scores += scorecard.score_task(candidate, name, files, settings)
      found.append(scorecard.to_json(candidate, scores))
    write_atomically(path, json.dumps(found, indent=2) + '\n')
  table = scorecard.format_means(found)
  write_atomically(workdir / 'test.md', table + '\n')
  return table


if __name__ == '__main__':
  flags.adopt_module_key_flags(scoring)
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main)
