# SPDX-License-Identifier: Apache-2.0
"""Statistics of mask updates, in a wrapper around the optimizer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity import selection
from spdf_jax.sparsity import statistics
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.state import get_mask

PyTree = Any

# Bits of `MaskTrackingState.history`.
_NOW, _BEFORE, _EVER = 1, 2, 4


class UnitTotals(NamedTuple):
  """Totals of `statistics.UnitCounts` over layers, float32 scalars."""

  cut_off: jax.Array
  """Number of inputs and outputs that keep no weight."""

  units: jax.Array
  """Number of inputs and outputs."""

  row_variation: jax.Array
  """Sum of the variation of rows, like the next."""

  column_variation: jax.Array
  layers: jax.Array
  """Number of layers."""


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

  units: UnitTotals
  """Totals over the inputs and outputs of all layers."""

  inner_state: PyTree
  """State of the wrapped optimizer."""

  @property
  def explored(self) -> PyTree:
    """Mask of the weights ever kept; `None` for leaves that stay dense."""
    return jax.tree.map(lambda h: h & _EVER != 0, self.history)


def track_masks(
    tx: optax.GradientTransformation, algorithm: Algorithm, where: Where
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer to count grown, dropped and ever kept weights.

  It also counts the inputs and outputs that keep no weight. Masks are read and
  counted only at mask updates; for an algorithm without any, no counting is
  compiled.

  Args:
    tx: The optimizer `sparsify(…, algorithm)`; transformations that accumulate
      or skip whole steps, such as `optax.MultiSteps`, wrap the result.
    algorithm: The same algorithm, for the steps of mask updates.
    where: The same `where`, for the axes of matrices.

  Returns:
    An optimizer with the same updates; `mask_statistics` reads its state.

  References:
    Liu et al., `ITOP <https://arxiv.org/abs/2102.02887>`_, 2021

  Example:
    >>> import spdf_jax as spdf
    >>> algorithm = spdf.join([spdf.static(0.75), spdf.static(0.5)], [100])
    >>> tx = spdf.sparsify(optax.adam(0.1), algorithm, key=0)
    >>> tx = track_masks(tx, algorithm, spdf.where.hidden_matrices)
    >>> state = tx.init({'w': jnp.ones((4, 8))})
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
        units=_count_units(history, params, selection.select(where, params)),
        inner_state=inner_state,
    )

  def update_fn(updates, state, params=None, **extra_args):
    updates, inner_state = tx.update(
        updates, state.inner_state, params, **extra_args
    )
    now = algorithm.update_at(state.count)
    seen = state[1:-1]
    if now is not False:
      axes = _axes(where, params, state.history)
      changed = lambda: _changes(
          state.history, get_mask(inner_state), params, axes
      )
      seen = jax.lax.cond(now, changed, lambda: seen)
    count = optax.safe_increment(state.count)
    return updates, MaskTrackingState._make((count, *seen, inner_state))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _axes(
    where: Where, params: PyTree, history: PyTree
) -> list[MatrixAxes | None]:
  """Returns the axes of all leaves, of which packed ones have no shape."""
  leaves, treedef = jax.tree.flatten(params)
  shaped = [
      p if h is None else jax.ShapeDtypeStruct(h.shape, p.dtype)
      for p, h in zip(leaves, trees.matching_leaves(history, params))
  ]
  return selection.select(where, jax.tree.unflatten(treedef, shaped))


def _changes(
    history: PyTree, mask: PyTree, params: PyTree, axes: list[MatrixAxes | None]
) -> tuple[Any, ...]:
  """Returns the new state fields from `history` to `units`."""
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
      _count_units(history, params, axes),
  )


def _count_units(
    history: PyTree, params: PyTree, axes: list[MatrixAxes | None]
) -> UnitTotals:
  """Adds up the counts of inputs and outputs of all layers."""
  sums = [jnp.zeros([], jnp.float32)] * len(UnitTotals._fields)
  for leaf, a in zip(trees.matching_leaves(history, params), axes):
    if leaf is None or a is None or not a.reduction:
      continue  # A vector has no units.
    counts = statistics.count_units(leaf & _NOW != 0, a)
    inputs, outputs = (
        math.prod(leaf.shape[axis] for axis in selection.as_tuple(x))
        for x in (a.reduction, a.output)
    )
    layers = leaf.size // max(inputs * outputs, 1)
    of_leaf = (
        jnp.sum(counts.without_inputs) + jnp.sum(counts.without_outputs),
        layers * (inputs + outputs),
        jnp.sum(counts.row_variation),
        jnp.sum(counts.column_variation),
        layers,
    )
    sums = [total + jnp.float32(x) for total, x in zip(sums, of_leaf)]
  return UnitTotals(*sums)


def _count(mask: PyTree) -> jax.Array:
  """Counts `True` entries exactly per matrix, then sums in float32."""
  counts = [
      jnp.sum(jnp.sum(m, axis=(-2, -1), dtype=jnp.int32).astype(jnp.float32))
      for m in map(jnp.atleast_2d, jax.tree.leaves(mask))
  ]
  return jnp.sum(jnp.stack(counts)) if counts else jnp.zeros([])


def _size(mask: PyTree) -> float:
  """Returns the number of weights, at least 1 as it is a divisor.

  JAX takes an int of 2^31 or more for an overflow of int32, and no float.
  """
  return float(max(1, sum(m.size for m in jax.tree.leaves(mask))))


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
    `'cut_off'` is the fraction of the inputs and outputs of layers that keep no
    weight; `'row_variation'` and `'column_variation'` are the variances of the
    number of kept weights per input and per output, divided by those of random
    masks that keep as many, on average over layers.

  Raises:
    ValueError: there is no `sparsify(…, track=True)` in `opt_state`.

  References:
    Liu et al., `ITOP <https://arxiv.org/abs/2102.02887>`_, 2021

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> tx = spdf.sparsify(
    ...     optax.adam(0.1), spdf.static(0.75), key=0, track=True)
    >>> state = tx.init({'w': jnp.ones((4, 8))})
    >>> {k: round(float(x), 2) for k, x in mask_statistics(state).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'grown': 0.0, 'dropped': 0.0, 'surviving': 8.0, 'overlap': 1.0,
     'exploration': 0.25, 'cut_off': 0.33, 'row_variation': 0.43,
     'column_variation': 2.21}
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
  units = jax.tree.map(lambda *x: sum(x), *(state.units for state in states))
  layers = jnp.maximum(units.layers, 1)
  return {
      'grown': grown,
      'dropped': dropped,
      'surviving': surviving,
      'overlap': jnp.where(either > 0, surviving / jnp.maximum(either, 1), 1.0),
      'exploration': explored / sum(sizes),
      'cut_off': units.cut_off / jnp.maximum(units.units, 1),
      'row_variation': units.row_variation / layers,
      'column_variation': units.column_variation / layers,
  }
