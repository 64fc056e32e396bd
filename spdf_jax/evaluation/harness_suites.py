# SPDX-License-Identifier: Apache-2.0
"""Suites of the harness: tasks, shots and metrics of published tables."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
from typing import Any
from typing import NamedTuple

from spdf_jax.evaluation.harness import harness_model
from spdf_jax.evaluation.harness import Subject
from spdf_jax.evaluation.local_tasks import local_tasks
from spdf_jax.extras import require
from spdf_jax.names import lookup


class Measure(NamedTuple):
  """One number of a suite.

  Attributes:
    task: Name of the task in the harness.
    shots: Number of solved examples before each question.
    metric: Metric and filter of the harness.
    in_mean: Whether the task counts in the suite's mean.
  """

  task: str
  shots: int
  metric: str
  in_mean: bool = True


SUITES: Mapping[str, tuple[Measure, ...]] = {
    # Dey et al. 2023, "Cerebras-GPT", table 3: accuracy, without shots.
    'cerebras_gpt': tuple(
        Measure(task, 0, 'acc,none')
        for task in ('hellaswag', 'piqa', 'winogrande', 'lambada_openai',
                     'arc_easy', 'arc_challenge', 'openbookqa')
    ),
    # The first Open LLM Leaderboard; GSM8K is reported outside the mean.
    'open_llm': (
        Measure('arc_challenge', 25, 'acc_norm,none'),
        Measure('hellaswag', 10, 'acc_norm,none'),
        Measure('truthfulqa_mc2', 0, 'acc,none'),
        Measure('mmlu', 5, 'acc,none'),
        Measure('winogrande', 5, 'acc,none'),
        Measure('gsm8k', 5, 'exact_match,strict-match', in_mean=False),
    ),
}
"""Suites by name."""


@dataclasses.dataclass(frozen=True)
class SuiteScores:
  """Scores of a model on a suite.

  Attributes:
    suite: Name of the suite.
    values: Score of each task, 0 to 1; None where it was not measured.
    items: Number of questions of each measured task.
    chance: Expected score of random guessing, 0 to 1, of each multiple-choice
      task.
    mean: Mean over the tasks with `in_mean`; None unless all of them were
      measured.
    reasons: Reason for each task that was not measured.
  """

  suite: str
  values: Mapping[str, float | None]
  items: Mapping[str, int]
  chance: Mapping[str, float]
  mean: float | None
  reasons: Mapping[str, str]


def run_suite(
    subject: Subject,
    suite: str,
    *,
    directory: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> SuiteScores:
  """Evaluates a model on a suite.

  Args:
    subject: Model to evaluate.
    suite: `'cerebras_gpt'` or `'open_llm'`.
    directory: Folder with the files of tasks, see `local_tasks`: nothing is
      downloaded, and tasks without a file are skipped. None: the tasks of the
      harness, which downloads them.
    limit: Maximum number of questions of each task, for a trial; None: all.

  Returns:
    The scores.

  Raises:
    ImportError: lm-eval is not installed.
    ValueError: The suite is unknown.
  """
  measures = lookup('suite', suite, SUITES)
  evaluator = require('lm_eval.evaluator', 'harness')
  manager = require('lm_eval.tasks', 'harness').TaskManager(
      include_defaults=directory is None
  )
  tasks = None if directory is None else local_tasks(directory)
  model = harness_model(subject)
  values: dict[str, float | None] = {}
  items: dict[str, int] = {}
  chance: dict[str, float] = {}
  reasons: dict[str, str] = {}
  for measure in measures:
    name = measure.task
    if tasks is not None and name not in tasks:
      values[name], reasons[name] = None, f'{directory} has no file of {name}.'
      continue
    found: dict[str, Any] = evaluator.simple_evaluate(
        model=model,
        tasks=[name if tasks is None else tasks[name]],
        num_fewshot=measure.shots,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
    )
    values[name] = float(found['results'][name][measure.metric])
    items[name] = sum(
        count['effective'] for count in found['n-samples'].values()
    )
    choices = [
        len(sample['arguments'])
        for task, samples in found['samples'].items() for sample in samples
        if _chooses(found['configs'][task])
    ]
    if len(choices) == items[name]:
      chance[name] = chance_level(choices)
  wanted = [m.task for m in measures if m.in_mean]
  counted = [x for x in map(values.get, wanted) if x is not None]
  mean = (
      sum(counted) / len(counted) if len(counted) == len(wanted) else None
  )
  return SuiteScores(suite, values, items, chance, mean, reasons)


def chance_level(choices: Sequence[int]) -> float:
  """Returns the expected accuracy of random guessing.

  Args:
    choices: Number of answers to each question, one of them right.

  Returns:
    The mean of the inverse numbers, 0 to 1.

  Example:
    >>> chance_level([4, 4, 5, 2])
    0.3
  """
  return sum(1 / number for number in choices) / len(choices)


def _chooses(config: Mapping[str, Any]) -> bool:
  """Returns whether a task is multiple choice, scored by its one answer."""
  return (
      config['output_type'] == 'multiple_choice'
      and not config.get('process_results')
  )
