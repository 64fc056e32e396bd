# SPDX-License-Identifier: Apache-2.0
"""Mask spans: consecutive phases that share a mask."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs


class MaskSpan(NamedTuple):
  """Consecutive phases of equal sparsity, which share a mask."""

  sparsity: float | Mapping[str, Any]
  """The sparsity of the phases, as `create_algorithm` reads it."""

  names: tuple[str, ...]
  """The names of the phases."""

  start: int
  """The first step, at which the algorithm's count is 0."""

  steps: int
  """The number of steps of all phases."""

  def __str__(self) -> str:
    if len(self.names) == 1:
      return f'phase {self.names[0]!r} has {self.steps} steps'
    first, *_, last = self.names
    return f'phases {first!r} to {last!r} have {self.steps} steps'

  def check_updates(self) -> None:
    """Checks that all mask updates fit the steps of the phases.

    Raises:
      ValueError: an update is after the last step, or the rounds of iterative
        pruning do not add up to the steps of the phases.
    """
    for spec in member_specs(self.sparsity):
      self._check_updates_of(spec)

  def _check_updates_of(self, spec: Mapping[str, Any]) -> None:
    if spec['algorithm'] == 'iterative':
      rounds = [
          r['steps'] if isinstance(r, Mapping) else r.steps
          for r in spec['rounds']
      ]
      if sum(rounds) != self.steps and math.isfinite(self.steps):
        raise ValueError(
            f'{self} and iterative rounds of '
            f'{" + ".join(map(str, rounds))} = {sum(rounds)}; make them equal.'
        )
    every, first, until = (
        spec[name] if name in spec else None
        for name in ('update_every', 'update_from', 'update_until')
    )
    if isinstance(every, Sequence) and every[-1] >= self.steps:
      self._refuse('update_every', f'lists step {every[-1]}')
    if first is not None and first >= self.steps:
      self._refuse('update_from', f'is {first}')
    if until is None or until < self.steps:
      return
    # An end equal to the number of steps is an error only if an update falls
    # on it, so that round numbers are accepted.
    if until > self.steps or create_algorithm(spec).update_at(until):
      self._refuse('update_until', f'is {until}')

  def _refuse(self, name: str, what: str) -> None:
    raise ValueError(
        f'{self}, counted from 0, and {name} {what}; give an earlier step or '
        'more steps.'
    )
