"""The kernels' library: built on demand, cached, loaded once."""

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
from typing import Any

import jax
import jax.numpy as jnp

TARGETS = (
    'spdf_sparse_matmul',
    'spdf_sparse_matmul_backward',
    'spdf_sampled_matmul',
    'spdf_packed_matmul',
    'spdf_packed_backward',
    'spdf_packed_gradient',
)
"""The functions that are registered with XLA."""

DTYPES = ('float32', 'bfloat16')
"""What there are kernels of."""

_SOURCES = pathlib.Path(__file__).parent / 'csrc'
_COMMON = ('-std=c++17', '-O3', '-fPIC', '-ffp-contract=fast')
_AVX512 = ('f', 'bw', 'dq', 'vl')
# Kernels of float32 by name: what the compiler may use.
KERNELS = {
    'portable': (),
    'avx2': ('-mavx2', '-mfma'),
    'avx512': (
        *(f'-mavx512{part}' for part in _AVX512),
        '-mprefer-vector-width=512',
    ),
}
# Those of bfloat16, which go with the last ones above.
_BFLOAT16 = {'avx512bf16': (*KERNELS['avx512'], '-mavx512bf16')}


class Unavailable(RuntimeError):
  """There are no native kernels here; the message says why."""


def is_available(dtype: Any = 'float32') -> bool:
  """Returns whether the native kernels work here, building them if need be.

  The first call of a process decides. Where they do not work, it logs one
  sentence that says why, and XLA's dense matmul is used. The environment
  variable `SPDF_NATIVE` decides otherwise: `0` never uses them, `require`
  raises where they do not work.

  Args:
    dtype: Of what they shall multiply. Those of bfloat16 need AVX-512 BF16 and
      a compiler that knows it; there are none of other types than these two.

  Returns:
    Whether they are loaded.

  Raises:
    Unavailable: `SPDF_NATIVE=require`, and they do not work.
    ValueError: `SPDF_NATIVE` is something else.

  Example:
    >>> is_available('float16')
    False
  """
  dtype = jnp.dtype(dtype).name
  if dtype not in DTYPES:
    return False
  wish = os.environ.get('SPDF_NATIVE', '1')
  if wish not in ('0', '1', 'require'):
    raise ValueError(f'SPDF_NATIVE is {wish!r}; set it to 0, 1 or require.')
  if wish == '0':
    return False
  try:
    kernels(dtype)
    return True
  except Unavailable as error:
    if wish == 'require':
      raise
    _say_once(str(error))
    return False


@functools.cache
def load() -> ctypes.CDLL:
  """Loads the library and registers its functions with XLA.

  Returns:
    The library.

  Raises:
    Unavailable: it cannot be built or loaded here.
  """
  reason = _load_or_reason()
  if isinstance(reason, str):
    raise Unavailable(reason)
  return reason


@functools.cache
def _load_or_reason() -> ctypes.CDLL | str:
  wished = os.environ.get('SPDF_NATIVE_KERNELS')
  try:
    if wished is not None and wished not in KERNELS:
      raise Unavailable(
          f'SPDF_NATIVE_KERNELS is {wished!r}; unset it, or set it to one of '
          f'{", ".join(KERNELS)}.'
      )
    library = ctypes.CDLL(str(build()))
  except (Unavailable, OSError) as error:
    return f'native kernels are not used: {error}'
  for name in TARGETS:
    function = getattr(library, name)
    jax.ffi.register_ffi_target(
        name, jax.ffi.pycapsule(function), platform='cpu'
    )
  for function in (library.spdf_kernels, library.spdf_bfloat16_kernels):
    function.restype = ctypes.c_char_p
  return library


@functools.cache
def _say_once(reason: str) -> None:
  logging.getLogger(__name__).warning('%s', reason)


def kernels(dtype: Any = 'float32') -> str:
  """Returns which kernels this processor runs: avx512, avx2 or portable.

  Args:
    dtype: Of what they multiply; of bfloat16 there is avx512bf16.

  Raises:
    Unavailable: there are none of it.
  """
  dtype = jnp.dtype(dtype).name
  if dtype not in DTYPES:
    raise Unavailable(f'there are no native kernels of {dtype}.')
  if dtype == 'float32':
    return load().spdf_kernels().decode()
  name = load().spdf_bfloat16_kernels()
  if name is None:
    raise Unavailable(
        'native kernels of bfloat16 are not used: they need a processor with '
        'AVX-512 BF16, a compiler that knows it (g++ 10 or later), and '
        'SPDF_NATIVE_KERNELS unset or avx512.'
    )
  return name.decode()


