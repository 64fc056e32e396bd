r"""Trains a config: sparse pre-training, dense continuation, fine-tuning.

  python -m experiments.train --config=configs/quickstart.py --workdir=runs/a

Any field of the config can be changed: --config.seed=1. --fields lists them all
with their values; configs/base.py explains them. If a run is stopped or killed,
the same command continues it. The workdir has all metrics in metrics.jsonl and
a summary in report.md. --dry_run prints the plan instead: the sparsified
matrices, parameters, memory and FLOPs. With --workdir it also checks that the
run could start or go on there, and the checkpoint of init_from. It allocates no
arrays, so any model and mesh can be planned:

  python -m experiments.train --config=configs/quickstart.py --dry_run \
    --config.model.preset=cerebras-gpt-13b --config.model.vocab_size=50257 \
    --config.model.scan_layers --config.mesh.fsdp=8

With --mirror=gs://bucket/runs/a a copy of the workdir is kept in a bucket, from
which the same command continues on another machine.

On several machines, start the same command on each; experiments.launch.local
does so in several processes of one machine.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import logging as standard_logging
import sys

from absl import app
from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from experiments.launch import dry_run
from experiments.launch import mirror
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import style
from spdf_jax.training.configs import config
from spdf_jax.training.loop import processes
from spdf_jax.training.loop import profiling
from spdf_jax.training.loop import writers
from spdf_jax.training.step import mesh

FLAGS = flags.FlagValues()
_CONFIG = config_file.define(FLAGS)
flags.mark_flag_as_required('config', FLAGS)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for checkpoints, metrics and generations.',
    flag_values=FLAGS,
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Print the plan and its cost; train nothing.',
    flag_values=FLAGS,
)
_FIELDS = flags.DEFINE_bool(
    'fields', False, 'Print the fields of the config; train nothing.',
    flag_values=FLAGS,
)
_LOG_TO = flags.DEFINE_list(
    'log_to', [],
    'Dashboards to write the metrics to, separated by commas: '
    f'{", ".join(writers.WRITERS)}; needs the extra log.',
    flag_values=FLAGS,
)
_MIRROR = flags.DEFINE_string(
    'mirror', '', 'URL of a folder in a bucket, for a copy of the workdir.',
    flag_values=FLAGS,
)
_PROFILE = flags.DEFINE_string(
    'profile', '', 'Steps to trace to WORKDIR/profile, FIRST:COUNT.',
    flag_values=FLAGS,
)
_DISTRIBUTED = flags.DEFINE_enum(
    'distributed', 'auto', processes.MODES,
    'Whether this is one of several processes: on, off, or auto, which detects '
    'a cluster (SLURM, Open MPI, TPU hosts), --coordinator, --num_processes '
    'and --process_id, or the variables JAX_COORDINATOR_ADDRESS, '
    'JAX_NUM_PROCESSES and JAX_PROCESS_ID.',
    flag_values=FLAGS,
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'Address of process 0, host:port.', flag_values=FLAGS
)
_NUM_PROCESSES = flags.DEFINE_integer(
    'num_processes', None, 'Number of processes.', lower_bound=1,
    flag_values=FLAGS,
)
_PROCESS_ID = flags.DEFINE_integer(
    'process_id', None, 'Number of this process, from 0.', lower_bound=0,
    flag_values=FLAGS,
)
_TIMEOUT = flags.DEFINE_integer(
    'process_timeout', 300,
    'Seconds that processes wait for one another at start and end.',
    lower_bound=1, flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if _FIELDS.value:
    return console.run(argv, config_file.format_fields, _CONFIG.value)
  if not _DRY_RUN.value and not _WORKDIR.value:
    raise app.UsageError('give --workdir, or --dry_run to see the plan.')
  compilation_cache.prepare()
  if _DRY_RUN.value:
    return console.run(argv, _describe)
  with contextlib.ExitStack() as stack:
    return console.run(argv, _open, stack)


def _describe() -> str:
  mesh.simulate_devices(dataclasses.asdict(config.parse_mesh(_CONFIG.value)))
  _join_processes()
  run = training.Run.create(
      _CONFIG.value, _WORKDIR.value or None, planning=True
  )
  name = lifecycle.folder_name(_WORKDIR.value or 'plan')
  return dry_run.format_plan(run, name)


def _open(stack: contextlib.ExitStack) -> Callable[[], str | None]:
  """Opens the run, and its mirror for as long as the stack is open.

  Args:
    stack: The stack that closes the mirror.

  Returns:
    The function that trains the run.
  """
  style.check_backend()
  _join_processes()
  profiling.parse_window(_PROFILE.value, sys.maxsize)
  chosen = writers.choose_writers(_LOG_TO.value)
  if _MIRROR.value:
    stack.enter_context(mirror.mirrored(_WORKDIR.value, _MIRROR.value))
  run = training.Run.create(_CONFIG.value, _WORKDIR.value)
  profile = profiling.parse_window(_PROFILE.value, run.plan.total_steps)
  return functools.partial(lifecycle.finish, run.open(), chosen, profile)


def _join_processes() -> None:
  """Joins the processes that the flags give; only process 0 logs progress."""
  processes.join_processes(
      _DISTRIBUTED.value,
      coordinator=_COORDINATOR.value,
      num_processes=_NUM_PROCESSES.value,
      process_id=_PROCESS_ID.value,
      timeout=_TIMEOUT.value,
  )
  if not processes.is_main_process():
    standard_logging.getLogger('spdf_jax').setLevel(standard_logging.WARNING)


if __name__ == '__main__':
  console.start(main, FLAGS)
