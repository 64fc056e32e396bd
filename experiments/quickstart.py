"""Trains, fine-tunes and compares a dense and a Variable SPDF model in minutes.

  python -m experiments.quickstart

Trains configs/quickstart.py twice from one seed and one data order, as a dense
baseline and with 75 % of the hidden weights held at zero for most of
pre-training; continues both densely, fine-tunes both densely, evaluates every
phase and writes report.md with plots. If killed, the same command continues
where it stopped.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import pathlib
import time

from absl import flags
from ml_collections import config_flags

from configs import quickstart
from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from spdf_jax import extras
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.runs import lifecycle

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
    'workdir', 'runs/quickstart', 'Folder for both runs and the report.',
    flag_values=FLAGS,
)
_CONFIG = config_flags.DEFINE_config_dict(
    'config', quickstart.get_config(),
    'Config of the sparse run, as configs/quickstart.py. Any field can be set: '
    '--config.seed=1.',
    flag_values=FLAGS,
)
config_file.adopt(FLAGS)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  started = time.monotonic()
  compilation_cache.prepare()
  return console.run(argv, _open, started)


def _open(started: float) -> Callable[[], Iterator[str]]:
  """Checks and opens both runs; returns the function that trains them."""
  workdir = pathlib.Path(_WORKDIR.value)
  sparse = _CONFIG.value
  dense = sparse.copy_and_resolve_references()
  dense.phases.pretrain.algorithm.name = 'dense'
  extras.require('matplotlib', 'viz')  # The report needs it, minutes later.
  opened = {
      name: training.Run.create(config, workdir / name).open()
      for name, config in {'dense': dense, 'variable-spdf': sparse}.items()
  }
  return functools.partial(_train, opened, started)


def _train(
    opened: Mapping[str, training.Run], started: float
) -> Iterator[str]:
  for name, run in opened.items():
    yield f'training {name} in {run.workdir}'
    training.train(run, **lifecycle.begin(run, name))
  finished = {name: runs.read_run(run.workdir) for name, run in opened.items()}
  report = runs.write_report(_WORKDIR.value, finished)
  seconds = time.monotonic() - started
  yield f'{report} is written, {seconds:.0f} s after start'


if __name__ == '__main__':
  console.start(main, FLAGS)
