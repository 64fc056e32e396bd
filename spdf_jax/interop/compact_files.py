# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors on disk: the kept values and a bitmap of all weights.

A tensor `w` with a mask is stored as two: `w.values`, the kept values in
row-major order, and `w.bitmap`, the mask in row-major order, eight entries per
byte, the first in the highest bit. At 75 % sparsity and four bytes per value
they take 28 % of the dense tensor.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from spdf_jax.accelerator.listing import list_values
from spdf_jax.accelerator.listing import ListedMatrix

_VALUES, _BITMAP = '.values', '.bitmap'


def pack(
    tensors: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Replaces tensors with a mask by their kept values and a bitmap.

  Args:
    tensors: Arrays by name.
    masks: Boolean arrays of the same shapes, for some of the names.

  Returns:
    Arrays of the file, by name.

  Example:
    >>> packed = pack({'w': np.array([[3, 0], [0, 4]])},
    ...               {'w': np.array([[True, False], [False, True]])})
    >>> packed['w.values'].tolist(), packed['w.bitmap'].tolist()
    ([3, 4], [144])
  """
  packed = {k: x for k, x in tensors.items() if k not in masks}
  for name, mask in masks.items():
    packed[name + _VALUES] = tensors[name][mask]
    packed[name + _BITMAP] = np.packbits(mask)
  return packed


def names_of(packed: Iterable[str]) -> set[str]:
  """Returns the names of the tensors, given those in the file.

  Example:
    >>> sorted(names_of({'w.values', 'w.bitmap', 'b'}))
    ['b', 'w']
  """
  return {
      name.removesuffix(_VALUES).removesuffix(_BITMAP) for name in packed
  }


def unpack(
    packed: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Inverts `pack`; pruned weights are zero.

  Args:
    packed: Arrays by name.
    shapes: Shapes of the tensors, by name.

  Returns:
    Tensors and masks, each by name.

  Raises:
    ValueError: a bitmap or its values are missing, their sizes do not fit, or a
      tensor is also stored whole.

  Example:
    >>> packed = {'w.values': np.array([3, 4]),
    ...           'w.bitmap': np.array([144], np.uint8)}
    >>> unpack(packed, {'w': (2, 2)})[0]['w'].tolist()
    [[3, 0], [0, 4]]
  """
  tensors = {
      k: x for k, x in packed.items() if not k.endswith((_VALUES, _BITMAP))
  }
  masks = {}
  for name, shape in shapes.items():
    if packed.keys().isdisjoint(parts_of(name)[1:]):
      continue
    if name in packed:
      raise ValueError(
          f'{name!r} is stored whole and as kept values; export the model '
          'again.'
      )
    values, mask = _values_and_mask(name, packed, shape)
    masks[name] = mask
    tensors[name] = np.zeros(shape, values.dtype)
    tensors[name][mask] = values
  return tensors, masks


def parts_of(name: str) -> tuple[str, str, str]:
  """Returns the names in the file of which a tensor has the first, or others.

  Example:
    >>> parts_of('w')
    ('w', 'w.values', 'w.bitmap')
  """
  return name, name + _VALUES, name + _BITMAP


def list_tensor(
    name: str,
    packed: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    *,
    transposed: bool,
    dtype: Any = None,
) -> ListedMatrix:
  """Lists the kept weights of a matrix.

  Args:
    name: Name of the tensor.
    packed: Arrays by name, with the values and the bitmap of the tensor.
    shape: Shape of the tensor, (in, out).
    transposed: Whether the shape is (out, in) instead.
    dtype: Dtype of the kept weights; `None`: that of the file, and float32 for
      float16.

  Returns:
    The listed matrix [in, out].

  Raises:
    ValueError: the bitmap or its values are missing, or their sizes do not fit.
    TypeError: there are no products of the dtype.

  Example:
    >>> packed = {'w.values': np.ones(2, np.float32),
    ...           'w.bitmap': np.array([144], np.uint8)}
    >>> list_tensor('w', packed, (2, 2), transposed=False).starts.tolist()
    [0, 1, 2]
  """
  values, mask = _values_and_mask(name, packed, shape)
  if not transposed:  # Values [in, out] in the order (output, input).
    matrix = np.zeros(shape, values.dtype)
    matrix[mask] = values
    mask = mask.T
    values = matrix.T[mask]
    del matrix
  # Not int64, as of `np.nonzero`, which can take more memory than the matrix.
  inputs = np.arange(mask.shape[1], dtype=np.uint32)
  indices = np.broadcast_to(inputs, mask.shape)[mask]
  if dtype is None and values.dtype == np.float16:
    dtype = np.float32
  return list_values(
      values if dtype is None else values.astype(dtype),
      indices, mask.sum(axis=1, dtype=np.int64), len(inputs),
  )


def _values_and_mask(
    name: str, packed: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the kept values and the mask of a tensor, if they fit."""
  values, bits = packed.get(name + _VALUES), packed.get(name + _BITMAP)
  size = math.prod(shape)
  if values is not None and bits is not None and (
      bits.dtype == np.uint8 and bits.shape == (-(-size // 8),)
  ):
    mask = np.unpackbits(bits, count=size).astype(bool).reshape(shape)
    if values.shape == (mask.sum(),):
      return values, mask
  raise ValueError(
      f'bitmap and values of {name!r} do not fit one another, or the shape '
      f'{shape}; export the model again.'
  )
