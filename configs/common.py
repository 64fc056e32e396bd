"""Common parts of configs: their argument, and algorithms by name."""

from collections.abc import Iterable
import copy
import re
from typing import Any

from ml_collections.config_dict import placeholder

PRUNING = ('iterative', 'lottery')
"""Algorithms of `sparse_phases` that prune a dense model in rounds."""


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


def parse_sparsity(arg: str) -> tuple[str, float]:
  """Parses `algorithm=rigl,sparsity=0.9`, or a part of it.

  Args:
    arg: Text after the colon in `--config=path.py:argument`.

  Returns:
    The algorithm, by default `'static'`, and the sparsity, by default 0.75, or
    for `PRUNING` that of three rounds which prune a quarter each.

  Raises:
    ValueError: the text has another form, or a name is unknown.
  """
  given = parse(arg, algorithm=str, sparsity=float)
  algorithm = given.get('algorithm', 'static')
  default = 1 - 0.75**3 if algorithm in PRUNING else 0.75
  return algorithm, given.get('sparsity', default)


def early_stop(metric: str = '', **when: Any) -> dict[str, Any]:
  """Returns the early stop of a phase.

  Args:
    metric: Metric that decides, e.g. `'validation/loss'`, `'target/loss'` or
      `'task/bleu'`; `''`: no early stop.
    **when: `patience`, the number of evaluations without a better value, or
      `value`, the value to reach. Without both, the phase has its full length
      and ends with the weights of its best evaluation.

  Returns:
    The fields of the early stop.
  """
  never = dict(value=placeholder(float), patience=placeholder(int))
  return dict(metric=metric) | never | when


def sparse_phases(
    phases: dict[str, Any], algorithm: str, sparsity: float
) -> dict[str, Any]:
  """Makes the phase `pretrain` sparse.

  Args:
    phases: Phases by name: `pretrain` of 1000 steps, `continuation` of 200, and
      others.
    algorithm: An algorithm of `sparsity_of`, or one of `PRUNING`: `'iterative'`
      rewinds the learning rate in each round, `'lottery'` the weights too.
    sparsity: Sparsity of the phase; for `PRUNING` of the last round.

  Returns:
    The phases; `PRUNING` has four rounds in place of the first two phases.
  """
  # Copied, so that a config can change phases independently.
  phases = {name: copy.deepcopy(phase) for name, phase in phases.items()}
  if algorithm in PRUNING:
    rounds = pruning_rounds(
        phases['pretrain'], number=4, steps=300, sparsity=sparsity,
        to='50 steps',
    )
    if algorithm == 'lottery':
      for name in list(rounds)[1:]:
        rounds[name].update(rewind_weights_to='50 steps', reset_moments=True)
    replaced = ('pretrain', 'continuation')
    return rounds | {k: v for k, v in phases.items() if k not in replaced}
  sparse = dict(sparsity=sparsity_of(algorithm, sparsity, steps=1000))
  return phases | {'pretrain': phases['pretrain'] | sparse}


def sparsity_of(algorithm: str, sparsity: float, steps: int) -> Any:
  """Returns the sparsity of a phase, with an algorithm's usual settings.

  Args:
    algorithm: `'static'` (a fixed random mask), `'set'`, `'rigl'`, `'gmp'` or
      `'granet'`.
    sparsity: Sparsity; for the last two that at the end of their schedule.
    steps: Steps of the phase; masks are updated in the first three quarters.

  Returns:
    The field `sparsity` of a phase.

  Raises:
    ValueError: the algorithm is unknown.
  """
  until = 3 * steps // 4
  times = dict(update_every=max(steps // 20, 1), update_until=until)
  rise = dict(schedule='cubic', initial=0.0, final=sparsity, steps=until)
  table = dict(
      static=sparsity,
      set=dict(algorithm='sparse_evolution', sparsity=sparsity, **times),
      rigl=dict(algorithm='rigl', sparsity=sparsity, **times),
      gmp=dict(algorithm='gmp', sparsity=rise, **times),
      granet=dict(algorithm='granet', sparsity=rise, **times),
  )
  if algorithm not in table:
    raise ValueError(
        f'algorithm {algorithm!r} is unknown; known are '
        f'{", ".join((*table, *PRUNING))}.'
    )
  return table[algorithm]


def pruning_rounds(
    phase: dict[str, Any], *, number: int, steps: int, sparsity: float, to: str
) -> dict[str, dict[str, Any]]:
  """Creates rounds of iterative pruning from a phase, the first one dense.

  Args:
    phase: Fields of the first round, except its length and sparsity.
    number: Number of rounds.
    steps: Steps of each round.
    sparsity: Sparsity of the last round. Each round after the first prunes the
      same share of the remaining weights.
    to: Step, as a duration, to which later rounds rewind the learning rate.

  Returns:
    The phases `round0`, `round1`, …; each later one begins a new epoch.
  """
  share = round(1 - (1 - sparsity) ** (1 / (number - 1)), 6)
  rounds = [dict(steps=steps, fraction=share if i else 0.0)
            for i in range(number)]
  first = phase | dict(
      duration=f'{steps} steps',
      sparsity=dict(algorithm='iterative', rounds=rounds),
  )
  rate = phase['learning_rate'] | dict(schedule='rewind', to=to)
  later = first | dict(learning_rate=rate, new_epoch=True)
  # Copied, so that a config can change rounds independently.
  return {
      f'round{i}': copy.deepcopy(later if i else first) for i in range(number)
  }
