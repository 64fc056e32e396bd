"""Stretches: neighbouring phases of one sparsity, which share a mask."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from spdf_jax.sparsity.algorithms import create_algorithm


class Stretch(NamedTuple):
  """Neighbouring phases of one sparsity."""

  sparsity: float | Mapping[str, Any]
  """What the phases ask for, as `create_algorithm` reads it."""

  names: tuple[str, ...]
  """The phases."""

  start: int
  """The first step; the algorithm counts from here."""

  steps: int
  """Steps of all of them."""

  def __str__(self) -> str:
    if len(self.names) == 1:
      return f'phase {self.names[0]!r} has {self.steps} steps'
    first, *_, last = self.names
    return f'phases {first!r} to {last!r} have {self.steps} steps'


def find_stretches(
    phases: Sequence[Any], starts: Sequence[int]
) -> tuple[Stretch, ...]:
  """Joins neighbouring phases of equal sparsity.

  Args:
    phases: The phases, in order.
    starts: The first step of each.

  Returns:
    The stretches, in order.
  """
  stretches: list[Stretch] = []
  for phase, start in zip(phases, starts):
    last = stretches[-1] if stretches else None
    if last is None or last.sparsity != phase.sparsity:
      stretches.append(
          Stretch(phase.sparsity, (phase.name,), start, phase.steps)
      )
    else:
      stretches[-1] = last._replace(
          names=(*last.names, phase.name), steps=last.steps + phase.steps
      )
  return tuple(stretches)


def check_fits(stretch: Stretch) -> None:
  """Raises ValueError where an algorithm is not done when its phases are.

  Args:
    stretch: The phases and their sparsity.

  Raises:
    ValueError: an update is asked for after the last step, or the rounds of
      iterative pruning do not add up to the phases.
  """
  spec = stretch.sparsity
  if not isinstance(spec, Mapping):
    return
  if spec['algorithm'] == 'iterative':
    rounds = [
        r['steps'] if isinstance(r, Mapping) else r.steps
        for r in spec['rounds']
    ]
    if sum(rounds) != stretch.steps:
      raise ValueError(
          f'{stretch} and iterative rounds of '
          f'{" + ".join(map(str, rounds))} = {sum(rounds)}; make them equal.'
      )
  every = spec.get('update_every')
  if isinstance(every, Sequence) and every[-1] >= stretch.steps:
    _refuse(stretch, 'update_every', f'lists step {every[-1]}')
  first = spec.get('update_from')
  if first is not None and first >= stretch.steps:
    _refuse(stretch, 'update_from', f'is {first}')
  until = spec.get('update_until')
  if until is None or until < stretch.steps:
    return
  # A round number that no update falls on is not worth an error.
  if until > stretch.steps or create_algorithm(spec).update_at(until):
    _refuse(stretch, 'update_until', f'is {until}')


def _refuse(stretch: Stretch, name: str, what: str) -> None:
  raise ValueError(
      f'{stretch}, counted from 0, and {name} {what}; give an earlier step or '
      'more steps.'
  )
