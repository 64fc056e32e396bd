"""Configs of the papers' experiments: each can be planned, as it is printed."""

import functools
import pathlib
import re
import shlex
import sys

from absl import flags as absl_flags
from ml_collections import config_flags
import pytest

from configs import finetune
from configs import iterative_pruning
from configs import llama_dst
from configs import spdf
from configs import variable_spdf
from experiments.launch import grid
from spdf_jax.costs import flops
from spdf_jax.costs import plan_costs
from spdf_jax.models import PRESETS
from spdf_jax.training import Run
from spdf_jax.training.configs.config import parse
from tests.quickstart_runs import CACHE
from tests.real_data import data_path
from tests.refusals import refuse

pytestmark = pytest.mark.papers

ROOT = pathlib.Path(__file__).parents[2]
FILES = (finetune, iterative_pruning, llama_dst, spdf, variable_spdf)
# Numbers of training examples of the tasks.
EXAMPLES = dict(e2e=42_061, webnlg=18_025, dart=62_659, curation=31_929)


def plan_of(config):
  """Plans as --dry_run does, without compiling the step."""
  return plan_costs.describe_plan(Run.create(config, planning=True), 'plan')


@functools.cache
def planned(file, arg=''):
  """Plans the config of a file, once for all tests that read it."""
  return plan_of(file.get_config(arg))


def flops_of(plan):
  return sum(p['steps'] * p['flops_per_step'] for p in plan['phases'])


def commands(file):
  """Yields the commands of a docstring, each as its words."""
  for line in file.__doc__.splitlines():
    if line.startswith('  python -m '):
      yield shlex.split(line, comments=True)


def config_of(words, monkeypatch):
  """Reads the config of a command as the command does, on one device."""
  monkeypatch.chdir(ROOT)
  arguments = ['command', *(
      word.replace('LOSS', '2.1') for word in words
      if word.startswith('--config') and 'mesh' not in word
  )]
  # config_flags reads overrides from sys.argv.
  monkeypatch.setattr(sys, 'argv', arguments)
  values = absl_flags.FlagValues()
  config = config_flags.DEFINE_config_file('config', flag_values=values)
  values(arguments)
  return config.value


LAUNCHES = [
    pytest.param(words, id=f'{file.__name__}-{i}') for file in FILES
    for i, words in enumerate(commands(file))
    if words[2] in ('experiments.train', 'experiments.sweep')
]


def test_every_file_shows_how_to_launch_it():
  launched = {
      re.search(r'configs/(\w+)\.py', ' '.join(launch.values[0]))[1]
      for launch in LAUNCHES
  }
  assert launched == {file.__name__.split('.')[1] for file in FILES}
  assert len(LAUNCHES) >= 14


@pytest.mark.parametrize('words', LAUNCHES)
def test_every_launch_command_can_be_planned(words, monkeypatch):
  config = config_of(words, monkeypatch)
  flags = dict(w.split('=', 1) for w in words if w.startswith('--workdir'))
  assert flags['--workdir'].startswith(('runs/', 'sweeps/'))
  assert flops_of(plan_of(config)) > 1e16
  values = [w.split('=', 1)[1] for w in words if w.startswith('--grid')]
  assert bool(values) == (words[2] == 'experiments.sweep')
  if values:  # Plans the first and the last point.
    points = grid.points(grid.parse_grid(values))
    for fields in (points[0], points[-1]):
      config.update_from_flattened_dict(fields)
      Run.create(config, planning=True)


@pytest.mark.parametrize('task, algorithm, model, sparsity', [
    *((task, 'dense', 'gpt2-small', 0.75) for task in EXAMPLES),
    *(('e2e', 'static', 'gpt2-small', sparsity) for sparsity in (0, 0.5, 0.75)),
    ('dart', 'dense', 'gpt3-xl', 0), ('curation', 'static', 'gpt3-xl', 0.75),
    ('e2e', 'rigl', 'gpt2-small', 0.75),
])
def test_every_fine_tuning_of_spdf_can_be_planned(
    task, algorithm, model, sparsity
):
  arg = f'{task=!s},{algorithm=!s},{model=!s},{sparsity=}'
  phase, = planned(finetune, arg)['phases']
  kept = 0 if algorithm == 'dense' else sparsity
  assert phase['sparsity'] == pytest.approx(kept, abs=1e-6)
  assert phase['tokens'] <= 5 * EXAMPLES[task] * 512
  each = phase['dense_flops_per_step'] / phase['batch_size']
  assert each == flops.training_flops(PRESETS[model], 512)
  config = finetune.get_config(arg)
  assert config.init_from == f'runs/{model}-{round(100 * sparsity)}'
  assert config.data.planned.examples == EXAMPLES[task]


