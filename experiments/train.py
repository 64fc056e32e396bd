"""Trains a config: sparse pre-training, dense continuation, fine-tuning.

  python -m experiments.train --config=configs/quickstart.py --workdir=runs/a

Any field of the config can be changed: --config.seed=1. A run that was
stopped or killed goes on when the same command is given again; everything it
measured is in the workdir's metrics.jsonl, and told in report.md beside it.
--dry_run prints the plan instead: what is sparsified, parameters, memory and
FLOPs; nothing is allocated, so any model and mesh can be asked for:

  python -m experiments.train --config=configs/quickstart.py --dry_run \
    --config.model.preset=cerebras-gpt-13b --config.model.vocab_size=50257 \
    --config.model.scan_layers --config.mesh.fsdp=16

On several machines the same command runs in each, see experiments/launch/.
"""

import pathlib

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.launch import processes
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.costs.dry_run import describe_plan
from spdf_jax.costs.dry_run import format_plan
from spdf_jax.runs import lifecycle
from spdf_jax.training.mesh import simulate_devices
from spdf_jax.training.metrics import choose_writers
from spdf_jax.training.metrics import WRITERS
from spdf_jax.training.processes import is_main_process
from spdf_jax.training.profiling import parse_window

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file, with its argument: path.py:argument.'
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Where checkpoints, metrics and generations go.'
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Print the plan and its cost; train nothing.'
)
_LOG_TO = flags.DEFINE_multi_enum(
    'log_to', [], list(WRITERS),
    'Dashboards that get the metrics too; needs the extra log.',
)
_PROFILE = flags.DEFINE_string(
    'profile', '', 'FIRST:COUNT: steps to trace, to WORKDIR/profile.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if not _DRY_RUN.value and not _WORKDIR.value:
    raise app.UsageError('give --workdir, or --dry_run to see the plan.')
  console.prepare()
  compilation_cache.prepare()
  if _DRY_RUN.value and 'mesh' in _CONFIG.value:
    simulate_devices(_CONFIG.value.mesh)
  name = pathlib.Path(_WORKDIR.value or 'plan').name
  try:
    processes.join()
    recipe = training.create_recipe(
        _CONFIG.value, planning=_DRY_RUN.value
    )
    if _DRY_RUN.value:
      print(format_plan(recipe, describe_plan(recipe, name)))
      return 0
    profile = parse_window(_PROFILE.value, recipe.plan.total_steps)
    writers = choose_writers(
        _LOG_TO.value, _WORKDIR.value, recipe.config.as_dict()
    )
    session = training.open_session(recipe, _WORKDIR.value)
  except (ValueError, OSError, ImportError) as error:
    # Bad input: the sentence says it all. Errors in training keep theirs.
    logging.error('%s', error)
    return 1
  try:
    lifecycle.run(session, name, writers, profile)
  except training.Interrupted as interrupted:
    logging.warning('%s', interrupted)
    return 128 + interrupted.signal
  except training.NotFinite as error:
    logging.error('%s', error)
    return 1
  if not is_main_process():
    return 0
  try:
    finished = {name: runs.read_run(session.workdir)}
    print(f'{runs.write_report(session.workdir, finished)} is written')
  except ImportError as error:
    # The run is whole without its plots.
    logging.warning('there is no report: %s', error)
  return 0


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main)
