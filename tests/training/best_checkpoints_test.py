"""The best checkpoint of a phase: kept, named, resumed from and ended with."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax import training
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord
from spdf_jax.runs.report import write_report
from spdf_jax.runs.statements import best_steps
from spdf_jax.training import Evaluators
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import manager as checkpoints
from spdf_jax.training.checkpoints.workdir import saved_steps
from spdf_jax.training.checkpoints.workdir import split_source
from spdf_jax.training.configs.early_stop import EarlyStop
from spdf_jax.training.programs import Programs
from tests.tiers import slow_except
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import make_config
from tests.tiny_run import make_run
from tests.tiny_run import rows_in
from tests.tiny_run import run_of
from tests.tiny_run import shared_step
from tests.tiny_run import Stopped
from tests.tiny_run import stopping_at
from tests.tiny_run import with_programs

# Without patience or value, no phase ends early.
STOP = EarlyStop('validation/loss')
# Phase `pretrain` is best at step 2 of 5, and `finetune` at step 12 of 11 to
# 14; `continuation`, of steps 6 to 10, has no early stop.
SEEN = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.0, 5: 2.4, 11: 1.0, 12: 0.5, 13: 0.7}
BEST = {'pretrain': 2, 'finetune': 12}


def make(**changes):
  saving = dict(checkpoints__keep=1, checkpoints__every=3)
  run = make_run(eval_every=1, **saving | changes)
  phases = tuple(
      dataclasses.replace(p, early_stop=STOP if p.name in BEST else None)
      for p in run.plan.phases
  )
  run = with_programs(
      run, plan=dataclasses.replace(run.plan, phases=phases)
  )
  vars(run.programs)['step'] = shared_step(0, 16, 0)
  return run


def seen(step, params):
  del params
  yield 'validation/loss', SEEN.get(step, 0.8)


EVALUATORS = Evaluators([seen])


def train(workdir, run=None, evaluators=EVALUATORS, **kwargs):
  run = (run or make()).open(workdir)
  return training.train(run, evaluators=evaluators, **kwargs)


def restore(source, run=None):
  run = run or make()
  return checkpoint_files.read_checkpoint(
      training.find_checkpoint(source), run.programs.abstract_state,
      config=run.config, fingerprints=run.fingerprints,
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole')
  states = {}

  def noting(step, params):
    states.setdefault(step, jax.tree.map(np.asarray, params))
    return ()

  return workdir, train(workdir, evaluators=Evaluators([seen, noting])), states


def test_the_best_checkpoint_of_every_phase_is_kept(whole):
  workdir, _, states = whole
  assert saved_steps(workdir) == [2, 5, 10, 12, 14]
  for phase, step in BEST.items():
    best = restore(f'{workdir}@{phase}:best')
    assert int(best.step) == step
    assert_same_arrays(best.params, states[step])


@pytest.mark.parametrize('phase', BEST)
def test_a_phase_ends_with_its_best_weights_and_its_own_counts(whole, phase):
  workdir = whole[0]
  best, end = (restore(f'{workdir}@{phase}{x}') for x in (':best', ''))
  assert_same_arrays(end.params, best.params)
  assert int(end.step) == {'pretrain': 5, 'finetune': 14}[phase]
  assert int(end.opt_state.count) == int(end.step)
  adam = lambda state: optax.tree_utils.tree_get(state.opt_state, 'mu')
  assert_same_arrays(adam(end), adam(best))
  assert_same_arrays(end.opt_state.mask, best.opt_state.mask)


def test_the_next_phase_starts_from_the_best_weights(whole):
  workdir, _, states = whole
  run = make()
  step_fn, state = run.programs.prepare_step(restore(f'{workdir}@pretrain'), 5)
  state, metrics = step_fn(state, run.programs.device_batch_at(5))
  assert_same_arrays(state.params, states[6])
  rate = run.plan.learning_rate(5)
  np.testing.assert_allclose(metrics['train/learning_rate'], rate, rtol=1e-6)


def test_a_phase_without_an_early_stop_ends_with_its_last_weights(whole):
  workdir, _, states = whole
  assert_same_arrays(restore(f'{workdir}@continuation').params, states[10])


@pytest.mark.ci
@pytest.mark.parametrize('place, killed_at', slow_except([('save', 2)], [
    ('batch', 1), ('save', 2), ('batch', 2), ('batch', 3), ('save', 5),
    ('batch', 5), ('batch', 8), ('save', 12), ('batch', 12), ('save', 14),
]))
def test_a_killed_run_keeps_the_same_best(
    whole, tmp_path, place, killed_at, monkeypatch
):
  read, save = Programs.device_batch_at, checkpoints.Checkpoints.save

  def reading(self, step):
    if place == 'batch' and step == killed_at:
      raise Stopped
    return read(self, step)

  def saving(self, state, best):
    if place == 'save' and int(state.step) >= killed_at:
      raise Stopped
    save(self, state, best)

  with monkeypatch.context() as patch:
    patch.setattr(Programs, 'device_batch_at', reading)
    patch.setattr(checkpoints.Checkpoints, 'save', saving)
    with pytest.raises(Stopped):
      train(tmp_path)
  assert_same_arrays(train(tmp_path), whole[1])
  assert saved_steps(tmp_path) == saved_steps(whole[0])
  for phase in BEST:
    assert_same_arrays(*(
        restore(f'{path}@{phase}:best') for path in (tmp_path, whole[0])
    ))
  assert json.dumps(rows_in(tmp_path)) == json.dumps(rows_in(whole[0]))


@pytest.mark.ci
def test_a_checkpoint_is_written_once_whenever_the_metric_improves(
    tmp_path, monkeypatch
):
  save, saved = checkpoints.Checkpoints.save, []

  def saving(self, state, best):
    saved.append(int(state.step))
    save(self, state, best)

  monkeypatch.setattr(checkpoints.Checkpoints, 'save', saving)
  train(tmp_path, make(checkpoints__every=100))
  assert saved == [1, 2, 5, 10, 11, 12, 14]


def test_the_best_is_found_while_its_phase_continues(tmp_path):
  with pytest.raises(Stopped):
    train(tmp_path, evaluators=stopping_at(4, seen))
  assert training.find_checkpoint(f'{tmp_path}@pretrain:best').name == '2'
  assert training.find_checkpoint(str(tmp_path)).name == '3'


@pytest.mark.ci
def test_values_that_are_not_finite_are_never_the_best(tmp_path):
  values = {1: float('nan'), 2: float('inf'), 3: 4.0, 4: float('nan')}
  evaluate = lambda step, params: [('validation/loss', values.get(step, 9.0))]
  train(tmp_path, evaluators=Evaluators([evaluate]))
  assert training.find_checkpoint(f'{tmp_path}@pretrain:best').name == '3'
  stop = EarlyStop('validation/loss', patience=9)
  assert stop.is_met([1.0] + [None] * 9) and not stop.is_met([None, 1.0])


def make_memorizing_run():
  """Builds a run of 20 steps on one batch, so that the model over-fits."""
  config = make_config(
      phases__order=('finetune',), phases__finetune__duration='20 steps',
      phases__finetune__learning_rate__final_fraction=1.0, eval_every=2,
      phases__finetune__early_stop=dict(metric=STOP.metric, patience=99),
  )
  run = run_of(config)
  batch_at = run.programs.batch_at
  vars(run.programs)['batch_at'] = lambda step, *rows: batch_at(0, *rows)
  return run


def held_out(step, params):
  run = make_run()
  batch = make_run(seed=1).programs.batch_at(6)
  logits = run.model.apply({'params': params}, jnp.asarray(batch.inputs))
  yield 'validation/loss', float(jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
  ))


@pytest.mark.ci
def test_a_run_that_over_fits_ends_with_the_weights_of_the_best_loss(
    tmp_path, caplog
):
  run = make_memorizing_run()
  caplog.set_level(logging.INFO, 'spdf_jax')
  train(tmp_path, run, Evaluators([held_out]))
  rows = [r for r in rows_in(tmp_path) if 'validation/loss' in r]
  *trained, end = [row['validation/loss'] for row in rows]
  assert end == min(trained) < trained[-1] and rows[-1]['best/step'] < 20
  checkpoint = training.find_checkpoint(str(tmp_path))
  params = checkpoint_files.read_params(
      checkpoint, run.programs.abstract_state.params
  )
  (_, value), = held_out(0, params)
  assert value == end
  best = f"the best of phase 'finetune' (step {rows[-1]['best/step']}, valid"
  assert f'the parameters of {checkpoint} are {best}' in caplog.text


@pytest.mark.parametrize('field', ['init_from', 'resume'])
def test_a_best_checkpoint_that_is_not_there_is_refused(
    whole, tmp_path, field
):
  for phase in ('continuation', 'other'):
    source = f'{whole[0]}@{phase}:best'
    with pytest.raises(ValueError, match=r"\['pretrain', 'finetune'\]; give"):
      training.find_checkpoint(source)
    with pytest.raises(ValueError, match=f'{field}: .*early_stop'):
      make(**{field: source}).open(tmp_path / 'run')
  with pytest.raises(ValueError, match='give WORKDIR, WORKDIR@PHASE or'):
    training.find_checkpoint(f'{whole[0]}@pretrain:last')


def test_a_run_resumes_from_the_best_checkpoint(whole, tmp_path):
  source = f'{whole[0]}@finetune:best'
  state = make(resume=source).open(tmp_path).state
  assert_same_arrays(state, restore(source))


@pytest.mark.ci
def test_a_best_checkpoint_that_cannot_be_read_stops_the_run(
    tmp_path, monkeypatch
):
  def damaging(step, params):
    if step == 5:
      run.checkpoints.wait()
      for path in (tmp_path / 'checkpoints' / '2').rglob('*'):
        if path.is_file():
          path.write_bytes(b'')
    yield from seen(step, params)

  run = make().open(tmp_path)
  with pytest.raises(ValueError, match='move it out of its folder and run the'):
    training.train(run, evaluators=Evaluators([damaging]))
  (tmp_path / 'checkpoints' / '2').rename(tmp_path / '2')
  train(tmp_path)
  assert training.find_checkpoint(f'{tmp_path}@pretrain:best').name == '4'


@pytest.mark.ci
def test_reports_and_progress_show_where_the_best_was(whole, tmp_path, capsys):
  rows = rows_in(whole[0])
  assert [r['best/step'] for r in rows if 'best/step' in r] == [
      1, 2, 2, 2, 2, 2, 11, 12, 12, 12, 12,
  ]
  phase = PhaseRecord('pretrain', 0, 5, 2, 8, 'corpus', 0.75, 80, 5.0, 9.0)
  run = RunRecord('toy', (phase,), tuple(rows[:-1]))
  assert best_steps({'toy': run}) == [
      'toy: pretrain was best at step 2 (validation/loss 2.00) and ends with '
      'its weights at step 5.'
  ]
  train(tmp_path)
  assert 'best at step 12' in capsys.readouterr().err


@pytest.mark.ci
def test_the_page_of_a_report_shows_where_the_best_was(tmp_path):
  phase = PhaseRecord('tune', 0, 8, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
  rows = ({'step': 6, 'best/step': 4, 'best/task/bleu': 9.0},)
  runs = {'toy': RunRecord('toy', (phase,), rows)}
  page = write_report(tmp_path, runs).read_text()
  sentence = 'tune was best at step 4 (task/bleu 9.00) and is at step 6.'
  assert f'* toy: {sentence}' in page


def test_the_last_at_sign_separates_the_phase_unless_it_is_in_a_folder(
    tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  split = split_source
  assert split('me@host@pretrain') == ('me@host', 'pretrain', '')
  assert split('a@b/me@host@tune:best') == ('a@b/me@host', 'tune', 'best')
  assert split('me@host') == ('me', 'host', '')
  (tmp_path / 'me@host').mkdir()
  assert split('me@host') == ('me@host', '', '')
