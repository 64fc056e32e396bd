"""All fields of a config, with neutral values that other configs change.

`common.set_phases` adds phases by what differs from `config.phase_defaults`. A
flag then changes a field of all, `--config.phase_defaults.batch_size=16`, or of
one phase, `--config.phases.pretrain.batch_size=16`.
"""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = ml_collections.ConfigDict({'seed': 0})  # weights, masks, data order

  config.model = dict(
      preset='gpt-mini',  # named sizes, overridden by the fields below
      vocab_size=1024, max_length=128,  # tokenizer's or more; positions
      n_layers=placeholder(int), n_heads=placeholder(int),
      d_model=placeholder(int), d_ff=placeholder(int),
      scan_layers=False, remat='none',  # one compiled layer; none, dots, full
      dtype='float32', dropout=0.0,  # of the computation; rate in training
  )
  config.matmul = 'auto'  # native, dense, blocks-64, …, or auto: the faster
  config.storage = 'auto'  # dense; compact: kept values only; or the faster
  config.loss = dict(
      label_smoothing=0.0, z_loss=0.0, chunk=0,  # 0: all logits at once
      teacher='', temperature=1.0, teacher_weight=0.5,  # WORKDIR[@PHASE]
  )
  config.micro_batches = 1  # gradient accumulation, which saves memory
  config.max_skipped_steps = 0  # in a row, if the loss or gradients are NaN
  config.mesh = dict(data=-1, fsdp=1, tensor=1)  # devices; -1: all remaining

  config.data = dict(
      corpus='python-stdlib',  # pre-training text: built in, or a folder
      tokenizer='bpe-1024',  # 'bytes', or 'bpe-N' learned on the corpus
      task='', task_dir='',  # '' for none; folder of its files
      cache_dir='~/.cache/spdf_jax',  # prepared corpora
      max_epochs=dict(corpus=1, task=1),
      planned=dict(tokens=0.0, vocab_size=0, examples=0),  # for a --dry_run
  )

  # Any of optax, or your own, with its arguments.
  config.optimizer = dict(name='adamw', b1=0.9, b2=0.95, eps=1e-8, clip_norm=1.)
  config.revival_warmup = placeholder(int)  # steps; moments from each revival
  config.parameterization = dict(  # standard, mup or sparse-mup; tuned at base
      name='standard', base_width=placeholder(int), embeddings_scale=1.0,
      base_density=placeholder(float), logits_scale=1.0,
  )

  config.phase_defaults = dict(
      duration='1000 steps',  # steps, tokens, epochs or tokens/parameter
      data='corpus',  # source of batches: corpus or task
      batch_size=8, length=128,  # sequences per step, tokens per sequence
      algorithm=dict(
          # dense, static, set, rigl, gmp, granet, hard_threshold, iterative,
          # partition, or your own; each takes the arguments that it knows.
          name='dense',
          sparsity=0.0,  # of the hidden matrices, in [0, 1)
          update_every='5%', update_until='75%',  # of the phase, or '100 steps'
          drop_fraction=placeholder(float), init=placeholder(str),  # its own
          grow=placeholder(str),  # gradient, balanced, random, or 'module:f'
          distribution='uniform',  # uniform, erk, igq or model_wide
          structure='unstructured',  # or N:M, as 2:4
      ),
      learning_rate=dict(
          schedule='cosine',  # constant, linear, cosine, continue or rewind
          peak=1e-3, warmup='5%',  # of the phase, or '50 steps'
          final_fraction=0.1, to='',  # final rate / peak; step to rewind to
      ),
      weight_decay=0.1,
      reset_moments=False, new_epoch=False,  # when the phase begins
      revive=0.0, initial_mask='', rewind_weights_to='', frozen=(),
      early_stop=dict(  # no metric: none; by a value to reach, or evaluations
          # without a better one; without both, the best one is kept
          metric='', value=placeholder(float), patience=placeholder(int),
      ),
  )
  config.phases = dict(order=())  # phases to run, in order

  config.evaluation = dict(
      batch_size=16, corpus_batches=8, task_batches=12,  # of validation splits
      generations=0, max_new_tokens=32,  # number at phase ends; their length
  )
  config.eval_every, config.log_every = 200, 10  # steps
  config.checkpoints = dict(every=200, keep=2)  # steps; number to keep
  config.resume = ''  # WORKDIR or WORKDIR@PHASE: start from its whole state
  config.init_from = ''  # the same: start from its parameters only
  config.adapter = dict(rank=0, scale=2.0)  # LoRA of hidden matrices; 0: none
  return config
