"""Sparse tensors on disk: the kept values and a bitmap of all weights.

A tensor `w` with a mask is stored as two: `w.values`, the kept values in
row-major order, and `w.bitmap`, the mask in row-major order, eight entries per
byte, the first in the highest bit. At 75 % sparsity and four bytes per value
they take 28 % of the dense tensor.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import math

import numpy as np

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
    ValueError: a bitmap or its values are missing, or their sizes do not fit.

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
    values, bits = packed.get(name + _VALUES), packed.get(name + _BITMAP)
    if values is None and bits is None:
      continue
    size = math.prod(shape)
    mask = None
    if bits is not None and bits.dtype == np.uint8 and bits.shape == (
        -(-size // 8),
    ):
      mask = np.unpackbits(bits, count=size).astype(bool).reshape(shape)
    if values is None or mask is None or values.shape != (mask.sum(),):
      raise ValueError(
          f'bitmap and values of {name!r} do not fit one another, or the shape '
          f'{shape}; export the model again.'
      )
    masks[name] = mask
    tensors[name] = np.zeros(shape, values.dtype)
    tensors[name][mask] = values
  return tensors, masks