@pytest.mark.parametrize('arg', [
    'algorithm=dense', 'algorithm=static', '', 'algorithm=set,sparsity=0.9',
    'algorithm=granet', 'algorithm=gmp',
])
def test_every_llama_sees_its_tokens_and_ends_at_its_sparsity(arg):
  config = llama_dst.get_config(arg)
  phase, = plan_of(config)['phases']
  given = dict(part.split('=') for part in arg.split(',') if part)
  assert phase['tokens'] == pytest.approx(112e9, rel=1e-4)
  sparsity = 0 if 'dense' in arg else float(given.get('sparsity', 0.8))
  assert phase['sparsity'] == pytest.approx(sparsity, abs=1e-6)
  moving = 'dense' not in arg and 'static' not in arg
  assert bool(phase['mask_updates']) == moving
  if moving:
    *_, (_, last, _) = phase['mask_updates']
    assert 0.72 < last / phase['steps'] <= 0.75
  start = {'granet': 0.5, 'gmp': 0}.get(given.get('algorithm'), sparsity)
  assert phase['spans'][0]['sparsity'] == pytest.approx(start, abs=1e-6)


def test_sparse_llamas_take_half_the_batch_for_twice_the_steps():
  dense, sparse = (
      planned(llama_dst, f'algorithm={name}')['phases'][0]
      for name in ('dense', 'static')
  )
  assert 2 * sparse['batch_size'] == dense['batch_size']
  assert sparse['steps'] == pytest.approx(2 * dense['steps'], abs=1)


def test_rates_of_the_llamas_are_those_that_are_printed():
  run = Run.create(llama_dst.get_config(), planning=True)
  rate = run.plan.learning_rate
  assert float(rate(2000)) == pytest.approx(2e-4)
  last = run.plan.total_steps - 1
  assert float(rate(last)) == pytest.approx(4.5e-6, rel=1e-3)


@pytest.mark.parametrize('model', ['cerebras-gpt-256m', 'cerebras-gpt-6.7b'])
def test_split_variable_spdf_takes_the_flops_of_static_75(model):
  static, split = (
      planned(spdf, f'model={model},sparsity=0.75'),
      planned(variable_spdf, f'model={model},reading=split'),
  )
  assert flops_of(split) == pytest.approx(flops_of(static), rel=1e-3)
  one, other = (
      sum(p['tokens'] for p in plan['phases']) for plan in (static, split)
  )
  assert one == pytest.approx(other, rel=1e-4)
  sparse, dense = split['phases']
  assert sparse['sparsity'] == pytest.approx(0.9, abs=1e-6)
  assert dense['sparsity'] == 0
  # One decay over both stages: the dense run has all of their steps.
  assert (sparse['continues'], dense['continues']) == (False, True)
  total, = split['totals']
  assert total['effective_sparsity'] == pytest.approx(0.75, abs=1e-4)


def test_extended_variable_spdf_is_that_of_the_published_configs():
  name = 'model=cerebras-gpt-6.7b'
  config = variable_spdf.get_config(name)
  run = Run.create(config, planning=True)
  plan = plan_costs.describe_plan(run, 'plan')
  steps = [phase['steps'] for phase in plan['phases']]
  # 62,523 and 9,379 there.
  assert steps == [62_523, 9_378]
  effective = flops.effective_sparsity(steps, [0.9, 0.0], 62_523)
  assert effective == pytest.approx(0.75, abs=1e-4)
  rate = run.plan.learning_rate
  warm = 62_523 + 938
  assert float(rate(warm)) == pytest.approx(3.6e-4, rel=1e-3)
  assert float(rate(sum(steps) - 1)) == pytest.approx(1.2e-5, rel=2e-2)
  assert float(rate(62_523)) < 1e-6
  dense = planned(spdf, f'{name},sparsity=0')
  # The post prints 64 %.
  saved = 1 - flops_of(plan) / flops_of(dense)
  assert saved == pytest.approx(0.657, abs=5e-4)


def test_iterative_pruning_ends_at_the_sparsity_that_is_printed():
  plan = planned(iterative_pruning)
  sparsities = [phase['sparsity'] for phase in plan['phases']]
  assert sparsities[0] == 0 and sparsities[-1] == pytest.approx(0.838, abs=1e-6)
  for before, after in zip(sparsities, sparsities[1:]):
    assert 0.20 <= 1 - (1 - after) / (1 - before) <= 0.33
  steps = [phase['steps'] for phase in plan['phases'][1:]]
  assert steps == sorted(steps) and (steps[0], steps[-1]) == (20_000, 120_000)
  assert plan['phases'][0]['tokens'] == pytest.approx(26e9, rel=1e-3)


