# SPDX-License-Identifier: Apache-2.0
"""Teachers: checkpoints whose logits a loss compares with the model's."""

from collections.abc import Callable
import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import models
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import workdir
from spdf_jax.training.step import losses


def check_teacher(source: str, vocab_size: int, length: int) -> None:
  """Raises ValueError unless a checkpoint can teach a model.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`.
    vocab_size: Vocabulary of the model.
    length: Largest number of tokens of a sequence.
  """
  try:
    config = teacher_config(source)
  except ValueError as error:
    raise ValueError(f'loss.teacher: {error}') from error
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


def teacher_fingerprint(source: str) -> str:
  """Returns a digest of a teacher's parameters, from its metadata.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`.
  """
  digests = workdir.read_source(source, workdir.read_meta)['digests']
  params = {k: v for k, v in digests.items() if k.startswith('params/')}
  text = json.dumps(params, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def loss_opener(
    loss: losses.Loss, mesh: jax.sharding.Mesh
) -> Callable[[], losses.Loss | losses.Distillation]:
  """Returns a function that returns the loss of a step, with its teacher.

  Args:
    loss: The loss of the config.
    mesh: Mesh of the run.

  Returns:
    The function. Its first call reads the teacher, if the loss names one, and
    raises ValueError if there is no checkpoint that records its model; later
    calls return the same loss.
  """
  @functools.cache
  def open_loss() -> losses.Loss | losses.Distillation:
    if loss.teacher is None:
      return loss
    return losses.Distillation(loss, open_teacher(loss.teacher, mesh))

  return open_loss


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
