"""The sparsity and the lengths of two stages within a budget."""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

from spdf_jax.accelerator.wafer import views

_GRID = 10_000  # Sparsities of static plans are multiples of 1 / _GRID.
_ROUNDING = 1e-9  # Relative tolerance of budgets, for rounding of float sums.

Cost = Callable[[float], float]


class OutOfBudget(ValueError):
  """An error for a budget that no plan meets.

  Attributes:
    least: Smallest sufficient budget, in the same unit.
  """

  def __init__(self, budget: float, least: float, sparsity: float):
    super().__init__(
        f'budget is {budget:.4g}, and at least {least:.4g} is needed, at a '
        f'sparsity of {sparsity:.4g} throughout; give that, fewer steps or a '
        'higher sparsity.'
    )
    self.least = least


class Stages(NamedTuple):
  """A pre-training with a sparse stage followed by a dense stage.

  Attributes:
    kind: `'dense'`, `'static'` or `'variable'`.
    sparsity: Fraction of zeros in the sparse stage.
    sparse_steps: Number of steps of the sparse stage.
    dense_steps: Number of steps of the dense stage.
  """

  kind: str
  sparsity: float
  sparse_steps: int
  dense_steps: int

  def total(self, cost: Cost) -> float:
    """Returns the cost of all steps, in the unit of `cost`.

    Example:
      >>> Stages('variable', 0.9, 50, 10).total(lambda sparsity: 1 - sparsity)
      15.0
    """
    return (
        self.sparse_steps * cost(self.sparsity) + self.dense_steps * cost(0.0)
    )


def plan_stages(
    cost: Cost, steps: int, budget: float, sparsities: Sequence[float]
) -> list[Stages]:
  """Returns the plans with a given number of steps that meet a budget.

  Args:
    cost: Function from a sparsity to the cost of a step, non-increasing.
    steps: Number of steps of the whole pre-training.
    budget: Limit on the total cost, in the unit of `cost`.
    sparsities: Sparsities of the sparse stage, increasing, in (0, 1).

  Returns:
    Only the dense plan if it meets the budget; otherwise the static plan of the
    lowest sparsity, a multiple of 0.0001 up to the last of `sparsities`, and
    the variable plan with the longest dense stage for every higher sparsity.

  Raises:
    OutOfBudget: All steps at the last sparsity exceed the budget.
    ValueError: an argument is out of its range.

  References:
    Cerebras 2023, "Variable Sparse Pre-training and Dense Fine-tuning",
    which controls the FLOPs by sparsity and length of the first stage.

  Example:
    >>> cost = lambda sparsity: 1 - sparsity
    >>> for plan in plan_stages(cost, 60, 15, [0.5, 0.9]):
    ...   print(plan)
    Stages(kind='static', sparsity=0.75, sparse_steps=60, dense_steps=0)
    Stages(kind='variable', sparsity=0.9, sparse_steps=50, dense_steps=10)
  """
  if steps < 1:
    raise ValueError(f'steps is {steps}; plan at least one.')
  check_budget('budget', budget)
  check_sparsities(sparsities)
  dense = Stages('dense', 0.0, 0, steps)
  if _fits(dense.total(cost), budget):
    return [dense]
  sparsity = least_sparsity(lambda s: steps * cost(s), budget, sparsities[-1])
  if sparsity is None:
    raise OutOfBudget(budget, steps * cost(sparsities[-1]), sparsities[-1])
  plans = [Stages('static', sparsity, steps, 0)]
  for sparsity in sparsities:
    longest = _longest_dense_stage(cost, steps, budget, sparsity)
    if longest:
      plans.append(Stages('variable', sparsity, steps - longest, longest))
  return plans


def choose(plans: Sequence[Stages], dense_share: float) -> Stages:
  """Returns the plan of lowest sparsity with a long enough dense stage.

  Args:
    plans: Plans that `plan_stages` returns.
    dense_share: Minimum fraction of all steps in the dense stage; one sixth for
      the 256M model of the Cerebras post.

  Returns:
    The plan; if no dense stage is long enough, the plan with the longest one.

  Raises:
    ValueError: `dense_share` is outside [0, 1].

  Example:
    >>> cost = lambda sparsity: 1 - sparsity
    >>> plans = plan_stages(cost, 60, 15, [0.8, 0.9, 0.95])
    >>> choose(plans, 1 / 6).sparsity
    0.9
  """
  check_dense_share(dense_share)
  steps = plans[0].sparse_steps + plans[0].dense_steps
  # Dense stages are rounded down to whole steps, so a share may miss one step.
  enough = [p for p in plans if p.dense_steps + 1 > dense_share * steps]
  if enough:
    return min(enough, key=lambda p: p.sparsity)
  return max(plans, key=lambda p: p.dense_steps)


