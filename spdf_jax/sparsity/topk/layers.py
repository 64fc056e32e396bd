"""Exact top-k masks: no sort, no gather, for any number of ties.

The k-th largest value is found by histograms of the scores' bits on CPU and by
comparing and counting elsewhere; the result equals that of a stable argsort. A
primitive stands for it, which native kernels lower where they are loaded.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.lowerings import batch_by_reference
from spdf_jax.lowerings import define_primitive
from spdf_jax.lowerings import is_available
from spdf_jax.lowerings import NATIVE
from spdf_jax.sparsity.topk import competitions
from spdf_jax.sparsity.topk import digits
from spdf_jax.sparsity.topk import random_bits
from spdf_jax.sparsity.topk import units as units_lib

# Competitions of fewer units cost less to compare than their bins to clear, and
# those of very few less to compare each with each.
_FEW_UNITS = 4096
_VERY_FEW_UNITS = 16


def keep_largest(
    scores: jax.Array,
    kept: int | jax.Array,
    *,
    among: jax.Array | None = None,
    tie_break: jax.Array | None = None,
    by_magnitude: bool = False,
) -> jax.Array:
  """Keeps the `kept` largest scores of every layer.

  Exactly `min(kept, number of candidates)` are kept per layer, as by a stable
  argsort, for any number of ties. NaN ranks below every number. Scratch memory
  is some 6 bytes per score of one layer, 11 with random ties; sharded scores
  stay where they are.

  Args:
    scores: Real scores of at most 32 bits, `[layers, inputs, outputs]`; every
      axis before the last two numbers independent competitions.
    kept: How many to keep: one number, or int32 per layer; may be traced.
    among: A mask of the scores' shape: only these may be kept; `None`: all.
    tie_break: `None` prefers the lower row-major index among equal scores, a
      typed PRNG key (folded for this leaf) breaks ties uniformly at random.
    by_magnitude: Ranks by `abs(scores)`, of which kernels make no array.

  Returns:
    The mask, bool of the scores' shape.

  Raises:
    ValueError: an argument's shape does not fit the scores, `kept` is
      negative, or a layer has 2^31 scores or more.
    TypeError: scores of 64 bits or of a complex type.

  Example:
    >>> keep_largest(jnp.array([[[1., 5., 5., 5.]]]), 2).tolist()
    [[[False, True, True, False]]]
  """
  units_lib.check_rankable(scores)
  words = None if tie_break is None else random_bits.key_words(tie_break)
  return _keep(scores, among, words, kept, tuple(scores.shape), by_magnitude)


def keep_random(
    key: jax.Array,
    shape: tuple[int, ...],
    kept: int | jax.Array,
    *,
    among: jax.Array | None = None,
) -> jax.Array:
  """Keeps `kept` entries of every layer, uniformly at random.

  The same as `keep_largest(jax.random.bits(key, shape), kept, among=among)`.

  Args:
    key: A typed PRNG key, folded for this leaf.
    shape: `(layers, inputs, outputs)` of the mask.
    kept: How many to keep: one number, or int32 per layer; may be traced.
    among: A mask of that shape: only these may be kept; `None`: all.

  Returns:
    The mask.

  Raises:
    ValueError: an argument does not fit the shape, `kept` is negative, or a
      layer has 2^31 entries or more.

  Example:
    >>> keep_random(jax.random.key(0), (2, 4, 8), 8).sum((1, 2)).tolist()
    [8, 8]
  """
  words = random_bits.key_words(key)
  return _keep(None, among, words, kept, tuple(shape), by_magnitude=False)


def chosen_by_kernels() -> bool:
  """Returns whether kernels choose the masks of what one device holds."""
  return jax.device_count() == 1 and is_available(NATIVE, keep_largest_p)


def _keep(
    scores: jax.Array | None,
    among: jax.Array | None,
    words: jax.Array | None,
    kept: int | jax.Array,
    shape: tuple[int, ...],
    by_magnitude: bool,
) -> jax.Array:
  units_lib.check_shapes(shape, among)
  if isinstance(kept, (int, np.integer)):
    if kept < 0:
      raise ValueError(f'kept is {kept}; give the number to keep, 0 or more.')
    kept = min(int(kept), shape[-2] * shape[-1])
  if jnp.shape(kept) != shape[:-2][:jnp.ndim(kept)]:
    raise ValueError(
        f'kept has shape {jnp.shape(kept)} for scores of shape {shape}; give '
        'one number, or one per layer.'
    )
  if not math.prod(shape):
    return jnp.zeros(shape, bool)
  return _keep_compiled(scores, among, words, kept, shape, by_magnitude)


@functools.partial(jax.jit, static_argnames=('shape', 'by_magnitude'))
def _keep_compiled(
    scores: jax.Array | None,
    among: jax.Array | None,
    words: jax.Array | None,
    kept: jax.Array,
    shape: tuple[int, ...],
    by_magnitude: bool,
) -> jax.Array:
  lead = shape[:-2]
  kept = jnp.asarray(kept, jnp.int32)
  kept = jnp.broadcast_to(
      kept.reshape(kept.shape + (1,) * (len(lead) - kept.ndim)), lead
  )
  size = shape[-2] * shape[-1]
  if scores is not None:
    # There is no rule of differentiation: a mask is a constant.
    scores = jax.lax.stop_gradient(scores)
  if size >= _FEW_UNITS and len(shape) == 3:
    operands, treedef = jax.tree.flatten((scores, among, words, kept))
    return keep_largest_p.bind(
        *operands,
        treedef=treedef,
        shape=shape,
        by_magnitude=by_magnitude,
        lowering=NATIVE,
    )
  units = _units(scores, among, words, shape, by_magnitude)
  if size <= _VERY_FEW_UNITS:
    keys = units_lib.keys_of(units, shape)
    return competitions.choose_by_rank(units, shape, keys, kept)
  return competitions.each(_keep_units, digits.COMPARING, units, shape, kept)


def _keep_in_layers(
    *operands: jax.Array,
    treedef: jax.tree_util.PyTreeDef,
    shape: tuple[int, ...],
    by_magnitude: bool,
) -> jax.Array:
  scores, among, words, kept = treedef.unflatten(operands)
  units = _units(scores, among, words, shape, by_magnitude)
  run = lambda counting, units, kept: competitions.each(
      _keep_units, counting, units, shape, kept
  )
  return competitions.on_this_platform(
      run, shape[-2] * shape[-1], units, kept
  )


def _units(
    scores: jax.Array | None,
    among: jax.Array | None,
    words: jax.Array | None,
    shape: tuple[int, ...],
    by_magnitude: bool,
) -> units_lib.Units:
  if scores is not None:
    scores = units_lib.ranked(scores, by_magnitude)
  return units_lib.all_units(scores, among, words, shape)


def _keep_units(
    counting: digits.Counting,
    units: units_lib.Units,
    shape: tuple[int, ...],
    kept: jax.Array,
) -> jax.Array:
  keys = units_lib.keys_of(units, shape)
  return competitions.choose(counting, units, shape, keys, kept)


keep_largest_p = define_primitive('keep_largest', _keep_in_layers)
"""Masks of layers; operands flattened: scores, among, words, numbers kept."""

batch_by_reference(keep_largest_p)
