r"""Trains a grid of configs and chooses the best by a validation metric.

  python -m experiments.sweep --config=configs/quickstart.py \
    --workdir=sweeps/a --metric=target/loss --seeds=3 \
    --grid=phases.finetune.learning_rate.peak=1e-3,2e-3 \
    --grid=phases.finetune.batch_size=8,16

Every point of the grid is trained with seeds 0, 1, …, each run in a folder
named after the fields it changes; --config.init_from=RUN@PHASE fine-tunes one
pre-trained model in all of them. If killed, the same command continues;
finished runs are not trained again. sweep.jsonl has a line for each run in the
folder, sweep.md the mean of each point of this grid over seeds ± its standard
deviation. --test_tasks has the form of --tasks of experiments.evaluate: the
runs of the best point are scored once on these tasks, in test.json and test.md,
with the answers in the runs' folders.

--executor=ray trains the runs on the nodes of a Ray cluster; if a node is lost,
its runs continue on another. --executor=slurm writes WORKDIR/array.sbatch, an
array of --jobs jobs that share the runs, and submits it.
"""

from collections.abc import Iterator
import pathlib

from absl import flags

from experiments import scoring
from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from experiments.launch import executors
from spdf_jax.runs import swept_runs
from spdf_jax.training.early_stop import METRICS

_CONFIG = config_file.define()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for all runs.')
_GRID = flags.DEFINE_multi_string(
    'grid', [],
    'Field of the config and its values, field=value,value; repeatable.',
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 1, 'Number of seeds for each point.', lower_bound=1
)
_METRIC = flags.DEFINE_string(
    'metric', 'validation/loss',
    f'Metric that chooses the best point: {", ".join(METRICS)}.',
)
_TEST_TASKS = flags.DEFINE_list(
    'test_tasks', [], 'Tasks to score the best point on, NAME=PATH.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  compilation_cache.prepare()
  return console.run(argv, _sweep)


def _sweep() -> Iterator[str]:
  workdir = pathlib.Path(_WORKDIR.value)
  if executors.name() == 'slurm':
    swept_runs.plan_runs(  # Checks the flags.
        _CONFIG.value, _GRID.value, _SEEDS.value, _METRIC.value,
        _TEST_TASKS.value,
    )
    yield executors.submit(workdir, 'experiments.sweep')
    return
  with executors.opened() as executor:
    yield from swept_runs.run_sweep(
        _CONFIG.value, workdir, _GRID.value, seeds=_SEEDS.value,
        metric=_METRIC.value, test_tasks=_TEST_TASKS.value,
        settings=scoring.settings(None), executor=executor,
        is_shared=executors.is_shared(),
    )


if __name__ == '__main__':
  flags.adopt_module_key_flags(scoring)
  flags.adopt_module_key_flags(executors)
  flags.mark_flags_as_required(['config', 'workdir'])
  console.start(main)
