"""Flags of commands that run a pool: folders, workers and limits."""

import math
import os
import pathlib
import time

from absl import flags

from experiments.papers.replica_groups import Limits

_DATA = flags.DEFINE_string(
    'data', os.environ.get('SPDF_DATA', ''),
    'Folder that contains books/, e2e/ and webnlg17/; by default $SPDF_DATA.',
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None,
    'Folder for runs; by default runs/claims-SCALE or runs/race.',
)
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'Folder for results; by default experiments/results/claims-SCALE or race.',
)
_REPORT = flags.DEFINE_bool(
    'report', False, 'Train nothing; write the results of finished runs.'
)
_WORKERS = flags.DEFINE_integer(
    'workers', 0, 'Number of runs at a time; 0: one on each core.',
    lower_bound=0,
)
_MINUTES = flags.DEFINE_float(
    'minutes', None,
    'With --scale=small: minutes after which it saves and stops.',
    lower_bound=0.0,
)
_REPLICAS = flags.DEFINE_integer(
    'replicas', 0,
    'With --scale=small: largest number of runs in one program; 0: all on an '
    'accelerator, 8 on a CPU.', lower_bound=0,
)


def folders(name: str) -> tuple[str, pathlib.Path, pathlib.Path]:
  """Returns the folders of data, of runs and of results.

  Args:
    name: Name of the folders of runs and results, unless the flags give some.
  """
  return (
      _DATA.value,
      pathlib.Path(_WORKDIR.value or f'runs/{name}'),
      pathlib.Path(_OUTPUT.value or f'experiments/results/{name}'),
  )


def limited() -> bool:
  """Returns whether a flag of a scale's pool is set."""
  return any(
      flag.present for flag in (_REPORT, _WORKERS, _MINUTES, _REPLICAS)
  )


def limits() -> tuple[bool, int, Limits]:
  """Returns whether only to report, the number of runs at a time, and limits.

  The minutes of the limits begin with this call; 0 runs at a time mean one on
  each core.
  """
  minutes = math.inf if _MINUTES.value is None else _MINUTES.value
  deadline = time.monotonic() + 60 * minutes
  return _REPORT.value, _WORKERS.value, Limits(deadline, _REPLICAS.value)
