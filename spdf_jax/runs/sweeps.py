# SPDX-License-Identifier: Apache-2.0
"""Sweeps: a grid over fields of a config and seeds, and its ranking."""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
import math
import statistics
from typing import Any
from typing import NamedTuple

from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.training.early_stop import METRICS


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
    ValueError: A text does not have that form, or a field occurs twice.

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


def rank(results: Sequence[Result], metric: str) -> list[Choice]:
  """Sorts the points of a grid by a metric, the best one first.

  Args:
    results: Results of finished runs.
    metric: One of `METRICS`, which defines whether higher is better.

  Returns:
    A choice for each point with results.

  Raises:
    ValueError: A run has no such metric.

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
  sign = -1 if METRICS[metric] else 1
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
  return markdown_table(
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
  return MISSING if math.isnan(value) else f'{value:.2g}'


def _value(word: str) -> Any:
  try:
    return ast.literal_eval(word)
  except (ValueError, SyntaxError):  # A word without quotes.
    return word
