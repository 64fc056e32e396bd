# SPDX-License-Identifier: Apache-2.0
"""Tensor files of safetensors or torch, also as shards with an index."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import importlib
import json
import os
import pathlib
import types
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.extras import require
from spdf_jax.interop.json_fields import read_json

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
  return np.dtype(getattr(require('ml_dtypes', 'hf'), name, name))


def require_unlisted(module: str) -> types.ModuleType:
  """Imports a library that no extra installs, because of its size.

  Raises:
    ImportError: the library is not installed.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ImportError(
        f'{module} is not installed, and no extra of spdf_jax installs it; use '
        f'`pip install {module}`.'
    ) from error


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
    if (directory / name).exists():
      return directory / name
  raise ValueError(
      f'{directory} has no weights; it must hold {WEIGHTS}, {COMPACT} or '
      f'{_TORCH}, or shards with an index.'
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
        name: StoredTensor(path, functools.partial(np.asarray, x))
        for name, x in _read_torch(path).items()
    }
  file = open_safetensors(path)
  read = functools.partial(_read_tensor, file, path)
  return {
      name: StoredTensor(path, functools.partial(read, name))
      for name in file.keys()  # noqa: SIM118
  }


def open_safetensors(path: pathlib.Path) -> Any:
  """Opens a safetensors file with `safetensors.safe_open`.

  Raises:
    ValueError: the file cannot be read.
    ImportError: safetensors is not installed.
  """
  require('ml_dtypes', 'hf')  # Registers bfloat16 with NumPy.
  safetensors = require('safetensors', 'hf')
  try:
    return safetensors.safe_open(path, framework='np')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
        f'{path} cannot be read as safetensors ({error}); fetch or export it '
        'again.'
    ) from error


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
    path: Path of the file.
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
  with open(path, 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for name in order:
      file.write(tensors[name].tobytes())


def _read_tensor(file: Any, path: pathlib.Path, name: str) -> np.ndarray:
  SafetensorError = require('safetensors', 'hf').SafetensorError
  try:
    return file.get_tensor(name)
  except (AttributeError, SafetensorError) as error:
    raise ValueError(
        f'{path} has {name!r} in a dtype that NumPy lacks ({error}); only '
        f'{", ".join(DTYPES)} can be read.'
    ) from error


def _open_shards(index: pathlib.Path) -> dict[str, StoredTensor]:
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not all(
      isinstance(name, str) for name in weight_map.values()
  ):
    raise ValueError(
        f'{index} has no weight_map from names of tensors to names of files; '
        'fetch it again.'
    )
  tensors = {}
  for name in sorted(set(weight_map.values())):
    path = index.parent / name
    is_plain = pathlib.PurePath(name).name == name and not name.endswith(INDEX)
    if not is_plain or not os.path.isfile(path):
      raise ValueError(
          f'{index} names the shard {name!r}, which is not beside it as a file '
          'of tensors; fetch all shards.'
      )
    tensors.update(open_tensors(path))
  return tensors


def _read_torch(path: pathlib.Path) -> dict[str, np.ndarray]:
  torch = require_unlisted('torch')
  try:
    tensors = torch.load(path, map_location='cpu', weights_only=True)
    # Widened by torch, which cannot convert its bfloat16 to NumPy.
    return {
        name: (x.float() if x.is_floating_point() else x).numpy()
        for name, x in tensors.items()
    }
  except Exception as error:  # Damage, or objects besides tensors.
    raise ValueError(
        f'{path} cannot be read as weights only ({type(error).__name__}); '
        'convert it to safetensors with transformers.'
    ) from error
