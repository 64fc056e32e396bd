"""In float16, a step that overflows changes the loss scale and nothing else."""

import dataclasses
import functools

from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.training import initial_state
from spdf_jax.training import NotFinite
from spdf_jax.training import train
from spdf_jax.training import train_step
from spdf_jax.training.loop import loop
from spdf_jax.training.step import losses as scaling
from spdf_jax.training.step.losses import create_loss_scale
from tests.refusals import refuse
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import make_dynamic_run
from tests.tiny_run import make_run
from tests.tiny_run import rows_in
from tests.tiny_run import Stopped
from tests.tiny_run import stopping_at
from tests.tiny_run import with_programs

TOO_LARGE = 2.0**40


def make_half_run(moving=True, **changes):
  """Builds the tiny run in float16, by default with mask updates."""
  run = make_dynamic_run() if moving else make_run()
  model = run.model
  half = model.clone(config=dataclasses.replace(model.config, dtype='float16'))
  if 'micro_batches' in changes:  # Batches of the last phase cannot be split.
    changes['phases'] = run.config.phases[:2]
  return with_programs(
      run, model=half,
      config=dataclasses.replace(
          run.config,
          model=dataclasses.replace(run.config.model, sizes=half.config),
          **changes,
      ),
  )


@functools.cache
def shared_run(micro_batches):
  """A run whose step is compiled once for several tests."""
  return make_half_run(micro_batches=micro_batches)


def scaled(state, scale):
  loss_scale = scaling.LossScale(
      jnp.asarray(scale, jnp.float32), jnp.asarray(5, jnp.int32)
  )
  placed = jax.device_put(loss_scale, state.step.sharding)
  return state.replace(loss_scale=placed)


def copied(tree):
  return jax.tree.map(jnp.copy, tree)


def test_the_scale_follows_the_rule_of_flax(monkeypatch):
  monkeypatch.setattr(scaling, '_GROWTH_INTERVAL', 3)
  ours = create_loss_scale('float16')
  flax = dynamic_scale.DynamicScale(growth_interval=2, minimum_scale=1.0)
  outcomes = np.random.default_rng(0).random(60) < 0.7
  outcomes[30:] = [*[False] * 20, *[True] * 10]
  scales = []
  for finite in outcomes:
    flax = flax.value_and_grad(lambda x, f=finite: x * (1 if f else jnp.inf))(
        1.0
    ).dynamic_scale
    ours = scaling.adjust(ours, jnp.asarray(finite))
    assert float(ours.scale) == float(flax.scale)
    scales.append(float(ours.scale))
  assert min(scales) == 1 and max(scales) > 2**16 and scales[-1] == 8


def test_only_float16_has_a_scale():
  assert initial_state.create(make_half_run().programs).loss_scale is not None
  state = initial_state.create(make_run().programs)
  assert state.loss_scale is None
  assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(
      (state.step, state.params, state.opt_state)
  ))


@pytest.mark.parametrize(
    'step, micro_batches', [(0, 1), (2, 2), (4, 1), (5, 2)]
)
def test_an_overflow_changes_no_bit_but_the_scale(step, micro_batches):
  # Masks move, and dense gradients are asked for, at steps 1 to 4; at 5 the
  # phase changes: its mask is all true, moments stay.
  run = shared_run(1)
  step_fn = shared_run(micro_batches).programs.step
  state = initial_state.create(run.programs)
  for i in range(step):
    state, _ = run.programs.step(state, run.programs.batch_at(i))
  state = scaled(state, TOO_LARGE)
  before = copied(state)
  state, metrics = step_fn(state, run.programs.batch_at(step))
  assert not np.isfinite(metrics['train/grad_norm'])
  assert metrics['train/loss_scale'] == TOO_LARGE
  assert float(state.loss_scale.scale) == TOO_LARGE / 2
  assert int(state.loss_scale.finite_steps) == 0
  assert_same_arrays(
      state.replace(loss_scale=None), before.replace(loss_scale=None)
  )


@pytest.mark.parametrize('micro_batches', [1, 2])
def test_a_step_does_not_depend_on_the_scale(micro_batches):
  run = shared_run(micro_batches)
  moments = []
  for scale in (2.0**10, 2.0**14):
    state = scaled(initial_state.create(run.programs), scale)
    state, metrics = run.programs.step(state, run.programs.batch_at(0))
    assert int(state.step) == 1 and metrics['train/loss_scale'] == scale
    moments.append(optax.tree.get(state.opt_state, 'mu'))
  difference = optax.tree.norm(optax.tree.sub(*moments))
  assert difference < 1e-3 * optax.tree.norm(moments[0])


