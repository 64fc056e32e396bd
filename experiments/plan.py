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

from absl import app
from absl import flags

from configs import planned
from experiments.launch import console
from spdf_jax.costs.budgets import Budget
from spdf_jax.costs.budgets import describe_plans
from spdf_jax.costs.step_seconds import MACHINES

_MODEL = flags.DEFINE_string(
    'model', None, 'A model of configs/spdf.py, llama-1.3b or gpt-mini.'
)
_TOKENS = flags.DEFINE_float(
    'tokens', None,
    "Tokens of both stages, e.g. 26e9; by default the config's.",
)
_FLOPS = flags.DEFINE_float('flops', None, 'Budget in FLOPs.')
_HOURS = flags.DEFINE_float('hours', None, 'Budget in hours of --machine.')
_MACHINE = flags.DEFINE_enum(
    'machine', None, list(MACHINES), 'With --hours: kind of machine.'
)
_COUNT = flags.DEFINE_integer('count', 1, 'Number of machines or GPUs.')
_SPARSITIES = flags.DEFINE_list(
    'sparsities', ['0.5', '0.6', '0.7', '0.75', '0.8', '0.85', '0.9', '0.95'],
    'Sparsities of the first stage.',
)
_DENSE_SHARE = flags.DEFINE_float(
    'dense_share', 1 / 6,
    "Least share of the steps in the chosen plan's dense stage.",
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if (_FLOPS.value is None) == (_HOURS.value is None):
    raise app.UsageError('give either --flops or --hours.')
  if _HOURS.value is not None and _MACHINE.value is None:
    raise app.UsageError(f'give --machine: {", ".join(MACHINES)}.')
  return console.run(
      argv, describe_plans, planned.get_config, _MODEL.value,
      Budget(_FLOPS.value, _HOURS.value, _MACHINE.value, _COUNT.value),
      tokens=_TOKENS.value, sparsities=_SPARSITIES.value,
      dense_share=_DENSE_SHARE.value,
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('model')
  console.start(main)
