# SPDX-License-Identifier: Apache-2.0
"""The product with a listed matrix, as a primitive.

It reads nothing of pruned weights, and is for the few tokens of generation.
Unlike packed matrices, of which every call makes lists, a listed one is built
once. The product has no gradients.
"""

import functools

import jax
from jax.interpreters import batching
import jax.numpy as jnp

from spdf_jax.accelerator.listing import check_dtype
from spdf_jax.accelerator.listing import ListedMatrix
from spdf_jax.lowerings import check_lowering
from spdf_jax.lowerings import define_primitive
from spdf_jax.lowerings import REFERENCE


def listed_matmul(
    x: jax.Array, w: ListedMatrix, *, lowering: str = REFERENCE
) -> jax.Array:
  """Multiplies by a listed matrix: y = x @ w.

  Inputs must be finite for lowerings to agree, as for `sparse_matmul`. The
  native result of a token does not depend on the number of tokens, nor on that
  of threads.

  Args:
    x: Inputs [..., inputs], float32 or bfloat16.
    w: The matrix, whose values may have the other dtype.
    lowering: Name of the lowering; `'reference'` builds the dense matrix at
      every call.

  Returns:
    Product [..., outputs], of the dtype of `x`, with float32 sums.

  Raises:
    ValueError: the widths do not fit, or the lowering is unknown.
    TypeError: there are no products of the dtypes.

  Example:
    >>> import numpy as np
    >>> from spdf_jax.accelerator import list_matrix
    >>> w = np.array([[3., 0.], [4., 5.]], np.float32)
    >>> listed_matmul(jnp.array([[1., 2.]]), list_matrix(w, w != 0)).tolist()
    [[11.0, 10.0]]
  """
  x = jnp.asarray(x)
  check_lowering(lowering)
  if x.ndim < 1 or len(w.shape) != 2 or x.shape[-1] != w.inputs or 0 in x.shape:
    raise ValueError(
        f'listed_matmul got x {list(x.shape)} and a matrix {list(w.shape)}; '
        'give x [..., inputs] with at least one entry per axis, and one matrix '
        '[inputs, outputs].'
    )
  check_dtype('x', x.dtype)
  check_dtype('values', w.values.dtype)
  return listed_matmul_p.bind(
      x, *map(jnp.asarray, (w.values, w.indices, w.starts)), lowering=lowering
  )


def _reference(x, values, indices, starts):
  """Multiplies by the dense matrix."""
  outputs = starts.shape[0] - 1
  places = jnp.arange(values.shape[0])
  columns = jnp.searchsorted(starts, places, side='right') - 1
  w = jnp.zeros((x.shape[-1], outputs), jnp.float32)
  # The column of padding is `outputs`, which is dropped.
  w = w.at[indices, columns].set(values.astype(jnp.float32), mode='drop')
  y = jnp.matmul(x.astype(jnp.float32), w, precision='highest')
  return y.astype(x.dtype)


listed_matmul_p = define_primitive('listed_matmul', _reference)
"""Primitive of y = x @ W; operands x, values, indices, starts."""


def _batch(args, axes, **params):
  if all(axis is None for axis in axes[1:]):
    x = jnp.moveaxis(args[0], axes[0], 0)
    return listed_matmul_p.bind(x, *args[1:], **params), 0
  f = functools.partial(listed_matmul_p.bind, **params)
  stacked = [
      None if axis is None else jnp.moveaxis(arg, axis, 0)
      for arg, axis in zip(args, axes)
  ]
  one = lambda mapped: f(*(
      arg if axis is None else each
      for arg, axis, each in zip(args, axes, mapped)
  ))
  return jax.lax.map(one, stacked), 0


batching.primitive_batchers[listed_matmul_p] = _batch
