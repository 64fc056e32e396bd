"""Flags of the settings of scoring, shared by commands."""

from collections.abc import Callable
import pathlib

from absl import flags

from experiments.scores.sheets import Settings
from spdf_jax import evaluation


def define(
    command_flags: flags.FlagValues,
) -> Callable[[pathlib.Path | None, int], Settings]:
  """Defines the flags of a command that scores models.

  Args:
    command_flags: Flags of the command.

  Returns:
    A function that returns the settings that the flags give. Its arguments are
    the folder for the answers (`None`: they are not written) and the number of
    positions of the model.
  """
  search = flags.DEFINE_enum(
      'search', 'hu2021', ['greedy', *evaluation.PROTOCOLS],
      'Decoding of answers: greedy, or the beam search of a publication.',
      flag_values=command_flags,
  )
  max_new_tokens = flags.DEFINE_integer(
      'max_new_tokens', None,
      'Largest number of tokens in an answer; by default 64, or half the '
      'positions of the model where these are fewer.',
      lower_bound=1, flag_values=command_flags,
  )
  batch_size = flags.DEFINE_integer(
      'batch_size', 8, 'Sequences per batch.', lower_bound=1,
      flag_values=command_flags,
  )
  limit = flags.DEFINE_integer(
      'limit', None,
      'Largest number of examples (lines of wikitext) per task, for a trial.',
      lower_bound=1, flag_values=command_flags,
  )
  special_tokens = flags.DEFINE_bool(
      'special_tokens', False,
      'Encode text that spells a special token as that token, not as text, '
      'also for a run; as transformers, a Hugging Face directory always does.',
      flag_values=command_flags,
  )
  meteor_jar = flags.DEFINE_string(
      'meteor_jar', None,
      'Path of meteor-1.5.jar; without it METEOR is omitted.',
      flag_values=command_flags,
  )

  def settings(
      generations: pathlib.Path | None, positions: int
  ) -> Settings:
    return Settings(
        search=search.value,
        max_new_tokens=max_new_tokens.value or min(64, positions // 2),
        batch_size=batch_size.value, limit=limit.value,
        meteor_jar=meteor_jar.value, generations=generations,
        special_tokens=special_tokens.value,
    )

  return settings
