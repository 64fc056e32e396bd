"""Phases that revive, rewind or freeze weights, or begin with a given mask."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.sparsity.trees import by_name
from spdf_jax.training import Evaluators
from spdf_jax.training import initial_state
from tests.sparse_loop import trajectory
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import DENSE
from tests.tiny_run import make_config
from tests.tiny_run import make_run
from tests.tiny_run import PHASE
from tests.tiny_run import run_of
from tests.tiny_run import static
from tests.tiny_run import Stopped


def make(**phases):
  """Builds a run of these phases, each the tiny one with some changes."""
  changed = {name: PHASE | change for name, change in phases.items()}
  return run_of(make_config(phases=dict(order=list(phases), **changed)))


def states(run, steps):
  """Returns the states before each of the first steps, and the last."""
  state, copies = initial_state.create(run.programs), []
  for step in range(steps):
    copies.append(jax.tree.map(jnp.copy, state))
    state, _ = run.programs.step(state, run.programs.device_batch_at(step))
  return [*copies, state]


def hidden(params):
  return {name: np.asarray(x) for name, x in by_name(params).items()
          if 'kernel' in name}


@pytest.mark.ci
def test_a_revived_weight_is_its_drawn_value_and_the_first_update():
  scale = lambda count: jnp.where(count == 3, 0.5, 0.0)
  algorithm = spdf.join(
      [spdf.static(0.75), spdf.static(0.5), spdf.dense()], [2, 3]
  )
  finals = {}
  for revive in (None, spdf.scaled_normal(scale)):
    tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0, revive=revive)
    params = {'w': jax.random.normal(jax.random.key(1), (64, 64))}
    *_, (before, state), (after, _) = trajectory(
        tx, params, lambda _, params: jax.tree.map(jnp.ones_like, params), 4
    )
    finals[revive is None] = np.asarray(after['w'])
  kept = np.asarray(spdf.get_mask(state)['w'])
  weights = np.asarray(before['w'])
  draws = finals[False] - finals[True]
  # At step 2 the scale is 0, so the runs differ in the last revival only.
  np.testing.assert_array_equal(draws[kept], 0)
  assert (draws[~kept] != 0).all()
  np.testing.assert_allclose(
      np.std(draws[~kept]), 0.5 * np.std(weights[kept]), rtol=0.1
  )
  np.testing.assert_allclose(finals[True][~kept], -0.1, rtol=1e-6)


def test_every_phase_revives_with_its_own_deviation():
  plan = make(
      sparse={}, less={'algorithm': static(0.5), 'revive': 0.5}, dense={}
  ).plan
  assert [float(plan.revive(i)) for i in (4, 5, 9, 10)] == [0, 0.5, 0.5, 0]
  assert make(sparse={}).plan.revive is None


def test_frozen_parameters_change_by_their_mask_only():
  run = make(dense={'algorithm': DENSE}, sparse={
      'algorithm': static(0.5), 'frozen': ['wte/*', '*/attn/*', '*/bias'],
  })
  history = states(run, 8)
  before, after = by_name(history[5].params), by_name(history[8].params)
  masks = by_name(spdf.get_mask(history[8].opt_state))
  frozen = {name for name in before
            if name.startswith('wte') or '/attn/' in name or 'bias' in name}
  assert 4 < len(frozen) < len(before) - 3
  for name, old in before.items():
    mask = masks.get(name)
    if mask is not None:
      assert np.mean(mask) == 0.5
      old = np.where(mask, old, 0)
    same = np.asarray(old).tobytes() == np.asarray(after[name]).tobytes()
    assert same == (name in frozen), name


@pytest.mark.ci
def test_a_lottery_ticket_is_the_pruned_model_at_its_early_weights():
  run = make(
      dense={'algorithm': DENSE},
      ticket={'algorithm': {
          'name': 'static', 'sparsity': 0.75, 'init': 'magnitude',
      }, 'rewind_weights_to': '2 steps'},
  )
  history = states(run, 7)
  trained, early = history[5].params, by_name(history[2].params)
  masks = by_name(spdf.get_mask(history[6].opt_state))
  assert any(m is not None for m in masks.values())
  for name, weights in by_name(history[6].params).items():
    wanted, mask = np.asarray(early[name]), masks.get(name)
    if mask is not None:
      magnitudes = np.abs(np.asarray(by_name(trained)[name], np.float64))
      least = np.sort(magnitudes, axis=None)[-np.sum(mask)]
      np.testing.assert_array_equal(mask, magnitudes >= least)
      wanted = np.where(mask, wanted, 0)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6, atol=1e-8)
  assert any(
      (np.asarray(x) != np.asarray(y)).any() for x, y in zip(*(
          jax.tree.leaves(state.params) for state in history[6:]
      ))
  )


def make_ticket(early_stop=None, **changes):
  phases = dict(
      order=['dense', 'ticket'],
      dense=PHASE | {'algorithm': DENSE, 'early_stop': early_stop},
      ticket=PHASE | {'rewind_weights_to': '3 steps'},
  )
  return run_of(make_config(phases=phases, **changes))


def test_a_phase_with_an_early_stop_rewinds_to_later_weights_than_its_best(
    tmp_path
):
  run = make_ticket(dict(metric='validation/loss'), eval_every=1)
  seen = {}

  def noting(step, params):
    seen.setdefault(step, jax.tree.map(np.asarray, params))
    yield 'validation/loss', float(step)

  training.train(run.open(tmp_path), evaluators=Evaluators([noting]))
  assert training.find_checkpoint(f'{tmp_path}@dense:best').name == '1'
  masks = by_name(jax.tree.map(lambda x: x != 0, seen[6]))
  early = by_name(seen[3])
  for name, weights in hidden(seen[6]).items():
    wanted = np.where(masks[name], early[name], 0)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6, atol=1e-8)


def test_a_skipped_step_still_rewinds_the_weights():
  run = make_ticket(max_skipped_steps=1)
  state = states(run, 5)[-1]
  batch = run.programs.device_batch_at(5)
  bad = batch._replace(weights=batch.weights * np.nan)
  rewound, skipped = (
      run.programs.step(jax.tree.map(jnp.copy, state), x)[0]
      for x in (batch, bad)
  )
  assert_same_arrays(skipped.params, rewound.params)


def test_snip_keeps_the_weights_that_matter_most_for_the_first_batch():
  run = make(sparse={'initial_mask': 'snip'}, dense={'algorithm': DENSE})
  params, batch = run.programs.init_params(), run.programs.batch_at(0)

  def loss(params):
    logits = run.model.apply({'params': params}, batch.inputs)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(
        logits, batch.targets
    ))

  grads = by_name(jax.jit(jax.grad(loss))(params))
  state = initial_state.create(run.programs)
  masks = hidden(spdf.get_mask(state.opt_state))
  assert masks
  for name, mask in masks.items():
    scores = np.abs(np.asarray(by_name(params)[name] * grads[name]))
    assert mask.sum() == mask.size // 4
    assert scores[mask].min() >= scores[~mask].max() * (1 - 1e-5)
    np.testing.assert_array_equal(
        hidden(state.params)[name], np.where(mask, by_name(params)[name], 0)
    )


def test_a_run_begins_with_the_mask_of_another(tmp_path):
  other = make_run(seed=3).open(tmp_path)
  other.checkpoints.save(other.state)
  other.checkpoints.close()
  run = make(sparse={'initial_mask': str(tmp_path)})
  saved = hidden(spdf.get_mask(other.state.opt_state))
  masks = hidden(spdf.get_mask(initial_state.create(run.programs).opt_state))
  assert masks.keys() == saved.keys() and masks
  for path, mask in masks.items():
    np.testing.assert_array_equal(mask, saved[path])


def test_a_mask_of_another_run_is_checked_for_all_phases_that_share_it(
    tmp_path
):
  other = make_run(seed=3).open(tmp_path)
  other.checkpoints.save(other.state)
  other.checkpoints.close()
  phase = PHASE | {'algorithm': dict(
      name='rigl', sparsity=0.75, update_every=3, update_until=9
  )}
  phases = dict(a=phase | {'initial_mask': str(tmp_path)}, b=phase)
  with pytest.raises(ValueError, match="^corpus 'text' is unknown"):
    training.Run.create(make_config(
        phases=dict(order=list(phases), **phases)
    ).as_dict())


def test_a_mask_of_another_run_has_the_structure_of_the_phase(tmp_path):
  def phase(structure):
    return {'algorithm': dict(
        name='static', sparsity=0.5, structure=structure
    )}

  def begun_from(structure):
    workdir = tmp_path / structure
    other = make(a=phase(structure)).open(workdir)
    other.checkpoints.save(other.state)
    other.checkpoints.close()
    return phase('2:4') | {'initial_mask': str(workdir)}

  initial_state.create(make(a=begun_from('2:4')).programs)
  with pytest.raises(ValueError, match="^phase 'a': mask of .* structure"):
    training.Run.create(make_config(phases=dict(
        order=['a'], a=PHASE | begun_from('unstructured')
    )).as_dict())


@pytest.mark.parametrize('phases, message', [
    ({'a': {'revive': -1.0}}, "phase 'a' has revive -1.0; give a multiple"),
    ({'a': {'initial_mask': 'snip', 'algorithm': DENSE}},
     "phase 'a' has the initial_mask 'snip' and is dense"),
    ({'a': {}, 'b': {'algorithm': static(0.5), 'initial_mask': 'snip'}},
     "phase 'b' has the initial_mask 'snip', but is not the first"),
    ({'a': {'initial_mask': 'snip', 'algorithm': dict(
        name='partition', groups=[['*', dict(
            name='static', sparsity=0.5, structure='2:4')]],
    )}}, 'groups with a structure, which that mask would'),
    ({'a': {'initial_mask': 'snip', 'algorithm': dict(
        name='gmp', update_every=2, update_until=4, sparsity=dict(
            schedule='cubic', initial=0.0, final=0.8, steps=4),
    )}}, "phase 'a' has the initial_mask 'snip' and begins with sparsity 0"),
    ({'a': {'initial_mask': 'snap'}},
     "phase 'a': initial_mask is 'snap', neither one of snip, grasp nor"),
    ({'a': {'rewind_weights_to': '1 steps'}},
     "phase 'a' begins at step 0, .* to the weights of step 1"),
    ({'a': {}, 'b': {'rewind_weights_to': '5 steps'}}, "'b' begins at step 5"),
    ({'a': {}, 'b': {'rewind_weights_to': '0 steps'},
      'c': {'rewind_weights_to': '2 steps'}},
     "different steps, {'b': 0, 'c': 2}"),
    ({'a': {}, 'b': {'rewind_weights_to': '2 lives'}},
     "phase 'b': duration is '2 lives'"),
    ({'a': {'frozen': ['wtf/*']}},
     r"phase 'a' has the pattern 'wtf/\*' in frozen, .* wte/embedding"),
    ({'a': {'frozen': ['*']}}, "phase 'a' has all parameters frozen"),
    ({'a': {'frozen': 'wte'}}, "'phases.a.frozen' is 'wte'; it must be a list"),
])
def test_fields_that_make_no_sense_are_refused_before_data_is_read(
    phases, message
):
  changed = {name: PHASE | change for name, change in phases.items()}
  with pytest.raises(ValueError, match=message):
    # There is no corpus of this name, which would be the next complaint.
    training.Run.create(make_config(
        phases=dict(order=list(phases), **changed)
    ).as_dict())


@pytest.mark.parametrize('changes, message', [
    (dict(adapter=dict(rank=2, scale=1.0)), 'and adapter.rank keeps trained'),
    (dict(optimizer=dict(name='schedule_free_sgd', clip_norm=1.0)),
     "and optimizer 'schedule_free_sgd' keeps trained weights in its state"),
])
def test_rewinding_is_refused_for_optimizers_with_other_iterates(
    changes, message
):
  phases = dict(a=PHASE, b=PHASE | {'rewind_weights_to': '0 steps'})
  with pytest.raises(ValueError, match=f"phase 'b' is set, {message}"):
    make_config(phases=dict(order=list(phases), **phases), **changes)


@pytest.mark.slow
@pytest.mark.parametrize('stopped_at', [2, 5, 6, 9, 12])
def test_a_stopped_run_continues_bit_for_bit(tmp_path, stopped_at):
  phases = dict(
      first={'initial_mask': 'grasp'},
      ticket={'algorithm': static(0.5), 'rewind_weights_to': '2 steps'},
      dense={'algorithm': DENSE, 'revive': 0.5, 'frozen': ['wte/*']},
  )

  def train(workdir, run):
    return training.train(run.open(workdir))

  whole = train(tmp_path / 'whole', make(**phases))

  stopped = make(**phases)
  batch_at = stopped.programs.device_batch_at

  def stopping(step):
    if step == stopped_at:
      raise Stopped
    return batch_at(step)

  vars(stopped.programs)['device_batch_at'] = stopping
  with pytest.raises(Stopped):
    train(tmp_path / 'run', stopped)
  assert_same_arrays(train(tmp_path / 'run', make(**phases)), whole)
