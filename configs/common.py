"""Common parts of configs: their argument, and algorithms by name."""

from collections.abc import Iterable, Mapping
import re
from typing import Any

import ml_collections
from ml_collections.config_dict import FieldReference

ALGORITHMS = (
    'dense', 'static', 'set', 'rigl', 'gmp', 'granet', 'hard_threshold',
)
"""Algorithms of one phase, by the names of `create_algorithm`."""

PRUNING = ('iterative', 'lottery')
"""Algorithms that prune a dense model in rounds, by `pruning_rounds`."""


def parse(arg: str, **types: type) -> dict[str, Any]:
  """Parses `name=value,name=value`.

  Args:
    arg: Text after the colon in `--config=path.py:argument`.
    **types: Types of the values, by name.

  Returns:
    The given values, by name.

  Raises:
    ValueError: the text has another form, or a name is unknown.
  """
  try:
    parts = [part.split('=') for part in arg.split(',') if part]
    return {name: types[name](value) for name, value in parts}
  except (KeyError, ValueError) as error:
    raise ValueError(
        f'config argument is {arg!r}; write name=value, separated by commas, '
        f'with the names {", ".join(types)}.'
    ) from error


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
  """Raises ValueError unless a config argument has one of these values.

  Example:
    >>> check_choice('task', 'e2e', ['e2e', 'dart'])
  """
  if value not in choices:
    raise ValueError(
        f'config argument has {name} {value!r}; use one of '
        f'{", ".join(choices)}.'
    )


def part_of(duration: str, share: float) -> str:
  """Returns a share of a duration, in its unit.

  Example:
    >>> part_of('20 tokens/parameter', 0.75), part_of('2.5B tokens', 0.5)
    ('15 tokens/parameter', '1.25B tokens')
  """
  number, unit = re.fullmatch(r'([0-9.]+)(.*)', duration).groups()
  return f'{float(number) * share:.10g}{unit}'


def parse_algorithm(
    arg: str,
    default: Mapping[str, Any],
    names: Iterable[str] = ALGORITHMS,
    **types: type,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Parses `algorithm=rigl,sparsity=0.9`, or a part of it, and other values.

  Args:
    arg: Text after the colon in `--config=path.py:argument`.
    default: Name and arguments of the algorithm if none are given.
    names: Names of algorithms that can be given.
    **types: Types of other values, by name.

  Returns:
    Name and arguments of the algorithm, and the other given values.

  Raises:
    ValueError: the text has another form, or a name is unknown.

  Example:
    >>> parse_algorithm('algorithm=rigl', dict(name='static', sparsity=0.75))
    ({'name': 'rigl', 'sparsity': 0.75}, {})
  """
  given = parse(arg, algorithm=str, sparsity=float, **types)
  algorithm = dict(default)
  if 'algorithm' in given:
    algorithm['name'] = given.pop('algorithm')
    check_choice('algorithm', algorithm['name'], names)
  if 'sparsity' in given:
    algorithm['sparsity'] = given.pop('sparsity')
  return algorithm, given


def set_phases(
    config: ml_collections.ConfigDict, **phases: Mapping[str, Any]
) -> None:
  """Sets the phases of a config, each by its fields that differ from defaults.

  Other fields are references: they follow later changes of
  `config.phase_defaults`, and are those of one phase if they are set in it.

  Args:
    config: The config, which has `phase_defaults`.
    **phases: Fields, also nested ones, by the name of the phase.
  """
  fields = {
      name: _inherited(config.phase_defaults, given)
      for name, given in phases.items()
  }
  config.phases = dict(order=tuple(phases), **fields)


def _inherited(
    defaults: ml_collections.ConfigDict, given: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns given fields, and references to defaults for all others."""
  fields = dict(given)
  for name, default in defaults.items():
    value = given.get(name, {})
    if isinstance(default, ml_collections.ConfigDict) and isinstance(
        value, Mapping
    ):
      fields[name] = _inherited(default, value)
    elif name not in given:
      # Like get_oneway_ref, whose references cannot be pickled.
      fields[name] = FieldReference(defaults.get_ref(name))
  return fields


def pruning_rounds(
    *, name: str, sparsity: float, number: int, steps: int, to: str
) -> dict[str, dict[str, Any]]:
  """Creates rounds of iterative pruning, the first one dense.

  Args:
    name: `'iterative'`, which rewinds the learning rate in each round, or
      `'lottery'`, which rewinds the weights too.
    sparsity: Sparsity of the last round. Each round after the first prunes the
      same share of the remaining weights.
    number: Number of rounds.
    steps: Steps of each round.
    to: Length of the warm-up, a duration, to the end of which later rounds
      rewind.

  Returns:
    What differs from the defaults in the phases `round0`, `round1`, …; each
    later one begins a new epoch.
  """
  share = round(1 - (1 - sparsity) ** (1 / (number - 1)), 6)
  rounds = [
      dict(steps=steps, fraction=share if i else 0.0) for i in range(number)
  ]
  first = dict(
      duration=f'{steps} steps', learning_rate=dict(warmup=to),
      algorithm=dict(name='iterative', rounds=rounds),
  )
  later = first | dict(
      learning_rate=dict(schedule='rewind', to=to), new_epoch=True
  )
  if name == 'lottery':
    later |= dict(rewind_weights_to=to, reset_moments=True)
  return {f'round{i}': later if i else first for i in range(number)}
