# SPDX-License-Identifier: Apache-2.0
"""Losses: cross-entropy, distance from a teacher, loss scaling in float16."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from spdf_jax.training.configs import fields

PyTree = Any

_FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0
_SCALE_FACTOR = 2.0
_GROWTH_INTERVAL = 2000  # Steps without an overflow.


class Sums(NamedTuple):
  """Sums over weighted tokens, in nats."""

  objective: jax.Array
  """The quantity to minimize."""

  cross_entropy: jax.Array
  """The quantity to report, without smoothing and z-loss."""


@dataclasses.dataclass(frozen=True)
class Loss:
  r"""Cross-entropy with label smoothing and z-loss, optionally in chunks.

  With logits :math:`z`, target :math:`t` and :math:`Z = \log\sum_v e^{z_v}`,
  the loss of a token is :math:`Z - (1 - s) z_t - s\,\overline{z} + c Z^2`.

  Attributes:
    label_smoothing: :math:`s`, the share of the target spread over all tokens.
    z_loss: :math:`c`, the coefficient that keeps :math:`Z` near zero.
    chunk: Number of positions of the sequences whose logits are computed at a
      time, and recomputed in the backward pass; 0: all at once.
    teacher: `'WORKDIR'` or `'WORKDIR@PHASE'` of a model whose outputs are
      learned too, see `Distillation`, which computes that part of the loss;
      `None`: there is none, and the following fields are `None`.
    temperature: Divisor of the logits that are compared.
    teacher_weight: Share of the teacher in the loss.

  Raises:
    ValueError: a number is out of its range, or there is a teacher and the loss
      is computed in chunks.

  References:
    Szegedy et al., `Rethinking the Inception Architecture
    <https://arxiv.org/abs/1512.00567>`_, 2016, section 7
    Chowdhery et al., `PaLM <https://arxiv.org/abs/2204.02311>`_, 2022, s. 5

  Example:
    >>> zeros = jnp.zeros((1, 1, 4))
    >>> token = jnp.zeros((1, 1), jnp.int32)
    >>> round(float(Loss(0.1).sums(zeros, token, token + 1).objective), 3)
    1.386
  """

  label_smoothing: float = 0.0
  z_loss: float = 0.0
  chunk: int = 0
  teacher: str | None = None
  temperature: float | None = None
  teacher_weight: float | None = None

  def __post_init__(self):
    if not 0 <= self.label_smoothing < 1:
      raise ValueError(
          f'loss.label_smoothing is {self.label_smoothing}; give a number in '
          '[0, 1).'
      )
    fields.check_numbers(self, 'loss.', '0 or more', 'z_loss', 'chunk')
    if self.teacher is not None:
      self._check_teacher()

  def _check_teacher(self) -> None:
    if self.chunk:
      raise ValueError(
          f'loss.chunk is {self.chunk} and loss.teacher {self.teacher!r}, with '
          'which all logits are computed at once; set loss.chunk to 0.'
      )
    if self.temperature is None or not self.temperature > 0:
      raise ValueError(
          f'loss.temperature is {self.temperature}; it must be positive.'
      )
    if self.teacher_weight is None or not 0 < self.teacher_weight <= 1:
      raise ValueError(
          f'loss.teacher_weight is {self.teacher_weight}; give a number in '
          '(0, 1], or remove loss.teacher.'
      )

  @property
  def is_plain(self) -> bool:
    """Whether the objective equals the cross-entropy."""
    return not (self.label_smoothing or self.z_loss)

  def __call__(
      self, apply_fn: Callable[..., Any], variables: PyTree, batch: Any
  ) -> Sums:
    """Computes the loss of a batch.

    Args:
      apply_fn: `(variables, tokens) -> logits`; with chunks it must also accept
        `read_out=`, as the models of `spdf_jax.models` do.
      variables: Variables of the model.
      batch: `inputs`, `targets` and `weights`, each [B, L].

    Returns:
      The sums.
    """
    if not self.chunk:
      logits_BxLxV = apply_fn(variables, batch.inputs)
      return self.sums(logits_BxLxV, batch.targets, batch.weights)
    return apply_fn(
        variables,
        batch.inputs,
        read_out=lambda head, x: self._in_chunks(
            head, x, batch.targets, batch.weights
        ),
    )

  def sums(
      self, logits_BxLxV: jax.Array, targets_BxL: jax.Array,
      weights_BxL: jax.Array,
  ) -> Sums:
    """Returns the weighted sums of the losses of all tokens."""
    entropy_BxL = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, targets_BxL
    )
    cross_entropy = (entropy_BxL * weights_BxL).sum()
    if self.is_plain:
      return Sums(cross_entropy, cross_entropy)
    log_sum_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    uniform_BxL = log_sum_BxL - logits_BxLxV.mean(axis=-1)
    s = self.label_smoothing
    cost_BxL = (1 - s) * entropy_BxL + s * uniform_BxL
    cost_BxL += self.z_loss * log_sum_BxL**2
    return Sums((cost_BxL * weights_BxL).sum(), cross_entropy)

  def _in_chunks(
      self,
      head: Callable[[jax.Array], jax.Array],
      x_BxLxD: jax.Array,
      targets_BxL: jax.Array,
      weights_BxL: jax.Array,
  ) -> Sums:
    length = x_BxLxD.shape[1]
    number = -(-length // self.chunk)

    def cut(x):
      missing = [(0, 0)] * x.ndim
      missing[1] = (0, number * self.chunk - length)
      x = jnp.pad(x, missing)
      return x.reshape(x.shape[0], number, -1, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def sums(x, targets, weights):
      return self.sums(head(x), targets, weights)

    def add(total, chunk):
      return jax.tree.map(jnp.add, total, sums(*chunk)), None

    chunks = jax.tree.map(cut, (x_BxLxD, targets_BxL, weights_BxL))
    zero = jnp.zeros([], jnp.float32)
    return jax.lax.scan(add, Sums(zero, zero), chunks)[0]


CROSS_ENTROPY = Loss()
"""Plain cross-entropy, with all logits computed at once."""


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
    teacher: `tokens [B, L] -> logits [B, L, V]`, e.g. of
      `teacher.open_teacher`.

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


def token_loss(
    logits_BxLxV: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy of tokens, in nats per token.

  The mean is weighted by `weights_BxL`; its divisor is their sum, at least 1.
  """
  sums = CROSS_ENTROPY.sums(logits_BxLxV, targets_BxL, weights_BxL)
  return sums.cross_entropy / number_of_tokens(weights_BxL)


