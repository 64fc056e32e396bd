# SPDX-License-Identifier: Apache-2.0
"""Budgets of FLOPs or of hours, and two-stage plans within them."""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

from spdf_jax.costs import planner
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.rooflines import GPUS
from spdf_jax.costs.step_seconds import step_seconds
from spdf_jax.training.recipe_creation import create_recipe


class Budget(NamedTuple):
  """A limit on training: FLOPs, or hours on machines.

  Attributes:
    flops: Limit in FLOPs; `None`: the limit is in hours.
    hours: Limit in hours; `None`: the limit is in FLOPs.
    machine: Machine on which hours are counted, one of `MACHINES`; `None`:
      times are not estimated.
    count: Number of machines, or of GPUs.
  """

  flops: float | None = None
  hours: float | None = None
  machine: str | None = None
  count: int = 1  # type: ignore[assignment]  # hides tuple.count

  def refuse(self, least: float, sparsity: float) -> ValueError:
    """Returns the error for a budget that no plan meets.

    Args:
      least: Cost of the cheapest plan, in FLOPs or in seconds.
      sparsity: Highest sparsity of a plan.

    Example:
      >>> str(Budget(flops=1e18).refuse(2e18, 0.9)).partition(',')[0]
      'flops is 1e+18'
    """
    if self.flops is not None:
      needed, given = f'{least:.4g} FLOPs', f'flops is {self.flops:.4g}'
    else:
      needed, given = f'{least / 3600:.4g} hours', f'hours is {self.hours}'
    if self.hours is not None and self.machine in GPUS:
      return ValueError(
          f'{given}, and at least {needed} are needed at any sparsity, which '
          f'gives no speedup on {self.machine}; give that, fewer tokens or a '
          'greater --count.'
      )
    return ValueError(
        f'{given}, and at least {needed} are needed, at a sparsity of '
        f'{sparsity:.4g} throughout; give that, fewer tokens or a higher '
        'sparsity.'
    )


def describe_plans(
    get_config: Callable[[str], Any],
    model: str,
    budget: Budget,
    *,
    tokens: float | None,
    sparsities: Sequence[str],
    dense_share: float,
) -> str:
  """Describes the plans within a budget, and the command for one of them.

  Args:
    get_config: Function `get_config` of `configs/planned.py`, from an argument
      such as `'model=gpt3-xl,sparsity=0.75'` to a config.
    model: Name of a model that `get_config` accepts.
    budget: Limit on training.
    tokens: Number of tokens of both stages; `None`: the number in the config.
    sparsities: Sparsities of the first stage, as text.
    dense_share: Minimum fraction of the steps in the dense stage of the chosen
      plan.

  Returns:
    A text: the model, a table of plans, and a command.

  Raises:
    ValueError: The model is unknown, a sparsity is not a number, or no plan
      meets the budget.
  """
  recipe_at = lambda sparsity: create_recipe(
      get_config(f'model={model},sparsity={sparsity}'), planning=True
  )
  if tokens is not None and not 1 <= tokens < math.inf:
    raise ValueError(
        f'tokens is {tokens}; give the number of tokens of both stages.'
    )
  rising = _parse_sparsities(sparsities)
  recipe = recipe_at(rising[-1])
  phase = recipe.plan.phases[0]
  steps = max(round((tokens or phase.tokens) / phase.tokens_per_step), 1)
  shape = shape_of(recipe.model.config)
  flops = lambda sparsity: phase.batch_size * training_flops(
      shape, phase.length, sparsity
  )
  seconds: Callable[[float], float] | None = None
  if budget.machine:
    seconds = step_seconds(recipe_at, budget.machine, budget.count, rising)
  cost: Callable[[float], float]
  if budget.flops is not None:
    limit, cost = budget.flops, flops
  elif budget.hours is not None and seconds is not None:
    limit, cost = 3600 * budget.hours, seconds
  else:
    raise ValueError(
        f'hours is {budget.hours} and machine is {budget.machine!r}; give '
        'flops, or both of these.'
    )
  try:
    plans = planner.plan_stages(cost, steps, limit, rising)
  except planner.OutOfBudget as error:
    raise budget.refuse(error.least, rising[-1]) from None
  chosen = planner.choose(plans, dense_share)
  argument = (
      f'model={model},sparsity={chosen.sparsity:g},'
      f'sparse={chosen.sparse_steps},dense={chosen.dense_steps}'
  )
  create_recipe(get_config(argument), planning=True)
  table = planner.format_plans(
      plans, chosen, tokens_per_step=phase.tokens_per_step, flops=flops,
      seconds=seconds,
  )
  return (
      f'{model}: {recipe.parameters:,} parameters, {steps:,} steps of '
      f'{phase.batch_size} x {phase.length} tokens\n\n{table}\n\n'
      '* python -m experiments.train --workdir=runs/planned \\\n'
      f'    --config=configs/planned.py:{argument}'
  )


def _parse_sparsities(words: Sequence[str]) -> list[float]:
  try:
    return sorted(float(word) for word in words)
  except ValueError:
    raise ValueError(
        f'sparsities is {",".join(words)}; give fractions of zeros, e.g. '
        '0.5,0.9.'
    ) from None
