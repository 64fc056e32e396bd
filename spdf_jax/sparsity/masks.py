"""Mask pytrees: made from scores with exact counts, and applied.

A mask has the structure of the parameters, `True` where a weight is kept,
`None` where a leaf is not sparsified. In every function here the last two axes
of a leaf are one layer and all earlier axes count independent layers, so
stacked (scanned) layers never compete with each other.
"""

import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.counts import number_kept

PyTree = Any

# Passes over the 32 bits of a score, 11 bits at a time from the highest; the
# last sees one bit again, so that all passes are alike.
_BINS = 2**11
_SHIFTS = (21, 10, 0)

_is_none = lambda x: x is None


def apply_mask(tree: PyTree, mask: PyTree) -> PyTree:
  """Zeroes the pruned entries of a tree.

  Entries are selected, not multiplied, so a NaN off the mask does not spread.

  Args:
    tree: Parameters, gradients, or any tree of their structure.
    mask: The mask; leaves under `None` pass unchanged.

  Returns:
    The masked tree, dtypes unchanged.

  Example:
    >>> import jax.numpy as jnp
    >>> w = {'w': jnp.array([[1., 2.]])}
    >>> apply_mask(w, {'w': jnp.array([[True, False]])})['w'].tolist()
    [[1.0, 0.0]]
  """
  return jax.tree.map(
      lambda m, x: x if m is None else jnp.where(m, x, jnp.zeros_like(x)),
      mask, tree, is_leaf=_is_none,
  )


def random_mask(key: jax.Array, params: PyTree, sparsity: PyTree) -> PyTree:
  """Draws masks uniformly among those with the exact number of zeros.

  The key of a leaf is `key` with the crc32 of the leaf's path folded in, so
  adding a leaf to the tree changes no other mask.

  Args:
    key: A typed PRNG key.
    params: Parameters, or their shapes; `None` leaves stay `None`.
    sparsity: The fraction of zeros in [0, 1), one number or a tree of them.

  Returns:
    The mask.

  Raises:
    ValueError: a sparsity is outside [0, 1).

  Example:
    >>> params = {'w': jnp.ones((4, 8))}
    >>> int(random_mask(jax.random.key(0), params, 0.75)['w'].sum())
    8
  """
  levels = distributions.uniform(params, sparsity)

  def draw(path, p, level):
    if p is None:
      return None
    if number_kept(_layer_size(p.shape), level) == _layer_size(p.shape):
      return jnp.ones(p.shape, bool)
    return _mask_leaf(jax.random.bits(_leaf_key(key, path), p.shape), level)

  return jax.tree_util.tree_map_with_path(
      draw, params, levels, is_leaf=_is_none
  )


def magnitude_mask(
    key: jax.Array | None, params: PyTree, sparsity: PyTree
) -> PyTree:
  """Keeps the weights of largest magnitude in every layer.

  Equal magnitudes are told apart at random by `key`: pruned weights, all zero,
  are revived without preference. `key=None` prefers the lower index.

  Args:
    key: A typed PRNG key, or `None`.
    params: Parameters; `None` leaves stay `None`.
    sparsity: The fraction of zeros in [0, 1), one number or a tree of them.

  Returns:
    The mask.

  Raises:
    ValueError: a sparsity is outside [0, 1).

  Example:
    >>> params = {'w': jnp.array([[3., -4.], [1., 2.]])}
    >>> magnitude_mask(None, params, 0.5)['w'].tolist()
    [[True, True], [False, False]]
  """
  scores = jax.tree.map(jnp.abs, params)
  return mask_from_scores(scores, sparsity, tie_break=key)


def mask_from_scores(
    scores: PyTree, sparsity: PyTree, *, tie_break: jax.Array | None = None
) -> PyTree:
  """Keeps the highest scores of every layer, by an exact integer count.

  Per layer of n scores, `max(1, n - round(sparsity * n))` are kept, for any
  number of ties. The k-th largest score is found by histograms of the bits of
  the scores, highest bits first: no sort and no gather; scratch memory is some
  6 bytes per score. NaN ranks below every number.

  Args:
    scores: A tree of real scores; the last two axes of a leaf are a layer.
    sparsity: The fraction of zeros in [0, 1), one number or a tree of them.
    tie_break: `None` prefers the lower index among equal scores, a typed PRNG
      key breaks ties at random (a function of the key and the leaf's path).

  Returns:
    The mask, of the scores' shapes.

  Raises:
    ValueError: a sparsity is outside [0, 1).
    TypeError: scores of 64 bits or of a complex type.

  Example:
    >>> mask_from_scores(jnp.array([[1., 5., 5., 5.]]), 0.5).tolist()
    [[False, True, True, False]]
  """
  levels = distributions.uniform(scores, sparsity)

  def cut(path, s, level):
    if s is None:
      return None
    _check_rankable(s)
    if number_kept(_layer_size(s.shape), level) == _layer_size(s.shape):
      return jnp.ones(s.shape, bool)
    bits = tie_break if tie_break is None else jax.random.bits(
        _leaf_key(tie_break, path), s.shape
    )
    return _mask_leaf(s, level, bits)

  return jax.tree_util.tree_map_with_path(cut, scores, levels, is_leaf=_is_none)


