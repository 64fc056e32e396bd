# SPDX-License-Identifier: Apache-2.0
"""Settings: the independent parts of a run's config."""

import dataclasses
from typing import Any

from spdf_jax import models
from spdf_jax.training.configs.fields import check_numbers
from spdf_jax.training.own_models import create_own_model
from spdf_jax.training.own_models import OwnSizes
from spdf_jax.training.step.mesh import check_axes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A model by the name of its preset.

  Attributes:
    preset: A key of `models.PRESETS`, or `'package.module:function'`.
    sizes: The preset's config, with the fields that the run changes, or the
      arguments of the user's function.
  """

  preset: str
  sizes: models.DecoderConfig | OwnSizes

  def create_model(self) -> models.Model:
    """Creates the model, and checks the shapes of a user's own.

    Raises:
      ValueError: the user's function cannot be imported or fails, or the model
        returns other shapes.
    """
    if isinstance(self.sizes, OwnSizes):
      return create_own_model(self.preset, self.sizes)
    return models.model_of(self.sizes)

  def as_dict(self) -> dict[str, Any]:
    """Returns the preset and all its fields."""
    return {'preset': self.preset, **self.sizes.as_dict()}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the axes of the mesh; -1: all remaining devices.

  See `create_mesh`.

  Attributes:
    data: Replicas of the parameters.
    fsdp: Devices that share the storage of one replica.
    tensor: Devices that share the computation of every layer.

  Raises:
    ValueError: a size is neither positive nor -1, or more than one is -1.
  """

  data: int
  fsdp: int
  tensor: int

  def __post_init__(self):
    check_axes(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class MaxEpochs:
  """The largest number of epochs of each source.

  Attributes:
    corpus: Epochs of the corpus.
    task: Epochs of the task's examples.

  Raises:
    ValueError: a number is below 1.
  """

  corpus: int
  task: int

  def __post_init__(self):
    check_numbers(self, 'data.max_epochs.', 'at least 1', 'corpus', 'task')


@dataclasses.dataclass(frozen=True)
class PlannedData:
  """Sizes of data that need not exist, to plan a run.

  Attributes:
    tokens: Number of tokens of the corpus; 0: the corpus must exist.
    vocab_size: Size of the vocabulary of the corpus.
    examples: Training examples of the task; 0: the task must exist.

  Raises:
    ValueError: a size is negative.
  """

  tokens: float
  vocab_size: int
  examples: int

  def __post_init__(self):
    check_numbers(
        self, 'data.planned.', '0 or more', 'tokens', 'vocab_size', 'examples'
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The data of a run.

  Attributes:
    corpus: Name or folder of the corpus.
    tokenizer: Tokenizer, as `data.prepare_corpus` takes it.
    task: Name of the task; `''`: there is none.
    task_dir: Folder of the task's files; `''`: it has none.
    cache_dir: Folder of prepared corpora.
    max_epochs: Largest number of epochs of each source.
    planned: Sizes of data that need not exist to plan a run.
  """

  corpus: str
  tokenizer: str
  task: str
  task_dir: str
  cache_dir: str
  max_epochs: MaxEpochs
  planned: PlannedData


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Settings of AdamW, see `training.adamw`.

  Attributes:
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Term added to the square root of the second moment.
    clip_norm: Largest global norm of the gradient.

  Raises:
    ValueError: a number is out of its range.
  """

  b1: float
  b2: float
  eps: float
  clip_norm: float

  def __post_init__(self):
    for name in ('b1', 'b2'):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(
            f'optimizer.{name} is {getattr(self, name)}; give a number in '
            '[0, 1).'
        )
    check_numbers(self, 'optimizer.', '0 or more', 'eps')
    check_numbers(self, 'optimizer.', 'positive', 'clip_norm')

  def as_dict(self) -> dict[str, Any]:
    """Returns the fields and the name, as `read_optimizer` reads them."""
    return {'name': 'adamw', **dataclasses.asdict(self)}


PARAMETERIZATIONS = ('standard', 'mup', 'sparse-mup')
"""Parameterizations by name; the standard one is `None` in a run's config."""


@dataclasses.dataclass(frozen=True)
class Parameterization:
  """How initial weights, learning rates and the model follow its size.

  The rates and the initial weights of hidden matrices are divided by the width
  and, with `sparse-mup`, by the density over those of a base model, see
  `sparsity.scale_by_density`; attention scores by the head size.

  Attributes:
    name: `mup` or `sparse-mup`.
    base_width: `d_model` of the model for which the rates were tuned.
    base_density: Density at which they were tuned, for `sparse-mup`; `None` for
      `mup`.
    embeddings_scale: Factor of the embeddings.
    logits_scale: Factor of the logits at the base width; it falls with 1 /
      width.

  Raises:
    ValueError: a number is missing or out of its range.

  References:
    Dey et al., `Sparse maximal update parameterization
    <https://arxiv.org/abs/2405.15743>`_, 2024, table 1
  """

  name: str
  base_width: int
  base_density: float | None
  embeddings_scale: float
  logits_scale: float

  def __post_init__(self):
    path = 'parameterization.'
    check_numbers(self, path, 'at least 1', 'base_width')
    check_numbers(self, path, 'positive', 'embeddings_scale', 'logits_scale')
    density = self.base_density
    if self.name == 'mup' and density is not None:
      raise ValueError(
          f"parameterization.base_density is {density}, but 'mup' does not "
          "follow the density; remove it, or use 'sparse-mup'."
      )
    if self.name == 'sparse-mup' and not 0 < (density or 0) <= 1:
      raise ValueError(
          f"parameterization.base_density is {density}, but 'sparse-mup' needs "
          'the density at which the learning rate was tuned; set it to 1.0 for '
          'that of a dense model.'
      )

  def width_multiplier(self, d_model: int) -> float:
    """Returns the width over the base width.

    Raises:
      ValueError: the base width is above the width.
    """
    if self.base_width > d_model:
      raise ValueError(
          f'parameterization.base_width is {self.base_width}, above the width '
          f'of the model, {d_model}; give the width of a smaller model, for '
          'which the learning rate was tuned.'
      )
    return d_model / self.base_width

  def apply_to(self, model: ModelConfig) -> ModelConfig:
    """Returns a model with the multipliers of the forward pass.

    A user's own model is returned as it is.

    Raises:
      ValueError: the base width is above the width, or the model states other
        multipliers.
    """
    if isinstance(model.sizes, OwnSizes):
      return model
    multiplier = self.width_multiplier(model.sizes.d_model)
    fields: dict[str, Any] = dict(
        embeddings_scale=self.embeddings_scale,
        logits_scale=self.logits_scale / multiplier,
        attention_by_size=True,
    )
    for name, value in fields.items():
      current = getattr(model.sizes, name)
      if current not in (value, getattr(models.DecoderConfig, name)):
        raise ValueError(
            f'model.{name} is {current}, but parameterization {self.name!r} '
            'sets it; remove it, and use the fields of parameterization.'
        )
    sizes = dataclasses.replace(model.sizes, **fields)
    return dataclasses.replace(model, sizes=sizes)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
  """Low-rank adapters of the hidden matrices, see `sparsity.lora`.

  Attributes:
    rank: Rank of the changes.
    scale: Factor of the changes, in LoRA alpha / r.

  Raises:
    ValueError: a number is not positive.
  """

  rank: int
  scale: float

  def __post_init__(self):
    check_numbers(self, 'adapter.', 'positive', 'rank', 'scale')


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Sizes of the evaluations during training.

  Attributes:
    batch_size: Sequences per batch.
    corpus_batches: Batches of the corpus' validation split.
    task_batches: Batches of the task's validation examples.
    generations: Number of validation examples to generate from at the ends of
      phases.
    max_new_tokens: Largest number of tokens per generation.

  Raises:
    ValueError: a number is below 1, or `generations` below 0.
  """

  batch_size: int
  corpus_batches: int
  task_batches: int
  generations: int
  max_new_tokens: int

  def __post_init__(self):
    check_numbers(
        self, 'evaluation.', 'at least 1',
        'batch_size', 'corpus_batches', 'task_batches', 'max_new_tokens',
    )
    check_numbers(self, 'evaluation.', '0 or more', 'generations')


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """The interval and the number of checkpoints.

  Attributes:
    every: Steps between checkpoints.
    keep: Number of the latest checkpoints to keep.

  Raises:
    ValueError: a number is below 1.
  """

  every: int
  keep: int

  def __post_init__(self):
    check_numbers(self, 'checkpoints.', 'at least 1', 'every', 'keep')
