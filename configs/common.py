"""What configs share: their argument, and algorithms in one word."""

from collections.abc import Iterable
import copy
import re
from typing import Any

from ml_collections.config_dict import placeholder


def parse(arg: str, **types: type) -> dict[str, Any]:
  """Reads `name=value,name=value`.

  Args:
    arg: What stands after the colon in `--config=path.py:argument`.
    **types: Every name that there is, and the type of its value.

  Returns:
    The values that are given, by name.

  Raises:
    ValueError: it is something else.
  """
  try:
    parts = [part.split('=') for part in arg.split(',') if part]
    return {name: types[name](value) for name, value in parts}
  except (KeyError, ValueError) as error:
    raise ValueError(
        f'config argument is {arg!r}; write name=value, with commas between, '
        f'of {", ".join(types)}.'
    ) from error


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
  """Raises ValueError where a config argument has none of these values.

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
  """Reads `algorithm=rigl,sparsity=0.9`, or a part of it.

  Args:
    arg: What stands after the colon in `--config=path.py:argument`.

  Returns:
    The algorithm, `'static'` by default, and the level: by default 0.75, and
    three rounds of a quarter for `'iterative'`.

  Raises:
    ValueError: it is something else.
  """
  given = parse(arg, algorithm=str, sparsity=float)
  algorithm = given.get('algorithm', 'static')
  default = 1 - 0.75**3 if algorithm == 'iterative' else 0.75
  return algorithm, given.get('sparsity', default)


def early_stop(metric: str = '', **when: Any) -> dict[str, Any]:
  """Returns when a phase ends early: never, unless there is a metric.

  Args:
    metric: E.g. `'validation/loss'`, `'target/loss'` or `'task/bleu'`.
    **when: `patience`, evaluations without a better value, or the `value` to
      reach.
  """
  never = dict(value=placeholder(float), patience=placeholder(int))
  return dict(metric=metric) | never | when


def sparse_phases(
    phases: dict[str, Any], algorithm: str, level: float
) -> dict[str, Any]:
  """Makes the phase `pretrain` of a life cycle sparse.

  Args:
    phases: `pretrain` of 1000 steps, `continuation` of 200, and others.
    algorithm: `'iterative'`, or one that `sparsity_of` knows.
    level: Fraction of zeros.

  Returns:
    The phases; `'iterative'` has four rounds in place of the first two.
  """
  if algorithm == 'iterative':
    rounds = pruning_rounds(
        phases['pretrain'], number=4, steps=300, level=level, to='50 steps'
    )
    replaced = ('pretrain', 'continuation')
    return rounds | {k: v for k, v in phases.items() if k not in replaced}
  sparsity = sparsity_of(algorithm, level, steps=1000)
  return phases | {'pretrain': phases['pretrain'] | dict(sparsity=sparsity)}


def sparsity_of(algorithm: str, level: float, steps: int) -> Any:
  """Returns the sparsity of a phase, with an algorithm's usual settings.

  Args:
    algorithm: `'static'` (a random mask that stays), `'set'`, `'rigl'`,
      `'gmp'` or `'granet'`.
    level: Fraction of zeros, for the last two at the end of their rise.
    steps: Steps of the phase; masks change in the first three quarters.

  Returns:
    What a phase takes for its sparsity.

  Raises:
    ValueError: the algorithm is unknown.
  """
  until = 3 * steps // 4
  times = dict(update_every=max(steps // 20, 1), update_until=until)
  rise = dict(schedule='cubic', initial=0.0, final=level, steps=until)
  table = dict(
      static=level,
      set=dict(algorithm='sparse_evolution', sparsity=level, **times),
      rigl=dict(algorithm='rigl', sparsity=level, **times),
      gmp=dict(algorithm='gmp', sparsity=rise, **times),
      granet=dict(algorithm='granet', sparsity=rise, **times),
  )
  if algorithm not in table:
    raise ValueError(
        f'algorithm {algorithm!r} is unknown; known are {", ".join(table)} and '
        'iterative.'
    )
  return table[algorithm]


def pruning_rounds(
    phase: dict[str, Any], *, number: int, steps: int, level: float, to: str
) -> dict[str, dict[str, Any]]:
  """Makes rounds of iterative pruning of a phase, the first one dense.

  Args:
    phase: What the first round is, but for its length and sparsity.
    number: How many rounds.
    steps: Steps of each.
    level: Fraction of zeros in the last one; all prune the same share.
    to: Where each later round rewinds the learning rate to, a duration.

  Returns:
    The phases `round0`, `round1`, …; later ones begin a new epoch.
  """
  share = round(1 - (1 - level) ** (1 / (number - 1)), 6)
  rounds = [dict(steps=steps, fraction=share if i else 0.0)
            for i in range(number)]
  first = phase | dict(
      duration=f'{steps} steps',
      sparsity=dict(algorithm='iterative', rounds=rounds),
  )
  rate = phase['learning_rate'] | dict(schedule='rewind', to=to)
  later = first | dict(learning_rate=rate, reshuffle=True)
  # Copies: a change of one round must not change another.
  return {
      f'round{i}': copy.deepcopy(later if i else first) for i in range(number)
  }
