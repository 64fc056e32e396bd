"""How large experiments.reproduce tests the claims: scales as data."""

from collections.abc import Mapping
from typing import NamedTuple

from spdf_jax.analysis.paper_claims import CLAIMS


class Scale(NamedTuple):
  """Everything that the runs of a scale have in common.

  Attributes:
    claims: Letters of the claims.
    seeds: How many the claims are judged on; the grids are run on one more.
    widths: Of the models, by the end of an arm's name; `''` is the main one.
    layers: Of all models.
    length: Tokens of a sequence.
    batch_size: Sequences of a step of pre-training.
    steps: Steps of a pre-training.
    rates: Peak learning rates tried for every arm of pre-training.
    stages: Learning rates tried for the dense stage of Variable SPDF: it
      continues the first one's schedule, or is warmed up anew to a share of its
      peak.
    rounds: Rounds of iterative pruning.
    round_steps: Steps of each.
    tune_batch: Sequences of a step of fine-tuning.
    tune_steps: Steps of a fine-tuning.
    tune_rates: Peak learning rates tried for every arm of fine-tuning.
    corpus: A folder of text below that of the data, `''`: Python's library.
    tokenizer: As `data.prepare_corpus` and `data.prepare_files` take it.
    tasks: By the end of an arm's name: a task, its folder below that of the
      data, and the share of its examples that is trained on, one in so many.
    batches: What a loss is measured on, in batches of 16.
    pinned: Whether every worker keeps to one core.
  """

  claims: tuple[str, ...]
  seeds: int
  widths: Mapping[str, int]
  layers: int
  length: int
  batch_size: int
  steps: int
  rates: tuple[float, ...]
  stages: tuple[str | float, ...]
  rounds: int
  round_steps: int
  tune_batch: int
  tune_steps: int
  tune_rates: tuple[float, ...]
  corpus: str
  tokenizer: str
  tasks: Mapping[str, tuple[str, str, int]]
  batches: int
  pinned: bool = True


_TINY = Scale(
    claims=('a', 'b', 'd', 'e', 'g', 'h', 'j'),
    seeds=5,
    widths={'': 64},
    layers=4,
    length=128,
    batch_size=4,
    steps=1350,
    rates=(2.5e-3, 5e-3, 1e-2),
    stages=('continue', 0.3, 1.0),
    rounds=3,
    round_steps=225,
    tune_batch=8,
    tune_steps=300,
    tune_rates=(3e-3, 6e-3, 1.2e-2),
    corpus='books',
    tokenizer='bpe-1024',
    tasks={'task': ('e2e', 'e2e', 16)},
    batches=48,
)

SCALES = {
    'smoke': _TINY._replace(
        claims=('a', 'd', 'e', 'g', 'h'), seeds=1, widths={'': 16}, layers=1,
        length=48, steps=60, rates=(1e-2,), stages=('continue', 1.0), rounds=2,
        round_steps=12, tune_steps=12, tune_rates=(1e-2,), corpus='',
        tokenizer='bytes',
        tasks={'task': ('python-docstrings', '', 20)}, batches=4,
    ),
    'tiny': _TINY,
    'cpu': _TINY._replace(
        claims=tuple(CLAIMS), widths={'': 64, '_small': 32, '_large': 128},
        steps=6000, rounds=4, round_steps=1500, tune_steps=1200,
        tasks={
            'task': ('e2e', 'e2e', 4),
            'hard': ('webnlg', 'webnlg17', 2),
            'tenth': ('e2e', 'e2e', 40),
        },
        batches=64,
    ),
    'small': _TINY._replace(
        claims=tuple(CLAIMS), widths={'': 512, '_small': 256, '_large': 768},
        layers=8, length=256, batch_size=32, steps=5000,
        rates=(5e-4, 1e-3, 2e-3), rounds=4, round_steps=1250, tune_batch=16,
        tune_steps=2000, tune_rates=(1.25e-4, 2.5e-4, 5e-4, 1e-3),
        tokenizer='bpe-8192',
        tasks={
            'task': ('e2e', 'e2e', 1),
            'hard': ('webnlg', 'webnlg17', 1),
            'tenth': ('e2e', 'e2e', 10),
        },
        batches=64,
        pinned=False,
    ),
}
"""By name: in CI, in minutes and overnight on two cores, and on one GPU."""
