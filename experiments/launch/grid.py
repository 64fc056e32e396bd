"""Grid over fields of a config: its points, their training and ranking."""

import ast
from collections.abc import Mapping, Sequence
import copy
import dataclasses
import itertools
import json
import logging
import math
import pathlib
import statistics
from typing import Any, NamedTuple

import jax

from experiments.scores import task_scores
from spdf_jax import files
from spdf_jax import names
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import markdown
from spdf_jax.training.checkpoints import identity
from spdf_jax.training.configs import early_stop
from spdf_jax.training.loop import metrics as metric_files

logger = logging.getLogger('spdf_jax')


class Result(NamedTuple):
  """One run of a sweep, a line of `sweep.jsonl`.

  Attributes:
    fields: Changed values of the config, by dotted name.
    seed: Seed of the run.
    workdir: Name of the run's folder.
    metrics: Metrics of the last evaluation, which is that of the best weights
      if the phase has an early stop; infinite if the run diverged.
  """

  fields: Mapping[str, Any]
  seed: int
  workdir: str
  metrics: Mapping[str, float]


class Choice(NamedTuple):
  """One point of the grid: the statistics of a metric over seeds.

  Attributes:
    fields: Changed values of the config, by dotted name.
    mean: Mean over seeds.
    deviation: Sample standard deviation over seeds; nan for a single seed, or
      if a run diverged.
    seeds: Number of seeds.
  """

  fields: Mapping[str, Any]
  mean: float
  deviation: float
  seeds: int


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
  """Parses a grid from texts `'field=value,value'`.

  Args:
    texts: A text for each field, with its dotted name; values are numbers,
      words or quoted text.

  Returns:
    Values by field.

  Raises:
    ValueError: a text does not have that form, or a field occurs twice.

  Example:
    >>> parse_grid(['optimizer.b2=0.95,0.99', 'data.task=e2e'])
    {'optimizer.b2': [0.95, 0.99], 'data.task': ['e2e']}
  """
  grid: dict[str, list[Any]] = {}
  for text in texts:
    name, equals, values = text.partition('=')
    if not (name and equals and values) or name in grid:
      raise ValueError(
          f'grid has {text!r}; give every field once, as field=value,value.'
      )
    grid[name] = [_value(word) for word in values.split(',')]
  return grid


def points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
  """Returns all combinations of values, varying the last field fastest.

  Example:
    >>> points({'a': [1, 2], 'b': [3, 4]})[1]
    {'a': 1, 'b': 4}
  """
  return [
      dict(zip(grid, values)) for values in itertools.product(*grid.values())
  ]


