"""Trains, fine-tunes and compares a dense and a Variable SPDF model in minutes.

  python -m experiments.quickstart

Trains configs/quickstart.py twice from one seed and one data order, as a dense
baseline and with 75 % of the hidden weights held at zero for most of
pre-training; continues both densely, fine-tunes both densely, evaluates every
phase and writes report.md with plots. If killed, the same command continues
where it stopped.
"""

import pathlib
import time

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from configs import quickstart
from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.extras import require
from spdf_jax.runs import lifecycle

_WORKDIR = flags.DEFINE_string(
    'workdir', 'runs/quickstart', 'Folder for both runs and the report.'
)
_CONFIG = config_file.hide_default(config_flags.DEFINE_config_dict(
    'config', quickstart.get_config(),
    'Config of the sparse run, as configs/quickstart.py. Any field can be set: '
    '--config.seed=1.',
))


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  console.prepare()
  compilation_cache.prepare()
  started = time.monotonic()
  workdir = pathlib.Path(_WORKDIR.value)
  sparse = _CONFIG.value
  dense = sparse.copy_and_resolve_references()
  dense.phases.pretrain.sparsity = 0.0
  configs = {'dense': dense, 'variable-spdf': sparse}
  try:
    require('matplotlib', 'viz')  # Of the report, after minutes of training.
    sessions = {
        name: training.open_session(
            training.create_recipe(config, workdir=workdir / name),
            workdir / name,
        )
        for name, config in configs.items()
    }
  except (ValueError, OSError, ImportError) as error:
    logging.error('%s', error)
    return 1
  for name, session in sessions.items():
    print(f'training {name} in {session.workdir}', flush=True)
    try:
      lifecycle.run(session, name)
    except training.Interrupted as interrupted:
      logging.warning('%s', interrupted)
      return 128 + interrupted.signal
    except training.NotFinite as error:
      logging.error('%s', error)
      return 1
  finished = {name: runs.read_run(workdir / name) for name in sessions}
  report = runs.write_report(workdir, finished)
  print(f'{report} is written, {time.monotonic() - started:.0f} s after start')
  return 0


if __name__ == '__main__':
  console.start(main)
