"""A run goes on from its state with more phases, or with others."""

import pytest

from configs import common
import spdf_jax as spdf
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.runs import lifecycle
from tests.quickstart_runs import small_config
from tests.refusals import refuse
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import DENSE
from tests.tiny_run import rows_in
from tests.tiny_run import static

pytestmark = pytest.mark.ci

RIGL = dict(
    name='rigl', sparsity=0.5, update_every='2 steps', update_until='4 steps'
)
SET = dict(name='set', sparsity=0.5, update_every='2 steps', update_until=None)
CONSTANT = dict(schedule='constant', warmup='1 steps')


def phase(steps, **fields):
  return dict(
      duration=f'{steps} steps', length=32, batch_size=4,
      algorithm=static(0.75), learning_rate=CONSTANT,
  ) | fields


FIRST = dict(
    a=phase(5), b=phase(4, algorithm=DENSE, batch_size=2)
)
# Phases of the first run, the phase it is resumed from, and all phases.
CASES = {
    'longer': (FIRST, 'b', FIRST | dict(
        c=phase(4, algorithm=DENSE, learning_rate=dict(
            schedule='linear', warmup='1 steps', peak=5e-3
        ))
    )),
    'longer with the same mask': (
        dict(a=phase(5)), 'a', dict(a=phase(5), b=phase(4))
    ),
    'another batch size': (
        FIRST, 'a', FIRST | dict(b=phase(5, algorithm=DENSE, batch_size=8))
    ),
    'denser': (
        dict(a=phase(5)), 'a', dict(a=phase(5), b=phase(4, algorithm=DENSE))
    ),
    'sparser': (
        FIRST, 'a', dict(a=phase(5), b=phase(4, algorithm=static(0.9)))
    ),
    'further updates': (
        dict(a=phase(5, algorithm=SET)), 'a',
        dict(a=phase(5, algorithm=SET), b=phase(4, algorithm=SET)),
    ),
    'restarted moments': (
        FIRST, 'a', FIRST | dict(c=phase(4, reset_moments=True))
    ),
}


def make_run(phases, **changes):
  config = small_config(data__task='', **changes)
  common.set_phases(config, **phases)
  return training.Run.create(config)


def train(run, workdir):
  return training.train(run.open(workdir))


@pytest.mark.parametrize('name', CASES)
def test_a_resumed_run_ends_as_one_launch_of_all_phases(name, tmp_path):
  before, end, phases = CASES[name]
  train(make_run(before), tmp_path / 'before')
  run = make_run(phases, resume=f'{tmp_path / "before"}@{end}').open(
      tmp_path / 'after'
  )
  start = int(run.state.step)
  assert 0 < start < run.plan.total_steps
  resumed = training.train(run)
  wanted = train(make_run(phases), tmp_path / 'whole')
  assert_same_arrays(resumed, wanted)
  rows, expected = (
      rows_in(tmp_path / name, start + 1) for name in ('after', 'whole')
  )
  assert rows == expected


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'a'
  train(make_run(FIRST), workdir)
  return workdir


def test_what_an_earlier_run_took_is_recorded(tmp_path):
  def record(name, phases, **start):
    run = make_run(phases, **start).open(tmp_path / name)
    training.train(run, **lifecycle.begin(run, name))
    return runs.read_run(tmp_path / name)

  longer = FIRST | dict(c=phase(2))
  first = record('first', FIRST)
  seconds = sum(first.series('time/seconds')[1])
  resumed = record('resumed', longer, resume=f'{tmp_path}/first@b')
  whole = record('whole', longer)
  assert runs.flops_at(resumed, 11) == runs.flops_at(whole, 11)
  assert resumed.before.steps == whole.before.steps == 0
  assert resumed.before.seconds == pytest.approx(seconds)
  tuned = record('tuned', dict(c=phase(2)), init_from=f'{tmp_path}/resumed')
  tokens = 5 * 128 + 4 * 64 + 2 * 128
  assert (tuned.before.steps, tuned.before.tokens) == (11, tokens)
  assert tuned.before.flops == runs.flops_at(whole, 11)
  assert tuned.before.seconds > seconds
  again = make_run(dict(c=phase(2)), init_from=f'{tmp_path}/resumed')
  (tmp_path / 'resumed' / 'plan.json').unlink()
  assert lifecycle.begin(again.open(tmp_path / 'tuned'), 'tuned')
  assert runs.read_run(tmp_path / 'tuned').before == tuned.before


def rate(**fields):
  return phase(4, algorithm=DENSE, batch_size=2, learning_rate=fields)


