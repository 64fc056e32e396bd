# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes and dtypes of the sparse matmul's operands."""

from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.packing import PackedMask


def check_dense(
    x: jax.Array, w: jax.Array, mask: jax.Array, grad_mask: jax.Array
) -> None:
  """Raises ValueError or TypeError unless weights and their masks fit x."""
  shapes = f'x {list(x.shape)}, w {list(w.shape)}'
  if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
    raise ValueError(
        f'sparse_matmul got {shapes}; give x [..., inputs] and w [inputs, '
        'outputs].'
    )
  for name, m in (('mask', mask), ('grad_mask', grad_mask)):
    if m.shape != w.shape:
      raise ValueError(
          f'sparse_matmul got {shapes} and {name} {list(m.shape)}; give the '
          f'{name} the shape of w.'
      )
  if 0 in x.shape + w.shape:
    raise ValueError(
        f'sparse_matmul got {shapes}; every axis must have at least one entry.'
    )
  _check_floats(x, w)
  for name, m in (('mask', mask), ('grad_mask', grad_mask)):
    if m.dtype != bool:
      raise TypeError(
          f'sparse_matmul got {name} {list(m.shape)} of dtype {m.dtype}; give '
          f'booleans, e.g. {name} != 0.'
      )


def check_packed(
    x: jax.Array,
    values: jax.Array,
    mask: PackedMask,
    grad_mask: Any,
    out_sharding: Any,
) -> None:
  """Raises ValueError or TypeError unless packed weights fit x."""
  shapes = (
      f'x {list(x.shape)}, values {list(values.shape)} and a packed mask '
      f'{list(mask.shape)}'
  )
  fits = x.ndim >= 1 and len(mask.shape) == 2 and x.shape[-1] == mask.shape[0]
  if not fits or values.ndim != 1:
    raise ValueError(
        f'sparse_matmul got {shapes}; give x [..., inputs], values [kept] and '
        'a mask [inputs, outputs].'
    )
  if mask.bits.shape[-1] != -(-mask.columns // 8):
    raise ValueError(
        f'sparse_matmul got {shapes} with {mask.bits.shape[-1]} bytes per row; '
        f'its {mask.columns} columns need {-(-mask.columns // 8)}: make the '
        'mask by spdf_jax.packing.pack_mask.'
    )
  if 0 in x.shape + values.shape + mask.shape:
    raise ValueError(
        f'sparse_matmul got {shapes}; every axis must have at least one entry.'
    )
  for name, given in (
      ('grad_mask', grad_mask), ('out_sharding', out_sharding)
  ):
    if given is not None:
      raise ValueError(
          f'sparse_matmul got a packed mask and {name} '
          f'{getattr(given, "shape", given)}; omit {name}, or unpack weights '
          'and mask by scatter_kept and unpack_mask of spdf_jax.packing.'
      )
  _check_floats(x, values)


def _check_floats(x: jax.Array, w: jax.Array) -> None:
  if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
    raise TypeError(
        f'sparse_matmul got x of dtype {x.dtype}; cast x and w to float32, '
        'bfloat16 or float16.'
    )
  if x.dtype != w.dtype:
    raise TypeError(
        f'sparse_matmul got x {list(x.shape)} of dtype {x.dtype} and w '
        f'{list(w.shape)} of dtype {w.dtype}; cast one of them to the dtype of '
        'the other: they are not promoted.'
    )


def accumulation_dtype(dtype: Any, requested: Any) -> Any:
  """Returns the accumulation dtype: as requested, or at least float32.

  Args:
    dtype: Dtype of the operands.
    requested: A dtype, or `None` for the default.

  Returns:
    The dtype.

  Raises:
    TypeError: `requested` is neither `dtype` nor the default.

  Example:
    >>> accumulation_dtype(jnp.dtype('bfloat16'), None)
    dtype('float32')
  """
  if requested is None:
    return jnp.promote_types(dtype, jnp.float32)
  requested = jnp.dtype(requested)
  valid = {dtype: None, jnp.promote_types(dtype, jnp.float32): None}
  if requested not in valid:
    raise TypeError(
        f'accumulation_dtype is {requested} for x of dtype {dtype}; use '
        f'{" or ".join(map(str, valid))}.'
    )
  return requested