def _check_rankable(scores: jax.Array) -> None:
  dtype = jnp.dtype(scores.dtype)
  small = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 2
  real = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
  if not (small or real or dtype == jnp.uint32):
    raise TypeError(
        f'scores have dtype {dtype}; cast them to a real type of at most 32 '
        'bits, e.g. scores.astype(jnp.float32).'
    )


def _layer_size(shape: tuple[int, ...]) -> int:
  return math.prod(shape[-2:])


def _leaf_key(key: jax.Array, path: jax.tree_util.KeyPath) -> jax.Array:
  name = selection.path_name(path)
  return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def _mask_leaf(
    scores: jax.Array, sparsity: float, ties: jax.Array | None = None
) -> jax.Array:
  kept = number_kept(_layer_size(scores.shape), sparsity)
  if kept >= 2**31:
    raise ValueError(
        f'a layer of shape {scores.shape[-2:]} has more than 2^31 kept '
        'weights; split it along an axis.'
    )
  shape = (1,) * (2 - scores.ndim) + scores.shape
  as_matrices = lambda x: x.reshape((-1,) + shape[-2:])
  keys = (scores,) if ties is None else (scores, ties)
  mask = _keep_largest_of_layers(tuple(map(as_matrices, keys)), kept)
  return mask.reshape(scores.shape)


@jax.jit
def _keep_largest_of_layers(
    keys: tuple[jax.Array, ...], kept: jax.Array
) -> jax.Array:
  return jax.lax.map(lambda layer: _keep_largest(layer, kept), keys)


def _keep_largest(
    keys: tuple[jax.Array, ...], kept: jax.Array
) -> jax.Array:
  """Keeps the `kept` largest of a matrix; later keys break ties of earlier."""
  above = jnp.zeros(keys[0].shape, bool)
  equal = jnp.ones(keys[0].shape, bool)
  need = kept
  for i, key in enumerate(keys):
    value, need = _kth_largest(key, None if i == 0 else equal, need)
    bits = _sortable_bits(key)
    above = above | (equal & (bits > value))
    equal = equal & (bits == value)
  return above | _first(equal, need)


def _kth_largest(
    x: jax.Array, among: jax.Array | None, kept: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the k-th largest value's bits and how many equal to it to keep."""
  shifts = jnp.array([32, *_SHIFTS], jnp.uint32)

  def narrow(i, carry):
    # The barrier has each pass recompute its bits from x: without it XLA keeps
    # another 4 bytes per score alive between the passes.
    scores, (prefix, need) = jax.lax.optimization_barrier((x, carry))
    bits = _sortable_bits(scores)
    known, shift = shifts[i], shifts[i + 1]
    candidates = (i == 0) | (bits >> known == prefix >> known)
    if among is not None:
      candidates &= among
    bins = jnp.where(candidates, bits >> shift & (_BINS - 1), _BINS)
    counts = _histogram(bins)[:_BINS]
    at_least = jnp.cumsum(counts[::-1])[::-1]
    digit = jnp.sum(at_least >= need) - 1
    need = need - (at_least[digit] - counts[digit])
    return prefix | digit.astype(jnp.uint32) << shift, need

  first = jnp.uint32(0), jnp.asarray(kept, jnp.int32)
  return jax.lax.fori_loop(0, len(_SHIFTS), narrow, first)


def _histogram(bins: jax.Array) -> jax.Array:
  """Counts how often 0 … _BINS occur, without flattening `bins`."""
  return jax.lax.scatter_add(
      jnp.zeros(_BINS + 1, jnp.int32),
      bins.astype(jnp.uint16)[..., None],
      jnp.ones(bins.shape, jnp.int32),
      jax.lax.ScatterDimensionNumbers((), (0,), (0,)),
      mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )


def _first(candidates: jax.Array, count: jax.Array) -> jax.Array:
  """Keeps the first `count` candidates of a matrix in row-major order."""
  in_row = jnp.sum(candidates, axis=1, dtype=jnp.int32)
  up_to_row = jnp.cumsum(in_row)
  cut_row = jnp.sum(up_to_row <= count)
  before_cut = jnp.sum(jnp.where(up_to_row <= count, in_row, 0))
  row = jax.lax.broadcasted_iota(jnp.int32, candidates.shape, 0)
  in_cut_row = jnp.any(candidates & (row == cut_row), axis=0)
  column_kept = jnp.cumsum(in_cut_row) <= count - before_cut
  return candidates & ((row < cut_row) | ((row == cut_row) & column_kept))


def _sortable_bits(x: jax.Array) -> jax.Array:
  """Maps scores to uint32 such that larger scores have larger integers."""
  if x.dtype == jnp.uint32:
    return x
  x = x.astype(jnp.float32)
  # One zero, and NaN below everything.
  x = jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(x == 0, 0.0, x))
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))