def build() -> pathlib.Path:
  """Builds the library, unless it is in the cache.

  It lies in `$XDG_CACHE_HOME/spdf_jax` (by default `~/.cache/spdf_jax`), under
  a name that follows from sources, compiler and jaxlib, beside its checksum: a
  file that was damaged is built anew. Several processes may build at once.

  Returns:
    Where it lies.

  Raises:
    Unavailable: there is no compiler, it fails, or nothing can be written.
  """
  if platform.system() != 'Linux':
    raise Unavailable(f'they are for Linux, this is {platform.system()}.')
  compiler = _compiler()
  folder = _cache() / _key(compiler)
  path, checksum = folder / 'libspdf.so', folder / 'libspdf.so.sha256'
  if _is_intact(path, checksum):
    return path
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
      made = pathlib.Path(work) / path.name
      _compile(compiler, pathlib.Path(work), made)
      digest = pathlib.Path(work) / checksum.name
      digest.write_text(_digest(made))
      # The library last: beside an older checksum it would look damaged, and
      # one that a process has open stays what it was.
      os.replace(digest, checksum)
      os.replace(made, path)
  except OSError as error:
    raise Unavailable(f'{folder} cannot be written: {error}.') from error
  return path


def _compiler() -> str:
  wished = os.environ.get('CXX')
  for name in (wished,) if wished else ('g++', 'clang++', 'c++'):
    path = shutil.which(name)
    if path:
      return path
  raise Unavailable(
      f'there is no C++ compiler ({wished or "g++"}) on PATH; install one.'
  )


def _cache() -> pathlib.Path:
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return pathlib.Path(home) / 'spdf_jax'


def _key(compiler: str) -> str:
  """Names everything that a build follows from."""
  version = subprocess.run(
      [compiler, '--version'], capture_output=True, text=True, check=False
  ).stdout
  jaxlib = importlib.metadata.version('jaxlib')
  parts = [compiler, version, jaxlib, platform.machine()]
  parts += [' '.join((*_COMMON, *flags)) for flags in _buildable().values()]
  for source in sorted(_SOURCES.iterdir()):
    parts += [source.name, source.read_text()]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]


def _buildable() -> dict[str, tuple[str, ...]]:
  if platform.machine() in ('x86_64', 'AMD64'):
    return KERNELS | _BFLOAT16
  return {'portable': KERNELS['portable']}


def _kernels_command(
    compiler: str, name: str, made: pathlib.Path
) -> list[str]:
  """Returns the command that compiles the kernels of a name."""
  element = 'bfloat16' if name in _BFLOAT16 else 'float32'
  return [
      compiler, *_COMMON, *_buildable()[name],
      f'-DSPDF_KERNELS=k{name.capitalize()}', f'-DSPDF_NAME="{name}"',
      f'-DSPDF_SIMD="simd_{name}.h"', f'-DSPDF_ELEMENT="{element}.h"', '-c',
      str(_SOURCES / 'kernels.cc'), '-o', str(made),
  ]


def _compile(compiler: str, work: pathlib.Path, made: pathlib.Path) -> None:
  objects = [work / 'handlers.o']
  _run([
      compiler, *_COMMON, f'-I{jax.ffi.include_dir()}', '-c',
      str(_SOURCES / 'handlers.cc'), '-o', str(objects[0]),
  ])
  for name in _buildable():
    made_of_name = work / f'{name}.o'
    try:
      _run(_kernels_command(compiler, name, made_of_name))
    except Unavailable:
      if name not in _BFLOAT16:
        raise
    else:
      objects.append(made_of_name)
  _run([compiler, '-shared', *map(str, objects), '-o', str(made)])


def _run(command: list[str]) -> None:
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  if result.returncode:
    lines = result.stderr.splitlines()
    errors = [line for line in lines if 'error' in line] or lines[:1]
    reason = errors[0] if errors else f'exit status {result.returncode}'
    raise Unavailable(f'{command[0]} failed: {reason}')


def _is_intact(path: pathlib.Path, checksum: pathlib.Path) -> bool:
  if not (path.exists() and checksum.exists()):
    return False
  return checksum.read_bytes() == _digest(path).encode()


def _digest(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()
