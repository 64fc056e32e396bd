"""Variable SPDF on two CPU cores: sparse, then dense, then fine-tuned.

A GPT of 0.7M parameters is pre-trained on Python's library at 75 % sparsity,
continues densely, and is fine-tuned to write docstrings (Thangarasa et al.,
SPDF, 2023, https://arxiv.org/abs/2303.10464; Cerebras, Variable SPDF, 2023).
Expected: less perplexity than a bigram model, and a third of it on docstrings
after tuning.

  python -m experiments.train --config=configs/quickstart.py --workdir=runs/a

  configs/quickstart.py:algorithm=rigl,sparsity=0.9  # both are optional
    static, set, rigl, gmp, granet, or iterative or lottery: four rounds
"""

import ml_collections
from ml_collections.config_dict import placeholder

from configs import common


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` is `algorithm=…`, `sparsity=…` or both."""
  algorithm, sparsity = common.parse_sparsity(arg)

  config = ml_collections.ConfigDict({'seed': 0})  # weights, masks, data order

  config.model = dict(
      preset='gpt-mini',  # named sizes, overridden by the fields below
      vocab_size=1024, max_length=128,  # tokenizer's or more; positions
      n_layers=placeholder(int), n_heads=placeholder(int),
      d_model=placeholder(int), d_ff=placeholder(int),
      scan_layers=False,  # one compiled layer, scanned over: for deep models
      remat='none',  # rematerialization: none, dots or full
      dtype='float32', dropout=0.0,  # of the computation; rate in training
  )
  config.matmul = 'auto'  # native, dense, wafer, or auto: the faster
  config.storage = 'dense'  # 'compact': sparse phases store kept values only
  config.loss = dict(label_smoothing=0.0, z_loss=0.0, chunk=0)  # 0: all logits
  config.micro_batches = 1  # gradient accumulation, which saves memory
  config.max_skipped_steps = 0  # in a row, if the loss or gradients are NaN
  config.mesh = dict(data=-1, fsdp=1, tensor=1)  # devices; -1: all remaining

  config.data = dict(
      corpus='python-stdlib',  # pre-training text
      tokenizer='bpe-1024',  # 'bytes', or 'bpe-N' learned on the corpus
      task='python-docstrings', task_dir='',  # '' for none; folder of its files
      cache_dir='~/.cache/spdf_jax',  # prepared corpora
      max_epochs=dict(corpus=4 if algorithm in common.PRUNING else 1, task=2),
      planned=dict(tokens=0.0, vocab_size=0, examples=0),  # for a --dry_run
  )

  # Any of optax, or your own, with its arguments.
  config.optimizer = dict(name='adamw', b1=0.9, b2=0.95, eps=1e-8, clip_norm=1.)

  cosine = dict(
      schedule='cosine',  # constant, linear, cosine, continue or rewind
      peak=3e-3, warmup='50 steps',  # a duration
      final_fraction=0.1, to='',  # final rate / peak; step to rewind to
  )
  pretrain = dict(
      duration='1000 steps',  # steps, tokens, epochs or tokens/parameter
      data='corpus',  # source of batches: corpus or task
      batch_size=8, length=128,  # sequences per step, tokens per sequence
      sparsity=0.0,  # of the hidden matrices, in [0, 1), or an algorithm
      learning_rate=cosine, weight_decay=0.1,
      reset_moments=False, new_epoch=False,  # when the phase begins
      revive=0.0, initial_mask='', rewind_weights_to='', frozen=(),
      early_stop=common.early_stop(),  # none; or metric, patience, value
  )
  continued = cosine | dict(schedule='continue')  # one cosine for both phases
  rest = pretrain | dict(duration='200 steps', learning_rate=continued)
  fall = dict(schedule='linear', peak=2e-3, warmup='30 steps', final_fraction=0)
  finetune = pretrain | dict(
      duration='2 epochs', data='task', batch_size=16, length=64,
      learning_rate=fall, weight_decay=0.01, reset_moments=True,
  )
  phases = dict(pretrain=pretrain, continuation=rest, finetune=finetune)
  phases = common.sparse_phases(phases, algorithm, sparsity)
  config.phases = dict(order=tuple(phases), **phases)  # phases to run, in order

  config.evaluation = dict(
      batch_size=16, corpus_batches=8, task_batches=12,  # of validation splits
      generations=48, max_new_tokens=32,  # number at phase ends; their length
  )
  config.eval_every = 50 if algorithm in common.PRUNING else 200  # steps
  config.log_every = 10  # steps
  config.checkpoints = dict(every=200, keep=2)  # steps; number to keep
  config.resume = ''  # WORKDIR or WORKDIR@PHASE: start from its whole state
  config.init_from = ''  # the same: start from its parameters only
  return config
