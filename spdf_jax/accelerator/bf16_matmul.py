# SPDX-License-Identifier: Apache-2.0
"""Dense products of 16-bit arrays with float32 sums, also in derivatives.

On processors with AVX-512 BF16, XLA:CPU multiplies bfloat16 by bfloat16 into
float32 about twice as fast as float32 by float32, but for a bfloat16 result it
converts the operands to float32 first.
The derivative of a product into float32 would be as slow, since its cotangent
is float32. This primitive sums in float32, rounds the result, and rounds
cotangents before it multiplies them.
"""

from collections.abc import Sequence
import functools
import os
import string
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax.accelerator import processor

_BATCH = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'


def einsum_reference(
    x: jax.Array, y: jax.Array, *, subscripts: str, dtype: Any
) -> jax.Array:
  """Computes `jnp.einsum` with float32 sums: the reference, used on CPUs.

  Args:
    x: First operand, float16 or bfloat16.
    y: Second operand, of the dtype of `x`.
    subscripts: Subscripts of both operands and the result, as `ik,kj->ij`. Each
      index occurs once in an operand, and in at least two of the three.
    dtype: Dtype of the result.

  Returns:
    The product.
  """
  product = functools.partial(
      jnp.einsum, subscripts, preferred_element_type=jnp.float32
  )
  (of_x, of_y), of_z = _split(subscripts)
  is_row = of_x and of_x[0] in of_z and all(
      size == 1 and a not in of_y for a, size in zip(of_x, x.shape) if a in of_z
  )
  if not is_row:
    return product(x, y).astype(dtype)
  # XLA:CPU multiplies two rows of bfloat16 by a matrix 5 times faster than one.
  z = product(jnp.repeat(x, 2, 0), y)
  return jax.lax.slice_in_dim(z, 0, 1, axis=of_z.index(of_x[0])).astype(dtype)


einsum_p = lowerings.define_primitive('bf16_einsum', einsum_reference)
"""Primitive of an einsum of two 16-bit arrays with float32 sums."""


def _einsum_elsewhere(x, y, *, subscripts, dtype, lowering):
  """Multiplies like `matmul` on the platform that a program is lowered for."""
  del lowering
  return jnp.einsum(subscripts, x, y).astype(dtype)


for _platform in ('cuda', 'rocm', 'tpu'):
  mlir.register_lowering(
      einsum_p, mlir.lower_fun(_einsum_elsewhere, multiple_results=False),
      platform=_platform,
  )


def is_faster(dtype: Any) -> bool:
  """Returns whether products of a dtype are faster by `einsum`.

  They are for bfloat16, if this process runs on one CPU device with
  instructions for it (AVX-512 BF16). With several devices, JAX's own products
  are used, since they propagate shardings. A program that is lowered for
  another platform also gets JAX's own product from `einsum`, but in a process
  on a GPU `einsum` is not used at all, since `remat='dots'` would save its
  result in float32.

  Example:
    >>> is_faster('float32')
    False
  """
  if jnp.dtype(dtype) != jnp.bfloat16 or jax.default_backend() != 'cpu':
    return False
  return jax.device_count() == 1 and multiplies_bfloat16()


def multiplies_bfloat16() -> bool:
  """Returns whether `/proc/cpuinfo` lists AVX-512 BF16 for the processor.

  XLA does not check it; its products for other processors are not measured.
  """
  return 'avx512_bf16' in processor.cpuinfo()


def einsum(
    subscripts: str, x: jax.Array, y: jax.Array, dtype: Any = None
) -> jax.Array:
  """Multiplies 16-bit arrays with float32 sums and rounds the result once.

  Args:
    subscripts: Subscripts as for `jnp.einsum`, with lower-case letters and the
      result, as `ik,kj->ij`. Each index occurs once in an operand, and in at
      least two of the operands and the result.
    x: First operand.
    y: Second operand, of the dtype of `x`.
    dtype: Dtype of the result; by default that of the operands.

  Returns:
    The product. In derivatives of any order, cotangents are rounded to the
    dtype of the operands and multiplied in the same way. GPUs and TPUs round
    every product to the dtype of the operands first.

  Example:
    >>> x = jnp.ones((2, 3), jnp.bfloat16)
    >>> einsum('ik,jk->ij', x, x).dtype
    dtype(bfloat16)
  """
  return einsum_p.bind(
      x, y, subscripts=subscripts, dtype=jnp.dtype(dtype or x.dtype),
      lowering=lowerings.REFERENCE,
  )


