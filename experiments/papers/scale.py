"""What the runs of a scale of experiments.reproduce have in common."""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from configs import claims as base
from experiments.papers.arms import Arm
from experiments.papers.arms import with_parents
from experiments.pool.pool import Entry
from spdf_jax import models
from spdf_jax.costs import flops
from spdf_jax.training.configs.config import parse

TOKENS_PER_PARAMETER = 20
EPOCHS = 4
"""Limits of gate G4: fewest tokens per parameter, and most epochs."""


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of the models of a scale.

  Attributes:
    width: Width of the model.
    rates: Peak learning rates that pre-training is tuned over.
    batch_size: Sequences in a batch of pre-training; `None`: the scale's.
    n_heads: Number of heads; `None`: heads of 16.
    d_ff: Width of the hidden layers; `None`: four times the width.
    rotary: Whether the model is a Llama, with rotary positions.
    tokens_of: Name of the size whose pre-training reads as many tokens; `None`:
      this one, by its own parameters.
  """

  width: int
  rates: tuple[float, ...]
  batch_size: int | None = None
  n_heads: int | None = None
  d_ff: int | None = None
  rotary: bool = False
  tokens_of: str | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """A fine-tuning task of a scale.

  Attributes:
    kind: Kind of the task, see `data.load_task`.
    folder: Folder of its files, relative to that of the data; `''`: none.
    every: n if every n-th example is trained on.
    steps: Steps of the fine-tuning; `None`: the scale's.
  """

  kind: str
  folder: str = ''
  every: int = 1
  steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Block:
  """Arms that are run together, before those of later blocks.

  Attributes:
    arms: The arms.
    seeds: Number of evaluation seeds; 0: the arms run on tuning seeds alone.
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
    tokenizer: Tokenizer, see `data.prepare_corpus` and
      `preparation.prepare_files`.
    tasks: Tasks by name.
    batches: Number of batches of 16 sequences that losses are measured on.
    micro_batches: Number of micro-batches of a batch.
    epochs: Largest number of epochs of the corpus.
    demonstration: Whether the scale may violate gate G4; then its claims get no
      verdict.
    protocol: File of the protocol in `experiments/results`.
    tuning_seeds: See `pool.Entry`.
    repeat_every: See `pool.Entry`.
    tune_length: Tokens of a sequence of fine-tuning; `None`: `length`.
    domains: Texts by name that pre-trained models are evaluated on without
      fine-tuning: files relative to the folder of the data.

  Raises:
    ValueError: gate G4 is violated and the scale is no demonstration, or a
      seed that tunes rates also judges claims.
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
  tasks: Mapping[str, Task]
  batches: int
  micro_batches: int = 1
  epochs: int = 1
  demonstration: bool = False
  protocol: str = 'claims-fair/PROTOCOL.md'
  tuning_seeds: tuple[int, ...] = (0,)
  repeat_every: int = 0
  tune_length: int | None = None
  domains: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    evaluated = range(1, 1 + max(block.seeds for block in self.blocks))
    if shared := sorted(set(self.tuning_seeds) & set(evaluated)):
      raise ValueError(
          f'tuning_seeds has {shared}, which judge claims too; choose rates on '
          f'seeds above {evaluated[-1]}, or no verdict is fair.'
      )
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

  def model(self, size: str) -> models.DecoderConfig:
    """Returns the config of the models of a size."""
    return parse(self.base_config(size)).model.sizes

  def base_config(
      self, size: str, length: int | None = None
  ) -> ml_collections.ConfigDict:
    """Returns the config that the runs of a size have in common.

    Args:
      size: Name of the size.
      length: Tokens of a sequence; `None`: those of pre-training.
    """
    dimensions = self.sizes[size]
    config = base.get_config(
        f'width={dimensions.width},layers={self.layers},'
        f'length={length or self.length}'
    )
    config.model.vocab_size = self.vocab_size
    if dimensions.n_heads:
      config.model.n_heads = dimensions.n_heads
    if dimensions.rotary:
      # Three matrices of this width have as many weights as GPT's two.
      config.model.update(preset='llama-1.3b', tied=True)
      config.model.d_ff = 8 * round(dimensions.width / 3)
    if dimensions.d_ff:
      config.model.d_ff = dimensions.d_ff
    return config

  def batch(self, size: str) -> int:
    """Returns the number of sequences in a batch of pre-training."""
    return self.sizes[size].batch_size or self.batch_size

  def steps(self, arm: Arm) -> int:
    """Returns the steps of a pre-training, or of a fine-tuning."""
    if arm.task:
      return self.tasks[arm.task].steps or self.tune_steps
    if arm.flops_of is not None:
      other = arm.flops_of
      ratio = self.step_flops(other) / self.step_flops(arm)
      return round(self.steps(other) * ratio)
    tokens = self.tokens_per_parameter * parameters(
        self.model(self.reference(arm.size))
    )
    return round(tokens / (self.batch(arm.size) * self.length))

  def work(self, arm: Arm) -> float:
    """Returns tokens times parameters of a run, for estimates of its time."""
    if arm.method == 'init' and not arm.task:
      return 0.0
    tokens = self.steps(arm) * (
        self.tune_batch * (self.tune_length or self.length) if arm.task
        else self.batch(arm.size) * self.length
    )
    return float(tokens * parameters(self.model(arm.size)))

  def step_flops(self, arm: Arm) -> float:
    """Returns the mean FLOPs of a step of pre-training.

    Sparsities must be constant, but for the dense stage of `'variable'`.
    """
    of = lambda sparsity: self.batch(arm.size) * flops.training_flops(
        self.model(arm.size), self.length, sparsity
    )
    if arm.method != 'variable':
      return of(arm.sparsity)
    dense = float(arm.dense_share)
    return (1 - dense) * of(arm.sparsity) + dense * of(0.0)

  def entries(self, claims_arms: list[Arm]) -> list[Entry]:
    """Returns the pool's entries: arms that claims or tuning seeds need.

    Args:
      claims_arms: Arms of claims and gates.

    Returns:
      Entries in the order of the blocks, each after its parent. An arm has an
      entry in each block that adds seeds to those of the blocks before.

    Raises:
      ValueError: an arm is in no block.
    """
    tuning = [arm for b in self.blocks if not b.seeds for arm in b.arms]
    needed = set(with_parents([*claims_arms, *tuning]))
    seeds: dict[Arm, int] = {}
    added = []
    for block in self.blocks:
      for arm in with_parents(list(block.arms)):
        if seeds.get(arm, -1) < block.seeds:
          seeds[arm] = block.seeds
          added.append((arm, block.seeds))
    missing = sorted(arm.name for arm in needed - set(seeds))
    if missing:
      raise ValueError(
          f'claims need {", ".join(missing)}, which this scale does not train; '
          f'choose claims of {", ".join(self.claims)}.'
      )
    return [
        Entry(
            arm, self._grid(arm), n, not self.demonstration, self.tuning_seeds,
            self.repeat_every,
        )
        for arm, n in added if arm in needed
    ]

  def find(
      self, method: str, sparsity: float = 0.0, size: str = '', task: str = ''
  ) -> Arm | None:
    """Returns the arm with these values and its own number of tokens."""
    return next((
        arm for block in self.blocks for arm in block.arms
        if (arm.method, arm.sparsity, arm.size, arm.task)
        == (method, sparsity, size, task)
        and arm.flops_of is None and not arm.sparse_tuning
    ), None)

  def reference(self, size: str) -> str:
    """Returns the size that a size takes its number of tokens from."""
    other = self.sizes[size].tokens_of
    return size if other is None else other

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
def parameters(config: models.DecoderConfig) -> int:
  """Returns the number of parameters of a model.

  Example:
    >>> from experiments.papers.scales import FAIR
    >>> parameters(FAIR.model(''))
    232896
  """
  shapes = jax.eval_shape(
      models.model_of(config).init, jax.random.key(0),
      jnp.zeros((1, 2), jnp.int32),
  )
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))
