"""Weight-sparse GPT that one can read: Gao et al., 2025, on Python's library.

After each step of AdamW, every matrix and bias keeps its largest entries, a
fraction that falls linearly from 1 over the first half of training. Gradients
and moments are dense. The model cuts activations to the largest quarter, has
heads of 16 with an attention sink, RMSNorm, and a dense table of bigrams.

  python -m experiments.train --workdir=runs/readable \
    --config=configs/weight_sparse.py:kept=1/64,width=128

  kept: fraction of the weights that stay, 1 for a dense model; width; layers
    (all optional: 1/16, 128, 2)

By default it trains 2,000 steps on two cores in minutes. Sizes of the paper,
for an accelerator and a corpus of one's own (PROMPTS of Python, not published):

  --config=configs/weight_sparse.py:kept=1/256,width=2048,layers=8 \
    --config.data.corpus=./corpora/python --config.data.tokenizer='' \
    --config.model.vocab_size=2048 --config.model.max_length=256 \
    --config.phase_defaults.length=256 --config.phase_defaults.batch_size=512 \
    --config.phases.pretrain.duration="10B tokens" --config.micro_batches=64
"""

import fractions

import ml_collections

from configs import base
from configs import common


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` is `kept=…`, `width=…`, `layers=…` or several."""
  given = common.parse(
      arg, kept=lambda text: float(fractions.Fraction(text)), width=int,
      layers=int,
  )
  kept, width = given.get('kept', 1 / 16), given.get('width', 128)

  config = base.get_config()
  config.model = dict(
      preset='experiments.weight_sparse.model:make_model',
      vocab_size=1024, d_model=width, max_length=128,
      n_layers=given.get('layers', 2), head_size=16,  # heads fill the width
      kept_activations=0.25,  # AbsTopK, at all locations of the authors' code
      sink=True, biases=True, positions=False, bigrams=True,
  )
  config.optimizer = dict(
      name='experiments.weight_sparse.optimizer:adamw', b1=0.9, b2=0.95,
      eps=0.1,  # large, since gradients are scaled to the RMS below
      rms=1.0, normalize=True,  # False: clips larger gradients only
      rate_power=-0.5,  # of the kept fraction, as a factor of the rate
      clip_norm=1e9,  # does not clip
  )
  config.phase_defaults.learning_rate.update(
      schedule='linear', peak=3e-2, warmup='1%', final_fraction=0.0
  )
  config.phase_defaults.update(batch_size=16, weight_decay=0.1)
  common.set_phases(
      config, pretrain=dict(duration='2000 steps', algorithm=dict(
          name='partition', groups=_groups(kept, width)
      ) if kept < 1 else dict(name='dense')),
  )
  config.data.max_epochs.corpus = 4
  config.evaluation.corpus_batches = 32
  return config


def _groups(kept: float, width: int) -> list[list]:
  """Returns how many weights each kind of leaf keeps."""
  def rule(kept, least=0):
    return dict(
        name='hard_threshold', least=least,
        update_every='0.5%', update_until='50%',  # falls in 100 steps
        sparsity=dict(
            schedule='linear_schedule', init_value=0.0, end_value=1 - kept,
            transition_steps='50%',
        ),
    )

  # Four inputs of each neuron and channel, if the fraction leaves that many.
  least = min(4, int(kept * width / 2))
  return [
      ['*/bias', rule(max(kept, 4 / width))],
      ['h_*/kernel', rule(kept, least)],
      ['*', rule(kept)],  # embedding and output
  ]