def number_of_tokens(weights_BxL: jax.Array) -> jax.Array:
  """Returns the divisor of sums: the sum of the weights, at least 1."""
  return jnp.maximum(weights_BxL.sum(), 1)


class NotFinite(ArithmeticError):
  """An error for a loss or gradients that are not finite."""


@flax.struct.dataclass
class LossScale:
  """A dynamic loss scale: a factor of the loss that divides its gradients.

  `flax.training.dynamic_scale` has the same rule, but computes the gradients
  itself, which excludes gradient accumulation over micro-batches.

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2
  """

  scale: jax.Array
  """A power of two, float32."""

  finite_steps: jax.Array
  """Finite steps since the last change of the scale, int32."""


def create_loss_scale(dtype: str) -> LossScale | None:
  """Returns the initial loss scale of a model that computes in `dtype`.

  Args:
    dtype: Name of the dtype.

  Returns:
    The loss scale in float16; `None` in other dtypes, which need none.

  Example:
    >>> float(create_loss_scale('float16').scale)
    65536.0
    >>> create_loss_scale('bfloat16') is None
    True
  """
  if dtype != 'float16':
    return None
  return LossScale(
      jnp.asarray(_FIRST_SCALE, jnp.float32), jnp.zeros([], jnp.int32)
  )


def adjust(loss_scale: LossScale, finite: jax.Array) -> LossScale:
  """Halves the scale after an overflow; doubles it after 2000 finite steps.

  Args:
    loss_scale: Loss scale of the gradients.
    finite: Whether all gradients were finite.

  Returns:
    The loss scale of the next gradients, at least 1.

  Example:
    >>> scale = create_loss_scale('float16')
    >>> float(adjust(scale, jnp.array(False)).scale)
    32768.0
  """
  steps = loss_scale.finite_steps + 1
  grow = steps == _GROWTH_INTERVAL
  scale = loss_scale.scale
  return LossScale(
      jnp.where(
          finite,
          jnp.where(grow, scale * _SCALE_FACTOR, scale),
          jnp.maximum(scale / _SCALE_FACTOR, LEAST_SCALE),
      ),
      jnp.where(finite & ~grow, steps, 0),
  )
