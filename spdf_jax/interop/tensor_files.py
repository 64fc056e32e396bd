"""Files of tensors: one, or shards with an index; safetensors or torch's."""

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
"""Where the weights are, by format."""

DTYPES = ('float32', 'bfloat16', 'float16')
"""Types that weights are read from and written in."""

_TORCH = 'pytorch_model.bin'
_WRITER = 'spdf_jax'
_OURS = frozenset({CONFIG, MASKS, *FORMATS.values()})


def dtype_of(name: str) -> np.dtype:
  """Returns a type of weights by its name.

  Raises:
    ValueError: it is no type of weights.
  """
  if name not in DTYPES:
    raise ValueError(f'dtype is {name!r}; use one of {", ".join(DTYPES)}.')
  return np.dtype(getattr(require('ml_dtypes', 'hf'), name, name))


def require_unlisted(module: str) -> types.ModuleType:
  """Imports a library that is too heavy for any of our extras.

  Raises:
    ImportError: it is not installed.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ImportError(
        f'{module} is not installed, and no extra of spdf_jax installs it; use '
        f'`pip install {module}`.'
    ) from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    ValueError: it is missing or damaged.
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
        f'{path} is no JSON ({error}); fetch or export it again.'
    ) from error
  if not isinstance(found, dict):
    raise ValueError(f'{path} holds no JSON object; fetch or export it again.')
  return found


def read_weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads all weights of a directory, whichever files they are in.

  Args:
    directory: With `model.safetensors`, or `pytorch_model.bin`, or shards of
      one of them and their index.

  Returns:
    Arrays by name, of the types in the files.

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
    path: Of the file.

  Returns:
    Arrays by name.

  Raises:
    ValueError: it is damaged.
  """
  with _opened(path) as file:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes a safetensors file that transformers and `check_ours` know.

  Args:
    path: Of the file.
    tensors: Arrays by name.
  """
  require('ml_dtypes', 'hf')
  # transformers refuses a file that does not say so.
  metadata = {'format': 'pt', 'writer': _WRITER}
  # A transposed view would be written in the wrong order, silently.
  contiguous = {k: np.ascontiguousarray(x) for k, x in tensors.items()}
  require('safetensors.numpy', 'hf').save_file(contiguous, path, metadata)


def check_ours(directory: pathlib.Path) -> None:
  """Raises ValueError where a directory holds a model that is not our own.

  Args:
    directory: To be written to; may be missing.

  Raises:
    ValueError: it has a model that `write_tensors` did not write.
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
  """Moves an exported model to its place, instead of one exported before.

  The config goes first and comes last: without it nothing reads the others.

  Args:
    directory: Where the model goes.
    source: A directory on the same disk, with all files of the model.
  """
  (directory / CONFIG).unlink(missing_ok=True)
  for name in sorted(_OURS - {CONFIG}):
    (directory / name).unlink(missing_ok=True)
    if (source / name).exists():
      os.replace(source / name, directory / name)
  os.replace(source / CONFIG, directory / CONFIG)


def _opened(path: pathlib.Path) -> Any:
  require('ml_dtypes', 'hf')  # With it numpy knows what bfloat16 is.
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
  except Exception as error:  # Any damage, or more than weights.
    raise ValueError(
        f'{path} cannot be read as weights only ({type(error).__name__}); '
        'convert it to safetensors with transformers.'
    ) from error
  # Widened there: numpy does not know torch's bfloat16.
  return {
      name: (x.float() if x.is_floating_point() else x).numpy()
      for name, x in tensors.items()
  }
