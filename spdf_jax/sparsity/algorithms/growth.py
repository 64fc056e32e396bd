# SPDX-License-Identifier: Apache-2.0
"""Growth of pruned units, by scores: the units of a leaf, and their scores."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax import names

_LEAST = 2.0**-30  # Smaller shares of a layer's largest gradient count as zero.


class Units(NamedTuple):
  """The units of one leaf: weights, or blocks of weights.

  Arrays are `[..., a, b]`, where the last two axes are one group; counts
  are int32, one for all groups or one for each.
  """

  mask: jax.Array
  """The current mask of the units."""

  weights: jax.Array
  """The weights, summed where units are blocks."""

  magnitudes: jax.Array
  """The magnitudes of the weights, summed where units are blocks."""

  grads: jax.Array
  """The magnitudes of the gradients, summed where units are blocks, including
  those of pruned weights."""

  grad_matrices: jax.Array
  """The entries of `grads` as matrices `[layers, rows, columns]`, with a row
  for each input, or each row of blocks."""

  group: Callable[[jax.Array], jax.Array]
  """Function that arranges such matrices in groups, as `grads` is."""

  key: jax.Array
  """A typed PRNG key for this leaf and step."""

  kept: jax.Array
  """Number of units to keep."""

  drop_fraction: jax.Array
  """Fraction of the connections to drop, as a fixed-point number of `fixed`."""

  carry: jax.Array
  """Fixed-point numbers below 1 that are added to a product with the fraction,
  before it is rounded down: 0, or random numbers where a layer has several
  groups, so that small groups drop the fraction on average."""


Growth = Callable[[Units], jax.Array | None]
"""`(units) -> scores`: the pruned units of largest score grow, NaN last and
equal ones in the order of their index; `None`: random ones."""


def balanced(units: Units) -> jax.Array:
  r"""Scores gradients in relation to those of their row and their column.

  The gradient of a matrix is a sum of outer products, so its largest entries
  share rows and columns: growth by magnitude alone is concentrated in few units
  and leaves others without inputs or outputs. The score is

  .. math::
    \frac{g_{ij}^2}{\sum_k g_{ik}^2 \, \sum_k g_{kj}^2}

  It ranks entries as :math:`|g_{ij}|`, divided by the root mean squares of its
  row and its column, does; this is the size of Adafactor's first update. An
  axis of length one is left out. Sums are exact in fixed point, so that they do
  not depend on the sharding; a gradient that is not finite, or below
  :math:`2^{-30}` of the largest of its layer, counts as zero.

  Args:
    units: The units of a leaf.

  Returns:
    Scores, of the shape of `units.grads`.

  References:
    Shazeer and Stern, `Adafactor <https://arxiv.org/abs/1804.04235>`_, 2018;
    Zhang et al., `relative importance of weights
    <https://iclr.cc/virtual/2024/poster/18549>`_, 2024

  Example:
    >>> import spdf_jax as spdf
    >>> algorithm = spdf.rigl(
    ...     0.8, update_every=100, update_until=75_000, grow='balanced')
    >>> algorithm.dense_grads_at(100)
    True
  """
  g = units.grad_matrices
  if g.dtype.itemsize < 4:
    g = g.astype(jnp.float32)
  # Subnormal numbers count as zero on all devices, as on those without them.
  g = jnp.where((g >= jnp.finfo(g.dtype).tiny) & (g < jnp.inf), g, 0)
  g /= _power_of_two(jnp.max(g, axis=(-2, -1), keepdims=True))
  g = jnp.where(g >= _LEAST, g, 0)
  by = _sums_of_squares(g, -2) * _sums_of_squares(g, -1)
  return units.group(jnp.where(g > 0, g * g / jnp.where(by > 0, by, 1), 0))


def _sums_of_squares(x: jax.Array, axis: int) -> jax.Array:
  """Returns sums of squares over an axis; 1 where it has a single entry."""
  size = x.shape[axis]
  if size == 1:
    return jnp.ones([], x.dtype)
  scale = _power_of_two(jnp.max(x, axis=axis, keepdims=True))
  one = 2.0 ** (30 - size.bit_length())  # Squares are below 4.
  squares = (jnp.square(x / scale) * one).astype(jnp.uint32)
  total = jnp.sum(squares, axis=axis, keepdims=True, dtype=jnp.uint32)
  return total.astype(x.dtype) / one * jnp.square(scale)


def _power_of_two(x: jax.Array) -> jax.Array:
  """Returns the largest power of two up to x, by which division is exact."""
  _, exponent = jnp.frexp(x)
  return jnp.ldexp(jnp.ones([], x.dtype), exponent - 1)


GROWTHS: dict[str, Growth] = {
    'balanced': balanced,
    'gradient': lambda units: units.grads,
    'random': lambda units: None,
}
"""Scores of growth by name: of a gradient within its row and column, of a
gradient (RigL), and none (SET)."""


def growth_of(value: Growth | str) -> Growth:
  """Returns growth scores given by name, or themselves.

  Args:
    value: `(units) -> scores`, a name in `GROWTHS`, or
      `'package.module:function'`.

  Returns:
    The function.

  Raises:
    ValueError: `value` is something else, or the name is unknown.

  Example:
    >>> growth_of('random')(None) is None
    True
  """
  growth = names.by_entry('grow', value, GROWTHS, missing=1)
  if not callable(growth):
    raise ValueError(
        f'grow is {growth!r:.80}; give {", ".join(map(repr, GROWTHS))}, or a '
        'function (units) -> scores.'
    )
  return growth
