"""A sparse launch made dense continues as one launch of all phases does."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.training import Evaluators
from spdf_jax.training.checkpoints.files import write_params
from tests.quickstart_runs import ROOT
from tests.quickstart_runs import small_config
from tests.refusals import refuse
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import rows_in
from tests.tiny_run import static

pytestmark = pytest.mark.ci

SPARSE = ('pretrain',)
BOTH = ('pretrain', 'continuation')
RIGL = 'algorithm=rigl'


def make_run(order=BOTH, arg='', **changes):
  """Six sparse steps, then four dense ones with a learning rate of their own.
  """
  times = dict(update_every='2', update_until='4') if arg == RIGL else {}
  return training.Run.create(small_config(arg, **dict(
      data__task='',
      phases__order=order,
      phases__pretrain__duration='6 steps',
      phases__continuation__duration='4 steps',
      phases__continuation__learning_rate__schedule='constant',
      phases__continuation__learning_rate__warmup='1 steps',
  ) | {f'phases__pretrain__algorithm__{k}': v for k, v in times.items()}
      | changes))


def trained(run, workdir):
  return training.train(run.open(workdir))


@pytest.fixture(scope='module')
def sparse(tmp_path_factory):
  """Returns the workdir of a launch with the sparse phase only."""
  workdir = tmp_path_factory.mktemp('sparse') / 'a'
  trained(make_run(SPARSE), workdir)
  return workdir


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The workdir and final state of one launch of both phases."""
  workdir = tmp_path_factory.mktemp('whole') / 'a'
  return workdir, trained(make_run(), workdir)


@pytest.mark.slow
@pytest.mark.parametrize('moments, arg', [
    ('keep', ''), ('reset', ''), ('keep', RIGL),
])
def test_densifying_equals_one_launch_bit_for_bit(moments, arg, tmp_path):
  trained(make_run(SPARSE, arg), tmp_path / 'sparse')
  training.densify_checkpoint(
      str(tmp_path / 'sparse'), tmp_path / 'made', moments=moments
  )
  run = make_run(arg=arg, resume=str(tmp_path / 'made'))
  state = trained(run, tmp_path / 'dense')
  one_launch = make_run(
      arg=arg, phases__continuation__reset_moments=moments == 'reset'
  )
  want = trained(one_launch, tmp_path / 'whole')
  assert int(state.step) == int(want.step) == 10
  assert_same_arrays(state, want)
  assert rows_in(tmp_path / 'dense') == rows_in(tmp_path / 'whole', first=7)


@pytest.mark.slow
def test_the_phase_of_a_longer_launch_can_be_followed_by_another(
    whole, tmp_path
):
  training.densify_checkpoint(f'{whole[0]}@pretrain', tmp_path / 'made')
  other = dict(
      phases__continuation__duration='3 steps',
      phases__continuation__learning_rate__peak=1e-4,
  )
  run = make_run(resume=str(tmp_path / 'made'), **other)
  state = trained(run, tmp_path / 'dense')
  assert_same_arrays(state, trained(make_run(**other), tmp_path / 'whole'))


def test_the_new_workdir_can_be_trained(sparse, whole, tmp_path):
  training.densify_checkpoint(str(sparse), tmp_path)
  assert_same_arrays(trained(make_run(), tmp_path), whole[1])
  # The checkpoint that was saved belongs to this config.
  assert int(make_run().open(tmp_path).state.step) == 10


def test_a_phase_that_ended_early_can_be_densified(tmp_path):
  early = dict(eval_every=2, phases__pretrain__early_stop=dict(
      metric='validation/loss', value=9.0
  ))
  seen = lambda step, params: [('validation/loss', 1.0)]
  want = training.train(
      make_run(**early).open(tmp_path / 'whole'), evaluators=Evaluators([seen])
  )
  assert int(want.step) == 6
  training.densify_checkpoint(f'{tmp_path}/whole@pretrain', tmp_path / 'made')
  run = make_run(**early).open(tmp_path / 'made')
  assert run.plan.ends == {'pretrain': 2, 'continuation': 6}
  assert_same_arrays(training.train(run, evaluators=Evaluators([seen])), want)


