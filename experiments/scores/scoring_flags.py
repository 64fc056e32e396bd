"""Flags of the settings of scoring, shared by commands."""

import pathlib

from absl import flags

from experiments.scores.sheets import Settings
from spdf_jax import evaluation

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
    'Encode text that spells a special token as that token, not as text, also '
    'for a run; as transformers, a Hugging Face directory always does.',
)
_METEOR_JAR = flags.DEFINE_string(
    'meteor_jar', None, 'Path of meteor-1.5.jar; without it METEOR is omitted.'
)


def settings(generations: pathlib.Path | None) -> Settings:
  """Returns the settings that the flags give.

  Args:
    generations: Folder for the answers; `None`: they are not written.
  """
  return Settings(
      search=_SEARCH.value, max_new_tokens=_MAX_NEW_TOKENS.value,
      batch_size=_BATCH_SIZE.value, limit=_LIMIT.value,
      meteor_jar=_METEOR_JAR.value, generations=generations,
      special_tokens=_SPECIAL_TOKENS.value,
  )
