# SPDX-License-Identifier: Apache-2.0
"""Revival: the initial values of pruned weights that a mask update keeps."""

from collections.abc import Callable
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.state import SparsifyState

PyTree = Any
Revival = Callable[[jax.Array, jax.Array, PyTree, PyTree], PyTree]
"""`(key, count, params, mask) -> values`, see `scaled_normal`."""

_REVIVAL = 1  # Folded into a step's key to draw the values of revived weights.


def scaled_normal(
    scale: float | optax.Schedule,
) -> Revival:
  r"""Returns a function that draws revived weights from a normal distribution.

  Pass it to `sparsify` as `revive`. In a layer whose kept weights have the
  standard deviation :math:`\sigma`, values are drawn from :math:`N(0,
  (\mathrm{scale}\ \sigma)^2)`. The SPDF paper reports that a "scaled normal"
  initialization, which it does not specify, is no better than zeros.

  Args:
    scale: The standard deviation as a multiple of :math:`\sigma`, or a schedule
      of it; where the schedule is 0, values are zero.

  Returns:
    `(key, count, params, mask) -> values`, with trees of leaves `[layers,
    inputs, outputs]`, or `None` for leaves that are not sparsified: `count` is
    the number of steps taken, and `mask` the mask before its update. Values are
    drawn for all weights, in the dtype of the parameters; `sparsify` takes
    those of revived weights.

  Raises:
    ValueError: the scale is a number that is not positive.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023,
    section 2.2

  Example:
    The kept weights are 1 and -1, with a standard deviation of 1:

    >>> import jax, jax.numpy as jnp
    >>> params = {'w': jnp.tile(jnp.array([1., -1.]), (1, 64, 32))}
    >>> mask = {'w': jnp.ones((1, 64, 64), bool)}
    >>> values = scaled_normal(0.5)(jax.random.key(0), 0, params, mask)
    >>> round(float(values['w'].std()), 1)
    0.5
  """
  is_number = isinstance(scale, numbers.Real) and 0 < float(scale) < math.inf
  if not callable(scale) and not is_number:
    raise ValueError(
        f'scale is {scale!r:.80}; give a positive number, by which the '
        'standard deviation of the kept weights is multiplied.'
    )

  def values(key, count, params, mask):
    multiple = scale(count) if callable(scale) else scale

    def draw(p, m, leaf_key):
      dtype = p.dtype if p.dtype.itemsize > 4 else jnp.float32
      weights = jnp.where(m, p, 0).astype(dtype)
      kept = jnp.sum(m, axis=(-2, -1), keepdims=True, dtype=jnp.int32)
      count = jnp.maximum(kept, 1).astype(weights.real.dtype)
      mean = jnp.sum(weights, axis=(-2, -1), keepdims=True) / count
      from_mean = jnp.where(m, weights - mean, 0)
      variance = jnp.sum(
          jnp.square(jnp.abs(from_mean)), axis=(-2, -1), keepdims=True
      ) / count
      normal = jax.random.normal(leaf_key, p.shape, dtype)
      deviation = multiple * jnp.sqrt(variance)
      return (deviation.astype(dtype) * normal).astype(p.dtype)

    kept = jax.tree.map(lambda m, p: p, mask, params)
    return jax.tree.map(draw, kept, mask, masks.leaf_keys(key, kept))

  return values


def add_revived(
    revive: Revival,
    update_now: jax.Array,
    updates: PyTree,
    state: SparsifyState,
    params: PyTree,
    mask: PyTree,
    *,
    axes: list[Any],
    key_of_step: Callable[[], jax.Array],
) -> PyTree:
  """Adds initial values to the updates of the weights that a mask revives.

  Args:
    revive: Function that draws the values.
    update_now: Whether the mask is updated at this step.
    updates: Updates of the parameters.
    state: State before the mask update.
    params: The parameters.
    mask: Mask after the update.
    axes: Axes of the sparsified leaves, as `select` returns them.
    key_of_step: Function that returns the key of the step. It is called where
      a mask is updated, so that other steps derive no key.

  Returns:
    The updates.
  """
  chosen = selection.selected(params, params, axes)

  def values_of(key, *given):
    layers = [selection.to_layers(tree, params, axes) for tree in given]
    values = revive(key, state.count, *layers)
    return selection.from_layers(values, params, axes)

  def revived():
    key = jax.random.fold_in(key_of_step(), _REVIVAL)
    values = trees.auto_axes(values_of, chosen)(key, chosen, state.mask)
    return jax.tree.map(
        lambda value, u, new, old: u if value is None else jnp.where(
            new & ~old, u + value.astype(u.dtype), u
        ),
        values, updates, mask, state.mask, is_leaf=lambda x: x is None,
    )

  return jax.lax.cond(update_now, revived, lambda: updates)
