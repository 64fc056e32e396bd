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
    --config=configs/llama_dst.py:algorithm=granet,tokens=2.6e9 \
    --config.micro_batches=8
  python -m experiments.train --workdir=runs/llama-rigl-short \
    --config=configs/llama_dst.py:algorithm=rigl,tokens=2.6e9 \
    --config.micro_batches=8

algorithm: dense, static, set, rigl, granet. `--config.phases.pretrain.sparsity.
algorithm=granet` uses the GraNet of Liu et al., 2021 instead of the post's.

Expected: SET and RigL have a lower validation perplexity and a higher accuracy
(Open LLM Leaderboard) than static (table 3); GraNet has a lower loss than RigL
(figure 8). Since tables 1 to 3 and figure 8 are images, sizes, batches and
update intervals are our choices, marked ours.
"""

import ml_collections

from configs import common
from configs import quickstart

_BATCH_SIZE = 512  # of the dense model: ours
_UPDATES = 200  # mask updates, at least 100 steps apart: ours
_ALGORITHMS = ('dense', 'static', 'set', 'rigl', 'granet')


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `algorithm`, `sparsity` and `tokens`."""
  given = common.parse(arg, algorithm=str, sparsity=float, tokens=float)
  algorithm = given.get('algorithm', 'rigl')
  common.check_choice('algorithm', algorithm, _ALGORITHMS)
  sparsity = given.get('sparsity', 0.8)
  batch_size = _BATCH_SIZE if algorithm == 'dense' else _BATCH_SIZE // 2
  steps = round(given.get('tokens', 112e9) / (batch_size * 2048))

  config = quickstart.get_config()
  config.model.update(
      preset='llama-1.3b',  # its sizes: ours
      vocab_size=32000, max_length=2048, scan_layers=True, remat='full',
      dtype='bfloat16',
  )
  config.loss.chunk = 256  # tokens whose logits are computed at once
  config.data.update(
      corpus='./corpora/slimpajama', tokenizer='', task='',
  )
  config.data.planned.update(tokens=627e9, vocab_size=32000)
  pretrain = config.phases.pretrain.copy_and_resolve_references()
  pretrain.update(duration=f'{steps} steps', batch_size=batch_size, length=2048)
  pretrain.learning_rate.update(
      peak=2e-4, warmup='2000 steps', final_fraction=4.5e-6 / 2e-4
  )
  with pretrain.ignore_type():
    pretrain.sparsity = _sparsity(algorithm, sparsity, steps)
  config.phases = dict(order=('pretrain',), pretrain=pretrain)
  config.evaluation.batch_size = 8
  config.eval_every = 1000
  config.checkpoints.every = 1000
  return config


def _sparsity(algorithm, sparsity, steps):
  if algorithm in ('dense', 'static'):
    return sparsity if algorithm == 'static' else 0.0
  until = 3 * steps // 4
  # The end of the schedule is ours.
  rise = dict(schedule='cubic', initial=0.5, final=sparsity, steps=until)
  return dict(
      algorithm='sparse_evolution' if algorithm == 'set' else 'rigl',
      sparsity=rise if algorithm == 'granet' else sparsity,
      update_every=max(steps // _UPDATES, 100), update_until=until,
      drop_fraction=0.5,  # decays to zero at update_until by a cosine
  )
