"""What the planner says: a table of plans, the chosen one marked."""

from collections.abc import Sequence

from spdf_jax.costs.planner import Cost
from spdf_jax.costs.planner import Stages
from spdf_jax.costs.simulation_text import duration


def format_plans(
    plans: Sequence[Stages],
    chosen: Stages,
    *,
    tokens_per_step: int,
    flops: Cost,
    seconds: Cost | None = None,
) -> str:
  """Writes plans as a table.

  Args:
    plans: From `plan_stages`.
    chosen: One of them.
    tokens_per_step: Batch size times length.
    flops: Of a step at a level.
    seconds: The same in time, where a machine is given.

  Returns:
    A line for the dense plan and each of the others.

  Example:
    >>> plans = [Stages('variable', 0.9, 50, 10)]
    >>> table = format_plans(plans, plans[0], tokens_per_step=100,
    ...                      flops=lambda level: 1e9 * (1 - level))
    >>> ' '.join(table.splitlines()[-1].split())
    'variable 90.0% 50 (5,000) 10 (1,000) 1.500e+10 25.0% *'
  """
  steps = chosen.sparse_steps + chosen.dense_steps
  dense = Stages('dense', 0.0, 0, steps)
  others = [plan for plan in plans if plan != dense]
  time = f'{"time":>12}' if seconds else ''
  lines = [
      f'{"plan":<9}{"zeros":>7}{"sparse steps (tokens)":>28}'
      f'{"dense steps (tokens)":>28}{"FLOPs":>12}{"of dense":>10}{time}'
  ]
  for plan in (dense, *others):
    total = plan.total(flops)
    time = f'{duration(plan.total(seconds)):>12}' if seconds else ''
    stage = lambda n: f'{n:,} ({n * tokens_per_step:,})'
    lines.append(
        f'{plan.kind:<9}{_percent(plan.sparsity):>7}'
        f'{stage(plan.sparse_steps):>28}{stage(plan.dense_steps):>28}'
        f'{total:>12.3e}{total / dense.total(flops):>10.1%}{time}'
        + (' *' if plan == chosen else '')
    )
  return '\n'.join(lines)


def _percent(level: float) -> str:
  text = f'{100 * level:.2f}'
  return (text[:-1] if text.endswith('0') else text) + '%'
