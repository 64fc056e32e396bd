# SPDX-License-Identifier: Apache-2.0
"""Distillation: a loss that compares the logits with those of a teacher."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import models
from spdf_jax.training import checkpoint_files
from spdf_jax.training import workdir
from spdf_jax.training.losses import Loss
from spdf_jax.training.losses import Sums

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Distillation:
  r"""A loss plus the divergence from the outputs of a teacher.

  With the objective :math:`L` of the loss, the softmax :math:`p_T` of the
  teacher's logits divided by the temperature :math:`T`, and :math:`q_T` of the
  model's, the loss of a token is :math:`(1 - w) L + w T^2
  \mathrm{KL}(p_T \Vert q_T)`.

  Attributes:
    loss: The loss of the targets, whose fields `temperature` and
      `teacher_weight` are :math:`T` and :math:`w`.
    teacher: `tokens [B, L] -> logits [B, L, V]`, e.g. of `open_teacher`.

  References:
    Hinton et al., `Distilling the Knowledge in a Neural Network
    <https://arxiv.org/abs/1503.02531>`_, 2015, section 2

  Example:
    >>> from types import SimpleNamespace
    >>> one = jnp.ones((1, 1), jnp.int32)
    >>> batch = SimpleNamespace(inputs=one, targets=one, weights=one)
    >>> loss = Loss(teacher='runs/dense', temperature=1.0, teacher_weight=1.0)
    >>> logits = jnp.log(jnp.array([[[0.5, 0.5]]]))
    >>> distilled = Distillation(loss, lambda _: jnp.array([[[9., -9.]]]))
    >>> sums = distilled(lambda *_: logits, {}, batch)
    >>> round(float(sums.objective), 3)
    0.693
  """

  loss: Loss
  teacher: Callable[[jax.Array], jax.Array]

  @property
  def is_plain(self) -> bool:
    """Whether the objective equals the cross-entropy, here `False`."""
    return False

  def __call__(
      self, apply_fn: Callable[..., Any], variables: PyTree, batch: Any
  ) -> Sums:
    """Computes the loss of a batch, as `Loss` does."""
    weight, t = self.loss.teacher_weight or 0.0, self.loss.temperature or 1.0
    logits_BxLxV = apply_fn(variables, batch.inputs)
    sums = self.loss.sums(logits_BxLxV, batch.targets, batch.weights)
    teacher_BxLxV = jax.lax.stop_gradient(self.teacher(batch.inputs))
    log_p_BxLxV = jax.nn.log_softmax(teacher_BxLxV.astype(jnp.float32) / t)
    log_q_BxLxV = jax.nn.log_softmax(logits_BxLxV / t)
    kl_BxL = jnp.sum(
        jnp.exp(log_p_BxLxV) * (log_p_BxLxV - log_q_BxLxV), axis=-1
    )
    distance = weight * t**2 * (kl_BxL * batch.weights).sum()
    return Sums((1 - weight) * sums.objective + distance, sums.cross_entropy)


def check_teacher(source: str, vocab_size: int, length: int) -> None:
  """Raises ValueError unless a checkpoint can teach a model.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`.
    vocab_size: Vocabulary of the model.
    length: Largest number of tokens of a sequence.
  """
  config = teacher_config(source)
  if config.vocab_size != vocab_size:
    raise ValueError(
        f'loss.teacher {source!r} has a vocabulary of {config.vocab_size} and '
        f'the model {vocab_size}; give a teacher with the same tokenizer.'
    )
  if config.max_length < length:
    raise ValueError(
        f'loss.teacher {source!r} has {config.max_length} positions, and the '
        f'phases have sequences of {length} tokens; give another teacher, or '
        'shorten the sequences.'
    )


def teacher_config(source: str) -> models.DecoderConfig:
  """Reads the config of a teacher's model."""
  return workdir.read_source(source, _model_of).config


def open_teacher(
    source: str, mesh: jax.sharding.Mesh
) -> Callable[[jax.Array], jax.Array]:
  """Reads a teacher, of which every device holds a copy.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`, the best checkpoint of the phase
      if there is one.
    mesh: The mesh of the run.

  Returns:
    `tokens [B, L] -> logits [B, L, V]`.

  Raises:
    ValueError: there is no such checkpoint, or it does not record its model.
  """
  replicated = jax.NamedSharding(mesh, jax.P())

  def read(checkpoint):
    model = _model_of(checkpoint)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )['params']
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
        shapes,
    )
    return model, checkpoint_files.read_params(checkpoint, abstract)

  model, params = workdir.read_source(source, read)
  return functools.partial(model.apply, {'params': params})


def _model_of(checkpoint: Any) -> Any:
  stored = workdir.read_meta(checkpoint)['config']
  if 'model' not in stored or ':' in stored['model']['preset']:
    raise ValueError(
        f'loss.teacher names checkpoint {checkpoint}, which does not record a '
        'model of spdf_jax.models; give one that experiments.train or '
        'experiments.convert wrote.'
    )
  return models.create_model(**stored['model'])
