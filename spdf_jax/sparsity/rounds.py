# SPDX-License-Identifier: Apache-2.0
"""Rounds of iterative pruning: their lengths, fractions and first steps."""

from collections.abc import Iterable
from collections.abc import Sequence
import itertools
import math
from typing import Any
from typing import NamedTuple

from spdf_jax.sparsity.times import check_steps


class Round(NamedTuple):
  """One round of iterative pruning: prune, rewind, train."""

  steps: int
  """Number of training steps."""

  fraction: float = 0.0
  """Fraction of the remaining weights, of each layer or of the whole model, to
  prune at the first step."""

  rewind_to: int = 0
  """Step of the base schedule at which the round's learning rate begins."""


def rounds_to(
    target: float,
    fraction: float,
    steps: int | Sequence[int],
    rewind_to: int = 0,
) -> tuple[Round, ...]:
  """Returns a dense round and the pruning rounds that end at a sparsity.

  Each round prunes `fraction` of the remaining weights; the last prunes the
  fraction that reaches the target.

  Args:
    target: The sparsity after the last round, in (0, 1).
    fraction: The fraction of the remaining weights pruned per round, in (0, 1).
    steps: Number of steps of every round, or a list with one number per round,
      the dense one first.
    rewind_to: The step of the base schedule to which every round but the first
      rewinds.

  Returns:
    The rounds, as few as possible.

  Raises:
    ValueError: an argument is out of its range, or `steps` is a list whose
      length is not the number of rounds.

  References:
    Renda et al., `Comparing Rewinding and Fine-tuning in Neural Network
    Pruning <https://arxiv.org/abs/2003.02389>`_, 2020

  Example:
    >>> [round(r.fraction, 3) for r in rounds_to(0.838, 0.33, 20_000, 1_000)]
    [0.0, 0.33, 0.33, 0.33, 0.33, 0.196]
  """
  for name, value in (('target', target), ('fraction', fraction)):
    if not _is_fraction(value):
      raise ValueError(f'{name} is {value!r}; give a number in (0, 1).')
  # The tolerance prevents rounding from adding a round that prunes nothing.
  exactly = math.log1p(-target) / math.log1p(-fraction)
  number = max(1, math.ceil(exactly - 1e-9))
  last = 1 - (1 - target) / (1 - fraction) ** (number - 1)
  fractions = [0.0, *[fraction] * (number - 1), last]
  lengths = (
      list(steps) if isinstance(steps, Iterable) else [steps] * len(fractions)
  )
  if len(lengths) != len(fractions):
    raise ValueError(
        f'steps has {len(lengths)} entries, but target={target} takes '
        f'{number} rounds that prune fraction={fraction} after the dense one; '
        f'give {len(fractions)} entries or one number.'
    )
  rewinds = [0, *[rewind_to] * number]
  return check_rounds(map(Round, lengths, fractions, rewinds))


def check_rounds(rounds: Iterable[Round]) -> tuple[Round, ...]:
  """Returns rounds as a tuple, or raises.

  Args:
    rounds: The rounds, each a `Round` or a tuple of its fields.

  Returns:
    The rounds.

  Raises:
    ValueError: there is no round or something else, a length is not positive, a
      `rewind_to` is negative, or a fraction is outside (0, 1); the first may be
      0.

  Example:
    >>> check_rounds([(100,), (50, 0.2)])[1].fraction
    0.2
  """
  try:
    checked = tuple(Round(*r) for r in rounds)
  except TypeError as error:
    raise ValueError(
        f'rounds is {rounds!r:.80}; give a list of Round(steps, fraction).'
    ) from error
  if not checked:
    raise ValueError('rounds is empty; give at least one Round(steps).')
  for i, r in enumerate(checked):
    check_steps(f'steps of round {i}', r.steps, 1)
    check_steps(f'rewind_to of round {i}', r.rewind_to, 0)
    if not (_is_fraction(r.fraction) or i == 0 == r.fraction):
      raise ValueError(
          f'fraction of round {i} is {r.fraction!r}; give the fraction of the '
          'remaining weights to prune, in (0, 1); only the first round may '
          'prune none.'
      )
  check_steps('the number of steps of all rounds', sum(
      r.steps for r in checked
  ), 1)
  return checked


def _is_fraction(value: Any) -> bool:
  try:
    return bool(0 < value < 1)
  except TypeError:
    return False


def round_starts(rounds: Sequence[Round]) -> list[int]:
  """Returns the first step of every round.

  Args:
    rounds: The rounds.

  Returns:
    Increasing steps that begin with 0, e.g. for `reset_state`.

  Raises:
    ValueError: the rounds are invalid, see `check_rounds`.

  Example:
    >>> round_starts([Round(100), Round(50, 0.2), Round(50, 0.2)])
    [0, 100, 150]
  """
  lengths = [r.steps for r in check_rounds(rounds)]
  return list(itertools.accumulate(lengths[:-1], initial=0))
