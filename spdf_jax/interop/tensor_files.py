"""Tensor files of safetensors or torch, also as shards with an index."""

from collections.abc import Mapping
import importlib
import json
import os
import pathlib
import types
from typing import Any

import numpy as np

from spdf_jax.extras import require

WEIGHTS = 'model.safetensors'
COMPACT = 'model.compact.safetensors'
MASKS = 'masks.safetensors'
CONFIG = 'config.json'
FORMATS = {'dense': WEIGHTS, 'compact': COMPACT}
"""File name of the weights, by format."""

DTYPES = ('float32', 'bfloat16', 'float16')
"""Dtypes in which weights are read and written."""

_TORCH = 'pytorch_model.bin'
_WRITER = 'spdf_jax'
_OURS = frozenset({CONFIG, MASKS, *FORMATS.values()})


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


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object from a file.

  Raises:
    ValueError: the file is missing or damaged.
  """
  try:
    found = json.loads(path.read_text('utf-8'))
  except FileNotFoundError as error:
    raise ValueError(
        f'{path.parent} has no {path.name}; give the directory of a model that '
        'transformers or spdf_jax saved.'
    ) from error
  except ValueError as error:
    raise ValueError(
        f'{path} is not JSON ({error}); fetch or export it again.'
    ) from error
  if not isinstance(found, dict):
    raise ValueError(f'{path} holds no JSON object; fetch or export it again.')
  return found


def read_weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads all weights of a directory.

  Args:
    directory: Directory with `model.safetensors`, `pytorch_model.bin`, or
      shards of one of them and their index.

  Returns:
    Arrays by name; those of safetensors have the dtypes of the file, and those
    of torch are widened to float32.

  Raises:
    ValueError: there are no such files, or one is damaged.
  """
  for name, read in ((WEIGHTS, read_tensors), (_TORCH, _read_torch)):
    if (directory / name).exists():
      return read(directory / name)
    index = directory / f'{name}.index.json'
    if index.exists():
      return _read_shards(index, read)
  raise ValueError(
      f'{directory} has no weights; it must hold {WEIGHTS}, {COMPACT} or '
      f'{_TORCH}, or shards with an index.'
  )


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads a safetensors file.

  Args:
    path: Path of the file.

  Returns:
    Arrays by name.

  Raises:
    ValueError: the file is damaged.
  """
  with _opened(path) as file:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes a safetensors file that transformers and `check_ours` recognize.

  Args:
    path: Path of the file.
    tensors: Arrays by name.
  """
  require('ml_dtypes', 'hf')
  # transformers rejects a file without the format 'pt'.
  metadata = {'format': 'pt', 'writer': _WRITER}
  # safetensors ignores strides: it would store a transposed view untransposed.
  contiguous = {k: np.ascontiguousarray(x) for k, x in tensors.items()}
  require('safetensors.numpy', 'hf').save_file(contiguous, path, metadata)


def check_ours(directory: pathlib.Path) -> None:
  """Raises ValueError if a directory holds a model that we did not export.

  Args:
    directory: Directory of the next export; may be missing.

  Raises:
    ValueError: the directory has a model that `write_tensors` did not write,
      or is a file.
  """
  if not directory.is_dir():
    if directory.exists():
      raise ValueError(f'{directory} is a file; give a directory.')
    return
  names = {path.name for path in directory.iterdir()}
  kinds = ('.safetensors', '.bin', '.index.json')
  models = {name for name in names if name.endswith(kinds)}
  foreign = sorted(
      name for name in models
      if name not in _OURS or not _is_ours(directory / name)
  )
  if not models and CONFIG in names:
    foreign = [CONFIG]
  if foreign:
    raise ValueError(
        f'{directory} holds {foreign[0]}, which spdf_jax did not export; give '
        'another directory, or empty this one.'
    )


def replace_files(directory: pathlib.Path, source: pathlib.Path) -> None:
  """Moves an exported model to its place, replacing an earlier export.

  The config is deleted first and moved last, since a directory without it is
  not read as a model.

  Args:
    directory: Directory of the model.
    source: A directory on the same file system, with all files of the model.
  """
  (directory / CONFIG).unlink(missing_ok=True)
  for name in sorted(_OURS - {CONFIG}):
    (directory / name).unlink(missing_ok=True)
    if (source / name).exists():
      os.replace(source / name, directory / name)
  os.replace(source / CONFIG, directory / CONFIG)


def _opened(path: pathlib.Path) -> Any:
  require('ml_dtypes', 'hf')  # Registers bfloat16 with NumPy.
  safetensors = require('safetensors', 'hf')
  try:
    return safetensors.safe_open(path, framework='np')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
        f'{path} cannot be read as safetensors ({error}); fetch or export it '
        'again.'
    ) from error


def _is_ours(path: pathlib.Path) -> bool:
  with _opened(path) as file:
    return (file.metadata() or {}).get('writer') == _WRITER


def _read_shards(index: pathlib.Path, read: Any) -> dict[str, np.ndarray]:
  files = set(read_json(index).get('weight_map', {}).values())
  tensors = {}
  for name in sorted(files):
    path = index.parent / name
    if pathlib.PurePath(name).name != name or not path.exists():
      raise ValueError(
          f'{index} names the shard {name!r}, which is not beside it; fetch '
          'all shards.'
      )
    tensors.update(read(path))
  return tensors


def _read_torch(path: pathlib.Path) -> dict[str, np.ndarray]:
  torch = require_unlisted('torch')
  try:
    tensors = torch.load(path, map_location='cpu', weights_only=True)
  except Exception as error:  # Damage, or pickled objects besides weights.
    raise ValueError(
        f'{path} cannot be read as weights only ({type(error).__name__}); '
        'convert it to safetensors with transformers.'
    ) from error
  # Widened by torch, which cannot convert its bfloat16 to NumPy.
  return {
      name: (x.float() if x.is_floating_point() else x).numpy()
      for name, x in tensors.items()
  }
