"""Variable SPDF, sparse then dense pre-training on the Pile: Cerebras, 2023.

There are two readings of "effective 75 %". *split* (the post's 256M): the
standard budget, 5/6 of it at 90 % and 1/6 dense, with the FLOPs of static 75 %.
*extended* (Cerebras' published configs of the 6.7B): the whole budget at 90 %,
then 15 % more steps, dense, from the same peak; 1 - (0.10 + 0.15) = 75 %.

  python -m experiments.train --workdir=runs/variable-256m \
    --config=configs/variable_spdf.py:model=cerebras-gpt-256m,reading=split \
    --config.micro_batches=3
  python -m experiments.train --workdir=runs/variable-6.7b \
    --config=configs/variable_spdf.py:model=cerebras-gpt-6.7b,reading=extended \
    --config.mesh.data=1 --config.mesh.fsdp=16 --config.micro_batches=65

The baselines, and the grid of learning rates, which the post tuned:

  python -m experiments.train --workdir=runs/cerebras-gpt-256m-75 \
    --config=configs/spdf.py:model=cerebras-gpt-256m,sparsity=0.75 \
    --config.micro_batches=3
  python -m experiments.train --workdir=runs/cerebras-gpt-256m-0 \
    --config=configs/spdf.py:model=cerebras-gpt-256m,sparsity=0 \
    --config.micro_batches=3
  python -m experiments.train --workdir=runs/cerebras-gpt-6.7b-0 \
    --config=configs/spdf.py:model=cerebras-gpt-6.7b,sparsity=0 \
    --config.mesh.data=1 --config.mesh.fsdp=16 --config.micro_batches=65
  python -m experiments.sweep --workdir=sweeps/variable-256m \
    --config=configs/variable_spdf.py:model=cerebras-gpt-256m \
    --config.micro_batches=3 \
    --grid=phases.pretrain.learning_rate.peak=6e-4,1.2e-3,1.8e-3  # ours

Then DART, by configs/finetune.py with --config.init_from=WORKDIR.

Expected for 256M, static 75 % and variable: mean zero-shot accuracy of seven
tasks 32.7, 33.6 (table 1; by task in table 5); DART BLEU 45.3 ± 0.07,
45.6 ± 0.04 (table 2). For 6.7B, dense and variable: DART BLEU 49.3 ± 0.1,
49.1 ± 0.1 (table 3); 64 % fewer FLOPs (figure 5; ours: 65.7 %, or 63.4 % with
the input embedding counted as a product; --dry_run prints both).
"""

from typing import Any

import ml_collections

from configs import common
from configs import spdf

_EFFECTIVE = 0.75
_READINGS = {'cerebras-gpt-256m': 'split', 'cerebras-gpt-6.7b': 'extended'}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `model`, `reading` and an algorithm."""
  algorithm, given = common.parse_algorithm(
      arg, dict(name='static', sparsity=0.9), model=str, reading=str
  )
  model = given.get('model', 'cerebras-gpt-256m')
  reading = given.get('reading', _READINGS.get(model, 'split'))
  common.check_choice('reading', reading, ('split', 'extended'))
  sparsity = algorithm['sparsity']
  if not _EFFECTIVE < sparsity < 1:
    raise ValueError(
        f'config argument has sparsity {sparsity}; give that of the first '
        f'stage, above the effective {_EFFECTIVE} and below 1.'
    )

  config = spdf.get_config(f'model={model}')
  budget = config.phase_defaults.duration
  first: dict[str, Any] = dict(algorithm=algorithm)
  if reading == 'split':
    sparse = _EFFECTIVE / sparsity  # of the steps
    first['duration'] = common.part_of(budget, sparse)
    second = dict(
        duration=common.part_of(budget, 1 - sparse),
        # our choice: one decay over both
        learning_rate=dict(schedule='continue'),
    )
  else:
    dense = sparsity - _EFFECTIVE  # additional share of the steps
    second = dict(
        duration=common.part_of(budget, dense),
        learning_rate=dict(  # 938 of their 9,379 steps
            schedule='linear', warmup=common.part_of(budget, dense / 10)
        ),
    )
    if model == 'cerebras-gpt-6.7b':
      config.phase_defaults.learning_rate.update(
          peak=3.6e-4, final_fraction=1 / 30
      )
  common.set_phases(config, pretrain=first, continuation=second)
  return config