@pytest.mark.parametrize('moments', ['keep', 'reset'])
def test_only_masks_and_moments_change(moments, sparse, tmp_path):
  run = make_run(SPARSE)
  before = run.open(shutil.copytree(sparse, tmp_path / 'a')).state
  training.densify_checkpoint(str(sparse), tmp_path / 'made', moments=moments)
  run = make_run(resume=str(tmp_path / 'made')).open(tmp_path / 'b')
  after = run.state
  assert all(m.all() for m in jax.tree.leaves(spdf.get_mask(after.opt_state)))
  assert_same_arrays(after.params, before.params)
  assert int(after.step) == 6
  assert int(after.opt_state.count) == int(before.opt_state.count) == 6
  adam, old = (s.opt_state.inner_state[1].inner_state for s in (after, before))
  if moments == 'keep':
    assert_same_arrays(adam, old)
  else:
    assert not any(np.any(x) for x in jax.tree.leaves(adam))
  assert any(np.any(x) for x in jax.tree.leaves(old))


@pytest.mark.parametrize('changes, message', [
    (dict(seed=1), 'another config: seed was 0 and is 1'),
    (dict(phases__pretrain__weight_decay=0.2),
     'phases.pretrain.weight_decay was 0.1 and is 0.2'),
    (dict(phases__continuation__algorithm=static(0.75)),
     "was densified, and phase 'continuation', which would resume"),
    (dict(phases__continuation__learning_rate__schedule='continue'),
     "phases.continuation.batch_size was 'absent' and is 4"),
])
def test_a_run_that_cannot_resume_from_a_densified_one_is_refused(
    changes, message, sparse, tmp_path
):
  training.densify_checkpoint(str(sparse), tmp_path / 'made')
  run = make_run(resume=str(tmp_path / 'made'), **changes)
  refuse(message, run.open, tmp_path / 'b', error=training.MismatchError)


def test_a_checkpoint_within_a_phase_is_refused(sparse, tmp_path):
  workdir = shutil.copytree(sparse, tmp_path / 'a')
  folder = workdir / 'checkpoints'
  os.rename(folder / '6', folder / '5')
  densify = training.densify_checkpoint
  refuse('5, within a phase; give ', densify, str(workdir), tmp_path / 'b')


def test_a_checkpoint_of_parameters_only_is_refused(tmp_path):
  write_params(tmp_path, {'w': np.ones(2)}, {})
  densify = training.densify_checkpoint
  refuse('only, and no mask; start', densify, str(tmp_path), tmp_path / 'b')


def test_a_workdir_with_checkpoints_and_unknown_moments_are_refused(sparse):
  given = training.densify_checkpoint, str(sparse), sparse
  refuse('holds checkpoints already; give anoth', *given)
  refuse("moments 'kept' is unknown; did you", *given, moments='kept')


def run_densify(*arguments):
  return subprocess.run(
      [sys.executable, '-m', 'experiments.densify', *map(str, arguments)],
      cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)},
      capture_output=True, text=True, timeout=300, check=False,
  )


@pytest.mark.process
def test_the_command_writes_what_the_function_does(sparse, tmp_path):
  done = run_densify(
      f'--checkpoint={sparse}@pretrain', f'--to={tmp_path / "b"}',
      '--moments=reset',
  )
  assert done.returncode == 0, done.stderr
  assert '6 is written: dense, with moments: reset' in done.stdout
  training.densify_checkpoint(str(sparse), tmp_path / 'c', moments='reset')
  states = [
      make_run().open(tmp_path / name).state for name in 'bc'
  ]
  assert_same_arrays(*states)
  assert training.find_checkpoint(str(tmp_path / 'b')) == pathlib.Path(
      tmp_path / 'b' / 'checkpoints' / '6'
  )
