"""The common config of all runs of experiments.reproduce.

  python -m experiments.reproduce --scale=fair --data=DIR

A small GPT is trained on books; each arm changes sparsity, phases, learning
rate and initial parameters, see experiments/papers/arm_configs.py. AdamW,
clipping and weight decay are those of SPDF, appendix A.1, except b2, 0.95.
Sizes are in experiments/papers/scales.py.
"""

import ml_collections

from configs import base
from configs import common


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `width`, `layers`, `length`."""
  given = dict(width=64, layers=4, length=128)
  given |= common.parse(arg, width=int, layers=int, length=int)
  width, length = given['width'], given['length']
  head = 16 if width < 256 else 64

  config = base.get_config()
  config.model.update(
      n_layers=given['layers'], n_heads=max(width // head, 1), d_model=width,
      d_ff=4 * width, max_length=length,
  )
  config.data.max_epochs = dict(corpus=12, task=16)
  config.phase_defaults.length = length
  config.phase_defaults.learning_rate.peak = 3e-3
  common.set_phases(config, pretrain={})
  config.eval_every = 10**9  # at the end of a phase only
  config.log_every = 100
  config.checkpoints.update(every=500, keep=1)
  return config
