# SPDX-License-Identifier: Apache-2.0
"""Tensor files: safetensors, shards with an index, torch's, and compact ones.

A compact file has two tensors for each `w` with a mask: `w.values` and
`w.bits`, in the format of `spdf_jax.packing`. At 75 % sparsity and four bytes
per value they take 28 % of the dense tensor.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import json
import os
import pathlib
from typing import Any, NamedTuple
import zipfile

import numpy as np

from spdf_jax import extras
from spdf_jax import files
from spdf_jax import packing
from spdf_jax.accelerator import listed_matrix

WEIGHTS = 'model.safetensors'
COMPACT = 'model.compact.safetensors'
MASKS = 'masks.safetensors'
CONFIG = 'config.json'
GENERATION = 'generation_config.json'
FORMATS = {'dense': WEIGHTS, 'compact': COMPACT}
"""File name of the weights, by format."""

DTYPES = ('float32', 'bfloat16', 'float16')
"""Dtypes in which weights are read and written."""

INDEX = '.index.json'
"""End of the name of an index of shards."""

WRITER = 'spdf_jax'
"""Entry of the metadata of a file that `write_tensors` wrote."""

_TORCH = 'pytorch_model.bin'
_MOST_TENSORS = 100_000  # A model of 10,000 layers has as many.
_VALUES, _BITS = '.values', '.bits'
_CODES = {
    'bool': 'BOOL', 'uint8': 'U8', 'float16': 'F16', 'bfloat16': 'BF16',
    'float32': 'F32',
}
"""Names of dtypes in safetensors files."""


def dtype_of(name: str) -> np.dtype:
  """Returns a dtype of weights by its name.

  Raises:
    ValueError: the name is not in `DTYPES`.
  """
  if name not in DTYPES:
    raise ValueError(f'dtype is {name!r}; use one of {", ".join(DTYPES)}.')
  return np.dtype(getattr(extras.require('ml_dtypes', 'hf'), name, name))


class StoredTensor(NamedTuple):
  """A tensor of a file that is not loaded yet."""

  path: pathlib.Path
  """Path of the file."""

  read: Callable[[], np.ndarray]
  """Reads the array: of safetensors in the dtype of the file, of torch widened
  to float32. Raises ValueError if NumPy lacks the dtype."""


def find_weights(directory: pathlib.Path) -> pathlib.Path:
  """Returns the path of the weights in a directory.

  Args:
    directory: Directory with `model.compact.safetensors`, `model.safetensors`,
      `pytorch_model.bin`, or the index of shards of one of the latter two.

  Returns:
    The first of these files that exists.

  Raises:
    ValueError: there are no such files.
  """
  for name in (COMPACT, WEIGHTS, WEIGHTS + INDEX, _TORCH, _TORCH + INDEX):
    if (directory / name).is_file():  # A pipe would block its reader.
      return directory / name
  raise ValueError(
      f'{directory} has no weights; it must hold {WEIGHTS}, {COMPACT} or '
      f'{_TORCH}, or shards with {WEIGHTS + INDEX} or {_TORCH + INDEX}.'
  )


def open_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
  """Opens a file of tensors, or the shards of an index.

  Of safetensors only the header is read, so that names can be checked before
  any tensor is loaded.

  Args:
    path: Path of a `.safetensors` or `.bin` file, or of an index.

  Returns:
    The tensors by name.

  Raises:
    ValueError: a file is missing or damaged.
  """
  if path.name.endswith(INDEX):
    return _open_shards(path)
  if path.suffix == '.bin':
    return {
        name: StoredTensor(path, functools.partial(_widened, x))
        for name, x in _open_torch(path).items()
    }
  file = open_safetensors(path)
  names = file.keys()
  if len(names) > _MOST_TENSORS:
    raise ValueError(
        f'{path} holds {len(names):,} tensors, and models that can be read '
        f'have at most {_MOST_TENSORS:,}; fetch or export it again.'
    )
  read = functools.partial(_read_tensor, file, path)
  return {
      name: StoredTensor(path, functools.partial(read, name)) for name in names
  }


def open_safetensors(path: pathlib.Path) -> Any:
  """Opens a safetensors file with `safetensors.safe_open`.

  Raises:
    ValueError: the file cannot be read.
    ImportError: safetensors is not installed.
  """
  extras.require('ml_dtypes', 'hf')  # Registers bfloat16 with NumPy.
  safetensors = extras.require('safetensors', 'hf')
  with files.reading(path, 'fetch or export it again.'):
    return safetensors.safe_open(path, framework='np')


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads all tensors of a file or index.

  Args:
    path: Argument of `open_tensors`.

  Returns:
    Arrays by name.

  Raises:
    ValueError: a file is missing or damaged.
  """
  return {name: x.read() for name, x in open_tensors(path).items()}


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes a safetensors file that transformers recognizes.

  Equal tensors give equal files, with the permissions of the umask. The library
  safetensors orders the metadata at random and sets permissions 0600.

  Args:
    path: Path of the file, which does not exist.
    tensors: Arrays by name.

  References:
    `safetensors, format <https://github.com/huggingface/safetensors#format>`_
  """
  # transformers rejects a file without the format 'pt'.
  header: dict[str, Any] = {
      '__metadata__': {'format': 'pt', 'writer': WRITER}
  }
  end = 0
  # Wide dtypes come first, so that every tensor is aligned.
  order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
  for name in order:
    x, start = tensors[name], end
    end += x.nbytes
    header[name] = dict(
        dtype=_CODES[x.dtype.name], shape=x.shape, data_offsets=[start, end]
    )
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'xb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for name in order:
      file.write(tensors[name].tobytes())


def pack_tensors(
    tensors: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Replaces tensors with a mask by their kept values and the bits of the mask.

  Args:
    tensors: Arrays by name.
    masks: Boolean arrays of the same shapes, for some of the names.

  Returns:
    Arrays of the file, by name.

  Example:
    >>> packed = pack_tensors({'w': np.array([[3, 0], [0, 4]])},
    ...                       {'w': np.array([[True, False], [False, True]])})
    >>> packed['w.values'].tolist(), packed['w.bits'].tolist()
    ([3, 4], [[1], [2]])
  """
  packed = {k: x for k, x in tensors.items() if k not in masks}
  for name, mask in masks.items():
    packed[name + _VALUES] = tensors[name][mask]
    packed[name + _BITS] = np.asarray(packing.pack_mask(mask).bits)
  return packed


