"""Score sheets: scores of a model with their protocols, as tables and JSON."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from spdf_jax.runs import markdown


class Score(NamedTuple):
  """One score of a model.

  Attributes:
    task: Name of the task; `'task (part)'` for a part of a task.
    protocol: Name of the definition of the metric.
    metric: Name of the metric.
    value: The score; `None` if it could not be computed.
    note: Number of scored items, or the reason why there is no score.
    chance: Expected score of random guessing; `None` unless the task is
      multiple choice.
  """

  task: str
  protocol: str
  metric: str
  value: float | None
  note: str = ''
  chance: float | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of generation and scoring.

  Attributes:
    search: A name of `evaluation.PROTOCOLS`, or `'greedy'`.
    max_new_tokens: Maximum number of tokens in an answer.
    batch_size: Number of sequences in a batch.
    limit: Maximum number of inputs, questions or lines of a text, for a trial;
      `None`: all.
    meteor_jar: Path of `meteor-1.5.jar`; `None`: no METEOR.
    generations: Folder for the answers; `None`: answers are not stored.
    special_tokens: Whether text that spells a special token is encoded as that
      token, see `data.with_special_tokens`, as it always is for a Hugging Face
      directory; the notes of the scores say so.
  """

  search: str = 'hu2021'
  max_new_tokens: int = 64
  batch_size: int = 8
  limit: int | None = None
  meteor_jar: str | None = None
  generations: pathlib.Path | None = None
  special_tokens: bool = False

  def as_dict(self) -> dict[str, Any]:
    """Returns the settings that scores depend on, by name."""
    return dataclasses.asdict(self) | {'generations': None}


def format_scores(scores: Sequence[Score]) -> str:
  """Formats scores as a Markdown table.

  The table has a column `chance` if any of the tasks is multiple choice.

  Example:
    >>> print(format_scores([Score('e2e', 'lora_e2e', 'bleu', 61.25)]))
    | task | protocol | metric | value | note |
    | --- | --- | --- | ---: | --- |
    | e2e | lora_e2e | bleu | 61.25 |  |
  """
  number = lambda x: markdown.MISSING if x is None else f'{x:.5g}'
  by_chance = any(score.chance is not None for score in scores)
  return markdown.markdown_table(
      ['task', 'protocol', 'metric', 'value', *['chance'] * by_chance, 'note'],
      [
          [
              score.task, score.protocol, score.metric, number(score.value),
              *[number(score.chance)] * by_chance, score.note,
          ]
          for score in scores
      ],
      numbers=['value', 'chance'],
  )


def to_json(
    name: str, scores: Sequence[Score], settings: Settings
) -> Mapping[str, Any]:
  """Returns the scores of a model as JSON-serializable data.

  JSON has no infinite or NaN numbers: such a score is `None`, with a note.

  Args:
    name: Name of the model.
    scores: Scores of the model.
    settings: Settings of generation and scoring.
  """
  return {
      'model': name,
      'settings': settings.as_dict(),
      'scores': [_finite(score)._asdict() for score in scores],
  }


def _finite(score: Score) -> Score:
  if score.value is None or math.isfinite(score.value):
    return score
  return score._replace(value=None, note=f'the score is {score.value}')


def format_means(runs: Sequence[Mapping[str, Any]]) -> str:
  """Formats means and standard deviations over runs of one config.

  Args:
    runs: Results of `to_json`, all with the same tasks.

  Returns:
    A Markdown table.

  Example:
    >>> score = Score('e2e', 'lora_e2e', 'bleu', 60.0)
    >>> runs = [{'scores': [score._replace(value=v)._asdict()]}
    ...         for v in (60.0, 62.0)]
    >>> print(format_means(runs))
    | task | protocol | metric | mean | deviation | runs |
    | --- | --- | --- | ---: | ---: | ---: |
    | e2e | lora_e2e | bleu | 61 | 1.4 | 2 |
  """
  rows = []
  for same in zip(*(run['scores'] for run in runs), strict=True):
    values = [score['value'] for score in same if score['value'] is not None]
    mean = f'{statistics.fmean(values):.5g}' if values else markdown.MISSING
    deviation = (
        f'{statistics.stdev(values):.2g}' if len(values) > 1
        else markdown.MISSING
    )
    rows.append([
        same[0]['task'], same[0]['protocol'], same[0]['metric'], mean,
        deviation, str(len(values)),
    ])
  numbers = ['mean', 'deviation', 'runs']
  return markdown.markdown_table(
      ['task', 'protocol', 'metric', *numbers], rows, numbers=numbers
  )
