"""Phases that end early: conditions, the next phase, and resuming."""

import json
import shutil

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax import training
from spdf_jax.files import unseal
from spdf_jax.runs import lifecycle
from spdf_jax.sparsity import get_dense_grads
from spdf_jax.sparsity import get_mask
from spdf_jax.sparsity import summarize
from spdf_jax.training import Evaluators
from spdf_jax.training.configs.config import parse
from spdf_jax.training.configs.early_stop import EarlyStop
from spdf_jax.training.configs.early_stop import METRICS
from spdf_jax.training.loop.evaluations import values_in
from spdf_jax.training.programs import Programs
from tests.quickstart_runs import small_config
from tests.tiers import slow_except
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import rows_in
from tests.tiny_run import Stopped

pytestmark = pytest.mark.ci

RULE = dict(metric='validation/loss', patience=2)
# What evaluations see: phase `pretrain` stalls from its second value on.
SEEN = {3: 3.0, 6: 2.0, 9: 2.5, 12: 2.1, 15: 1.0}


LARGER_IS_BETTER = {
    'validation/loss': False, 'validation/perplexity': False,
    'validation/bits_per_byte': False, 'target/loss': False,
    'target/perplexity': False, 'task/bleu': True, 'task/chrf': True,
}


def test_only_scores_of_texts_are_better_when_larger():
  assert METRICS == LARGER_IS_BETTER


@given(
    values=st.lists(st.floats(0, 9), min_size=1, max_size=12),
    patience=st.integers(1, 4),
    metric=st.sampled_from(sorted(LARGER_IS_BETTER)),
)
def test_patience_counts_evaluations_since_the_best(values, patience, metric):
  better = max if LARGER_IS_BETTER[metric] else min
  stop = EarlyStop(metric, patience=patience)
  best = better(values)
  after_best = len(values) - 1 - values.index(best)
  assert stop.is_met(values) == (after_best >= patience)


@pytest.mark.parametrize('metric, values, met', [
    ('validation/loss', [3.0, 2.5], True),
    ('validation/loss', [2.4, 2.6], False),
    ('task/bleu', [2.4], False),
    ('task/bleu', [2.4, 2.5], True),
    ('task/bleu', [], False),
])
def test_a_value_that_is_reached_ends_the_phase(metric, values, met):
  assert EarlyStop(metric, value=2.5).is_met(values) == met


def test_a_metric_alone_never_ends_a_phase():
  stop = EarlyStop('validation/loss')
  assert not stop.is_met([1.0, *[2.0] * 99])
  assert stop.improves(0.5, 1.0) and not stop.improves(1.0, 1.0)


def test_an_early_stop_sees_values_of_its_own_phase_only():
  rows = [
      {'phase': 'a', 'validation/loss': 1.0}, {'phase': 'a', 'train/loss': 9.0},
      {'phase': 'b', 'validation/loss': 2.0},
  ]
  assert values_in(rows, EarlyStop(**RULE), 'a') == [1.0]


def make_run(**changes):
  config = dict(
      phases__order=('pretrain', 'continuation'), data__task='', eval_every=3,
      phases__pretrain__early_stop=RULE, checkpoints__keep=9,
      checkpoints__every=5,
  )
  return training.Run.create(small_config(**config | changes))


def seen(step, params):
  del params
  yield 'validation/loss', SEEN.get(step, 1.0)


EVALUATORS = Evaluators([seen])


def train(workdir, run=None, evaluators=EVALUATORS, **kwargs):
  run = (run or make_run()).open(workdir)
  return training.train(run, evaluators=evaluators, **kwargs), run


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole')
  called = []
  at_ends = lambda step, params: called.append(step) or ()
  state, run = train(workdir, evaluators=Evaluators([seen], [at_ends]))
  return workdir, state, run, called


def test_the_next_phase_follows_where_one_ends_early(whole):
  workdir, state, run, called = whole
  plan = run.plan
  assert plan.ends == {'pretrain': 12, 'continuation': 27}
  assert int(state.step) == 27 and called == [12, 27]
  rows = [row for row in rows_in(workdir) if 'train/loss' in row]
  names = ['pretrain'] * 12 + ['continuation'] * 15
  assert [row['phase'] for row in rows] == names
  mask = get_mask(state.opt_state)
  assert summarize(mask, state.params, where=run.model.where).sparsity == 0
  assert training.find_checkpoint(f'{workdir}@pretrain').name == '12'


def test_weights_that_a_phase_revives_have_gradients_where_it_begins(whole):
  workdir, _, run, _ = whole
  read = lambda name: run.read_checkpoint(training.find_checkpoint(name))
  assert get_dense_grads(read(f'{workdir}@pretrain').opt_state)
  assert not get_dense_grads(read(str(workdir)).opt_state)


