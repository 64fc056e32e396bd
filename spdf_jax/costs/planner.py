"""Planner: the sparsity and the lengths of two stages that meet a budget."""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import NamedTuple

_GRID = 10_000  # Levels of static plans are whole hundredths of a percent.
_ROUNDING = 1e-9  # A budget that a sum of floats exceeds by so little is met.

Cost = Callable[[float], float]


class OutOfBudget(ValueError):
  """A budget that no plan meets.

  Attributes:
    least: What would, in the unit of the budget.
  """

  def __init__(self, budget: float, least: float, level: float):
    super().__init__(
        f'budget is {budget:.4g}, and at least {least:.4g} is needed, with '
        f'{level:.4g} of the weights at zero all along; give that, fewer '
        'steps or a higher level.'
    )
    self.least = least


class Stages(NamedTuple):
  """A pre-training in a sparse stage and a dense one.

  Attributes:
    kind: `'dense'`, `'static'` or `'variable'`.
    sparsity: Fraction of zeros in the sparse stage.
    sparse_steps: Its steps.
    dense_steps: Steps of the dense stage that follows.
  """

  kind: str
  sparsity: float
  sparse_steps: int
  dense_steps: int

  def total(self, cost: Cost) -> float:
    """Returns what all steps cost, in the unit of `cost`.

    Example:
      >>> Stages('variable', 0.9, 50, 10).total(lambda level: 1 - level)
      15.0
    """
    return (
        self.sparse_steps * cost(self.sparsity) + self.dense_steps * cost(0.0)
    )


def plan_stages(
    cost: Cost, steps: int, budget: float, levels: Sequence[float]
) -> list[Stages]:
  """Lists the plans of so many steps that a budget pays for.

  Args:
    cost: What a step costs at a level, 0 being dense; it does not rise with
      the level.
    steps: Of the whole pre-training.
    budget: In the unit of `cost`.
    levels: Rising levels of the sparse stage, in (0, 1).

  Returns:
    The dense plan, where that is met, alone; otherwise the static plan of the
    least level, in steps of 0.0001 up to the last of `levels`, and for every
    level above it the variable plan with the longest dense stage.

  Raises:
    OutOfBudget: not even all steps at the last level can be paid.
    ValueError: an argument is out of its range.

  Source: Cerebras 2023, "Variable Sparse Pre-training and Dense Fine-tuning":
  level and length of the first stage regulate the FLOPs.

  Example:
    >>> for plan in plan_stages(lambda level: 1 - level, 60, 15, [0.5, 0.9]):
    ...   print(plan)
    Stages(kind='static', sparsity=0.75, sparse_steps=60, dense_steps=0)
    Stages(kind='variable', sparsity=0.9, sparse_steps=50, dense_steps=10)
  """
  _check(steps, budget, levels)
  dense = Stages('dense', 0.0, 0, steps)
  if _fits(dense.total(cost), budget):
    return [dense]
  level = least_level(lambda s: steps * cost(s), budget, levels[-1])
  if level is None:
    raise OutOfBudget(budget, steps * cost(levels[-1]), levels[-1])
  plans = [Stages('static', level, steps, 0)]
  for level in levels:
    longest = _longest_dense_stage(cost, steps, budget, level)
    if longest:
      plans.append(Stages('variable', level, steps - longest, longest))
  return plans


def choose(plans: Sequence[Stages], dense_share: float) -> Stages:
  """Chooses the plan of least sparsity whose dense stage is long enough.

  Args:
    plans: From `plan_stages`.
    dense_share: Of all steps, that the dense stage should have; in the post's
      256M it has a sixth.

  Returns:
    That plan; where no dense stage is so long, the one with the longest, and
    where there is none the only plan.

  Raises:
    ValueError: `dense_share` is outside [0, 1].

  Example:
    >>> plans = plan_stages(lambda level: 1 - level, 60, 15, [0.8, 0.9, 0.95])
    >>> choose(plans, 1 / 6).sparsity
    0.9
  """
  if not 0 <= dense_share <= 1:
    raise ValueError(
        f'dense_share is {dense_share}; give the share of all steps that are '
        'dense, from 0 to 1.'
    )
  steps = plans[0].sparse_steps + plans[0].dense_steps
  # A step is lost to rounding down.
  enough = [p for p in plans if p.dense_steps + 1 > dense_share * steps]
  if enough:
    return min(enough, key=lambda p: p.sparsity)
  return max(plans, key=lambda p: p.dense_steps)


def least_level(total: Cost, budget: float, highest: float) -> float | None:
  """Returns the least level at which a total is within a budget.

  Args:
    total: What all steps cost at a level; it does not rise with it.
    budget: In its unit.
    highest: The highest level.

  Returns:
    The level, in steps of 0.0001; `None` if there is none up to `highest`.

  Example:
    >>> least_level(lambda level: 8 * (1 - level), 3, 0.9)
    0.625
    >>> least_level(lambda level: 8 * (1 - level), 0.5, 0.9) is None
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


def _longest_dense_stage(
    cost: Cost, steps: int, budget: float, level: float
) -> int:
  """Returns the most steps that can be dense; 0 also where nothing is paid."""
  low, high = 0, steps
  while low < high:
    middle = (low + high + 1) // 2
    plan = Stages('variable', level, steps - middle, middle)
    if _fits(plan.total(cost), budget):
      low = middle
    else:
      high = middle - 1
  return low


def _fits(total: float, budget: float) -> bool:
  return total <= budget * (1 + _ROUNDING)


def _check(steps: int, budget: float, levels: Sequence[float]) -> None:
  if steps < 1:
    raise ValueError(f'steps is {steps}; plan at least one.')
  if not 0 < budget < math.inf:
    raise ValueError(f'budget is {budget}; it must be positive and finite.')
  if not levels or list(levels) != sorted(set(levels)) or not (
      0 < levels[0] and levels[-1] < 1
  ):
    raise ValueError(
        f'levels is {list(levels)}; give rising fractions of zeros between 0 '
        'and 1, e.g. 0.5,0.75,0.9.'
    )
