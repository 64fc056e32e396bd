"""The loss of a teacher equals NumPy's; runs with teachers and adapters."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.wafer.run_costs import trace_step
import spdf_jax as spdf
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.costs import plan_costs
from spdf_jax.costs.flops import forward_flops
from spdf_jax.models import GPTConfig
from spdf_jax.models import model_of
from spdf_jax.training import Evaluators
from spdf_jax.training import find_checkpoint
from spdf_jax.training import initial_state
from spdf_jax.training import MismatchError
from spdf_jax.training import read_params
from spdf_jax.training import Run
from spdf_jax.training import train
from spdf_jax.training.checkpoints.files import write_params
from spdf_jax.training.step.losses import Distillation
from spdf_jax.training.step.losses import Loss
from tests.hf_models import assert_same_bits
from tests.refusals import refuse
from tests.tiny_run import L
from tests.tiny_run import make_config
from tests.tiny_run import run_of
from tests.tiny_run import static
from tests.tiny_run import V

TEACHER = GPTConfig(V, 2, 2, 8, 16, L)  # Another model of the vocabulary.


def log_softmax(x):
  x = x - x.max(axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def write_model(workdir, config, seed=0):
  params = model_of(config).init(
      jax.random.key(seed), jnp.zeros((1, 2), jnp.int32)
  )['params']
  # Larger than at first, so that the teacher is not uniform.
  params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
  write_params(workdir, params, {
      'model': {'preset': 'gpt-mini'} | dataclasses.asdict(config)
  })
  return params


def create(**changes):
  return Run.create(make_config(**changes).as_dict())


@pytest.mark.parametrize('t, w, smoothing', [(1, 1, 0), (2.5, 0.3, 0.1)])
def test_the_loss_is_that_of_numpy(t, w, smoothing):
  rng = np.random.default_rng(0)
  logits, theirs = rng.standard_normal((2, 3, 5, 7))
  targets = rng.integers(7, size=(3, 5))
  weights = rng.random((3, 5)) * (rng.random((3, 5)) > 0.3)
  loss = Loss(smoothing, teacher='a', temperature=t, teacher_weight=w)
  batch = SimpleNamespace(inputs=targets, targets=targets, weights=weights)
  with jax.enable_x64(True):
    sums = Distillation(loss, lambda _: jnp.asarray(theirs))(
        lambda *_: jnp.asarray(logits), {}, batch
    )
  one_hot = np.eye(7)[targets] * (1 - smoothing) + smoothing / 7
  hard = -(one_hot * log_softmax(logits)).sum(-1)
  p = np.exp(log_softmax(theirs / t))
  kl = (p * (log_softmax(theirs / t) - log_softmax(logits / t))).sum(-1)
  want = ((1 - w) * hard + w * t**2 * kl) * weights
  np.testing.assert_allclose(sums.objective, want.sum(), rtol=1e-5)
  plain = -np.take_along_axis(log_softmax(logits), targets[..., None], -1)
  np.testing.assert_allclose(
      sums.cross_entropy, (plain[..., 0] * weights).sum(), rtol=1e-5
  )


@pytest.mark.ci
def test_a_student_approaches_its_teacher(tmp_path):
  params = write_model(tmp_path / 'teacher', TEACHER)
  run = run_of(make_config(
      loss__teacher=str(tmp_path / 'teacher'), loss__temperature=1.0,
      loss__teacher_weight=1.0, phases__pretrain__duration='60 steps',
      phases__order=['pretrain'],
  ))
  batch = run.programs.batch_at(0)
  theirs = model_of(TEACHER).apply({'params': params}, batch.inputs)
  state, first = run.programs.step(initial_state.create(run.programs), batch)
  for step in range(1, 60):
    state, metrics = run.programs.step(state, run.programs.batch_at(step))
  # The corpus is random, so that only the divergence can fall.
  assert metrics['train/objective'] < 0.6 * first['train/objective']
  ours = run.model.apply({'params': state.params}, batch.inputs)
  agreement = (ours.argmax(-1) == theirs.argmax(-1)).mean()
  assert agreement > 0.3  # By chance it would be 1 / 16.
  assert_same_bits(
      read_params(find_checkpoint(str(tmp_path / 'teacher')), params), params
  )


def test_a_run_continues_when_its_teacher_is_deleted(tmp_path):
  write_model(tmp_path / 'teacher', TEACHER)

  def evaluate(step, params):
    shutil.rmtree(tmp_path / 'teacher', ignore_errors=True)
    yield 'validation/loss', 1.0

  run = run_of(make_config(
      loss__teacher=str(tmp_path / 'teacher'), loss__temperature=1.0,
      loss__teacher_weight=0.5, eval_every=2,
      phases__pretrain__early_stop=dict(metric='validation/loss', value=2.0),
  )).open(tmp_path / 'run')
  planned = run.plan.total_steps
  train(run, evaluators=Evaluators([evaluate]))
  # The first phase ended early, so that steps were compiled again.
  assert run.plan.ends['pretrain'] == 2 and run.plan.total_steps < planned


@pytest.mark.ci
def test_another_teacher_of_the_same_name_is_refused(tmp_path):
  write_model(tmp_path / 'teacher', TEACHER)
  config = make_config(
      loss__teacher=str(tmp_path / 'teacher'), loss__temperature=1.0,
      loss__teacher_weight=0.5,
  )
  train(run_of(config).open(tmp_path / 'run'))
  run_of(config).open(tmp_path / 'run').close()
  shutil.rmtree(tmp_path / 'teacher')
  write_model(tmp_path / 'teacher', TEACHER, seed=1)
  refuse('teacher', run_of(config).open, tmp_path / 'run', error=MismatchError)


@pytest.fixture(scope='module')
def alone_and_taught(tmp_path_factory):
  """A run without and a run with a teacher."""
  teacher = tmp_path_factory.mktemp('teacher')
  write_model(teacher, TEACHER)
  return [run_of(make_config(**changes)) for changes in ({}, dict(
      loss__teacher=str(teacher), loss__temperature=1.0,
      loss__teacher_weight=0.5,
  ))]


def test_the_flops_of_a_plan_include_the_forward_pass_of_the_teacher(
    alone_and_taught
):
  alone, taught = (
      plan_costs.describe_plan(run, 'a')['phases'] for run in alone_and_taught
  )
  for without, phase in zip(alone, taught, strict=True):
    added = phase['batch_size'] * forward_flops(TEACHER, phase['length'])
    for key in ('flops_per_step', 'dense_flops_per_step'):
      assert phase[key] == pytest.approx(without[key] + added)


@pytest.mark.ci
def test_the_wafer_computes_the_products_of_the_teacher(alone_and_taught):
  programs = [trace_step(run, 2, L) for run in alone_and_taught]
  without, taught = (
      sum(isinstance(operation.work, Product) for operation in p.operations)
      for p in programs
  )
  # The teacher's layers and its head.
  assert taught == without + 6 * TEACHER.n_layers + 1


def taught(**changes):
  loss = dict(temperature=1.0, teacher_weight=0.5, teacher='none') | changes
  return {f'loss__{name}': value for name, value in loss.items()}


def adapted(**changes):
  return dict(adapter=dict(rank=2, scale=2.0) | changes)


@pytest.mark.parametrize('changes, message', [
    (taught(teacher_weight=0.0),
     'loss.teacher_weight is 0.0; give a number in'),
    (taught(temperature=0.0), 'loss.temperature is 0.0; it must be positive'),
    (taught(temperature=None), 'loss.temperature is None; it must be positive'),
    (taught(chunk=2),
     'loss.chunk is 2 and loss.teacher .*; set loss.chunk to 0'),
    (taught(), "'none' names no checkpoint"),
    (adapted(rank=17),
     "adapter: rank is 17, and 'h_0/attn/wd/kernel' has 16 inputs and 16 outp"),
    (adapted(scale=0.0), 'adapter.scale is 0.0; it must be'),
    (adapted() | dict(optimizer=dict(name='lion', clip_norm=1.0)),
     'adapter is set, which needs .*lion'),
    (adapted() | dict(storage='compact'),
     "storage is 'compact' and adapter.rank is 2, and adapters change dense"),
])
def test_teachers_and_adapters_of_wrong_settings_are_refused(changes, message):
  refuse(message, lambda: create(**changes))


@pytest.mark.parametrize('config, message', [
    (dataclasses.replace(TEACHER, vocab_size=9),
     "has a vocabulary of 9 and the model 16; give a teacher with the same to"),
    (dataclasses.replace(TEACHER, max_length=4),
     'has 4 positions, and the phases have sequences of 8 tokens; give anothe'),
])
def test_teachers_of_other_sizes_are_refused(config, message, tmp_path):
  write_model(tmp_path / 'teacher', config)
  refuse(
      message, lambda: create(**taught(teacher=str(tmp_path / 'teacher')))
  )


@pytest.mark.ci
@pytest.mark.parametrize('algorithm', ['static', 'dense'])
def test_runs_with_adapters_keep_zeros_or_densify(algorithm, tmp_path):
  sparse = run_of(make_config(phases__order=['pretrain']))
  train(sparse.open(tmp_path / 'sparse'))
  config = dict(
      phases__order=['finetune'], init_from=str(tmp_path / 'sparse'),
      adapter=dict(rank=2, scale=2.0), phases__finetune__duration='6 steps',
  )
  if algorithm == 'static':
    config['phases__finetune__algorithm'] = static(0.75) | dict(init='nonzero')
  run = run_of(make_config(**config)).open(tmp_path / 'tuned')
  before = jax.tree.map(np.array, run.state.params)
  train(run)
  after = read_params(
      find_checkpoint(str(tmp_path / 'tuned')),
      run.programs.abstract_state.params,
  )
  hidden = spdf.get_mask(run.programs.abstract_state.opt_state)
  changes = jax.tree.map(
      lambda m, x, y: None if m is None else y - x, hidden, before, after,
      is_leaf=lambda x: x is None,
  )
  for change, x, y in zip(
      jax.tree.leaves(changes),
      *(jax.tree.leaves(jax.tree.map(
          lambda m, x: None if m is None else x, hidden, tree,
          is_leaf=lambda x: x is None,
      )) for tree in (before, after)),
  ):
    assert np.abs(change).max() > 1e-4
    if algorithm == 'static':
      np.testing.assert_array_equal(x == 0, y == 0)
    else:
      assert (y != 0).mean() > 0.9
      assert np.linalg.matrix_rank(change, tol=1e-5) == 2
  np.testing.assert_array_equal(
      after['wte']['embedding'], before['wte']['embedding']
  )
