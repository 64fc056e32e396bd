"""Plans sparse pre-training for a budget of FLOPs, or of hours on a machine.

  python -m experiments.plan --model=gpt3-xl --tokens=26e9 --flops=9.5e19
  python -m experiments.plan --model=gpt3-xl --hours=12 --machine=cs2 --count=4
  python -m experiments.plan --model=gpt-mini --hours=0.05 --machine=cpu

It prints what meets the budget: the static plan of the least sparsity and, for
each of --levels, the Variable SPDF plan with the longest dense stage, all of
--tokens. The one marked * is the least sparse with a dense stage of at least
--dense_share of the steps; the command that trains it follows. Hours are
modeled on cs2 and cs3, the least that data sheets allow on a100, h100 and h200,
where zeros gain nothing, and measured on the cpu, here and now.
"""

from absl import app
from absl import flags
from absl import logging

from configs import planned
from experiments.launch import console
from spdf_jax import training
from spdf_jax.accelerator.wafer.comparisons import GPUS
from spdf_jax.costs import planner
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.planner_text import format_plans
from spdf_jax.costs.step_seconds import MACHINES
from spdf_jax.costs.step_seconds import step_seconds

_MODEL = flags.DEFINE_string(
    'model', None, 'A model of configs/spdf.py, llama-1.3b or gpt-mini.'
)
_TOKENS = flags.DEFINE_float(
    'tokens', None, "Of both stages, e.g. 26e9; the config's by default.",
    lower_bound=1,
)
_FLOPS = flags.DEFINE_float('flops', None, 'The budget, in FLOPs.')
_HOURS = flags.DEFINE_float('hours', None, 'The budget, in hours.')
_MACHINE = flags.DEFINE_enum(
    'machine', None, list(MACHINES), 'Where hours pass.'
)
_COUNT = flags.DEFINE_integer('count', 1, 'Machines, or GPUs.')
_LEVELS = flags.DEFINE_list(
    'levels', ['0.5', '0.6', '0.7', '0.75', '0.8', '0.85', '0.9', '0.95'],
    'Sparsity levels of the first stage.',
)
_DENSE_SHARE = flags.DEFINE_float(
    'dense_share', 1 / 6, 'Of the steps; of the chosen plan, at least.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if (_FLOPS.value is None) == (_HOURS.value is None):
    raise app.UsageError('give either --flops or --hours.')
  if _HOURS.value is not None and _MACHINE.value is None:
    raise app.UsageError(f'give --machine: {", ".join(MACHINES)}.')
  console.prepare()
  try:
    _run()
  except ValueError as error:
    logging.error('%s', error)
    return 1
  return 0


def _run() -> None:
  levels = _parse_levels(_LEVELS.value)
  recipe = _recipe_at(levels[-1])
  phase = recipe.plan.phases[0]
  tokens = _TOKENS.value or phase.tokens
  steps = max(round(tokens / phase.tokens_per_step), 1)
  shape = shape_of(recipe.model.config)
  flops = lambda level: phase.batch_size * training_flops(
      shape, phase.length, level
  )
  seconds = None
  if _MACHINE.value:
    seconds = step_seconds(_recipe_at, _MACHINE.value, _COUNT.value, levels)
  budget = _FLOPS.value
  cost = flops
  if budget is None:
    budget, cost = 3600 * _HOURS.value, seconds
  try:
    plans = planner.plan_stages(cost, steps, budget, levels)
  except planner.OutOfBudget as error:
    raise ValueError(_sentence(error, levels[-1])) from None
  chosen = planner.choose(plans, _DENSE_SHARE.value)
  argument = _argument(chosen)
  training.create_recipe(planned.get_config(argument), planning=True)
  print(
      f'{_MODEL.value}: {recipe.parameters:,} parameters, {steps:,} steps of '
      f'{phase.batch_size} x {phase.length} tokens\n'
  )
  print(format_plans(
      plans, chosen, tokens_per_step=phase.tokens_per_step, flops=flops,
      seconds=seconds,
  ))
  print(
      f'\n* python -m experiments.train --workdir=runs/planned \\\n'
      f'    --config=configs/planned.py:{argument}'
  )


def _parse_levels(words: list[str]) -> list[float]:
  try:
    return sorted(float(word) for word in words)
  except ValueError:
    raise ValueError(
        f'levels is {",".join(words)}; give fractions of zeros, e.g. 0.5,0.9.'
    ) from None


def _recipe_at(level: float) -> training.Recipe:
  config = planned.get_config(f'model={_MODEL.value},sparsity={level}')
  return training.create_recipe(config, planning=True)


def _argument(plan: planner.Stages) -> str:
  return (
      f'model={_MODEL.value},sparsity={plan.sparsity:g},'
      f'sparse={plan.sparse_steps},dense={plan.dense_steps}'
  )


def _sentence(error: planner.OutOfBudget, level: float) -> str:
  if _FLOPS.value is not None:
    least, given = f'{error.least:.4g} FLOPs', f'flops is {_FLOPS.value:.4g}'
  else:
    least, given = f'{error.least / 3600:.4g} hours', f'hours is {_HOURS.value}'
  if _HOURS.value is not None and _MACHINE.value in GPUS:
    return (
        f'{given}, and at least {least} are needed at any sparsity: zeros gain '
        f'nothing on {_MACHINE.value}; give that, fewer tokens or a greater '
        '--count.'
    )
  return (
      f'{given}, and at least {least} are needed, with {level:.4g} of the '
      'weights at zero all along; give that, fewer tokens or a higher level.'
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('model')
  app.run(main)
