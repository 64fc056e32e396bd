"""GPT-3 1.3B pruned to 83.8 %: Cerebras, Creating Sparse GPT-3 Models, 2022.

A dense model is trained on the Pile; then each round prunes the smallest
magnitudes of each layer, rewinds the learning rate, reshuffles the data and
trains again. The post gives 26B tokens of dense training, 20 to 33 % pruned per
round, 83.8 % in the end, and some 20K (least sparse) to 120K (most sparse)
steps; a round stopped when it reached the dense model's validation loss. All
other choices are marked ours.

  python -m experiments.train --workdir=runs/dense-1.3b \
    --config=configs/iterative_pruning.py --config.phases.order="('round0',)" \
    --config.micro_batches=8
  python -m experiments.train --workdir=runs/pruned-1.3b \
    --config=configs/iterative_pruning.py:stop_at=LOSS --config.micro_batches=8

LOSS is the final validation loss of the first run; the second run starts from
its weights. Without stop_at, one run takes all steps of all rounds.
`distribution=model_wide` prunes the smallest magnitudes of all layers together
instead (ours).

Expected at 83.8 %: 3x fewer inference FLOPs (ours: 3.02), 4.3x fewer parameters
(4.34), some 6.2x fewer in projections and feed-forward layers, and no higher
loss. The losses by sparsity, table 1 and figure 3, are images. Validation,
LAMBADA and WikiText-103 are scored by experiments.evaluate, also of a round:
--workdir=runs/pruned-1.3b@round3.
"""

from typing import Any

import ml_collections

from configs import common
from configs import spdf

# first and last are published, the others are our choice
_STEPS = (20_000, 45_000, 70_000, 95_000, 120_000)


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `stop_at=LOSS`, `distribution`, `algorithm`.

  The `algorithm` is that of each round, and `sparsity` that of the last one.
  """
  algorithm, given = common.parse_algorithm(
      arg, dict(name='static', sparsity=0.838), stop_at=float, distribution=str
  )
  distribution = given.get('distribution', 'uniform')
  common.check_choice('distribution', distribution, ('uniform', 'model_wide'))
  # The post has no batch size and learning rate; these are of SPDF's GPT-3 XL.
  config = spdf.get_config('model=gpt3-xl')
  config.model.update(preset='gpt3-1.3b', vocab_size=50267)
  phases: dict[str, dict[str, Any]] = {'round0': dict(duration='26B tokens')}
  for i, steps in enumerate(_STEPS, start=1):
    # Our choice: each round prunes the same share of what remains, 30.5 %.
    kept = 1 - algorithm['sparsity']
    sparsity = round(1 - kept ** (i / len(_STEPS)), 6)
    phase = dict(
        duration=f'{steps} steps', new_epoch=True,
        algorithm=algorithm | dict(
            sparsity=sparsity, init='magnitude', distribution=distribution
        ),
    )
    if i > 1:
      # Our choice: rewinds to the end of the first round's warm-up.
      phase['learning_rate'] = dict(schedule='rewind', to='375M tokens')
    if 'stop_at' in given:
      phase['early_stop'] = dict(
          metric='validation/loss', value=given['stop_at']
      )
    phases[f'round{i}'] = phase
  if 'stop_at' in given:
    del phases['round0']
    config.init_from = 'runs/dense-1.3b'
    config.seed = 1  # another order of the data
  common.set_phases(config, **phases)
  config.data.max_epochs.corpus = len(phases)  # every round begins an epoch
  return config
