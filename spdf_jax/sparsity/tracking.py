"""Statistics of changing masks, kept beside the optimizer's state."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.state import get_mask

PyTree = Any

# Bits of `MaskTrackingState.history`.
_NOW, _BEFORE, _EVER = 1, 2, 4


class MaskTrackingState(NamedTuple):
  """State of `track_masks`; what it counts is of all leaves together."""

  count: jax.Array
  """Steps taken, int32."""

  history: PyTree
  """Per weight, uint8: bit 0 is its mask, bit 1 its mask before the last
  change, bit 2 whether it was ever active.

  Were the old mask of `sparsify` read here, it could not be overwritten in
  place, and XLA would copy it at every step."""

  grown: jax.Array
  """Weights that became active at the last change, float32."""

  dropped: jax.Array
  """Weights that were pruned at the last change, float32."""

  surviving: jax.Array
  """Weights active before and after the last change, float32; at first, all
  that are active."""

  exploration: jax.Array
  """Share of weights that were ever active, float32."""

  inner_state: PyTree
  """State of the wrapped optimizer."""

  @property
  def explored(self) -> PyTree:
    """Which weights were ever active; `None` for leaves that stay dense."""
    return jax.tree.map(lambda h: h & _EVER != 0, self.history)


def track_masks(
    tx: optax.GradientTransformation, algorithm: Algorithm
) -> optax.GradientTransformationExtraArgs:
  """Counts what changes when masks change, and what was ever explored.

  Nothing is read or counted between the updates of the masks, and nothing at
  all if the algorithm has none.

  Args:
    tx: The optimizer `sparsify(…, algorithm)`; what collects or skips whole
      steps, as `optax.MultiSteps`, goes around this.
    algorithm: The same algorithm: says when the masks change.

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
    return updates, MaskTrackingState(count, *seen, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _changes(history: PyTree, mask: PyTree) -> tuple[Any, ...]:
  """Returns the fields of the state, `history` to `exploration`, anew."""
  def add(h, m):
    before = h * (_BEFORE // _NOW) & _BEFORE
    return before | h & _EVER | m.astype(jnp.uint8) * (_NOW | _EVER)

  # Counts are of the new history alone: were the old one read for them too, it
  # could not be overwritten, and XLA would copy the result at every step.
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
  """Counts in integers per matrix, which are exact, then adds in float32."""
  counts = [
      jnp.sum(jnp.sum(m, axis=(-2, -1), dtype=jnp.int32).astype(jnp.float32))
      for m in jax.tree.leaves(mask)
  ]
  return jnp.sum(jnp.stack(counts)) if counts else jnp.zeros([])


def _size(mask: PyTree) -> int:
  """Returns the number of weights, at least 1 to divide by."""
  return max(1, sum(m.size for m in jax.tree.leaves(mask)))


def mask_statistics(opt_state: PyTree) -> dict[str, jax.Array]:
  """Returns what the last change of the masks did, as values to log.

  Args:
    opt_state: The state of an optimizer that contains `track_masks`; several
      (under `optax.partition`) are added up.

  Returns:
    Float32 scalars: weights `'grown'`, `'dropped'` and `'surviving'` at the
    last change; `'overlap'` of the masks before and after it, surviving
    weights as a share of those active in either (1 before any change); and
    `'exploration'`, the share of the weights of sparsified leaves that were
    ever active, ITOP's :math:`R_s`.

  Raises:
    ValueError: there is no `MaskTrackingState` in it.

  References:
    Liu et al., `ITOP <https://arxiv.org/abs/2102.02887>`_, 2021

  Example:
    >>> import spdf_jax as spdf
    >>> algorithm = spdf.static(0.75)
    >>> tx = spdf.sparsify(optax.adam(0.1), algorithm, key=0)
    >>> state = track_masks(tx, algorithm).init({'w': jnp.ones((4, 8))})
    >>> {name: float(x) for name, x in mask_statistics(state).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'grown': 0.0, 'dropped': 0.0, 'surviving': 8.0, 'overlap': 1.0,
     'exploration': 0.25}
  """
  is_state = lambda x: isinstance(x, MaskTrackingState)
  found = [
      leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_state)
      if is_state(leaf)
  ]
  if not found:
    raise ValueError(
        'the optimizer state holds no MaskTrackingState; wrap the optimizer '
        'with spdf_jax.track_masks and pass the state of that.'
    )
  sizes = [_size(state.history) for state in found]
  grown = sum(state.grown for state in found)
  dropped = sum(state.dropped for state in found)
  surviving = sum(state.surviving for state in found)
  either = surviving + grown + dropped
  explored = sum(state.exploration * n for state, n in zip(found, sizes))
  return {
      'grown': grown,
      'dropped': dropped,
      'surviving': surviving,
      'overlap': jnp.where(either > 0, surviving / jnp.maximum(either, 1), 1.0),
      'exploration': explored / sum(sizes),
  }
