"""The native kernels agree with naive sums, and stay within their buffers."""

import pathlib
import subprocess

import pytest

from spdf_jax.accelerator.native import library

pytestmark = pytest.mark.slow

FLAGS = (
    '-fsanitize=address,undefined', '-fno-sanitize-recover=all', '-g', '-O1',
)
DRIVER = pathlib.Path(__file__).parent / 'kernels_test.cc'
EMULATION = [
    '-DSPDF_TILES_PERMITTED=1',
    f'-DSPDF_EMULATED_TILES="{DRIVER.with_name("emulated_tiles.h")}"',
]
SECONDS = 600  # Timeout of a process on a busy machine.


def run(command):
  return subprocess.run(
      command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      timeout=SECONDS, check=False,
  )


def check(command):
  result = run(command)
  assert result.returncode == 0, result.stdout[-4000:]
  return result.stdout


def find_compiler(folder):
  """Returns a compiler with sanitizers that work here, or skips."""
  try:
    compiler = library.find_compiler()
  except library.Unavailable as error:
    pytest.skip(str(error))
  source, program = folder / 'nothing.cc', folder / 'nothing'
  source.write_text('int main() {}\n')
  for command in (
      [compiler, *FLAGS, str(source), '-o', str(program)], [str(program)],
  ):
    result = run(command)
    if result.returncode:
      pytest.skip(f'{compiler} has no sanitizers: {result.stdout.strip()}')
  return compiler


def test_kernels_agree_with_naive_sums_under_sanitizers(tmp_path):
  compiler = find_compiler(tmp_path)
  names = tuple(library.buildable())
  objects = [tmp_path / f'{name}.o' for name in names]
  for name, made in zip(names, objects):
    check([
        *library.kernels_command(compiler, name, made), *FLAGS, *EMULATION,
    ])
  driver = tmp_path / 'kernels_test'
  check([
      compiler, '-std=c++17', *FLAGS, *EMULATION, '-pthread',
      f'-I{library.SOURCES}', str(DRIVER), *map(str, objects),
      '-o', str(driver),
  ])
  assert 'portable' in check([str(driver)])
