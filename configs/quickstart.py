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

from configs import base
from configs import common


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` is `algorithm=…`, `sparsity=…` or both."""
  algorithm, _ = common.parse_algorithm(
      arg, dict(name='static'), (*common.ALGORITHMS, *common.PRUNING)
  )
  in_rounds = algorithm['name'] in common.PRUNING
  # Three rounds of pruning, a quarter each.
  algorithm.setdefault('sparsity', 1 - 0.75**3 if in_rounds else 0.75)

  config = base.get_config()
  config.data.update(
      task='python-docstrings',
      max_epochs=dict(corpus=4 if in_rounds else 1, task=2),
  )
  config.phase_defaults.learning_rate.peak = 3e-3
  if in_rounds:
    pretraining = common.pruning_rounds(
        number=4, steps=300, to='50 steps', **algorithm
    )
    config.eval_every = 50
  else:
    pretraining = dict(
        pretrain=dict(algorithm=algorithm),
        continuation=dict(
            duration='200 steps',
            learning_rate=dict(schedule='continue'),  # one cosine for both
        ),
    )
  common.set_phases(config, **pretraining, finetune=dict(
      duration='2 epochs', data='task', batch_size=16, length=64,
      learning_rate=dict(
          schedule='linear', peak=2e-3, warmup='30 steps', final_fraction=0.0
      ),
      weight_decay=0.01, reset_moments=True,
  ))
  config.evaluation.generations = 48
  return config
