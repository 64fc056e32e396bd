"""Configs: algorithms by one word, and the limit on their length."""

import pathlib
import pickle

import pytest

from configs import base
from configs import books
from configs import quickstart
from configs import variable_spdf
from spdf_jax.training import create_plan
from spdf_jax.training.configs.config import parse

ROOT = pathlib.Path(__file__).parents[2]


def make_plan(arg):
  return create_plan(
      parse(quickstart.get_config(arg)).phases,
      tokens_per_epoch={
          'corpus': lambda length: 1_300_000, 'task': lambda length: 335_872
      },
      parameters=742_528,
  )


def test_configs_have_ninety_lines_at_most():
  for path in (ROOT / 'configs').glob('*.py'):
    if path.name != 'common.py':
      assert len(path.read_text().splitlines()) <= 90, path


@pytest.mark.parametrize('arg, sparsity', [
    ('', 0.75), ('sparsity=0.9', 0.9), ('algorithm=static', 0.75),
    ('algorithm=static,sparsity=0', 0.0),
])
def test_the_default_is_static(arg, sparsity):
  config = quickstart.get_config(arg)
  algorithm = config.phases.pretrain.algorithm
  assert algorithm.name == 'static' and algorithm.sparsity == sparsity
  assert list(config.phases.order) == ['pretrain', 'continuation', 'finetune']
  assert not make_plan(arg).updates_masks


@pytest.mark.parametrize('name', ['set', 'rigl', 'gmp', 'granet'])
@pytest.mark.parametrize('order', ['algorithm={},sparsity=0.9', 'sparsity=0.9,'
                                   'algorithm={}'])
def test_algorithms_change_masks_in_the_first_three_quarters(name, order):
  plan = make_plan(order.format(name))
  updates = plan.update_steps.tolist()
  first = [0] if name == 'gmp' else []
  assert updates == first + list(range(50, 751, 50)) + [1000]
  assert plan.updates_masks
  assert plan.algorithm.sparsity_at(999, {'w': None, 'v': 0.0})['v'] == 0.9


def test_iterative_prunes_a_quarter_in_each_of_three_rounds():
  plan = make_plan('algorithm=iterative')
  assert [p.name for p in plan.phases] == [
      'round0', 'round1', 'round2', 'round3', 'finetune'
  ]
  assert plan.update_steps.tolist() == [300, 600, 900, 1200]
  assert [p.new_epoch for p in plan.phases] == [False, True, True, True, False]
  rates = [float(plan.learning_rate(step)) for step in (50, 300, 600, 900)]
  assert rates == [rates[0]] * 4
  config = quickstart.get_config('algorithm=iterative,sparsity=0.875')
  fractions = [r['fraction'] for r in config.phases.round3.algorithm.rounds]
  assert fractions == [0.0, 0.5, 0.5, 0.5]
  assert config.data.max_epochs.corpus == 4


def test_a_change_of_one_phase_changes_no_other():
  config = quickstart.get_config('algorithm=iterative')
  config.phases.round1.learning_rate.to = '7 steps'
  config.phases.round0.learning_rate.peak = 0.5
  assert config.phases.round2.learning_rate.to == '50 steps'
  config = quickstart.get_config()
  config.phase_defaults.batch_size = 4
  assert config.phases.pretrain.batch_size == 4
  assert config.phases.finetune.batch_size == 16
  config.phases.pretrain.learning_rate.peak = 0.5
  assert config.phases.continuation.learning_rate.peak == 3e-3
  config.phases.finetune.early_stop.metric = 'target/loss'
  assert not config.phases.pretrain.early_stop.metric
  config = books.get_config()
  config.phases.pretrain.early_stop.metric = 'validation/loss'
  assert not config.phases.continuation.early_stop.metric


@pytest.mark.parametrize('file', [base, books, quickstart, variable_spdf])
def test_a_config_can_be_pickled_and_its_phases_follow_the_defaults(file):
  config = pickle.loads(pickle.dumps(file.get_config()))
  assert config.to_json_best_effort() == (
      file.get_config().to_json_best_effort()
  )
  config.phase_defaults.weight_decay = 0.7
  for name in config.phases.order:
    own = name == 'finetune'
    assert (config.phases[name].weight_decay == 0.7) != own
    config.phases[name].weight_decay = 0.3
  assert config.phase_defaults.weight_decay == 0.7


def test_books_are_learned_sparse_then_dense_and_tasks_densely():
  config = books.get_config()
  assert list(config.phases.order) == ['pretrain', 'continuation']
  assert config.phases.pretrain.algorithm.sparsity == 0.75
  assert config.phases.continuation.algorithm.name == 'dense'
  assert not config.data.task and not config.init_from
  config = books.get_config('task=webnlg,sparsity=0.5')
  assert list(config.phases.order) == ['finetune']
  assert config.phases.finetune.algorithm.name == 'dense'
  assert config.data.task == 'webnlg' and config.init_from == 'runs/books'
