"""Scales of experiments.reproduce: sizes of models, data and runs, as data."""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs import claims as base
from experiments.papers.arms import Arm
from experiments.papers.arms import with_parents
from experiments.papers.pool import Entry
from spdf_jax import models
from spdf_jax.training.config import parse

TOKENS_PER_PARAMETER = 20
EPOCHS = 4
"""Limits of gate G4: fewest tokens per parameter, and most epochs."""


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of the models of a scale.

  Attributes:
    width: Width of the model.
    rates: Peak learning rates that pre-training is tuned over.
  """

  width: int
  rates: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Block:
  """Arms that are run together, before those of later blocks.

  Attributes:
    arms: The arms.
    seeds: Number of judging seeds.
  """

  arms: tuple[Arm, ...]
  seeds: int


@dataclasses.dataclass(frozen=True)
class Scale:
  """Settings that the runs of a scale have in common.

  Attributes:
    claims: Keys of the claims.
    blocks: Arms that are run, in order.
    sizes: Sizes by name; `''` is the main one.
    layers: Layers of all models.
    length: Tokens of a sequence.
    batch_size: Sequences in a batch of pre-training.
    tokens_per_parameter: Tokens of a pre-training, as a multiple of the
      model's parameters.
    stages: Learning rates tried for the dense stage of Variable SPDF:
      `'continue'` continues the schedule of the first stage, a number warms up
      again to that share of its peak.
    rounds: Rounds of iterative pruning.
    round_share: Steps of a round, as a share of those of a pre-training.
    tune_batch: Sequences in a batch of fine-tuning.
    tune_steps: Steps of a fine-tuning.
    tune_rates: Peak learning rates that fine-tuning is tuned over.
    corpus: Folder of the corpus, relative to that of the data; `''`: the
      sources of Python's standard library.
    tokenizer: Tokenizer, see `data.prepare_corpus` and `data.prepare_files`.
    tasks: Tasks by name: kind of the task, its folder relative to that of the
      data, and n if every n-th example is trained on.
    batches: Number of batches of 16 sequences that losses are measured on.
    micro_batches: Number of micro-batches of a batch.
    matmul: Value of `config.matmul`.
    epochs: Largest number of epochs of the corpus.
    speeds: Factors of the number of steps of an arm, by its kind; 1 for other
      arms.
    demonstration: Whether the scale may violate gate G4; then its claims get no
      verdict.
    vmapped: Whether runs of one size are trained together in one program.

  Raises:
    ValueError: gate G4 is violated and the scale is no demonstration.
  """

  claims: tuple[str, ...]
  blocks: tuple[Block, ...]
  sizes: Mapping[str, Size]
  layers: int
  length: int
  batch_size: int
  tokens_per_parameter: float
  stages: tuple[str | float, ...]
  rounds: int
  round_share: float
  tune_batch: int
  tune_steps: int
  tune_rates: tuple[float, ...]
  corpus: str
  tokenizer: str
  tasks: Mapping[str, tuple[str, str, int]]
  batches: int
  micro_batches: int = 1
  matmul: str = 'auto'
  epochs: int = 1
  speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  demonstration: bool = False
  vmapped: bool = False

  def __post_init__(self):
    if self.demonstration:
      return
    if self.tokens_per_parameter < TOKENS_PER_PARAMETER:
      raise ValueError(
          f'tokens_per_parameter is {self.tokens_per_parameter}; gate G4 '
          f'requires {TOKENS_PER_PARAMETER} or more: raise it, or make the '
          'scale a demonstration, which gives no verdicts.'
      )
    if self.epochs > EPOCHS:
      raise ValueError(
          f'epochs is {self.epochs}; gate G4 allows {EPOCHS}: reduce it, or '
          'make the scale a demonstration, which gives no verdicts.'
      )

  @property
  def vocab_size(self) -> int:
    """Size of the vocabulary."""
    words = self.tokenizer.removeprefix('bpe-')
    return 257 if words == 'bytes' else int(words)

  def steps(self, arm: Arm) -> int:
    """Returns the steps of a pre-training, or of a fine-tuning."""
    if arm.task:
      return self.tune_steps
    tokens = self.tokens_per_parameter * parameters(
        self.sizes[arm.size].width, self.layers, self.length, self.vocab_size
    )
    steps = tokens / (self.batch_size * self.length)
    return round(steps * self.speeds.get(arm.kind, 1.0) * arm.share)

  def entries(self, claims_arms: list[Arm]) -> list[Entry]:
    """Returns the pool's entries: arms of the blocks that claims need.

    Args:
      claims_arms: Arms of claims and gates.

    Returns:
      Entries in the order of the blocks, each after its parent; an arm in
      several blocks has the number of seeds of the first one.

    Raises:
      ValueError: an arm is in no block.
    """
    needed = set(with_parents(claims_arms))
    seeds: dict[Arm, int] = {}
    for block in self.blocks:
      for arm in with_parents(list(block.arms)):
        seeds.setdefault(arm, block.seeds)
    missing = sorted(arm.name for arm in needed - set(seeds))
    if missing:
      raise ValueError(
          f'claims need {", ".join(missing)}, which this scale does not train; '
          f'choose claims of {", ".join(self.claims)}.'
      )
    return [
        Entry(arm, self._grid(arm), n, extend=not self.demonstration)
        for arm, n in seeds.items() if arm in needed
    ]

  def _grid(self, arm: Arm) -> dict[str, tuple]:
    if arm.method == 'init' and not arm.task:
      return {}
    if arm.task:
      return {'rate': self.tune_rates}
    grid: dict[str, tuple] = {'rate': self.sizes[arm.size].rates}
    if arm.method == 'variable':
      grid['stage'] = self.stages
    return grid


@functools.cache
def parameters(width: int, layers: int, length: int, vocab_size: int) -> int:
  """Returns the number of parameters of a scale's model.

  Example:
    >>> parameters(64, 4, 256, 257)
    232896
  """
  config = parse(base.get_config(
      f'width={width},layers={layers},length={length}'
  ))
  model = models.model_of(
      dataclasses.replace(config.model.sizes, vocab_size=vocab_size)
  )
  shapes = jax.eval_shape(
      model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
  )
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


DENSE = Arm('dense')
STATIC_50, STATIC_75, STATIC_90 = (
    Arm('static', sparsity) for sparsity in (0.5, 0.75, 0.9)
)
CONTROL = Arm('static', 0.99)
VARIABLE = Arm('variable', 0.9)
_RATES = (4e-3, 8e-3, 1.6e-2)


def tuned(arm: Arm, task: str = 'task', **changes) -> Arm:
  """Returns the fine-tuning of an arm on a task."""
  return dataclasses.replace(arm, task=task, **changes)


def sized(arm: Arm, size: str) -> Arm:
  """Returns an arm at another size."""
  return dataclasses.replace(arm, size=size)


FAIR = Scale(
    claims=(
        'a', 'b1', 'b2', 'c', 'd-pre', 'd-ft', 'g1', 'j',
        'c-ppl', 'e', 'g2', 'h', 'i',
    ),
    blocks=(
        Block((DENSE, STATIC_75, STATIC_90, VARIABLE), 8),
        Block((CONTROL,), 3),
        Block((
            tuned(DENSE), tuned(STATIC_75),
            tuned(STATIC_75, sparse_tuning=True), tuned(VARIABLE),
        ), 8),
        Block((STATIC_50, tuned(STATIC_50)), 8),
        Block((sized(DENSE, 'small'), sized(STATIC_75, 'small')), 8),
        Block((sized(CONTROL, 'small'),), 3),
        Block((sized(DENSE, 'large'), sized(STATIC_75, 'large')), 5),
        Block((sized(CONTROL, 'large'),), 3),
        Block((Arm('pruned', 0.75), Arm('longer')), 8),
        Block((Arm('set', 0.9), Arm('rigl', 0.9)), 6),
        Block((tuned(DENSE, rate_of=tuned(STATIC_75)),), 6),
        Block((tuned(DENSE, 'hard'), tuned(STATIC_75, 'hard')), 6),
    ),
    sizes={
        '': Size(64, _RATES),
        'small': Size(32, _RATES),
        'large': Size(96, (2e-3, 4e-3, 8e-3)),
    },
    layers=4,
    length=256,
    batch_size=4,
    micro_batches=2,
    tokens_per_parameter=20,
    stages=('continue', 0.3, 1.0),
    rounds=5,
    round_share=0.25,
    tune_batch=8,
    tune_steps=1200,
    tune_rates=(3e-3, 6e-3, 1.2e-2),
    corpus='books',
    tokenizer='bytes',
    tasks={'task': ('e2e', 'e2e', 4), 'hard': ('webnlg', 'webnlg17', 2)},
    batches=48,
)

SCALES = {
    'smoke': dataclasses.replace(
        FAIR, claims=('a', 'd-ft', 'e', 'g1', 'h'),
        sizes={'': Size(16, (1e-2,))},
        blocks=tuple(
            dataclasses.replace(block, seeds=1) for block in FAIR.blocks
        ),
        layers=1, length=48, batch_size=4, tokens_per_parameter=1.5,
        micro_batches=1, stages=('continue', 1.0), rounds=2, round_share=0.2,
        tune_steps=12, tune_rates=(1e-2,), corpus='',
        tasks={'task': ('python-docstrings', '', 20)}, batches=4,
        demonstration=True,
    ),
    'fair': FAIR,
    'small': dataclasses.replace(
        FAIR, claims=('b2', 'c'),
        blocks=(
            Block((DENSE, STATIC_50, STATIC_75, STATIC_90), 8),
            Block((CONTROL,), 3),
            Block((sized(DENSE, 'small'), sized(STATIC_75, 'small')), 8),
            Block((sized(CONTROL, 'small'),), 3),
            Block((sized(DENSE, 'large'), sized(STATIC_75, 'large')), 8),
            Block((sized(CONTROL, 'large'),), 3),
        ),
        sizes={
            '': Size(192, (2e-3, 4e-3, 8e-3)),
            'small': Size(128, (2e-3, 4e-3, 8e-3)),
            'large': Size(256, (1e-3, 2e-3, 4e-3)),
        },
        batch_size=8, micro_batches=1, tasks={}, matmul='dense', epochs=4,
        vmapped=True,
    ),
}
"""Scales by name: for CI, for a night on two cores, and for one GPU."""