def test_gradients_are_those_of_float32_and_small_ones_survive():
  full, half = make_run(), make_half_run(moving=False)
  # A loss so small that its gradients vanish in float16 unless scaled.
  tiny = lambda apply_fn: lambda *args: 1e-7 * apply_fn(*args)
  norms = {}
  for run, scales in (
      (full, {'full': None}), (half, {'half': 2.0**24, 'unscaled': 1.0}),
  ):
    first = initial_state.create(run.programs)
    step_fn = jax.jit(functools.partial(
        train_step, apply_fn=tiny(run.model.apply),
        optimizer=run.programs.optimizer, learning_rate=run.plan.learning_rate,
    ))
    for name, scale in scales.items():
      state = first if scale is None else scaled(first, scale)
      _, metrics = step_fn(state, run.programs.batch_at(0))
      norms[name] = float(metrics['train/grad_norm'])
  assert norms['half'] == pytest.approx(norms['full'], rel=0.01)
  assert norms['unscaled'] < 0.5 * norms['full']


def overflowing(monkeypatch):
  """Makes runs overflow at first, and again every few steps."""
  monkeypatch.setattr(scaling, '_FIRST_SCALE', 2.0**30)
  monkeypatch.setattr(scaling, '_GROWTH_INTERVAL', 2)


@pytest.mark.slow
def test_a_run_with_overflows_ends_at_its_last_step_and_resumes_bit_for_bit(
    monkeypatch, tmp_path
):
  overflowing(monkeypatch)
  run = make_half_run()
  steps = []

  def noting(step, rows, batch_at=run.programs.batch_at):
    steps.append(step)
    return batch_at(step, rows)

  vars(run.programs)['batch_at'] = noting
  whole = train(run.open(tmp_path / 'whole'))
  assert steps == list(range(14))
  assert int(whole.step) == int(whole.opt_state.count) == 14
  rows = rows_in(tmp_path / 'whole')
  trained = [row for row in rows if 'train/loss' in row]
  assert [row['step'] for row in trained] == list(range(1, 15))
  attempts = [row['train/attempts'] for row in trained]
  assert attempts[0] > 1 and max(attempts[1:]) > 1 and min(attempts) == 1
  assert all(np.isfinite(row['train/loss']) for row in trained)
  assert trained[0]['train/loss_scale'] == 2.0**(31 - attempts[0])
  for row in rows:
    for key in row:
      if key.startswith('sparsity_planned/'):
        assert row[key] == row[key.replace('_planned', '')]

  for stop in (3, 6):
    run = run.open(tmp_path / 'stopped')
    with pytest.raises(Stopped):
      train(run, evaluators=stopping_at(stop, lambda *_: ()))
    run.close()
  state = train(run.open(tmp_path / 'stopped'))
  assert_same_arrays(state, whole)
  assert rows_in(tmp_path / 'stopped') == rows


@pytest.mark.slow
def test_overflows_change_neither_losses_nor_masks(monkeypatch, tmp_path):
  run = make_half_run()
  calm = train(shared_run(1).open(tmp_path / 'calm'))
  overflowing(monkeypatch)
  state = train(run.open(tmp_path / 'overflowing'))
  losses = [
      [row['train/loss'] for row in rows_in(tmp_path / name)
       if 'train/loss' in row]
      for name in ('calm', 'overflowing')
  ]
  np.testing.assert_allclose(*losses, atol=0.01)
  assert_same_arrays(*(spdf.get_mask(s.opt_state) for s in (state, calm)))


@pytest.mark.ci
def test_training_that_overflows_without_a_scale_ends_in_one_sentence(tmp_path):
  run = make_half_run()
  run = run.open(tmp_path)
  count = 0

  def broken(state, batch):
    nonlocal count
    count += 1
    if int(state.step) == 3:
      state = state.replace(params=jax.tree.map(
          lambda x: jnp.full_like(x, jnp.nan), state.params
      ))
    return step(state, batch)

  step = shared_run(1).programs.step
  vars(run.programs)['step'] = broken
  message = 'step 4 are not finite in float16, with a loss scale of 1 either; '
  refuse(message, train, run, error=NotFinite)
  assert count == 3 + 17  # From 2**16 down to 1.
  run.close()
  vars(run.programs)['step'] = step
  saved = run.open(tmp_path).state
  assert int(saved.step) == 2 and float(saved.loss_scale.scale) == 2**16
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(saved.params))
  assert int(train(run.open(tmp_path)).step) == 14


def test_a_step_without_a_loss_scale_is_taken_once():
  calls = []

  def step_fn(state, batch):
    calls.append(batch)
    return state, {}

  # step_fn returns this state, whose step does not increase.
  state = initial_state.create(make_run().programs)
  assert loop.take_step(step_fn, state, 'batch', 0) == (state, {})
  assert calls == ['batch']


@pytest.mark.slow
def test_the_step_compiles_once_with_and_without_overflow():
  traces = []
  run = shared_run(1)

  def counting(variables, tokens):
    traces.append(tokens.shape)
    return run.model.apply(variables, tokens)

  state = scaled(initial_state.create(run.programs), TOO_LARGE)
  step_fn = jax.jit(
      functools.partial(
          train_step, apply_fn=counting, optimizer=run.programs.optimizer,
          learning_rate=optax.constant_schedule(0.1),
      ),
      out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
  )
  for _ in range(3):
    state, _ = step_fn(state, run.programs.batch_at(0))
  assert len(traces) == 1
  mask = spdf.get_mask(state.opt_state)
  first = initial_state.create(run.programs)
  assert_same_arrays(mask, spdf.get_mask(first.opt_state))