def names_of(packed: Iterable[str]) -> set[str]:
  """Returns the names of the tensors, given those in the file.

  Example:
    >>> sorted(names_of({'w.values', 'w.bits', 'b'}))
    ['b', 'w']
  """
  return {
      name.removesuffix(_VALUES).removesuffix(_BITS) for name in packed
  }


def unpack_tensors(
    packed: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Inverts `pack_tensors`; pruned weights are zero.

  Args:
    packed: Arrays by name.
    shapes: Shapes of the tensors, by name.

  Returns:
    Tensors and masks, each by name.

  Raises:
    ValueError: bits or values are missing, their sizes do not fit, or a
      tensor is also stored whole.

  Example:
    >>> packed = {'w.values': np.array([3, 4]),
    ...           'w.bits': np.array([[1], [2]], np.uint8)}
    >>> unpack_tensors(packed, {'w': (2, 2)})[0]['w'].tolist()
    [[3, 0], [0, 4]]
  """
  tensors = {
      k: x for k, x in packed.items() if not k.endswith((_VALUES, _BITS))
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
  """Returns the names in a file of a dense tensor, and of its packed parts.

  Example:
    >>> parts_of('w')
    ('w', 'w.values', 'w.bits')
  """
  return name, name + _VALUES, name + _BITS


def list_tensor(
    name: str,
    packed: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    *,
    transposed: bool,
    dtype: Any = None,
) -> listed_matrix.ListedMatrix:
  """Lists the kept weights of a matrix.

  Args:
    name: Name of the tensor.
    packed: Arrays by name, with the values and the bits of the tensor.
    shape: Shape of the tensor, (in, out).
    transposed: Whether the shape is (out, in) instead.
    dtype: Dtype of the kept weights; `None`: that of the file, and float32 for
      float16.

  Returns:
    The listed matrix [in, out].

  Raises:
    ValueError: the bits or values are missing, or their sizes do not fit.
    TypeError: the dtype is not supported.

  Example:
    >>> packed = {'w.values': np.ones(2, np.float32),
    ...           'w.bits': np.array([[1], [2]], np.uint8)}
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
  return listed_matrix.list_values(
      values if dtype is None else values.astype(dtype),
      indices, mask.sum(axis=1, dtype=np.int64), len(inputs),
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object from a file.

  Raises:
    ValueError: the file is missing or damaged.
  """
  try:
    return files.read_object(path, 'fetch or export it again.')
  except FileNotFoundError as error:
    raise ValueError(
        f'{path.parent} has no {path.name}; give the directory of a model that '
        'transformers or spdf_jax saved.'
    ) from error


def _read_tensor(file: Any, path: pathlib.Path, name: str) -> np.ndarray:
  with files.reading(f'{path}: {name!r}', f'convert it to {DTYPES[0]}.'):
    return file.get_tensor(name)


def _open_shards(index: pathlib.Path) -> dict[str, StoredTensor]:
  with files.reading(index, 'fetch it again.'):
    names = sorted(set(read_json(index)['weight_map'].values()))
    paths = [pathlib.PurePath(name) for name in names]
  stored: dict[str, StoredTensor] = {}
  for name, plain in zip(names, paths):
    path = index.parent / name
    is_plain = plain.name == name and not name.endswith(INDEX)
    if not is_plain or not os.path.isfile(path):
      raise ValueError(
          f'{index} names the shard {name!r}, but there is no such file in its '
          'folder; fetch all shards.'
      )
    stored.update(open_tensors(path))
  return stored


def _open_torch(path: pathlib.Path) -> dict[str, Any]:
  """Opens the tensors of a file of `torch.save`, no larger than the file."""
  torch = extras.require('torch', None)
  is_zip = zipfile.is_zipfile(path)
  if is_zip:
    with zipfile.ZipFile(path) as file:
      if any(x.compress_type != zipfile.ZIP_STORED for x in file.infolist()):
        raise ValueError(
            f'{path} is compressed, which torch.save does not do; fetch it '
            'again.'
        )
  # Damage, or objects besides tensors.
  with files.reading(path, 'convert it to safetensors with transformers.'):
    tensors = torch.load(
        path, map_location='cpu', weights_only=True, mmap=is_zip
    )
    large = [
        name for name, x in tensors.items()
        if x.numel() * x.element_size() > x.untyped_storage().nbytes()
    ]
  if large:
    raise ValueError(
        f'{path} stores fewer elements of {large[0]!r} than the tensor has; '
        'convert it to safetensors with transformers.'
    )
  return tensors


def _widened(tensor: Any) -> np.ndarray:
  # Widened by torch, which cannot convert its bfloat16 to NumPy.
  return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _values_and_mask(
    name: str, packed: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the kept values and the mask of a tensor, if they fit."""
  values, bits = packed.get(name + _VALUES), packed.get(name + _BITS)
  if values is not None and bits is not None and (
      bits.dtype == np.uint8 and bits.shape == (*shape[:-1], -(-shape[-1] // 8))
  ):
    mask = np.asarray(
        packing.unpack_mask(packing.PackedMask(bits, shape[-1]))
    )
    if values.shape == (mask.sum(),):
      return values, mask
  raise ValueError(
      f'{name + _BITS!r} or {name + _VALUES!r} is missing, or they do not fit '
      f'one another or the shape {shape}; export the model again.'
  )