@pytest.mark.parametrize('phases, changes, source, message', [
    (FIRST | dict(a=phase(6), c=phase(2)), {}, '@b',
     "phases.a.duration was '5 steps' and is '6 steps'; restore these values"),
    (FIRST | dict(c=phase(2)), dict(seed=1), '@b', 'seed was 0 and is 1'),
    (FIRST | dict(c=rate(schedule='continue')), {}, '@b',
     "may differ, but for a learning rate of schedule 'continue' and shared"),
    (FIRST | dict(b=phase(9)), {}, '/',
     "phases.b.duration was '4 steps' and is '9 steps'"),
    (FIRST, {}, '@b', 'nothing to train; add a phase to phases.order, or'),
])
def test_resuming_with_other_earlier_phases_is_refused(
    phases, changes, source, message, finished, tmp_path
):
  run = make_run(phases, resume=f'{finished}{source}', **changes)
  refuse(message, run.open, tmp_path / 'b')
  assert not (tmp_path / 'b').exists()


OBSERVED = dict(
    log_every=3, eval_every=3, evaluation__corpus_batches=1,
    evaluation__generations=2, evaluation__max_new_tokens=5,
    checkpoints__every=3, checkpoints__keep=1,
)


@pytest.mark.parametrize('name, source', [('at an end', '@a'), ('within', '')])
def test_a_resumed_run_may_be_logged_and_evaluated_otherwise(
    name, source, finished, tmp_path
):
  phases = FIRST | dict(b=phase(6, algorithm=DENSE)) if source else FIRST
  before = finished
  if not source:
    before = tmp_path / 'begun'
    begun = make_run(phases).open(before)
    begun.checkpoints.save(begun.state, begun.best)
    begun.close()
  other = make_run(phases, resume=f'{before}{source}', **OBSERVED)
  other.open(tmp_path / 'other').close()
  wanted = make_run(phases, resume=f'{before}{source}').open(tmp_path / 'same')
  assert_same_arrays(other.state, wanted.state)
  wanted.close()


def test_a_resumed_run_keeps_the_evaluations_that_chose_its_weights(
    tmp_path
):
  stop = dict(metric='validation/loss', value=None, patience=None)
  phases = dict(a=phase(4, early_stop=stop), b=phase(2))
  run = make_run(phases).open(tmp_path / 'a')
  run.checkpoints.save(run.state, run.best)
  run.close()
  other = make_run(phases, resume=str(tmp_path / 'a'), eval_every=2)
  refuse('eval_every was .* and is 2', other.open, tmp_path / 'b')


def test_resuming_with_more_phases_refuses_update_times_in_per_cent(tmp_path):
  share = RIGL | dict(update_every='25%', update_until='75%')
  train(make_run(dict(a=phase(5, algorithm=share))), tmp_path / 'a')
  phases = dict(a=phase(5, algorithm=share), b=phase(5, algorithm=share))
  run = make_run(phases, resume=str(tmp_path / 'a'))
  refuse('and shared mask updates in per cent', run.open, tmp_path / 'b')


def test_longer_sequences_need_a_new_epoch(tmp_path):
  first = dict(a=phase(4, length=16))
  train(make_run(first), tmp_path / 'a')
  start, longer = dict(resume=f'{tmp_path / "a"}@a'), phase(4, length=32)
  refuse(
      "blocks of 16 tokens, .* blocks of 32 'b' would read parts of the epoch",
      make_run(first | dict(b=longer), **start).open, tmp_path / 'b',
  )
  start |= dict(data__max_epochs__corpus=2)
  make_run(first | dict(b=longer | dict(new_epoch=True)), **start).open(
      tmp_path / 'c'
  ).close()


def test_a_workdir_with_fewer_phases_is_refused_with_the_resume_flag(finished):
  run = make_run(FIRST | dict(c=phase(2)))
  refuse(
      f'another workdir and --config.resume={finished}@b.', run.open, finished,
  )


def test_another_batch_size_within_a_phase_starts_from_the_parameters(
    tmp_path
):
  begun, other = dict(a=phase(8)), dict(a=phase(6, batch_size=2))
  run = make_run(begun).open(tmp_path / 'begun')
  state = run.state
  for step in range(5):
    step_fn, state = run.programs.prepare_step(state, step)
    state, _ = step_fn(state, run.programs.device_batch_at(step))
  state = run.programs.to_dense(state)
  run.checkpoints.save(state, run.best)
  run.close()
  for start in (tmp_path / 'begun', tmp_path / 'other'):
    source = dict(resume=f'{tmp_path / "begun"}')
    with pytest.raises(ValueError, match=(
        rf'config.init_from={tmp_path / "begun"}\b'
    )):
      make_run(other, **source if start.name == 'other' else {}).open(start)
  run = make_run(other, init_from=f'{tmp_path / "begun"}').open(
      tmp_path / 'other'
  )
  assert_same_arrays(run.state.params, state.params)
  assert_same_arrays(
      spdf.get_mask(run.state.opt_state), spdf.get_mask(state.opt_state)
  )
  assert int(training.train(run).step) == 6