def dimension_numbers(subscripts: str) -> Any:
  """Returns the dimension numbers of `dot_general` for an einsum.

  Args:
    subscripts: Subscripts of the einsum, as for `einsum`.

  Returns:
    The dimension numbers; `None` if `dot_general` orders the axes of the result
    otherwise, or an operand is summed alone.

  Example:
    >>> dimension_numbers('bik,kj->bij')
    (([2], [0]), ([], []))
  """
  (of_x, of_y), of_z = _split(subscripts)
  shared = [a for a in of_x if a in of_y]
  stacked = [a for a in shared if a in of_z]
  free = [a for a in of_x + of_y if a not in shared]
  if ''.join(stacked + free) != of_z:
    return None
  summed = [a for a in shared if a not in of_z]
  places = lambda axes: tuple(
      [of.index(a) for a in axes] for of in (of_x, of_y)
  )
  return places(summed), places(stacked)


def subscripts(numbers: Any, ranks: Sequence[int]) -> str:
  """Returns the subscripts of `einsum` for a `dot_general`.

  Args:
    numbers: Dimension numbers of `dot_general`.
    ranks: Number of axes of each operand.

  Example:
    >>> subscripts((([2], [0]), ([], [])), (3, 2))
    'abc,cd->abd'
  """
  (summed_x, summed_y), (stacked_x, stacked_y) = numbers
  letters = iter(string.ascii_lowercase)
  of_x = [next(letters) for _ in range(ranks[0])]
  of_y = [''] * ranks[1]
  for i, j in zip((*summed_x, *stacked_x), (*summed_y, *stacked_y)):
    of_y[j] = of_x[i]
  of_y = [letter or next(letters) for letter in of_y]
  stacked = [of_x[i] for i in stacked_x]
  free = [a for of in (of_x, of_y) for a in of if (a in of_x) != (a in of_y)]
  return f'{"".join(of_x)},{"".join(of_y)}->{"".join(stacked + free)}'


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies by dense weights, in the faster of two ways.

  Args:
    x: Inputs [..., inputs].
    w: Weights [inputs, outputs], of the dtype of `x`.

  Returns:
    The product [..., outputs]: float32 sums where `is_faster`, which the caller
    rounds, and otherwise of the dtype of `x`.

  Example:
    >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
  """
  if not is_faster(x.dtype):
    return jnp.dot(x, w)
  tokens = 'abcdefgh'[: x.ndim - 1]
  return einsum(f'{tokens}k,kn->{tokens}n', x, w, jnp.float32)


def no_batch_dims_saveable(
    primitive: Primitive, *args: Any, **params: Any
) -> bool:
  """Decides whether to save a result: a policy of `jax.checkpoint`.

  It saves the products of `einsum` without batch dimensions, as JAX's
  `dots_with_no_batch_dims_saveable` does for other products.

  Args:
    primitive: The primitive of an equation.
    *args: Operands of the equation.
    **params: Parameters of the equation.

  Returns:
    Whether the equation's result is saved for the backward pass.

  Example:
    >>> x = jnp.ones((2, 2), jnp.bfloat16)
    >>> f = jax.checkpoint(
    ...     lambda x: einsum('ik,kj->ij', x, x), policy=no_batch_dims_saveable)
    >>> jax.grad(lambda x: f(x).sum())(x).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
  """
  del args
  if primitive is not einsum_p:
    return False
  (of_x, of_y), of_z = _split(params['subscripts'])
  return not set(of_x) & set(of_y) & set(of_z)


def _transpose_x(dz, x, y, *, subscripts, dtype, lowering):
  del dtype
  (of_x, of_y), of_z = _split(subscripts)
  return einsum_p.bind(
      dz.astype(y.dtype), y, subscripts=f'{of_z},{of_y}->{of_x}',
      dtype=x.aval.dtype, lowering=lowering,
  )


def _transpose_y(dz, x, y, *, subscripts, dtype, lowering):
  del dtype
  (of_x, of_y), of_z = _split(subscripts)
  return einsum_p.bind(
      x, dz.astype(x.dtype), subscripts=f'{of_x},{of_z}->{of_y}',
      dtype=y.aval.dtype, lowering=lowering,
  )


ad.defbilinear(einsum_p, _transpose_x, _transpose_y)


def _batch(args, axes, *, subscripts, **params):
  letter = next(a for a in _BATCH if a not in subscripts)
  operands, of_z = _split(subscripts)
  # A new axis of one operand follows the shared ones, as in the result of
  # dot_general: XLA's CPU products of bfloat16 accept no other order.
  shared = 0
  if None in axes:
    shared = len(os.path.commonprefix([*operands, of_z]))
  insert = lambda of: of[:shared] + letter + of[shared:]
  args = [
      x if axis is None else jnp.moveaxis(x, axis, shared)
      for x, axis in zip(args, axes)
  ]
  of_x, of_y = (
      of if axis is None else insert(of) for of, axis in zip(operands, axes)
  )
  product = einsum_p.bind(
      *args, subscripts=f'{of_x},{of_y}->{insert(of_z)}', **params
  )
  return product, shared


batching.primitive_batchers[einsum_p] = _batch


def _split(subscripts: str) -> tuple[list[str], str]:
  operands, result = subscripts.split('->')
  return operands.split(','), result
