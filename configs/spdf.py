"""SPDF's pre-training on the Pile: Thangarasa et al., 2023, section 3.

  python -m experiments.prepare --input=pile/ --tokenizer=gpt2/ \
    --output=corpora/pile
  python -m experiments.train --workdir=runs/xl-75 \
    --config=configs/spdf.py:model=gpt3-xl,sparsity=0.75 \
    --config.mesh.fsdp=8 --config.micro_batches=8

Batch sizes and learning rates are those of SPDF's appendix, table 1, for
gpt2-small and gpt3-xl, and of Dey et al., Cerebras-GPT, 2023 for its models;
AdamW, warm-up and decay are those of SPDF's appendix A.1 for all of them.
Fine-tune densely by a launch of its own: --config.init_from=runs/xl-75.

Expected (SPDF, appendix, table 2): FLOPs of pre-training fall to 74 and 60 % of
dense for gpt2-small at 50 and 75 %, to 60 and 40 % for gpt3-xl. `--dry_run` and
experiments.simulate need no corpus.
"""

import ml_collections

from configs import common
from configs import quickstart

# Sequences in a batch, peak learning rate, length.
_SETTINGS = {
    'gpt2-small': (256, 6e-4, '2.5B tokens'),
    'gpt3-xl': (512, 2e-4, '26B tokens'),
    'cerebras-gpt-111m': (120, 6e-3, '20 tokens/parameter'),
    'cerebras-gpt-256m': (264, 6e-3, '20 tokens/parameter'),
    'cerebras-gpt-590m': (264, 2e-4, '20 tokens/parameter'),
    'cerebras-gpt-1.3b': (528, 2e-4, '20 tokens/parameter'),
    'cerebras-gpt-2.7b': (528, 2e-4, '20 tokens/parameter'),
    'cerebras-gpt-6.7b': (1040, 1.2e-4, '20 tokens/parameter'),
    'cerebras-gpt-13b': (720, 1.2e-4, '20 tokens/parameter'),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` is `model=…`, `sparsity=…` or both."""
  given = common.parse(arg, model=str, sparsity=float)
  model = given.get('model', 'gpt2-small')
  if model not in _SETTINGS:
    raise ValueError(
        f'config argument has model {model!r}; use one of '
        f'{", ".join(_SETTINGS)}.'
    )
  batch_size, peak, duration = _SETTINGS[model]

  config = quickstart.get_config()
  config.model.update(
      preset=model, vocab_size=50257, max_length=2048, scan_layers=True,
      remat='full', dtype='bfloat16',
  )
  config.loss.chunk = 256  # tokens whose logits are computed at once
  config.data.update(
      corpus='./corpora/pile', tokenizer='', task='',
      # The Pile has some 371 billion tokens of GPT-2's.
      planned=dict(tokens=371e9, vocab_size=50257),
  )
  config.optimizer.b2 = 0.999
  pretrain = config.phases.pretrain.copy_and_resolve_references()
  pretrain.update(
      duration=duration, batch_size=batch_size, length=2048,
      sparsity=given.get('sparsity', 0.75),
  )
  pretrain.learning_rate.update(peak=peak, warmup='375M tokens')
  config.phases = dict(order=('pretrain',), pretrain=pretrain)
  config.evaluation.batch_size = 8
  config.eval_every = 1000
  config.checkpoints.every = 1000
  return config
