# SPDX-License-Identifier: Apache-2.0
"""Durations of phases and warm-ups, in steps, tokens or epochs."""

import math
import re

_DURATION = re.compile(
    r'\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMBT]?)\s*'
    r'(steps?|tokens?|epochs?|tokens/parameter)\s*'
)
_SUFFIXES = {'': 1, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'B': 1e9, 'T': 1e12}
_MOST_STEPS = 2**31 - 1  # Steps are counted in int32.


def check_duration(duration: str) -> None:
  """Raises ValueError unless a string is a duration."""
  _match_duration(duration)


def _match_duration(duration: str) -> re.Match[str]:
  match = _DURATION.fullmatch(str(duration))
  if match is None:
    raise ValueError(
        f'duration is {duration!r}; write a number and one of steps, tokens, '
        "epochs, tokens/parameter, e.g. '1500 steps' or '2.5B tokens'."
    )
  return match


def resolve_duration(
    duration: str,
    *,
    tokens_per_step: int,
    tokens_per_epoch: float,
    parameters: int,
    least: int = 1,
) -> float:
  """Converts a duration to optimizer steps.

  Args:
    duration: `'1500 steps'`, `'2.5B tokens'`, `'5 epochs'` or
      `'20 tokens/parameter'`.
    tokens_per_step: Batch size times length.
    tokens_per_epoch: Tokens of the phase's data in one epoch; `math.inf`
      before the data is read.
    parameters: Number of parameters of the model.
    least: Smallest number of steps.

  Returns:
    The nearest number of steps. Epochs are rounded down, so that they never
    need data of a further epoch; they are `math.inf` before the data is read.

  Raises:
    ValueError: the string is not a duration, or is shorter than `least` or
      longer than steps are counted.

  Example:
    >>> resolve_duration('1M tokens', tokens_per_step=1000,
    ...                  tokens_per_epoch=5_000, parameters=7)
    1000
  """
  amount, suffix, unit = _match_duration(duration).groups()
  number = float(amount) * _SUFFIXES[suffix]
  if unit.startswith('epoch') and math.isinf(tokens_per_epoch) and number:
    return math.inf
  if unit.startswith('step'):
    steps = number
  elif unit.startswith('epoch'):
    steps = number and number * tokens_per_epoch // tokens_per_step
  else:
    tokens = number * parameters if unit == 'tokens/parameter' else number
    steps = tokens / tokens_per_step
  if not steps <= _MOST_STEPS:
    raise ValueError(
        f'duration {duration!r:.40} is more than {_MOST_STEPS:,} steps of '
        f'{tokens_per_step} tokens; make it shorter.'
    )
  steps = round(steps)
  if steps < least:
    raise ValueError(
        f'duration {duration!r} is less than one step of {tokens_per_step} '
        'tokens; make it longer or remove the phase.'
    )
  return steps
