"""Code that runs in a process of its own."""

import os
import subprocess
import sys


def run_python(code, *options, **variables):
  """Runs code that may import what this process can; returns what it prints.

  Args:
    code: Python code.
    *options: Options of the interpreter.
    **variables: Environment variables beside those of this process.
  """
  child = subprocess.run(
      [sys.executable, *options, '-c', code],
      env=os.environ | variables | {
          # The child imports the same package as this process.
          'PYTHONPATH': os.pathsep.join(path for path in sys.path if path),
      },
      capture_output=True, text=True, timeout=600, check=False,
  )
  assert child.returncode == 0, child.stderr[-3000:]
  return child.stdout
