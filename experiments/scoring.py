"""Flags for scoring models, shared by commands."""

from collections.abc import Callable
from collections.abc import Sequence
import json
import pathlib

from absl import flags

from spdf_jax import evaluation
from spdf_jax.evaluation import scorecard
from spdf_jax.evaluation.candidate import Candidate
from spdf_jax.training.metrics import write_atomically

_SEARCH = flags.DEFINE_enum(
    'search', 'hu2021', ['greedy', *evaluation.PROTOCOLS],
    'Decoding of answers: greedy, or the beam search of a publication.',
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    'max_new_tokens', 64, 'Largest number of tokens in an answer.',
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 8, 'Sequences per batch.', lower_bound=1
)
_LIMIT = flags.DEFINE_integer(
    'limit', None,
    'Largest number of examples (lines of wikitext) per task, for a trial.',
    lower_bound=1,
)
_SPECIAL_TOKENS = flags.DEFINE_bool(
    'special_tokens', False,
    'Encode text that spells a special token as that token, as transformers '
    'does, not as text.',
)
_METEOR_JAR = flags.DEFINE_string(
    'meteor_jar', None, 'Path of meteor-1.5.jar; without it METEOR is omitted.'
)


def settings(generations: pathlib.Path | None) -> scorecard.Settings:
  """Returns the settings that the flags give.

  Args:
    generations: Folder for the answers; `None`: they are not written.
  """
  return scorecard.Settings(
      search=_SEARCH.value, max_new_tokens=_MAX_NEW_TOKENS.value,
      batch_size=_BATCH_SIZE.value, limit=_LIMIT.value,
      meteor_jar=_METEOR_JAR.value, generations=generations,
      special_tokens=_SPECIAL_TOKENS.value,
  )


def score(
    open_model: Callable[[], Candidate],
    tasks: Sequence[str],
    output: str | None,
) -> str:
  """Scores a model on tasks with the settings that the flags give.

  Args:
    open_model: Opens the model, after tasks and output are checked.
    tasks: `NAME` or `NAME=PATH` of each task.
    output: JSON file for the scores; table and answers are written beside it,
      after each task. `None`: nothing is written.

  Returns:
    The table of the scores.

  Raises:
    ValueError: The name of the output does not end with `.json`, a task is
      invalid, or the model or a setting does not suit it.
    ImportError: A library is missing.
  """
  scorecard.parse_tasks(tasks)
  path = pathlib.Path(output) if output else None
  if path is not None:
    if path.suffix != '.json':
      raise ValueError(f'output is {output!r}; give a name that ends in .json.')
    path.parent.mkdir(parents=True, exist_ok=True)
  candidate = open_model()
  scores: list[scorecard.Score] = []
  given = settings(path and path.with_suffix(''))
  for found in scorecard.score_tasks(candidate, tasks, given):
    scores += found
    if path is not None:
      write_atomically(
          path.with_suffix('.md'), scorecard.format_scores(scores) + '\n'
      )
      entry = scorecard.to_json(candidate, scores, given)
      write_atomically(path, json.dumps(entry, indent=2) + '\n')
  return scorecard.format_scores(scores)
