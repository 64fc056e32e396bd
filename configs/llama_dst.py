"""Llama 1.3B, dense, static, SET, RigL and GraNet: Cerebras, 2024.

"Sparsity Made Easy": the architecture of Llama 2 without grouped queries, on
112B tokens of SlimPajama, at 80 % sparsity of all linear layers of the blocks;
sparse runs have half the batch size and twice the steps. Also GraNet, which is
RigL with a cubic schedule from 50 to 80 %, against RigL on 2.6B tokens.

  python -m experiments.prepare --input=slimpajama/ --tokenizer=llama2/ \
    --output=corpora/slimpajama
  python -m experiments.train --workdir=runs/llama-rigl \
    --config=configs/llama_dst.py:algorithm=rigl --config.micro_batches=8
  python -m experiments.train --workdir=runs/llama-granet \
    --config=configs/llama_dst.py:algorithm=granet --config.micro_batches=8 \
    --config.phases.pretrain.duration="2.6B tokens"
  python -m experiments.train --workdir=runs/llama-rigl-short \
    --config=configs/llama_dst.py:algorithm=rigl --config.micro_batches=8 \
    --config.phases.pretrain.duration="2.6B tokens"

algorithm: dense, static, set, rigl, gmp, granet. The last is the post's, RigL
from 50 to 80 %; `--config.phases.pretrain.algorithm.name=granet` in addition
makes it that of Liu et al., 2021. `…algorithm.grow=balanced` is recommended for
RigL, which SET is level with then, see experiments/results/claims-growth.

Expected: SET and RigL have a lower validation perplexity and a higher accuracy
(Open LLM Leaderboard) than static (table 3); GraNet has a lower loss than RigL
(figure 8). Since tables 1 to 3 and figure 8 are images, sizes, batches and
update intervals are our choices, marked ours.
"""

import ml_collections

from configs import base
from configs import common

_BATCH_SIZE = 512  # of the dense model; our choice


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` is `algorithm=…`, `sparsity=…` or both."""
  algorithm, _ = common.parse_algorithm(
      arg, dict(name='rigl', sparsity=0.8, update_every='0.5%')  # our choice
  )
  is_dense = algorithm['name'] == 'dense'
  if algorithm['name'] in ('set', 'rigl', 'granet'):
    algorithm['drop_fraction'] = 0.5  # decays to zero at the end by a cosine
  if algorithm['name'] == 'granet':
    # The post does not give the end of the schedule.
    algorithm |= dict(name='rigl', sparsity=dict(
        schedule='cubic', initial=0.5, final=algorithm['sparsity'], steps='75%'
    ))

  config = base.get_config()
  config.model.update(
      preset='llama-1.3b',  # sizes of our choice
      vocab_size=32000, max_length=2048, scan_layers=True, remat='full',
      dtype='bfloat16',
  )
  config.loss.chunk = 256  # tokens whose logits are computed at once
  config.data.update(corpus='./corpora/slimpajama', tokenizer='')
  config.data.planned.update(tokens=627e9, vocab_size=32000)
  config.phase_defaults.update(
      duration='112B tokens', length=2048,
      batch_size=_BATCH_SIZE if is_dense else _BATCH_SIZE // 2,
  )
  config.phase_defaults.learning_rate.update(
      peak=2e-4, warmup='2000 steps', final_fraction=4.5e-6 / 2e-4
  )
  common.set_phases(config, pretrain=dict(algorithm=algorithm))
  config.evaluation.batch_size = 8
  config.eval_every = 1000
  config.checkpoints.every = 1000
  return config