@pytest.mark.parametrize('arg, last, updates', [
    ('algorithm=rigl,sparsity=0.9', 0.9, True),
    ('distribution=model_wide', 0.838, False),
])
def test_rounds_may_rank_the_whole_model_and_move_their_masks(
    arg, last, updates
):
  plan = planned(iterative_pruning, arg)
  sparsities = [phase['sparsity'] for phase in plan['phases']]
  assert sparsities[0] == 0 and sparsities[-1] == pytest.approx(last, abs=1e-6)
  dense, *rounds = [phase['mask_updates'] for phase in plan['phases']]
  assert not dense
  for (first, last_step, _), in rounds:
    assert (first < last_step) == updates


def test_rounds_stop_at_the_loss_that_is_given_from_the_dense_weights():
  never = Run.create(iterative_pruning.get_config(), planning=True).plan
  config = iterative_pruning.get_config('stop_at=2.1')
  stopping = Run.create(config, planning=True).plan
  assert config.init_from == 'runs/dense-1.3b'
  assert [phase.early_stop for phase in never.phases] == [None] * 6
  assert {phase.early_stop.value for phase in stopping.phases} == {2.1}
  assert [phase.new_epoch for phase in never.phases] == [False] + [True] * 5
  algorithms = [phase.algorithm for phase in stopping.phases]
  assert algorithms == [phase.algorithm for phase in never.phases[1:]]
  rates = [float(p.learning_rate(0)) for p in stopping.phases[1:]]
  assert rates == pytest.approx([2e-4] * 4)


def test_dart_takes_the_steps_that_were_published():
  arg = 'task=dart,model=cerebras-gpt-6.7b'
  run = Run.create(finetune.get_config(arg), planning=True)
  phase, = run.plan.phases
  assert (phase.steps, phase.batch_size, phase.weight_decay) == (1938, 32, 0.01)
  assert float(phase.learning_rate(194)) == pytest.approx(1.6e-6)
  assert phase.early_stop is None


def test_a_task_without_a_training_split_is_refused():
  config = finetune.get_config('task=dart')
  config.data.task_dir = str(data_path('dart'))
  refuse("'dart' has no example to train on", Run.create, config, planning=True)


def test_training_needs_the_files_of_the_task():
  config = finetune.get_config('task=e2e')
  config.data.corpus = 'python-stdlib'
  config.data.tokenizer = 'bytes'
  config.data.cache_dir = str(CACHE)
  refuse('tasks/e2e', Run.create, config)
  run = Run.create(config, planning=True)
  refuse("task 'e2e' is only planned", run.programs.batch_at, 0)


FLAGS = {  # The fields that are changed most, each by a flag alone.
    'seed': 3,
    'micro_batches': 2,
    'matmul': 'dense',
    'eval_every': 77,
    'log_every': 7,
    'model.preset': 'gpt-mini',
    'model.n_layers': 3,
    'model.dtype': 'float32',
    'data.corpus': 'corpora/mine',
    'optimizer.b2': 0.9,
    'checkpoints.every': 50,
    'phase_defaults.batch_size': 16,
    'phase_defaults.weight_decay': 0.2,
    'phases.pretrain.duration': '1200 steps',
    'phases.pretrain.learning_rate.peak': 5e-4,
    'phases.pretrain.learning_rate.warmup': '2%',
    'phases.pretrain.algorithm.sparsity': 0.6,
    'phases.pretrain.algorithm.update_every': '10%',
    'phases.pretrain.algorithm.update_until': '600 steps',
    'phases.pretrain.algorithm.distribution': 'erk',
}


@pytest.mark.parametrize('file', [spdf, variable_spdf, llama_dst])
@pytest.mark.parametrize('name', ['static', 'set', 'rigl', 'gmp', 'granet'])
def test_flags_alone_change_a_config(file, name, monkeypatch):
  flags = FLAGS | {'phases.pretrain.algorithm.name': name}
  path = file.__file__
  words = [f'--config={path}', *(f'--config.{k}={v}' for k, v in flags.items())]
  config = parse(config_of(words, monkeypatch)).as_dict()
  for field, value in flags.items():
    if not field.startswith('phase_defaults'):
      assert functools.reduce(dict.get, field.split('.'), config) == value
  run = Run.create(config, planning=True)
  plan = run.plan
  assert {phase.batch_size for phase in plan.phases} == {16}
  assert {phase.weight_decay for phase in plan.phases} == {0.2}
  first = plan.phases[0]
  assert first.steps == 1200 and first.learning_rate(23) < 5e-4
  assert first.learning_rate(24) == pytest.approx(5e-4)
  moved = [step for step in plan.update_steps.tolist() if 0 < step < 1200]
  assert moved == ([] if name == 'static' else [120, 240, 360, 480, 600])
  described = plan_costs.describe_plan(run, 'plan')['phases'][0]
  assert described['spans'][-1]['sparsity'] == pytest.approx(0.6, abs=1e-3)
