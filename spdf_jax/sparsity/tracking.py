# SPDX-License-Identifier: Apache-2.0
"""Statistics of mask updates, in a wrapper around the optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.state import get_mask

PyTree = Any

# Bits of `MaskTrackingState.history`.
_NOW, _BEFORE, _EVER = 1, 2, 4


class MaskTrackingState(NamedTuple):
  """State of `track_masks`; counts are totals over all leaves."""

  count: jax.Array  # type: ignore[assignment]  # hides tuple.count
  """Number of steps taken, int32."""

  history: PyTree
  """uint8 per weight: bit 0 is the mask, bit 1 the mask before the last mask
  update, bit 2 whether the weight was ever kept.

  It contains a copy of the mask, because reading the old mask of `sparsify`
  would prevent its update in place, and XLA would copy it at every step."""

  grown: jax.Array
  """Number of weights grown at the last mask update, float32."""

  dropped: jax.Array
  """Number of weights dropped at the last mask update, float32."""

  surviving: jax.Array
  """Number of weights kept before and after the last mask update, float32;
  before the first, the number of all kept weights."""

  exploration: jax.Array
  """Fraction of weights that were ever kept, float32."""

  inner_state: PyTree
  """State of the wrapped optimizer."""

  @property
  def explored(self) -> PyTree:
    """Mask of the weights ever kept; `None` for leaves that stay dense."""
    return jax.tree.map(lambda h: h & _EVER != 0, self.history)


def track_masks(
    tx: optax.GradientTransformation, algorithm: Algorithm
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer to count grown, dropped and ever kept weights.

  Masks are read and counted only at mask updates; for an algorithm without
  any, no counting is compiled.

  Args:
    tx: The optimizer `sparsify(…, algorithm)`; transformations that accumulate
      or skip whole steps, such as `optax.MultiSteps`, wrap the result.
    algorithm: The same algorithm, for the steps of mask updates.

  Returns:
    An optimizer with the same updates; `mask_statistics` reads its state.

  References:
    Liu et al., `ITOP <https://arxiv.org/abs/2102.02887>`_, 2021

  Example:
    >>> import spdf_jax as spdf
    >>> algorithm = spdf.join([spdf.static(0.75), spdf.static(0.5)], [100])
    >>> tx = spdf.sparsify(optax.adam(0.1), algorithm, key=0)
    >>> state = track_masks(tx, algorithm).init({'w': jnp.ones((4, 8))})
    >>> float(state.exploration)
    0.25
  """
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    inner_state = tx.init(params)
    mask = get_mask(inner_state)
    history = jax.tree.map(
        lambda m: m.astype(jnp.uint8) * (_NOW | _EVER), mask
    )
    kept = _count(mask)
    return MaskTrackingState(
        count=jnp.zeros([], jnp.int32),
        history=history,
        grown=jnp.zeros([], jnp.float32),
        dropped=jnp.zeros([], jnp.float32),
        surviving=kept,
        exploration=kept / _size(mask),
        inner_state=inner_state,
    )

  def update_fn(updates, state, params=None, **extra_args):
    updates, inner_state = tx.update(
        updates, state.inner_state, params, **extra_args
    )
    now = algorithm.update_at(state.count)
    seen = state[1:-1]
    if now is not False:
      changed = lambda: _changes(state.history, get_mask(inner_state))
      seen = jax.lax.cond(now, changed, lambda: seen)
    count = optax.safe_increment(state.count)
    return updates, MaskTrackingState._make((count, *seen, inner_state))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _changes(history: PyTree, mask: PyTree) -> tuple[Any, ...]:
  """Returns the new state fields from `history` to `exploration`."""
  def add(h, m):
    before = h * (_BEFORE // _NOW) & _BEFORE
    return before | h & _EVER | m.astype(jnp.uint8) * (_NOW | _EVER)

  # Counts use the new history only: if they also read the old one, it could not
  # be overwritten in place, and XLA would copy the result at every step.
  history = jax.tree.map(add, history, mask)
  count = lambda bits, value: _count(
      jax.tree.map(lambda h: h & bits == value, history)
  )
  return (
      history,
      count(_NOW | _BEFORE, _NOW),
      count(_NOW | _BEFORE, _BEFORE),
      count(_NOW | _BEFORE, _NOW | _BEFORE),
      count(_EVER, _EVER) / _size(mask),
  )


def _count(mask: PyTree) -> jax.Array:
  """Counts `True` entries exactly per matrix, then sums in float32."""
  counts = [
      jnp.sum(jnp.sum(m, axis=(-2, -1), dtype=jnp.int32).astype(jnp.float32))
      for m in map(jnp.atleast_2d, jax.tree.leaves(mask))
  ]
  return jnp.sum(jnp.stack(counts)) if counts else jnp.zeros([])


def _size(mask: PyTree) -> int:
  """Returns the number of weights, at least 1 as it is a divisor."""
  return max(1, sum(m.size for m in jax.tree.leaves(mask)))


def mask_statistics(opt_state: PyTree) -> dict[str, jax.Array]:
  """Returns the statistics of the last mask update, as scalars to log.

  Args:
    opt_state: The state of an optimizer that contains `sparsify(…,
      track=True)`. Counts of several, under `optax.partition`, are added up.

  Returns:
    A dict of float32 scalars. `'grown'`, `'dropped'` and `'surviving'` are the
    numbers of weights that the last mask update grew, dropped and kept;
    `'overlap'` is the number of surviving weights as a fraction of those kept
    before or after this update. Before the first update nothing has grown or
    dropped, and all kept weights survive. `'exploration'` is the fraction of
    the weights of sparsified leaves that were ever kept, ITOP's :math:`R_s`.

  Raises:
    ValueError: there is no `sparsify(…, track=True)` in `opt_state`.

  References:
    Liu et al., `ITOP <https://arxiv.org/abs/2102.02887>`_, 2021

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> tx = spdf.sparsify(
    ...     optax.adam(0.1), spdf.static(0.75), key=0, track=True)
    >>> state = tx.init({'w': jnp.ones((4, 8))})
    >>> {name: float(x) for name, x in mask_statistics(state).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'grown': 0.0, 'dropped': 0.0, 'surviving': 8.0, 'overlap': 1.0,
     'exploration': 0.25}
  """
  is_state = lambda x: isinstance(x, MaskTrackingState)
  states = [
      leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_state)
      if is_state(leaf)
  ]
  if not states:
    raise ValueError(
        'the optimizer state does not track mask updates; create the optimizer '
        'with sparsify(…, track=True) and pass its state.'
    )
  sizes = [_size(state.history) for state in states]
  grown = sum(state.grown for state in states)
  dropped = sum(state.dropped for state in states)
  surviving = sum(state.surviving for state in states)
  either = surviving + grown + dropped
  explored = sum(state.exploration * n for state, n in zip(states, sizes))
  return {
      'grown': grown,
      'dropped': dropped,
      'surviving': surviving,
      'overlap': jnp.where(either > 0, surviving / jnp.maximum(either, 1), 1.0),
      'exploration': explored / sum(sizes),
  }
