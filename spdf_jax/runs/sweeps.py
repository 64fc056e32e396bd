"""Sweeps: a grid over fields of a config, seeds, and the best of it."""

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
from spdf_jax.training.phases import METRICS


class Result(NamedTuple):
  """One run of a sweep, a line of its `sweep.jsonl`.

  Attributes:
    fields: What it changed of the config, by dotted name.
    seed: Its seed.
    workdir: The name of its folder.
    metrics: What its last evaluation found.
  """

  fields: Mapping[str, Any]
  seed: int
  workdir: str
  metrics: Mapping[str, float]


class Choice(NamedTuple):
  """One point of the grid: a metric over its seeds.

  Attributes:
    fields: What it changes of the config.
    mean: Over seeds.
    deviation: The sample's standard deviation; nan for a single seed.
    seeds: How many.
  """

  fields: Mapping[str, Any]
  mean: float
  deviation: float
  seeds: int


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
  """Reads `'field=value,value'` of each field.

  Args:
    texts: One text a field, its name dotted; values are numbers, words or
      quoted text.

  Returns:
    Values by field.

  Raises:
    ValueError: a text is not of that form, or a field comes twice.

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
  """Returns every choice of one value a field, the last field fastest.

  Example:
    >>> points({'a': [1, 2], 'b': [3, 4]})[1]
    {'a': 1, 'b': 4}
  """
  return [
      dict(zip(grid, values)) for values in itertools.product(*grid.values())
  ]


def run_name(fields: Mapping[str, Any], seed: int) -> str:
  """Names the folder of a run by what it changed.

  Example:
    >>> run_name({'phases.finetune.learning_rate.peak': 0.001}, seed=2)
    'phases.finetune.learning_rate.peak=0.001,seed=2'
  """
  parts = [f'{name}={value}' for name, value in fields.items()]
  return ','.join([*parts, f'seed={seed}']).replace('/', '_')


def rank(results: Sequence[Result], metric: str) -> list[Choice]:
  """Orders the points of a grid by a metric, the best one first.

  Args:
    results: Of finished runs.
    metric: One of `METRICS`, which knows whether more is better.

  Returns:
    A choice for each point that has been run.

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
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    choices.append(Choice(
        group[0].fields, statistics.fmean(values), deviation, len(values)
    ))
  sign = -1 if METRICS[metric] else 1
  return sorted(choices, key=lambda choice: sign * choice.mean)


def format_choices(choices: Sequence[Choice], metric: str) -> str:
  """Writes a ranking as a Markdown table.

  Args:
    choices: From `rank`.
    metric: What they were ranked by.

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
  except (ValueError, SyntaxError):  # Not quoted text.
    return word
