"""Variable SPDF on two CPU cores: sparse, then dense, then fine-tuned.

A GPT of 0.7M parameters learns Python's library with 75 % of hidden weights at
zero, goes on densely, and is fine-tuned to write docstrings (Thangarasa et al.,
SPDF, 2023, https://arxiv.org/abs/2303.10464; Cerebras, Variable SPDF, 2023).
Expected: a perplexity below a bigram model's; fine-tuning halves docstrings'.

  python -m experiments.train --config=configs/quickstart.py --workdir=runs/a

  configs/quickstart.py:algorithm=rigl,sparsity=0.9  # or only one of the two;
    static, set, rigl, gmp, granet or iterative, which prunes in four rounds
"""

import ml_collections
from ml_collections.config_dict import placeholder

from configs import common


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` is `algorithm=…`, `sparsity=…` or both."""
  algorithm, level = common.parse_sparsity(arg)

  config = ml_collections.ConfigDict()
  config.seed = 0  # of initial weights, masks and data order

  config.model = dict(
      preset='gpt-mini',  # sizes by name; the fields below, if set, override it
      vocab_size=1024, max_length=128,  # at least the tokenizer's; positions
      n_layers=placeholder(int), n_heads=placeholder(int),
      d_model=placeholder(int), d_ff=placeholder(int),
      scan_layers=False,  # one compiled layer, scanned over: for deep models
      remat='none',  # what the backward pass computes anew: none, dots or full
      dtype='float32',  # of the computation; parameters are float32
  )
  config.matmul = 'auto'  # sparse steps: 'native' kernels, 'dense', the faster
  config.storage = 'dense'  # 'compact': sparse phases store kept values only
  config.loss = dict(label_smoothing=0.0, z_loss=0.0, chunk=0)  # 0: all logits
  config.micro_batches = 1  # parts of a batch, one after another: less memory
  config.mesh = dict(data=-1, fsdp=1, tensor=1)  # devices; -1: all others

  config.data = dict(
      corpus='python-stdlib',  # pre-training text
      tokenizer='bpe-1024',  # 'bytes', or 'bpe-N' learned on the corpus
      task='python-docstrings', task_dir='',  # '' for none; its files, if any
      cache_dir='~/.cache/spdf_jax',  # prepared corpora
      max_epochs=dict(corpus=4 if algorithm == 'iterative' else 1, task=2),
      planned=dict(tokens=0.0, vocab_size=0, examples=0),  # for a --dry_run
  )

  config.optimizer = dict(b1=0.9, b2=0.95, eps=1e-8, clip_norm=1.0)  # AdamW

  cosine = dict(
      schedule='cosine',  # constant, linear, cosine, continue or rewind
      peak=3e-3, warmup='50 steps',  # a duration
      final_fraction=0.1, to='',  # of the peak, at the end; of rewind
  )
  pretrain = dict(
      duration='1000 steps',  # steps, tokens, epochs or tokens/parameter
      data='corpus',  # which source: corpus or task
      batch_size=8, length=128,  # sequences per step, tokens per sequence
      sparsity=0.0,  # fraction of zeros in the hidden matrices, or an algorithm
      learning_rate=cosine, weight_decay=0.1,
      restart=False, reshuffle=False,  # moments; begins a new epoch of data
      early_stop=common.early_stop(),  # off; a metric, and patience or value
  )
  # The cosine of the first phase spans this one too: one pre-training.
  go_on = cosine | dict(schedule='continue')
  rest = pretrain | dict(duration='200 steps', learning_rate=go_on)
  fall = dict(schedule='linear', peak=2e-3, warmup='30 steps', final_fraction=0)
  finetune = pretrain | dict(
      duration='2 epochs', data='task', batch_size=16, length=64, restart=True,
      learning_rate=fall, weight_decay=0.01,
  )
  phases = dict(pretrain=pretrain, continuation=rest, finetune=finetune)
  phases = common.sparse_phases(phases, algorithm, level)
  config.phases = dict(order=tuple(phases), **phases)  # what runs, in order

  config.evaluation = dict(
      batch_size=16,  # sequences per evaluation batch
      corpus_batches=8, task_batches=12,  # batches of the validation splits
      generations=48,  # validation examples to generate at phase ends
      max_new_tokens=32,  # per generation
  )
  config.eval_every = 50 if algorithm == 'iterative' else 200  # steps
  config.log_every = 10  # steps
  config.checkpoints = dict(every=200, keep=2)  # steps; latest ones to keep
  config.resume = ''  # WORKDIR or WORKDIR@PHASE: start from all of it
  config.init_from = ''  # the same: start from its parameters only
  return config
