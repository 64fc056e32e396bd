"""Pre-training as planned by experiments.plan: sparse steps, then dense ones.

  python -m experiments.plan --model=gpt3-xl --tokens=26e9 --flops=9.476e19
  python -m experiments.train --workdir=runs/planned --config=\
configs/planned.py:model=gpt3-xl,sparsity=0.9,sparse=20664,dense=4132

Model, batch size and learning rate are those of configs/spdf.py, but for
llama-1.3b of configs/llama_dst.py and for gpt-mini of configs/quickstart.py;
one decay of the learning rate spans both phases. Expected: the planned FLOPs,
here those of static 75 % in SPDF's appendix, table 2, 94.76 exaFLOPs.
"""

from typing import Any

import ml_collections

from configs import common
from configs import llama_dst
from configs import quickstart
from configs import spdf


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `model`, and numbers of steps.

  These are `sparse` and `dense`; `algorithm` and its arguments, such as
  `sparsity`, are those of the sparse steps.
  """
  algorithm, given = common.parse_algorithm(
      arg, dict(name='static', sparsity=0.75), model=str, sparse=int, dense=int
  )
  model = given.get('model', 'gpt-mini')
  if model == 'gpt-mini':
    config = quickstart.get_config()
    config.data.task = ''
    config.phase_defaults.learning_rate.warmup = '50 steps'
  elif model == 'llama-1.3b':
    config = llama_dst.get_config('algorithm=static')
  else:
    config = spdf.get_config(f'model={model}')
  sparse, dense = given.get('sparse', 0), given.get('dense', 0)
  phases: dict[str, dict[str, Any]] = {}
  if sparse:
    phases['pretrain'] = dict(duration=f'{sparse} steps', algorithm=algorithm)
  if dense:
    rest = dict(learning_rate=dict(schedule='continue')) if phases else {}
    phases['continuation' if phases else 'pretrain'] = dict(
        duration=f'{dense} steps', **rest
    )
  if not phases:  # One sparse phase, of the config's own length.
    phases['pretrain'] = dict(algorithm=algorithm)
  common.set_phases(config, **phases)
  return config
