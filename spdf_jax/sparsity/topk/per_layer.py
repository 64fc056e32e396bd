# SPDX-License-Identifier: Apache-2.0
"""Exact top-k masks of every layer."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.topk import keys
from spdf_jax.sparsity.topk import radix_select
from spdf_jax.sparsity.topk.keys import Layers

Shape = tuple[int, ...]

# Below `_FEW` entries, clearing the histogram costs more than passes over
# single bits; up to `_VERY_FEW`, comparing all pairs costs less than those.
_FEW = 4096
_VERY_FEW = 16


def keep_largest(
    scores: jax.Array,
    kept: int | jax.Array,
    *,
    among: jax.Array | None = None,
    tie_break: jax.Array | None = None,
) -> jax.Array:
  """Keeps the `kept` largest scores of every layer.

  Exactly `min(kept, number of candidates)` are kept per layer, as with a stable
  argsort, for any number of ties. NaN ranks below every number. Scratch memory
  is about 6 bytes per score of one layer; sharded scores are not resharded.

  Args:
    scores: Scores, complex ones ranked by magnitude, `[layers, inputs,
      outputs]`; all axes before the last two index independent layers.
    kept: Number of entries to keep: one number, or int32 per layer; may be
      traced.
    among: Bool mask of the candidates, of the scores' shape; `None`: all.
    tie_break: `None` prefers the lower row-major index among equal scores; a
      typed PRNG key (folded for this leaf) breaks ties uniformly at random.

  Returns:
    Bool mask of the scores' shape.

  Raises:
    ValueError: an argument's shape does not fit the scores, `kept` is
      negative, or a layer has 2^31 scores or more.

  Example:
    >>> keep_largest(jnp.array([[[1., 5., 5., 5.]]]), 2).tolist()
    [[[False, True, True, False]]]
  """
  words = None if tie_break is None else keys.key_words(tie_break)
  return _keep(Layers(scores, among, words), kept, tuple(scores.shape))


def keep_random(
    key: jax.Array,
    shape: Shape,
    kept: int | jax.Array,
    *,
    among: jax.Array | None = None,
) -> jax.Array:
  """Keeps `kept` entries of every layer, uniformly at random.

  On CPUs scratch memory is about 11 bytes per entry of one layer, 4 of which
  hold its random bits; elsewhere the bits are drawn in every pass.

  Args:
    key: A typed PRNG key, folded for this leaf.
    shape: `(layers, inputs, outputs)` of the mask.
    kept: Number of entries to keep, as in `keep_largest`.
    among: The candidates, as in `keep_largest`.

  Returns:
    `keep_largest(jax.random.bits(key, shape, 'uint32'), kept, among=among)` for
    threefry2x32 keys, the default of JAX; for keys of other implementations the
    bits are those of the key that `keys.key_words` derives.

  Raises:
    ValueError: an argument does not fit the shape.

  Example:
    >>> keep_random(jax.random.key(0), (2, 4, 8), 8).sum((1, 2)).tolist()
    [8, 8]
  """
  layers = Layers(None, among, keys.key_words(key))
  return _keep(layers, kept, tuple(shape))


def _keep(
    layers: Layers, kept: int | jax.Array, shape: Shape
) -> jax.Array:
  radix_select.check_shapes(shape, layers.among)
  radix_select.check_number(kept)
  if isinstance(kept, (int, np.integer)):
    kept = min(int(kept), shape[-2] * shape[-1])
  if jnp.shape(kept) != shape[:-2][:jnp.ndim(kept)]:
    raise ValueError(
        f'kept has shape {jnp.shape(kept)} for scores of shape {shape}; give '
        'one number, or one per layer.'
    )
  if not math.prod(shape):
    return jnp.zeros(shape, bool)
  return _keep_in_layers(layers, kept, shape)


@functools.partial(jax.jit, static_argnames='shape')
def _keep_in_layers(
    layers: Layers, kept: jax.Array, shape: Shape
) -> jax.Array:
  *lead, rows, columns = shape
  kept = jnp.asarray(kept, jnp.int32)
  kept = jnp.broadcast_to(
      kept.reshape(kept.shape + (1,) * (len(lead) - kept.ndim)), lead
  )
  number = jnp.arange(math.prod(lead), dtype=jnp.uint32).reshape(lead)
  # A mask is a constant with respect to the scores, so gradients stop here.
  layers = jax.lax.stop_gradient(layers._replace(number=number))

  def keep(layers, kept, digit):
    one = functools.partial(_keep_in_layer, (rows, columns), digit)
    return radix_select.over_layers(one, digit, layers, kept)

  if rows * columns <= _VERY_FEW:
    one = functools.partial(_keep_by_rank, (rows, columns))
    return radix_select.over_layers(one, 1, layers, kept)
  if rows * columns < _FEW or len(lead) > 1:
    return keep(layers, kept, digit=1)
  return radix_select.on_this_platform(keep, layers, kept)


def _keep_in_layer(
    shape: Shape, digit: int, layer: Layers, kept: jax.Array
) -> jax.Array:
  if layer.scores is None and digit > 1:
    # Drawing the bits in each pass would take longer than ranking them.
    layer = layer._replace(scores=keys.draw(layer, shape), words=None)
  lasts, take, _ = radix_select.last_keys(
      functools.partial(radix_select.count_digits, shape, digit),
      layer,
      digit,
      number_of_keys=keys.number_of_keys(layer),
      need=kept,
      left=jnp.int32(math.prod(shape)),
      total=radix_select.sum_int32,
  )
  return radix_select.cut(shape, lasts, layer, take)


def _keep_by_rank(
    shape: Shape, layer: Layers, kept: jax.Array
) -> jax.Array:
  """Keeps the best entries of a very small layer by comparing all pairs."""
  index = jnp.arange(math.prod(shape), dtype=jnp.int32)
  ahead: Any = False
  equal: Any = True
  for i in range(keys.number_of_keys(layer)):
    key = keys.read_key(layer, i, shape).reshape(-1)
    ahead |= equal & (key < key[:, None])
    equal &= key == key[:, None]
  ahead |= equal & (index < index[:, None])
  among = jnp.ones(shape, bool) if layer.among is None else layer.among
  rank = jnp.sum(ahead & among.reshape(-1), axis=1, dtype=jnp.int32)
  return among & (rank < kept).reshape(shape)
