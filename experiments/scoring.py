"""How models are scored: flags that commands share."""

import pathlib

from absl import flags

from spdf_jax import evaluation
from spdf_jax.evaluation import scorecard

_SEARCH = flags.DEFINE_enum(
    'search', 'hu2021', ['greedy', *evaluation.PROTOCOLS],
    'How answers are found.',
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    'max_new_tokens', 64, 'Most tokens of an answer.', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 8, 'Sequences at once.', lower_bound=1
)
_LIMIT = flags.DEFINE_integer(
    'limit', None, 'Only so many of each, for a try.', lower_bound=1
)
_METEOR_JAR = flags.DEFINE_string('meteor_jar', None, 'meteor-1.5.jar.')


def settings(generations: pathlib.Path | None) -> scorecard.Settings:
  """Returns what the flags say.

  Args:
    generations: Folder for the answers; `None`: not kept.
  """
  return scorecard.Settings(
      search=_SEARCH.value, max_new_tokens=_MAX_NEW_TOKENS.value,
      batch_size=_BATCH_SIZE.value, limit=_LIMIT.value,
      meteor_jar=_METEOR_JAR.value, generations=generations,
  )