def run_name(fields: Mapping[str, Any], seed: int) -> str:
  """Returns the folder name of a run, from its changed values and seed.

  Example:
    >>> run_name({'phases.finetune.learning_rate.peak': 0.001}, seed=2)
    'phases.finetune.learning_rate.peak=0.001,seed=2'
  """
  parts = [f'{name}={value}' for name, value in fields.items()]
  return ','.join([*parts, f'seed={seed}']).replace('/', '_')


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
    ValueError: the grid is not of this form, has a run twice or two points that
      train alike, the config has no such field, the config of a run is invalid,
      or the metric or a task is unknown or not measured.
  """
  names.lookup('metric', metric, early_stop.METRICS)
  task_scores.parse_tasks(test_tasks)
  runs = []
  for fields in points(parse_grid(grid)):
    for seed in range(seeds):
      # A field of `phase_defaults` reaches the phases that refer to it.
      changed = copy.deepcopy(config)
      changed.seed = seed
      try:
        changed.update_from_flattened_dict(fields)
      except (KeyError, TypeError) as error:
        for name in fields:
          names.lookup('grid: field', name, identity.flatten(config.to_dict()))
        raise ValueError(f'grid: {error}; name fields of the config.') from None
      runs.append((fields, changed.copy_and_resolve_references()))
  seen = set()
  for fields, changed in runs:
    name = run_name(fields, changed.seed)
    if name in seen:
      raise ValueError(
          f'grid has the run {name!r} twice; give every value once, and seeds '
          'either in the grid or as their number.'
      )
    seen.add(name)
  parsed = {}
  for fields, changed in runs[::seeds]:
    point = parsed[run_name(fields, changed.seed)] = training.parse(changed)
    point.check_metric(metric, 'the sweep ranks by')
  refuse_alike('grid', parsed)
  for _, changed in runs[::seeds]:
    training.Run.create(changed)
  return runs


def refuse_alike(
    what: str, configs: Mapping[str, training.RunConfig]
) -> None:
  """Raises ValueError if two configs that should differ train alike.

  Phases that are not run, and arguments that a phase's algorithm ignores, are
  no difference.

  Args:
    what: Argument that names the configs, for the error message.
    configs: Parsed configs, by name.
  """
  seen: list[tuple[str, training.RunConfig]] = []
  for name, config in configs.items():
    used = dataclasses.replace(config, phases=tuple(
        dataclasses.replace(phase, algorithm={
            key: phase.algorithm[key] for key in phase.resolved_algorithm(None)
        })
        for phase in config.phases
    ))
    for other, trained in seen:
      if trained == used:
        raise ValueError(
            f'{what} has {other!r} and {name!r}, which train alike; change '
            'fields that a phase of phases.order uses.'
        )
    seen.append((name, used))


def train(config: Any, workdir: pathlib.Path) -> dict[str, float]:
  """Trains one run to its end and returns its last metrics.

  A phase with an early stop ends with its best weights, so that its metrics are
  those of the weights that are scored. If the loss or gradients are not
  finite, the run ends and its metrics are infinite, so that it ranks last; so
  is a metric that is not finite at the end. All compiled programs are released,
  since no other run uses those of this one.

  Raises:
    FolderInUse: Another process trains the run.
  """
  worst = {
      name: -math.inf if larger_is_better else math.inf
      for name, larger_is_better in early_stop.METRICS.items()
  }
  workdir.mkdir(parents=True, exist_ok=True)
  # Before the data is read, since a run in use is retried every few seconds.
  release = files.lock_folder(workdir, 'workdir')
  try:
    run = training.Run.create(config, workdir).open()
    training.train(run, **lifecycle.begin(run, workdir.name))
  except training.NotFinite as error:
    logger.warning('%s: %s', workdir.name, error)
    return worst
  finally:
    release()
    jax.clear_caches()  # Compiled programs of many runs would fill the memory.
  rows = metric_files.read_rows(workdir / 'metrics.jsonl')
  last = metric_files.last_values(rows, early_stop.METRICS)
  return {
      name: value if math.isfinite(value) else worst[name]
      for name, value in last.items()
  }


def rank(results: Sequence[Result], metric: str) -> list[Choice]:
  """Sorts the points of a grid by a metric, the best one first.

  Args:
    results: Results of finished runs.
    metric: One of `METRICS`, which defines whether higher is better.

  Returns:
    A choice for each point with results.

  Raises:
    ValueError: a run has no such metric.

  Example:
    >>> results = [Result({'a': a}, s, '', {'validation/loss': a + s})
    ...            for a in (2, 1) for s in (0, 1)]
    >>> rank(results, 'validation/loss')[0]
    ... # doctest: +NORMALIZE_WHITESPACE
    Choice(fields={'a': 1}, mean=1.5, deviation=0.7071067811865476, seeds=2)
  """
  groups: dict[str, list[Result]] = {}
  for result in results:
    if metric not in result.metrics:
      raise ValueError(
          f'run {result.workdir!r} has not measured {metric!r}; choose one of '
          f'{", ".join(sorted(result.metrics))}.'
      )
    groups.setdefault(json.dumps(result.fields), []).append(result)
  choices = []
  for group in groups.values():
    values = [result.metrics[metric] for result in group]
    deviation = math.nan
    if len(values) > 1 and all(map(math.isfinite, values)):
      deviation = statistics.stdev(values)
    choices.append(Choice(
        group[0].fields, statistics.fmean(values), deviation, len(values)
    ))
  sign = -1 if early_stop.METRICS[metric] else 1
  return sorted(choices, key=lambda choice: sign * choice.mean)


def format_choices(choices: Sequence[Choice], metric: str) -> str:
  """Formats a ranking as a Markdown table.

  Args:
    choices: Choices that `rank` returns.
    metric: Metric of the ranking.

  Returns:
    The table.

  Example:
    >>> print(format_choices([Choice({'a': 1}, 1.5, math.nan, 1)], 'loss'))
    | a | loss | seeds |
    | --- | ---: | ---: |
    | 1 | 1.5 ± – | 1 |
  """
  fields = list(choices[0].fields)
  return markdown.markdown_table(
      [*fields, metric, 'seeds'],
      [
          [
              *(str(choice.fields[name]) for name in fields),
              f'{choice.mean:.5g} ± {_number(choice.deviation)}',
              str(choice.seeds),
          ]
          for choice in choices
      ],
      numbers=[metric, 'seeds'],
  )


def _number(value: float) -> str:
  return markdown.MISSING if math.isnan(value) else f'{value:.2g}'


def _value(word: str) -> Any:
  try:
    return ast.literal_eval(word)
  except (ValueError, SyntaxError):  # A word without quotes.
    return word