def least_sparsity(total: Cost, budget: float, highest: float) -> float | None:
  """Returns the lowest sparsity at which a total is within a budget.

  Args:
    total: Function from a sparsity to the cost of all steps, non-increasing.
    budget: Limit on the total cost, in the unit of `total`.
    highest: Highest sparsity.

  Returns:
    The sparsity, a multiple of 0.0001; `None` if there is none up to `highest`.

  Example:
    >>> least_sparsity(lambda sparsity: 8 * (1 - sparsity), 3, 0.9)
    0.625
    >>> least_sparsity(lambda sparsity: 8 * (1 - sparsity), 0.5, 0.9) is None
    True
  """
  low, high = 0, math.floor(highest * _GRID + _ROUNDING)
  if not _fits(total(high / _GRID), budget):
    return None
  while low < high:
    middle = (low + high) // 2
    if _fits(total(middle / _GRID), budget):
      high = middle
    else:
      low = middle + 1
  return low / _GRID


def format_plans(
    plans: Sequence[Stages],
    chosen: Stages,
    *,
    tokens_per_step: int,
    flops: Cost,
    seconds: Cost | None = None,
) -> str:
  """Formats plans as a table.

  Args:
    plans: Plans that `plan_stages` returns.
    chosen: Plan to mark with a star.
    tokens_per_step: Batch size times sequence length.
    flops: Function from a sparsity to the FLOPs of a step.
    seconds: Function from a sparsity to the seconds of a step; `None`: the
      table has no times.

  Returns:
    A header and a line for each plan, the dense plan first.

  Example:
    >>> plans = [Stages('variable', 0.9, 50, 10)]
    >>> table = format_plans(plans, plans[0], tokens_per_step=100,
    ...                      flops=lambda sparsity: 1e9 * (1 - sparsity))
    >>> ' '.join(table.splitlines()[-1].split())
    'variable 90.0% 50 (5,000) 10 (1,000) 1.500e+10 25.0% *'
  """
  steps = chosen.sparse_steps + chosen.dense_steps
  dense = Stages('dense', 0.0, 0, steps)
  others = [plan for plan in plans if plan != dense]
  time = f'{"time":>12}' if seconds else ''
  lines = [
      f'{"plan":<9}{"sparsity":>10}{"sparse steps (tokens)":>28}'
      f'{"dense steps (tokens)":>28}{"FLOPs":>12}{"of dense":>10}{time}'
  ]
  for plan in (dense, *others):
    total = plan.total(flops)
    time = f'{views.duration(plan.total(seconds)):>12}' if seconds else ''
    stage = lambda n: f'{n:,} ({n * tokens_per_step:,})'
    lines.append(
        f'{plan.kind:<9}{_percent(plan.sparsity):>10}'
        f'{stage(plan.sparse_steps):>28}{stage(plan.dense_steps):>28}'
        f'{total:>12.3e}{total / dense.total(flops):>10.1%}{time}'
        + (' *' if plan == chosen else '')
    )
  return '\n'.join(lines)


def _percent(sparsity: float) -> str:
  text = f'{100 * sparsity:.2f}'
  return (text[:-1] if text.endswith('0') else text) + '%'


def _longest_dense_stage(
    cost: Cost, steps: int, budget: float, sparsity: float
) -> int:
  """Returns the maximum number of dense steps; 0 if the budget allows none."""
  low, high = 0, steps
  while low < high:
    middle = (low + high + 1) // 2
    plan = Stages('variable', sparsity, steps - middle, middle)
    if _fits(plan.total(cost), budget):
      low = middle
    else:
      high = middle - 1
  return low


def _fits(total: float, budget: float) -> bool:
  return total <= budget * (1 + _ROUNDING)


def check_budget(name: str, budget: float) -> None:
  """Raises ValueError if a budget, given by its name, is out of range."""
  if not 0 < budget < math.inf:
    raise ValueError(f'{name} is {budget}; it must be positive and finite.')


def check_dense_share(dense_share: float) -> None:
  """Raises ValueError if a share of dense steps is outside [0, 1]."""
  if not 0 <= dense_share <= 1:
    raise ValueError(
        f'dense_share is {dense_share}; give the share of all steps that are '
        'dense, from 0 to 1.'
    )


def check_sparsities(sparsities: Sequence[float]) -> None:
  """Raises ValueError if sparsities do not rise or are outside (0, 1)."""
  if (
      not sparsities or list(sparsities) != sorted(set(sparsities))
      or not all(0 < sparsity < 1 for sparsity in sparsities)
  ):
    raise ValueError(
        f'sparsities is {list(sparsities)}; give rising fractions of zeros '
        'between 0 and 1, e.g. 0.5,0.75,0.9.'
    )
