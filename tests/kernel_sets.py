"""Runs of tests with one set of native kernels, in a process of their own."""

import os
import pathlib
import subprocess
import sys

import pytest


def run_with_kernels(name, threads, code):
  """Runs code that prints `library.kernels()`, and then 'all right'.

  Args:
    name: Set of kernels; the test is skipped if the processor cannot run it.
    threads: Size of XLA's thread pool.
    code: Python code, which may import test modules.
  """
  child = subprocess.run(
      [sys.executable, '-c', code],
      cwd=pathlib.Path(__file__).parent,
      env=os.environ | {
          'SPDF_NATIVE_KERNELS': name, 'NPROC': str(threads),
          # The child imports the same package as this process.
          'PYTHONPATH': os.pathsep.join(path for path in sys.path if path),
      },
      capture_output=True, text=True, timeout=300, check=False,
  )
  assert child.returncode == 0, child.stderr
  if f'kernels {name}' not in child.stdout:
    pytest.skip(f'this processor does not run {name}')
  assert 'all right' in child.stdout
