"""Phases become functions of the step; impossible ones are refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax.sparsity import Algorithm
from spdf_jax.training import create_plan
from spdf_jax.training import Phase
from spdf_jax.training import Plan
from spdf_jax.training.configs.config import parse_phases
from tests.refusals import refuse
from tests.tiny_run import DENSE
from tests.tiny_run import static

PHASE = Phase(
    name='sparse', steps=10, data='corpus', batch_size=2, length=8,
    algorithm=static(0.75), learning_rate=optax.constant_schedule(0.1),
    weight_decay=0.01, reset_moments=False,
)
RATE = dict(
    schedule='cosine', peak=1e-2, warmup='4 steps', final_fraction=0.1
)
SPEC = dict(
    duration='30 steps', data='corpus', batch_size=2, length=8,
    algorithm=static(0.5), learning_rate=RATE, weight_decay=0.1,
    reset_moments=False, new_epoch=False,
)


def make_phase(**changes):
  return dataclasses.replace(PHASE, **changes)


def make_rate(schedule, **changes):
  return {'learning_rate': RATE | {'schedule': schedule} | changes}


def make_plan(*changes, order=None):
  """A plan of phases 'p0', 'p1', …, each SPEC with some changes."""
  specs = {f'p{i}': SPEC | change for i, change in enumerate(changes)}
  order = list(specs) if order is None else order
  return create_plan(
      parse_phases({'order': order, **specs}),
      tokens_per_epoch={'corpus': lambda length: 1_000 // length * length},
      parameters=50,
  )


def rates(plan):
  return np.array([
      float(plan.learning_rate(step)) for step in range(plan.total_steps)
  ])


def test_an_epoch_is_that_of_blocks_of_the_longest_sequences():
  short = {'duration': '1 epochs', 'length': 16, 'batch_size': 1}
  one, two = make_plan(short), make_plan(short, {'length': 256})
  assert (one.phases[0].steps, two.phases[0].steps) == (1_000 // 16, 768 // 16)


def test_a_continued_cosine_is_one_cosine_over_both_phases():
  both = make_plan({}, {'duration': '13 steps', **make_rate('continue')})
  one = make_plan({'duration': '43 steps'})
  np.testing.assert_array_equal(rates(both), rates(one))


def test_a_continued_schedule_spans_every_phase_that_continues_it():
  change = make_rate('continue')
  three = make_plan({}, change, change, make_rate('linear'))
  one = make_plan({'duration': '90 steps'}, make_rate('linear'))
  np.testing.assert_array_equal(rates(three), rates(one))
  assert three.starts == (0, 30, 60, 90)


def test_rewound_rounds_make_an_exact_sawtooth():
  rewound = make_rate('rewind', to='7 steps')
  plan = make_plan({}, rewound, {'duration': '20 steps', **rewound})
  base = rates(make_plan({}))
  late = np.full(7, base.dtype.type(optax.cosine_decay_schedule(
      1e-2, 26, alpha=0.1
  )(26)))
  want = np.concatenate([base, base[7:], late, base[7:27]])
  np.testing.assert_array_equal(rates(plan), want)
  # The rate jumps up at the start of each round.
  assert plan.learning_rate(30) > plan.learning_rate(29)
  assert plan.learning_rate(60) > plan.learning_rate(59)


def test_a_rewound_schedule_is_that_of_the_last_phase_with_its_own():
  linear = make_rate('linear', peak=0.5)
  rewind = make_rate('rewind', to='')
  plan = make_plan({}, linear, make_rate('continue'), rewind, rewind)
  base = rates(make_plan(linear | {'duration': '60 steps'}))
  want = np.concatenate([rates(make_plan({})), base, base[:30], base[:30]])
  np.testing.assert_array_equal(rates(plan), want)


def test_a_phase_continues_the_schedule_of_a_rewound_phase():
  changes = [make_rate('rewind', to='5 steps'), make_rate('continue')]
  plan = make_plan({}, *({'duration': '10 steps', **c} for c in changes))
  base = rates(make_plan({}))
  np.testing.assert_array_equal(rates(plan)[30:], base[5:25])


def test_the_target_of_a_rewind_is_a_duration_in_its_own_phase():
  # 64 tokens are 4 of the first phase's steps, 2 of the second's.
  rewound = make_rate('rewind', to='64 tokens') | {'batch_size': 4}
  plan = make_plan({}, rewound)
  np.testing.assert_array_equal(rates(plan)[30:56], rates(make_plan({}))[4:])


@pytest.mark.parametrize('rate, message', [
    (make_rate('rewind', to='30 steps'),
     "rate of phase 'p1': it rewinds to step 30 of a schedule of 30 steps"),
    (make_rate('rewind', to='soon'), "'p1': duration is 'soon'; write"),
    (make_rate('rewind'), "'p1': schedule 'rewind' needs 'to'"),
])
def test_a_rewind_to_a_step_outside_the_schedule_is_refused(rate, message):
  refuse(message, make_plan, {}, rate)


def test_a_cosine_falls_to_its_final_fraction():
  actual = rates(make_plan({}))
  decay = lambda k: 0.5 * (1 + math.cos(math.pi * k / 26))
  want = [1e-2 * (0.1 + 0.9 * decay(k)) for k in range(26)]
  np.testing.assert_allclose(actual[4:], want, rtol=1e-5)


def test_warm_up_learns_from_the_first_step_on():
  for name in ('cosine', 'linear', 'constant'):
    actual = rates(make_plan(make_rate(name)))
    want = 1e-2 * np.arange(1, 6) / 5
    np.testing.assert_allclose(actual[:5], want, rtol=1e-6)
    assert actual.max() == pytest.approx(1e-2)


def test_without_warm_up_the_first_step_has_the_peak():
  for name in ('cosine', 'linear', 'constant'):
    actual = rates(make_plan(make_rate(name, warmup='')))
    assert actual[0] == pytest.approx(1e-2)


def test_warm_up_is_a_duration_like_any_other():
  tokens = make_plan(make_rate('cosine', warmup='64 tokens'))
  np.testing.assert_array_equal(rates(tokens), rates(make_plan({})))


def test_a_phase_begins_its_own_schedule_at_its_boundary():
  plan = make_plan(
      make_rate('constant', peak=0.5, warmup=''),
      make_rate('linear', peak=0.25, warmup='', final_fraction=0.0),
  )
  actual = rates(plan)
  assert set(actual[:30].tolist()) == {0.5}
  np.testing.assert_allclose(
      actual[30:], 0.25 * (1 - np.arange(30) / 30), rtol=1e-5
  )


def test_the_schedule_is_the_same_when_it_is_traced():
  plan = make_plan({}, make_rate('linear'))
  steps = jnp.arange(plan.total_steps)
  traced = jax.jit(jax.vmap(plan.learning_rate))(steps)
  np.testing.assert_allclose(traced, rates(plan), rtol=1e-5)


def test_weight_decay_changes_at_the_boundary():
  plan = make_plan({'weight_decay': 0.25}, {'weight_decay': 0.5})
  decays = [float(plan.weight_decay(step)) for step in (0, 29, 30, 59)]
  assert decays == [0.25, 0.25, 0.5, 0.5]


def test_boundaries_are_where_phases_meet():
  plan = Plan((
      make_phase(name='a', steps=3),
      make_phase(name='b', steps=5, batch_size=4),
      make_phase(name='c', steps=2),
  ))
  assert plan.starts == (0, 3, 8)
  assert plan.ends == {'a': 3, 'b': 8, 'c': 10}
  assert plan.total_steps == 10
  names = ''.join(plan.phase_at(step).name for step in range(10))
  assert names == 'aaabbbbbcc'
  assert [phase.tokens for phase in plan.phases] == [48, 160, 32]


def test_moments_are_reset_where_a_phase_requests_it_but_never_at_the_start():
  flags = [True, False, True, True]
  plan = Plan(tuple(
      make_phase(name=str(i), reset_moments=flag)
      for i, flag in enumerate(flags)
  ))
  assert plan.restarts == (20, 30)


def sparsities(algorithm: Algorithm, steps):
  params = {'w': jnp.ones((1, 8, 8))}
  return [algorithm.sparsity_at(step, params)['w'] for step in steps]


def test_the_sparsity_changes_at_the_boundary():
  plan = Plan((
      make_phase(name='a', algorithm=static(0.75)),
      make_phase(name='b', algorithm=static(0.5)),
      make_phase(name='c', algorithm=DENSE),
  ))
  actual = sparsities(plan.algorithm, (0, 9, 10, 19, 20, 29))
  assert actual == [0.75, 0.75, 0.5, 0.5, 0.0, 0.0]


def test_neighbours_of_equal_sparsity_share_a_mask():
  plan = Plan((
      make_phase(name='a'), make_phase(name='b'),
      make_phase(name='c', algorithm=DENSE),
      make_phase(name='d', algorithm=DENSE),
  ))
  changes = [
      step for step in range(plan.total_steps)
      if plan.algorithm.update_at(step)
  ]
  assert changes == [20]
  alike = Plan((make_phase(name='a'), make_phase(name='b')))
  assert not any(alike.algorithm.update_at(s) for s in range(20))


RIGL = dict(name='rigl', sparsity=0.5, update_every=4, update_until=8)


def groups(*specs):
  """A partition by names of leaves that are never looked at."""
  pairs = [[f'*/{i}/*', spec] for i, spec in enumerate(specs)]
  return dict(name='partition', groups=pairs)


def at_thirds(count):
  return count % 3 == 2


def test_updates_and_rounds_may_be_given_in_all_forms_of_a_spec():
  own = RIGL | {'update_every': f'{__name__}:at_thirds'}
  assert Plan((make_phase(algorithm=own),)).update_steps.tolist() == [2, 5, 8]
  rounds = dict(name='iterative', rounds=[[4], [6, 0.25]])
  assert Plan((make_phase(algorithm=rounds),)).update_steps.tolist() == [4]
  with pytest.raises(ValueError, match=r'rounds of 4 \+ 7 = 11; make them'):
    Plan((make_phase(algorithm=rounds | {'rounds': [[4], [7, 0.25]]}),))


def test_the_steps_of_updates_are_those_of_all_groups():
  evolving = dict(name='set', sparsity=0.5, update_every=3)
  spec = groups(static(0.75), RIGL, evolving)
  plan = Plan((make_phase(name='a', algorithm=spec), make_phase(name='b')))
  assert plan.update_steps.tolist() == [3, 4, 6, 8, 9, 10]
  assert plan.dense_grads_steps.tolist() == [4, 8, 10]
  still = Plan((make_phase(algorithm=groups(static(0.75), DENSE)),))
  assert not still.update_steps.size and not still.updates_masks


def test_the_steps_of_updates_are_those_of_the_algorithms():
  plan = Plan((
      make_phase(name='a', algorithm=RIGL),
      make_phase(name='b', algorithm=RIGL | {'update_every': 3}),
      make_phase(name='c', algorithm=DENSE),
  ))
  assert plan.update_steps.tolist() == [4, 8, 10, 13, 16, 20]
  assert plan.dense_grads_steps.tolist() == [4, 8, 10, 13, 16, 20]
  still = Plan((make_phase(name='a'), make_phase(name='b')))
  assert still.update_steps.size == still.dense_grads_steps.size == 0


def test_a_plan_updates_masks_only_if_they_change_within_phases():
  sparse, dense = make_phase(name='a'), make_phase(name='b', algorithm=DENSE)
  rounds = dict(name='iterative', rounds=[
      dict(steps=10), dict(steps=10, fraction=0.25),
  ])
  pruned = [make_phase(name=name, algorithm=rounds) for name in 'cd']
  assert not Plan((sparse,)).updates_masks
  assert not Plan((sparse, dense)).updates_masks
  assert Plan((make_phase(algorithm=RIGL), dense)).updates_masks
  assert Plan(tuple(pruned)).updates_masks
  assert sparsities(Plan(tuple(pruned)).algorithm, (9, 10)) == [0.0, 0.25]


def test_update_times_in_per_cent_are_of_all_phases_with_one_algorithm():
  shares = RIGL | {'update_every': '20%', 'update_until': '60%'}
  plan = make_plan(
      {'algorithm': shares}, {'algorithm': shares, 'duration': '10 steps'},
      {'algorithm': static(0.5) | shares | {'name': 'static'}},
      {'duration': '1 epoch'},
  )
  # Phases of equal algorithms share their updates, whatever their lengths.
  assert plan.update_steps.tolist() == [8, 16, 24, 40]
  assert plan.phases[1].algorithm['update_until'] == 24
  assert plan.phases[2].algorithm == plan.phases[3].algorithm == static(0.5)


def test_a_warm_up_may_be_a_share_of_its_phase():
  for share, steps in (('20%', 6), ('1%', 1)):
    actual, wanted = (
        rates(make_plan(make_rate('linear', warmup=warmup), {}))
        for warmup in (share, f'{steps} steps')
    )
    np.testing.assert_array_equal(actual, wanted)


def test_listing_the_updates_of_a_long_plan_is_fast():
  rare = RIGL | {'update_every': 100, 'update_until': 200_000}
  plan = Plan((make_phase(steps=300_000, algorithm=rare),))
  assert plan.update_steps.tolist() == list(range(100, 200_001, 100))


@pytest.mark.parametrize('change, message', [
    ({'update_until': 11},
     "phase 'sparse' has 10 steps, counted from 0, and update_until is 11"),
    ({'update_until': 10, 'update_every': 5}, 'and update_until is 10; give'),
    ({'update_from': 10, 'update_until': 10}, 'and update_from is 10; give an'),
    ({'update_every': [2, 10]}, 'and update_every lists step 10; give an ear'),
])
def test_updates_after_the_last_step_are_refused(change, message):
  for spec in (RIGL | change, groups(RIGL, RIGL | change)):
    refuse(message, Plan, (make_phase(algorithm=spec),))


def test_updates_that_end_with_their_phase_are_taken():
  Plan((make_phase(algorithm=RIGL | {'update_until': 9}),))
  # A round number, but no update is at it.
  Plan((make_phase(algorithm=RIGL | {'update_until': 10}),))
  endless = dict(name='set', sparsity=0.5, update_every=3)
  Plan((make_phase(algorithm=endless),))
  # Two phases of equal algorithms are one span for the algorithm.
  late = RIGL | {'update_until': 16}
  Plan(tuple(make_phase(name=name, algorithm=late) for name in 'ab'))


@pytest.mark.parametrize('steps, message', [
    ((10, 15), "phases 'a' to 'b' have 20 steps and iterative rounds of"),
    ((10, 5), r'rounds of 10 \+ 5 = 15; make them equal'),
])
def test_rounds_that_do_not_fit_their_phases_are_refused(steps, message):
  rounds = dict(name='iterative', rounds=[
      dict(steps=n, fraction=0.25) for n in steps
  ])
  for spec in (rounds, groups(static(0.5), rounds)):
    phases = tuple(make_phase(name=name, algorithm=spec) for name in 'ab')
    refuse(message, Plan, phases)


def test_phases_run_in_the_order_that_is_requested():
  plan = make_plan({}, {'algorithm': DENSE}, {}, order=['p1', 'p0'])
  assert [phase.name for phase in plan.phases] == ['p1', 'p0']
  assert [phase.algorithm for phase in plan.phases] == [DENSE, static(0.5)]


def test_lengths_are_resolved_by_what_the_phase_reads():
  plan = make_plan(
      {'duration': '1 epoch'},
      {'duration': '1 epoch', 'length': 16, 'batch_size': 3},
      {'duration': '20 tokens/parameter', **make_rate('linear')},
  )
  assert [p.steps for p in plan.phases] == [62, 20, 62]


@pytest.mark.parametrize('field, value, message', [
    ('steps', 0, "phase 'sparse' has steps 0; it must be at least 1"),
    ('batch_size', 0, 'batch_size 0; it must be at least 1'),
    ('length', 0, 'length 0'),
    ('algorithm', static(1.0), "phase 'sparse': sparsity is.*1.0"),
    ('algorithm', static(-0.1), "phase 'sparse': sparsity is.*-0.1"),
    ('algorithm', static(math.nan), "phase 'sparse': sparsity is.*nan"),
    ('learning_rate', 0.1, 'learning rate 0.1; give a schedule'),
    ('learning_rate', None, 'learning rate None; give a schedule'),
    ('weight_decay', -1.0, 'weight_decay -1.0; it must not be negative'),
    ('weight_decay', math.nan, 'weight_decay nan'),
])
def test_an_impossible_phase_is_refused(field, value, message):
  refuse(message, make_phase, **{field: value})


@pytest.mark.parametrize('change, message', [
    ({'duration': '0 steps'}, "phase 'p0': duration '0 steps' is less than"),
    ({'duration': '9 lives'}, "phase 'p0': duration is '9 lives'; write a"),
    ({'algorithm': 0.5}, "'phases.p0.algorithm' is 0.5; it must be a mapping"),
    ({'data': 'corpsu'}, "data of phase 'p0': 'corpsu' .*'corpus'"),
    (make_rate('cosin'), "rate of phase 'p0': schedule 'cosin' .*'cosine'"),
    (make_rate('rewnd'), "rate of phase 'p0': schedule 'rewnd' .*'rewind'"),
    (make_rate('rewind', to=''), "'p0' is the first and has the.*'rewind'"),
    (make_rate('continue'), "'p0' is the first and has the sched.*'continue'"),
    (make_rate('cosine', warmup='30 steps'),
     "learning rate of phase 'p0': warm-up takes 30 of 30 steps"),
    (make_rate('linear', warmup='120%'),
     "learning rate of phase 'p0': warm-up takes 36 of 30 steps"),
    ({'duration': '50%'}, "phase 'p0': duration '50%' is a share of a phase"),
    (make_rate('cosine', warmup='soon'),
     "learning rate of phase 'p0': duration is 'soon'; write a number"),
    (make_rate('cosine', peak=0.0), "rate of phase 'p0': peak is 0.0; give a"),
    (make_rate('linear', peak=math.nan), 'peak is nan; give a positive, fin'),
    (make_rate('constant', peak=math.inf), 'peak is inf'),
])
def test_invalid_fields_of_phases_are_refused(change, message):
  refuse(message, make_plan, change)


def test_phases_without_a_name_of_their_own_are_refused():
  refuse(r"named \['sparse', 'sparse'\]", Plan, (PHASE, PHASE))
  refuse('give at least one', Plan, ())
  refuse(r"named \['p0', 'p0'\]", make_plan, {}, order=['p0', 'p0'])
  refuse("phases.order 'q1' is unknown.*'p0'", make_plan, {}, order=['q1'])


def test_moments_do_not_restart_at_a_step_that_only_updates_the_mask():
  # Updates at steps 3, 6 and 9 of both phases together.
  skipping = RIGL | {
      'update_every': 3, 'update_until': 9, 'skip_gradient_step': True
  }
  phases = [
      make_phase(name='a', steps=4, algorithm=skipping),
      make_phase(name='b', steps=20, algorithm=skipping, reset_moments=True),
  ]
  assert Plan(tuple(phases)).restarts == (4,)
  phases[0] = dataclasses.replace(phases[0], steps=3)
  refuse("phase 'b' resets .* at step 3", Plan, tuple(phases))
