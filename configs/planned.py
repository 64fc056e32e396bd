"""Pre-training as planned by experiments.plan: sparse steps, then dense ones.

  python -m experiments.plan --model=gpt3-xl --tokens=26e9 --flops=9.476e19
  python -m experiments.train --workdir=runs/planned --config=\
configs/planned.py:model=gpt3-xl,sparsity=0.9,sparse=20664,dense=4132

Model, batch size and learning rate are those of configs/spdf.py, but for
llama-1.3b of configs/llama_dst.py and for gpt-mini of configs/quickstart.py;
one decay of the learning rate spans both phases. Expected: the planned FLOPs,
here those of static 75 % in SPDF's appendix, table 2, 94.76 exaFLOPs.
"""

import ml_collections

from configs import common
from configs import llama_dst
from configs import quickstart
from configs import spdf


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `model`, `sparsity`, `sparse`, `dense`."""
  given = common.parse(arg, model=str, sparsity=float, sparse=int, dense=int)
  model = given.get('model', 'gpt-mini')
  if model == 'gpt-mini':
    config = quickstart.get_config('sparsity=0')
    config.data.task = ''
  elif model == 'llama-1.3b':
    config = llama_dst.get_config('algorithm=static')
  else:
    config = spdf.get_config(f'model={model}')
  stages = (
      (given.get('sparse', 0), given.get('sparsity', 0.75)),
      (given.get('dense', 0), 0.0),
  )
  first = config.phases.pretrain
  phases = {}
  for steps, sparsity in stages:
    if not steps:
      continue
    phase = first.copy_and_resolve_references()
    phase.update(duration=f'{steps} steps', sparsity=sparsity)
    if phases:
      phase.learning_rate.schedule = 'continue'
    phases['continuation' if phases else 'pretrain'] = phase
  if not phases:  # One sparse phase, of the config's own length.
    first.sparsity = given.get('sparsity', 0.75)
    phases['pretrain'] = first
  config.phases = dict(order=tuple(phases), **phases)
  return config
