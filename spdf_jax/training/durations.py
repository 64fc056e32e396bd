"""Lengths of training, written the way people say them."""

import re

_FORM = re.compile(
    r'\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMBT]?)\s*'
    r'(steps?|tokens?|epochs?|tokens/parameter)\s*'
)
_SUFFIXES = {'': 1, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'B': 1e9, 'T': 1e12}


def resolve_duration(
    duration: str,
    *,
    tokens_per_step: int,
    tokens_per_epoch: int,
    parameters: int,
) -> int:
  """Turns a duration into optimizer steps.

  Args:
    duration: `'1500 steps'`, `'2.5B tokens'`, `'5 epochs'` or
      `'20 tokens/parameter'`.
    tokens_per_step: Batch size times length.
    tokens_per_epoch: Tokens of the phase's data in one epoch.
    parameters: Parameters of the model.

  Returns:
    The nearest number of steps; epochs are rounded down, so that they never
    need data of one more.

  Raises:
    ValueError: the text is no duration, or it is shorter than one step.

  Example:
    >>> resolve_duration('1M tokens', tokens_per_step=1000,
    ...                  tokens_per_epoch=5_000, parameters=7)
    1000
  """
  match = _FORM.fullmatch(str(duration))
  if not match:
    raise ValueError(
        f'duration is {duration!r}; write a number and one of steps, tokens, '
        "epochs, tokens/parameter, e.g. '1500 steps' or '2.5B tokens'."
    )
  number = float(match[1]) * _SUFFIXES[match[2]]
  unit = match[3]
  if unit.startswith('step'):
    steps = round(number)
  elif unit.startswith('epoch'):
    steps = int(number * tokens_per_epoch // tokens_per_step)
  else:
    tokens = number * parameters if unit == 'tokens/parameter' else number
    steps = round(tokens / tokens_per_step)
  if steps < 1:
    raise ValueError(
        f'duration {duration!r} is less than one step of {tokens_per_step} '
        'tokens; make it longer or take the phase out.'
    )
  return steps


def epochs_asked(duration: str) -> float:
  """Returns how many epochs a duration names, 0 if it is in other units.

  Example:
    >>> epochs_asked('5 epochs'), epochs_asked('100 steps')
    (5.0, 0.0)
  """
  match = _FORM.fullmatch(str(duration))
  return float(match[1]) if match and match[3].startswith('epoch') else 0.0
