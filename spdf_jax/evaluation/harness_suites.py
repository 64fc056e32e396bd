"""Suites of the harness: which tasks, shots and metrics a table means."""

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
    shots: Worked examples before each question.
    metric: The harness' metric and filter.
    in_mean: Whether it counts in the suite's mean.
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
    # The first Open LLM Leaderboard; GSM8K is told apart.
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
  """What a suite found.

  Attributes:
    suite: The suite's name.
    values: Each task's score, 0 to 1; None where it could not be had.
    items: Questions of each task that was measured.
    chance: What guessing among the choices of each question scores on
      average, 0 to 1, of tasks that choose.
    mean: Over the tasks that count in it; None unless all of them were
      measured.
    reasons: Why a task was not.
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
  """Measures a model on a suite.

  Args:
    subject: What to measure.
    suite: `'cerebras_gpt'` or `'open_llm'`.
    directory: Files of tasks, see `local_tasks`: nothing is downloaded, and
      tasks without a file are left out. None: the harness' own tasks, which
      it downloads.
    limit: Only so many questions of each task, for a try.

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
  values, items, chance, reasons = {}, {}, {}, {}
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
  counted = [values[m.task] for m in measures if m.in_mean]
  mean = None if None in counted else sum(counted) / len(counted)
  return SuiteScores(suite, values, items, chance, mean, reasons)


def chance_level(choices: Sequence[int]) -> float:
  """Returns the accuracy of guessing.

  Args:
    choices: How many answers each question has, one of them right.

  Returns:
    The mean of their inverses, 0 to 1.

  Example:
    >>> chance_level([4, 4, 5, 2])
    0.3
  """
  return sum(1 / number for number in choices) / len(choices)


def _chooses(config: Mapping[str, Any]) -> bool:
  """Whether a task counts as right the one right choice of its questions."""
  return (
      config['output_type'] == 'multiple_choice'
      and not config.get('process_results')
  )
