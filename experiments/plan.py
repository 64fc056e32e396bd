"""Plans sparse pre-training for a budget of FLOPs, or of hours on a machine.

  python -m experiments.plan --model=gpt3-xl --tokens=26e9 --flops=9.5e19
  python -m experiments.plan --model=gpt3-xl --hours=12 --machine=cs2 --count=4
  python -m experiments.plan --model=gpt-mini --hours=0.05 --machine=cpu

Prints the plans of --tokens that meet the budget: the static plan of the least
sparsity and, for each of --sparsities, the Variable SPDF plan with the longest
dense stage. The plan marked * is the least sparse one whose dense stage has at
least --dense_share of the steps; the command that trains it follows. Hours on
cs2 and cs3 are modeled; on a100, h100 and h200, where sparsity saves no time,
they are lower bounds from data sheets; on cpu they are measured on this
machine.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

from absl import app
from absl import flags

from configs import planned
from experiments.launch import console
from experiments.planner import machines
from experiments.planner import stages
from experiments.planner.stages import Cost
from experiments.wafer import gpus
from spdf_jax import costs
from spdf_jax import training

FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    'model', None, 'A model of configs/spdf.py, llama-1.3b or gpt-mini.',
    required=True, flag_values=FLAGS,
)
_TOKENS = flags.DEFINE_float(
    'tokens', None,
    "Tokens of both stages, e.g. 26e9; by default the config's.",
    flag_values=FLAGS,
)
_FLOPS = flags.DEFINE_float(
    'flops', None, 'Budget in FLOPs.', flag_values=FLAGS
)
_HOURS = flags.DEFINE_float(
    'hours', None, 'Budget in hours of --machine.', flag_values=FLAGS
)
_MACHINE = flags.DEFINE_enum(
    'machine', None, list(machines.MACHINES), 'With --hours: kind of machine.',
    flag_values=FLAGS,
)
_COUNT = flags.DEFINE_integer(
    'count', 1, 'Number of machines or GPUs.', flag_values=FLAGS
)
_SPARSITIES = flags.DEFINE_list(
    'sparsities', ['0.5', '0.6', '0.7', '0.75', '0.8', '0.85', '0.9', '0.95'],
    'Sparsities of the first stage.',
    flag_values=FLAGS,
)
_DENSE_SHARE = flags.DEFINE_float(
    'dense_share', 1 / 6,
    "Least share of the steps in the chosen plan's dense stage.",
    flag_values=FLAGS,
)


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
    if self.hours is not None and self.machine in gpus.GPUS:
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
    model: str,
    budget: Budget,
    *,
    tokens: float | None,
    sparsities: Sequence[str],
    dense_share: float,
) -> str:
  """Describes the plans within a budget, and the command for one of them.

  Args:
    model: Name of a model that `configs/planned.py` accepts.
    budget: Limit on training.
    tokens: Number of tokens of both stages; `None`: the number in the config.
    sparsities: Sparsities of the first stage, as text.
    dense_share: Minimum fraction of the steps in the dense stage of the chosen
      plan.

  Returns:
    A text: the model, a table of plans, and a command.

  Raises:
    ValueError: an argument is unknown or out of its range, or no plan meets
      the budget.
  """
  run_at = lambda sparsity: training.Run.create(
      planned.get_config(f'model={model},sparsity={sparsity}'), planning=True
  )
  _check_tokens(tokens)
  rising = _parse_sparsities(sparsities)
  stages.check_dense_share(dense_share)
  for name in ('flops', 'hours'):
    amount = getattr(budget, name)
    if amount is not None:
      stages.check_budget(name, amount)
  run = run_at(rising[-1])
  phase = run.plan.phases[0]
  steps = max(round((tokens or phase.tokens) / phase.tokens_per_step), 1)
  shape = run.model.config
  flops = lambda sparsity: phase.batch_size * costs.training_flops(
      shape, phase.length, sparsity
  )
  seconds: Cost | None = None
  if budget.machine:
    seconds = machines.step_seconds(
        run_at, budget.machine, budget.count, rising
    )
  cost: Cost
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
    plans = stages.plan_stages(cost, steps, limit, rising)
  except stages.OutOfBudget as error:
    raise budget.refuse(error.least, rising[-1]) from None
  chosen = stages.choose(plans, dense_share)
  argument = (
      f'model={model},sparsity={chosen.sparsity:g},'
      f'sparse={chosen.sparse_steps},dense={chosen.dense_steps}'
  )
  training.Run.create(planned.get_config(argument), planning=True)
  table = stages.format_plans(
      plans, chosen, tokens_per_step=phase.tokens_per_step, flops=flops,
      seconds=seconds,
  )
  return (
      f'{model}: {run.parameters:,} parameters, {steps:,} steps of '
      f'{phase.batch_size} x {phase.length} tokens\n\n{table}\n\n'
      '* python -m experiments.train --workdir=runs/planned \\\n'
      f'    --config=configs/planned.py:{argument}'
  )


def _check_tokens(tokens: float | None) -> None:
  if tokens is not None and not 1 <= tokens < math.inf:
    raise ValueError(
        f'tokens is {tokens}; give the number of tokens of both stages.'
    )


def _parse_sparsities(words: Sequence[str]) -> list[float]:
  try:
    rising = sorted(float(word) for word in words)
  except ValueError:
    raise ValueError(
        f'sparsities is {",".join(words)}; give fractions of zeros, e.g. '
        '0.5,0.9.'
    ) from None
  stages.check_sparsities(rising)
  return rising


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if (_FLOPS.value is None) == (_HOURS.value is None):
    raise app.UsageError('give either --flops or --hours.')
  if _HOURS.value is not None and _MACHINE.value is None:
    raise app.UsageError(f'give --machine: {", ".join(machines.MACHINES)}.')
  return console.run(
      argv, describe_plans, _MODEL.value,
      Budget(_FLOPS.value, _HOURS.value, _MACHINE.value, _COUNT.value),
      tokens=_TOKENS.value, sparsities=_SPARSITIES.value,
      dense_share=_DENSE_SHARE.value,
  )


if __name__ == '__main__':
  console.start(main, FLAGS)
