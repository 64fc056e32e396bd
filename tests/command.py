"""Runs a command in this process: a child's imports take longer than most."""

import contextlib
import importlib
import importlib.util
import io
import logging
import pathlib
import sys
from typing import NamedTuple
from unittest import mock

from absl import app
from absl import flags
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parents[1]


class Finished(NamedTuple):
  """Exit status of a command, what it printed and what it logged."""

  status: int
  output: str
  log: str


def run(name, *arguments):
  """Runs `experiments.name` with these arguments; returns how it finished."""
  from experiments.launch import compilation_cache  # Only in a checkout.
  from experiments.launch import console

  # Defines the flags of the libraries that it imports once and for all.
  importlib.import_module(f'experiments.{name}')
  spec = importlib.util.spec_from_file_location(
      f'experiments.{name}', ROOT / 'experiments' / f'{name}.py'
  )
  argv = [name, *map(str, arguments)]
  output, log = io.StringIO(), io.StringIO()
  handler, library = logging.StreamHandler(log), logging.getLogger('spdf_jax')
  level = library.level
  logging.getLogger().addHandler(handler)
  library.setLevel(logging.INFO)
  try:
    with (
        flagsaver.flagsaver(), contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(log),
        mock.patch.object(sys, 'argv', argv),
        # They would change the settings of the tests that follow.
        mock.patch.object(console, 'prepare'),
        mock.patch.object(compilation_cache, 'prepare'),
    ):
      # Defines its flags anew: those of the last call have values.
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
      console.register(module.FLAGS)
      flags.FLAGS(argv)
      status = module.main(argv[:1])
  except (flags.Error, app.UsageError) as error:
    return Finished(1, output.getvalue(), str(error))
  finally:
    library.setLevel(level)
    logging.getLogger().removeHandler(handler)
  return Finished(status, output.getvalue(), log.getvalue())
