"""AdamW as Gao et al. use it, for `optimizer.name` of a config."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def scale_by_rms(
    largest: float, normalize: bool
) -> optax.GradientTransformation:
  r"""Scales gradients by the root of the mean of all their squares.

  Args:
    largest: The root mean square :math:`r` of all gradients together.
    normalize: Whether smaller gradients are enlarged to :math:`r` as well.

  Returns:
    The transformation, without a state.
  """
  def update_fn(updates, state, params=None):
    del params
    leaves = jax.tree.leaves(updates)
    size = sum(leaf.size for leaf in leaves)
    rms = optax.tree.norm(updates) / size ** 0.5
    rms = jnp.maximum(rms, jnp.finfo(jnp.float32).tiny)
    factor = largest / (rms if normalize else jnp.maximum(rms, largest))
    return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

  return optax.GradientTransformation(
      lambda params: optax.EmptyState(), update_fn
  )


def scale_by_kept(power: float = -0.5) -> optax.GradientTransformation:
  """Multiplies the updates of a leaf by a power of its fraction of nonzeros.

  Sparser models need larger learning rates, of about one over the root of the
  kept fraction (Gao et al., the "sharkfin" schedule). Pruned weights are zero,
  so that the fraction is read off the weights themselves.

  Args:
    power: The power; 0 leaves updates as they are.

  Returns:
    The transformation. Leaves that are all zero, such as initial biases, count
    as dense.

  Example:
    >>> tx = scale_by_kept()
    >>> w = {'w': jnp.array([2.0, 0.0, 0.0, 0.0])}
    >>> tx.update(w, tx.init(w), w)[0]['w'].tolist()
    [4.0, 0.0, 0.0, 0.0]
  """
  def scale(u, p):
    kept = jnp.mean(p != 0, dtype=jnp.float32)
    factor = jnp.where(kept > 0, kept, 1) ** power
    return u * factor.astype(u.dtype)

  return optax.GradientTransformation(
      lambda params: optax.EmptyState(),
      lambda updates, state, params=None: (
          jax.tree.map(scale, updates, params), state
      ),
  )


def adamw(
    learning_rate: float | jax.Array,
    weight_decay: float | jax.Array = 0.1,
    mask: Callable[[PyTree], PyTree] | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 0.1,
    rms: float = 1.0,
    normalize: bool = True,
    rate_power: float = -0.5,
) -> optax.GradientTransformation:
  """Returns AdamW on gradients scaled by their root mean square.

  Args:
    learning_rate: Learning rate of dense leaves.
    weight_decay: Decoupled weight decay.
    mask: Function from parameters to the leaves that decay.
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Term added to the root of the second moment: large, against a root mean
      square of 1.
    rms: Root mean square of the gradients, see `scale_by_rms`.
    normalize: Whether all gradients get this size, as in the authors' code, or
      only larger ones, as in the paper.
    rate_power: Power of the kept fraction of a leaf in its learning rate.

  Returns:
    The optimizer, for `hard_threshold`.
  """
  return optax.chain(
      scale_by_rms(rms, normalize),
      optax.scale_by_adam(b1, b2, eps),
      optax.add_decayed_weights(weight_decay, mask),
      scale_by_kept(rate_power),
      optax.scale_by_learning_rate(learning_rate),
  )