def test_schedules_see_the_step_within_their_phase(whole):
  planned, plan = make_run().plan, whole[2].plan
  for step in (0, 5, 11):
    assert plan.learning_rate(step) == planned.learning_rate(step)
  for step in range(15):
    assert plan.learning_rate(12 + step) == planned.learning_rate(15 + step)


def test_the_next_phase_reads_on_where_the_text_was_left(whole):
  planned, run = make_run(), whole[2]
  for step in (0, 12, 20):
    batches = (each.programs.batch_at(step) for each in (run, planned))
    for one, other in zip(*batches):
      np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('killed_at', slow_except([7], [7, 10, 11, 12, 13, 20]))
def test_a_killed_run_ends_its_phases_at_the_same_steps(
    whole, tmp_path, killed_at, monkeypatch
):
  read = Programs.device_batch_at

  def reading(self, step):
    if step == killed_at:
      raise Stopped
    return read(self, step)

  with monkeypatch.context() as patch:
    patch.setattr(Programs, 'device_batch_at', reading)
    run = make_run().open(tmp_path)
    with pytest.raises(Stopped):
      training.train(run, evaluators=EVALUATORS)
    run.checkpoints.wait()
  state, run = train(tmp_path)
  assert run.plan.ends == {'pretrain': 12, 'continuation': 27}
  best = training.find_checkpoint(f'{tmp_path}@pretrain:best')
  assert best.name == '6'
  assert_same_arrays(state, whole[1])
  assert json.dumps(rows_in(tmp_path)) == json.dumps(rows_in(whole[0]))


@pytest.fixture(scope='module')
def planned(tmp_path_factory):
  """Returns the workdir of a launched run, and its plans of each step."""
  workdir, plans = tmp_path_factory.mktemp('planned'), {}

  class Reader:

    def write_scalars(self, step, row):
      del row
      plans[step] = read_plan(workdir)

    def flush(self):
      pass

    close = flush

  launch(workdir, [lambda *_: Reader()])
  return workdir, plans


def launch(workdir, writers=()):
  run = make_run(phases__pretrain__early_stop=dict(
      metric='validation/loss', value=99.0
  ))
  run = run.open(workdir)
  begun = lifecycle.begin(run, 'planned', baseline=lambda run: {})
  training.train(run, **begun, writers=writers)


def read_plan(workdir):
  return unseal(json.loads((workdir / 'plan.json').read_text()), workdir)


def test_the_plan_on_disk_follows_as_soon_as_a_phase_has_ended_early(planned):
  steps = {
      step: [phase['steps'] for phase in plan['phases']]
      for step, plan in planned[1].items()
  }
  assert steps[2] == [15, 15] and steps[4] == steps[18] == [3, 15]


def test_a_run_killed_after_an_early_end_writes_its_plan_when_it_resumes(
    planned, tmp_path
):
  whole, plans = planned
  killed = tmp_path / 'killed'
  shutil.copytree(whole, killed)
  for step in (15, 18):
    shutil.rmtree(killed / 'checkpoints' / str(step))
  plan = plans[2] | {'bigram': {'validation/loss': 2.0}}
  (killed / 'plan.json').write_text(json.dumps(plan))
  launch(killed)
  assert read_plan(killed) == read_plan(whole) | {'bigram': plan['bigram']}


def test_a_phase_does_not_end_before_the_weights_to_rewind_to(tmp_path):
  run = make_run(
      phases__pretrain__early_stop=dict(metric='validation/loss', value=99.0),
      phases__continuation__rewind_weights_to='6 steps',
  )
  _, run = train(tmp_path, run)
  assert run.plan.ends == {'pretrain': 9, 'continuation': 24}


def test_a_phase_without_a_stall_has_its_planned_steps(tmp_path):
  falling = lambda step, params: [('validation/loss', 1 / step)]
  _, run = train(tmp_path, evaluators=Evaluators([falling]))
  assert run.plan.ends == {'pretrain': 15, 'continuation': 30}


def test_rounds_of_pruning_do_not_end_early():
  from configs import quickstart  # A checkout has configs, a wheel does not.

  config = quickstart.get_config('algorithm=iterative')
  phase = config.phases.round1
  phase.early_stop.update(RULE)
  spec = dict(name='iterative', rounds=phase.algorithm.rounds)
  groups = [['*/mlp/*', spec], ['*', dict(name='dense')]]
  for algorithm in (spec, dict(name='partition', groups=groups)):
    phase.algorithm = algorithm
    with pytest.raises(ValueError, match="'round1' consists of rounds"):
      parse(config)
