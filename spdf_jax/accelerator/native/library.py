# SPDX-License-Identifier: Apache-2.0
"""The shared library of the kernels: built on demand, cached, loaded once."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import files

TARGETS = (
    'spdf_sparse_matmul',
    'spdf_sparse_matmul_backward',
    'spdf_sampled_matmul',
    'spdf_packed_matmul',
    'spdf_packed_backward',
    'spdf_packed_gradient',
    'spdf_listed_matmul',
)
"""Names of the functions registered with XLA."""

DTYPES = ('float32', 'bfloat16')
"""Names of the dtypes with kernels."""

# Functions that return the name of the kernels for this processor, or of its
# matrix unit.
_NAMES = ('spdf_kernels', 'spdf_bfloat16_kernels', 'spdf_matrix_unit')
_DAY = 24 * 60 * 60  # Seconds.

SOURCES = pathlib.Path(__file__).parent / 'csrc'
"""Folder of the C++ sources."""

_COMMON = ('-std=c++17', '-O3', '-fPIC', '-ffp-contract=fast')
_AVX512 = ('f', 'bw', 'dq', 'vl')
# Compiler flags of the float32 kernels, by the name of an instruction set.
KERNELS = {
    'portable': (),
    'avx2': ('-mavx2', '-mfma'),
    'avx512': (
        *(f'-mavx512{part}' for part in _AVX512),
        '-mprefer-vector-width=512',
    ),
}
# Compiler flags of the bfloat16 kernels, which include those of AVX-512; a
# compiler may not support them.
_VECTORS = (*KERNELS['avx512'], '-mavx512bf16')
# Those of block masks, by the header that multiplies blocks, and the kernels
# of other masks.
_BLOCKS = {
    'avx2blocks': ('blocks_float32.h', 'avx2'),
    'avx512blocks': ('blocks_float32.h', 'avx512'),
    'avx512bf16blocks': ('blocks_vector.h', 'avx512bf16'),
    'amx': ('blocks_amx.h', 'avx512bf16'),
}
_OPTIONAL = {
    'avx512bf16': _VECTORS,
    'avx512bf16blocks': _VECTORS,
    'amx': (*_VECTORS, '-mamx-tile', '-mamx-bf16'),
}


class Unavailable(RuntimeError):
  """Error when native kernels cannot be used; the message has the reason."""


def is_available(dtype: Any = 'float32') -> bool:
  """Returns whether the native kernels are available, after building them.

  The first call of a process builds and loads them. If that fails, it logs the
  reason once, and the lowering `'native'` falls back to XLA's dense matmul. The
  environment variable `SPDF_NATIVE`, by default `1`, changes this: `0` disables
  the kernels, `require` raises an error if they are not available.

  Args:
    dtype: Dtype of the operands: float32, or bfloat16, which needs a processor
      with AVX-512 BF16 and a compiler that supports it. There are no kernels
      for other dtypes.

  Returns:
    Whether the kernels of the dtype are loaded.

  Raises:
    Unavailable: `SPDF_NATIVE` is `require`, and the kernels for float32 or
      bfloat16 are not available.
    ValueError: `SPDF_NATIVE` is not 0, 1 or `require`.

  Example:
    >>> is_available('float16')
    False
  """
  dtype = jnp.dtype(dtype).name
  if dtype not in DTYPES:
    return False
  setting = os.environ.get('SPDF_NATIVE', '1')
  if setting not in ('0', '1', 'require'):
    raise ValueError(
        f'environment variable SPDF_NATIVE is {setting!r}; set it to 0, 1 or '
        'require.'
    )
  if setting == '0':
    return False
  try:
    kernels(dtype)
    return True
  except Unavailable as error:
    if setting == 'require':
      raise
    _warn_once(str(error))
    return False


@functools.cache
def load() -> ctypes.CDLL:
  """Loads the library and registers its functions with XLA.

  Returns:
    The library.

  Raises:
    Unavailable: the library cannot be built or loaded.
  """
  reason = _load_or_reason()
  if isinstance(reason, str):
    raise Unavailable(reason)
  return reason


@functools.cache
def _load_or_reason() -> ctypes.CDLL | str:
  requested = os.environ.get('SPDF_NATIVE_KERNELS')
  try:
    if requested is not None and requested not in KERNELS:
      raise Unavailable(
          f'environment variable SPDF_NATIVE_KERNELS is {requested!r}; unset '
          f'it, or set it to one of {", ".join(KERNELS)}.'
      )
    path = build()
  except (Unavailable, OSError) as error:
    return f'native kernels are not used: {error}'
  try:
    library = ctypes.CDLL(str(path))
    targets = {name: getattr(library, name) for name in TARGETS}
    for name in _NAMES:
      getattr(library, name).restype = ctypes.c_char_p
  except (OSError, AttributeError) as error:
    return (
        f'native kernels are not used: {error}; delete {path.parent}, so that '
        'they are built again.'
    )
  for name, function in targets.items():
    jax.ffi.register_ffi_target(
        name, jax.ffi.pycapsule(function), platform='cpu'
    )
  return library


@functools.cache
def _warn_once(reason: str) -> None:
  logging.getLogger(__name__).warning('%s', reason)


def kernels(dtype: Any = 'float32') -> str:
  """Returns the name of the native kernels that this processor uses.

  The first call of a process builds and loads the kernels.

  Args:
    dtype: Dtype of the operands, float32 or bfloat16.

  Returns:
    The name, an instruction set: `'avx512'`, `'avx2'` or `'portable'` for
    float32, `'avx512bf16'` for bfloat16.

  Raises:
    Unavailable: there are no kernels for the dtype or the processor, or they
      cannot be built or loaded.
  """
  dtype = jnp.dtype(dtype).name
  if dtype not in DTYPES:
    raise Unavailable(
        f'there are no native kernels for {dtype}; use one of '
        f'{", ".join(DTYPES)}.'
    )
  if dtype == 'float32':
    return load().spdf_kernels().decode()
  name = load().spdf_bfloat16_kernels()
  if name is None:
    raise Unavailable(
        'native kernels of bfloat16 are not used: they need a processor with '
        'AVX-512 BF16, a compiler that supports it (g++ 10 or later), and '
        'SPDF_NATIVE_KERNELS unset or avx512.'
    )
  return name.decode()


def has_matrix_unit() -> bool:
  """Returns whether products with block masks use a matrix unit.

  Matrix units multiply bfloat16, by masks of whole 32 x 32 blocks: Intel's AMX.
  If the processor has one that cannot be used, this function logs the reason,
  once, and vector kernels are used. The first call of a process builds and
  loads the kernels.

  Returns:
    Whether there is one that can be used.

  Example:
    >>> has_matrix_unit() <= is_available('bfloat16')
    True
  """
  if not is_available('bfloat16'):
    return False
  unit = load().spdf_matrix_unit().decode()
  if unit not in ('', 'amx'):
    _warn_once(unit)
  return unit == 'amx'


def build() -> pathlib.Path:
  """Builds the library, unless it is in the cache.

  The cache is `$XDG_CACHE_HOME/spdf_jax` (by default `~/.cache/spdf_jax`), with
  a folder per hash of sources, flags, compiler and jaxlib. Folder and library
  must be private, see `check_private`. A library that does not match its
  checksum is rebuilt. Several processes may build concurrently.

  Returns:
    Path of the library.

  Raises:
    Unavailable: there is no compiler, compilation fails, or the cache cannot be
      written or is not private.
  """
  if platform.system() != 'Linux':
    raise Unavailable(
        f'the kernels need Linux, but this system is {platform.system()}; only '
        "XLA's dense products can be used here."
    )
  compiler = find_compiler()
  folder = _cache() / _key(compiler)
  path, checksum = folder / 'libspdf.so', folder / 'libspdf.so.sha256'
  try:
    files.create_private(folder)
    _remove_leftovers(folder)
    if _is_intact(path, checksum):
      files.check_private(path)
      return path
    with tempfile.TemporaryDirectory(dir=folder) as work:
      made = pathlib.Path(work) / path.name
      _compile(compiler, pathlib.Path(work), made)
      made.chmod(0o700)
      digest = pathlib.Path(work) / checksum.name
      digest.write_text(_digest(made))
      # Replaces the checksum first, because a process that sees the new library
      # with an old checksum would rebuild it. Replacing instead of overwriting
      # keeps the file of a process that has the old library open.
      os.replace(digest, checksum)
      os.replace(made, path)
  except OSError as error:
    raise Unavailable(
        f'{folder} cannot be written ({error}); set XDG_CACHE_HOME to a '
        'writable folder.'
    ) from error
  except ValueError as error:
    raise Unavailable(str(error)) from error
  return path


def _remove_leftovers(folder: pathlib.Path) -> None:
  """Removes the working folders of builds that were killed over a day ago."""
  for work in folder.iterdir():
    # Another process may remove it first.
    with contextlib.suppress(FileNotFoundError):
      if work.is_dir() and time.time() - work.stat().st_mtime > _DAY:
        shutil.rmtree(work, ignore_errors=True)


def find_compiler() -> str:
  """Returns the path of a C++ compiler, or raises Unavailable."""
  requested = os.environ.get('CXX')
  names = (requested,) if requested else ('g++', 'clang++', 'c++')
  for name in names:
    path = shutil.which(name)
    if path:
      return path
  raise Unavailable(
      f'there is no C++ compiler ({", ".join(names)}) on PATH; install one, or '
      'set the environment variable CXX to its path.'
  )


def _cache() -> pathlib.Path:
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return pathlib.Path(home) / 'spdf_jax'


def _key(compiler: str) -> str:
  """Returns a hash of everything that determines a build."""
  version = subprocess.run(
      [compiler, '--version'], capture_output=True, text=True, check=False
  ).stdout
  jaxlib = importlib.metadata.version('jaxlib')
  parts = [compiler, version, jaxlib, platform.machine()]
  parts += [' '.join((*_COMMON, *flags)) for flags in buildable().values()]
  for source in sorted(SOURCES.iterdir()):
    parts += [source.name, source.read_text()]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]


def buildable() -> dict[str, tuple[str, ...]]:
  """Returns compiler flags of kernels for this machine, by their name."""
  if platform.machine() in ('x86_64', 'AMD64'):
    of_blocks = {
        name: KERNELS[others] for name, (_, others) in _BLOCKS.items()
        if others in KERNELS
    }
    return KERNELS | of_blocks | _OPTIONAL
  return {'portable': KERNELS['portable']}


def kernels_command(
    compiler: str, name: str, made: pathlib.Path
) -> list[str]:
  """Returns the command that compiles the kernels with the given name."""
  if name in _BLOCKS:
    header, others = _BLOCKS[name]
    source, simd = 'blocks.cc', others
    of_source = [
        f'-DSPDF_PRODUCTS="{header}"', f'-DSPDF_OTHERS=k{others.capitalize()}'
    ]
  else:
    source, simd = 'kernels.cc', name
    element = 'bfloat16' if name in _OPTIONAL else 'float32'
    of_source = [f'-DSPDF_ELEMENT="{element}.h"']
  return [
      compiler, *_COMMON, *buildable()[name],
      f'-DSPDF_KERNELS=k{name.capitalize()}', f'-DSPDF_NAME="{simd}"',
      f'-DSPDF_SIMD="simd_{simd}.h"', *of_source, '-c', str(SOURCES / source),
      '-o', str(made),
  ]


def _compile(compiler: str, work: pathlib.Path, made: pathlib.Path) -> None:
  objects = [work / 'handlers.o']
  _run([
      compiler, *_COMMON, f'-I{jax.ffi.include_dir()}', '-c',
      str(SOURCES / 'handlers.cc'), '-o', str(objects[0]),
  ])
  for name in buildable():
    made_of_name = work / f'{name}.o'
    command = kernels_command(compiler, name, made_of_name)
    try:
      _run(command)
    except Unavailable as error:
      if name not in _OPTIONAL or not _is_refused(command, error):
        raise
    else:
      objects.append(made_of_name)
  _run([compiler, '-shared', *map(str, objects), '-o', str(made)])


def _is_refused(command: list[str], error: Unavailable) -> bool:
  """Returns whether compiler or assembler do not support flags or source.

  Otherwise it failed for another reason, such as too little memory, and the
  next start tries again.
  """
  if 'Assembler messages' in str(error):
    return True
  check = [command[0], '-fsyntax-only', *command[1:]]
  return subprocess.run(check, capture_output=True, check=False).returncode != 0


def _run(command: list[str]) -> None:
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  if result.returncode:
    lines = result.stderr.splitlines()
    is_error = lambda line: 'error' in line or 'Assembler messages' in line
    errors = list(filter(is_error, lines)) or lines[:1]
    reason = errors[0] if errors else f'exit status {result.returncode}'
    raise Unavailable(
        f'compiler {command[0]} failed: {reason}; update it, or set the '
        'environment variable CXX to another one.'
    )


def _is_intact(path: pathlib.Path, checksum: pathlib.Path) -> bool:
  if not (path.exists() and checksum.exists()):
    return False
  return checksum.read_bytes() == _digest(path).encode()


def _digest(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()
