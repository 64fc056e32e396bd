"""SPDF's pre-training on the Pile: Thangarasa et al., 2023, section 3.

  python -m experiments.prepare --input=pile/ --tokenizer=gpt2/ \
    --output=corpora/pile
  python -m experiments.train --workdir=runs/gpt2-small-75 \
    --config=configs/spdf.py:model=gpt2-small,sparsity=0.75 \
    --config.micro_batches=4
  python -m experiments.train --workdir=runs/gpt3-xl-75 \
    --config=configs/spdf.py:model=gpt3-xl,sparsity=0.75 \
    --config.micro_batches=8

Expected at 0, 50 and 75 % sparsity (appendix, table 2; ours differ for
gpt2-small at 75 %, 1.47 and 0.606x, and for gpt3-xl at 0 %, 236.09):

  gpt2-small  FLOPs per sequence 1.99e12, 1.47e12, 1.20e12; for 1.22e6
              sequences 2.43, 1.79, 1.46 exaFLOPs: 1x, 0.737x, 0.601x
  gpt3-xl     1.86e13, 1.12e13, 7.46e12; for 1.27e7 sequences 236.10, 141.87,
              94.76 exaFLOPs: 1x, 0.601x, 0.401x

Fine-tuning, by configs/finetune.py, starts from these workdirs. Sizes, batch
sizes and learning rates are from appendix, table 1, AdamW and the schedule from
A.1; those of Cerebras-GPT, for Variable SPDF and its dense baselines
(sparsity=0), are from the configs that Cerebras published with Dey et al.,
2023. `--dry_run` and experiments.simulate need no corpus.
"""

import ml_collections

from configs import base
from configs import common

_CHINCHILLA = '20 tokens/parameter'
_SPDF = dict(schedule='cosine', b2=0.999, eps=1e-8)
_LINEAR = dict(schedule='linear', b2=0.95, eps=1e-8)
_COSINE = dict(schedule='cosine', b2=0.95, eps=1e-8)
# Batch size, peak learning rate, duration, and schedule and fields of AdamW.
_SETTINGS = {
    'gpt2-small': (256, 6e-4, '2.5B tokens', _SPDF),
    'gpt3-xl': (512, 2e-4, '26B tokens', _SPDF),
    'cerebras-gpt-111m': (120, 6e-4, _CHINCHILLA, _LINEAR),
    'cerebras-gpt-256m': (264, 6e-4, _CHINCHILLA, _LINEAR),
    'cerebras-gpt-590m': (264, 2e-4, _CHINCHILLA, _LINEAR),
    'cerebras-gpt-1.3b': (528, 2e-4, _CHINCHILLA, _COSINE),
    'cerebras-gpt-2.7b': (528, 2e-4, _CHINCHILLA, _COSINE),
    'cerebras-gpt-6.7b': (1040, 1.2e-4, _CHINCHILLA, _LINEAR | dict(eps=1e-9)),
    # Cerebras changed the batch size to 1080 after 57,000 steps.
    'cerebras-gpt-13b': (720, 1.2e-4, _CHINCHILLA, _COSINE | dict(eps=1e-9)),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `model`, `algorithm` and `sparsity`."""
  algorithm, given = common.parse_algorithm(
      arg, dict(name='static', sparsity=0.75), model=str
  )
  model = given.get('model', 'gpt2-small')
  common.check_choice('model', model, _SETTINGS)
  batch_size, peak, duration, adamw = _SETTINGS[model]

  config = base.get_config()
  config.model.update(
      preset=model, vocab_size=50257, max_length=2048, scan_layers=True,
      remat='full', dtype='bfloat16',
  )
  config.loss.chunk = 256  # tokens whose logits are computed at once
  config.data.update(corpus='./corpora/pile', tokenizer='')
  # The Pile has some 371 billion tokens of GPT-2's tokenizer.
  config.data.planned.update(tokens=371e9, vocab_size=50257)
  config.optimizer.update(b2=adamw['b2'], eps=adamw['eps'])
  config.phase_defaults.update(
      duration=duration, batch_size=batch_size, length=2048
  )
  config.phase_defaults.learning_rate.update(
      schedule=adamw['schedule'], peak=peak, warmup='375M tokens'
  )
  common.set_phases(config, pretrain=dict(algorithm=algorithm))
  config.evaluation.batch_size = 8
  config.eval_every = 1000
  config.checkpoints.every = 1000
  return config
