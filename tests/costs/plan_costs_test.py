"""FLOPs of a plan are the sum of those of its steps."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import spdf_jax
from spdf_jax import models
from spdf_jax import training
from spdf_jax.costs import flops
from spdf_jax.costs import plan_costs
from spdf_jax.runs import read
from spdf_jax.runs.curves import flops_at
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.training import plan as plans
from tests.tiny_run import DENSE
from tests.tiny_run import static

SHAPE = models.GPTConfig(32, 2, 2, 8, 16, 16)
PHASE = training.Phase(
    name='a', steps=40, data='corpus', batch_size=2, length=16,
    algorithm=static(0.75), learning_rate=optax.constant_schedule(0.1),
    weight_decay=0.0, reset_moments=False,
)
CUBIC = dict(schedule='cubic', initial=0.25, final=0.75, steps=24)
TIMES = dict(update_every=6, update_until=30)
RIGL = dict(name='rigl', sparsity=CUBIC, **TIMES)
SPECS = {
    'static': [static(0.75)],
    'variable': [static(0.75), DENSE, static(0.5)],
    'rigl': [dict(name='rigl', sparsity=0.75, **TIMES), DENSE],
    'rigl on a schedule': [RIGL, DENSE],
    'gmp': [dict(name='gmp', sparsity=CUBIC, **TIMES), static(0.75)],
    'granet': [dict(name='granet', sparsity=CUBIC, **TIMES)] * 2,
    'iterative': [dict(name='iterative', rounds=[
        dict(steps=40), dict(steps=40, fraction=0.25)
    ])] * 2,
    'groups': [dict(name='partition', groups=[
        ['b', RIGL], ['a', dict(name='gmp', sparsity=CUBIC, **TIMES)],
    ]), DENSE],
}
PARAMS = {
    'a': jax.ShapeDtypeStruct((8, 16), np.float32),
    'b': jax.ShapeDtypeStruct((2, 8, 8), np.float32),
}


def where(path, leaf):
  del path, leaf
  return True


def make_plan(specs):
  return training.Plan(tuple(
      dataclasses.replace(PHASE, name=str(i), algorithm=spec, batch_size=2 + i)
      for i, spec in enumerate(specs)
  ))


def cost(phase, sparsity, dense_grads):
  return phase.batch_size * flops.training_flops(
      SHAPE, phase.length, sparsity, dense_grads=dense_grads
  )


def spans_of(plan):
  sparsity = lambda step: plans.mean_sparsity(
      plans.planned_sparsities(plan, step, PARAMS, where)
  )
  return plan_costs.find_spans(plan, sparsity, cost)


def costs_by_step(plan):
  """Walks through a plan as training does: a mask is used after its step."""
  shapes = {'a': (1, 8, 16), 'b': (2, 8, 8)}
  layers = {k: np.zeros(shape, np.float32) for k, shape in shapes.items()}
  used = plan.algorithm.sparsity_at(0, layers)
  sizes = {'a': (1, 128), 'b': (2, 64)}
  for step in range(plan.total_steps):
    kept = sum(n * number_kept(size, used[k]) for k, (n, size) in sizes.items())
    zeros = 1 - kept / 256
    dense = bool(plan.algorithm.dense_grads_at(step))
    yield cost(plan.phase_at(step), zeros, dense)
    if plan.algorithm.update_at(step):
      used = plan.algorithm.sparsity_at(step, layers)


@pytest.mark.parametrize('name', SPECS)
def test_spans_add_up_to_the_steps(name):
  plan = make_plan(SPECS[name])
  want = np.array(list(costs_by_step(plan)))
  done = 0
  for phase, spans in zip(plan.phases, spans_of(plan)):
    assert spans[0].start == plan.starts[plan.phases.index(phase)]
    for span in spans:
      assert span.start == done
      done += span.steps
      np.testing.assert_allclose(
          span.cost_per_step * span.steps,
          want[span.start:done].sum(), rtol=1e-12,
      )
  assert done == plan.total_steps


def test_spans_add_up_any_cost():
  plan = make_plan(SPECS['rigl on a schedule'])
  sparsities_at = lambda step: ('layer', step >= 12)
  seconds = lambda phase, sparsities, dense_grads: 2.0 - sparsities[1]
  first, last = plan_costs.find_spans(plan, sparsities_at, seconds)
  assert [(s.start, s.sparsity[1]) for s in first] == [(0, False), (12, True)]
  # The update takes effect at the step after it.
  totals = [s.steps * s.cost_per_step for s in (*first, *last)]
  assert totals == pytest.approx([2.0 * 12, 2.0 + 27, 40])


def test_flops_are_added_up_over_spans():
  plan = make_plan(SPECS['rigl on a schedule'])
  records = [
      read.PhaseRecord(
          p.name, start, p.steps, p.batch_size, p.length, p.data, 0.0, p.tokens,
          0.0, 1.0, spans=tuple(spans),
      )
      for p, start, spans in zip(
          plan.phases, plan.starts, spans_of(plan)
      )
  ]
  run = read.RunRecord('toy', tuple(records), ())
  want = np.cumsum(list(costs_by_step(plan)))
  ends = [s.start + s.steps for p in records for s in p.spans]
  np.testing.assert_allclose(
      [flops_at(run, end) for end in ends], want[np.array(ends) - 1], rtol=1e-12
  )
  assert flops_at(run, 0) == 0
  assert records[0].sparsities == (0.25, 0.75)
  assert records[1].sparsities == (0.0, 0.0)


def drifting():
  """A user's own algorithm, whose sparsity is read between updates too."""
  return spdf_jax.static(0.0)._replace(
      sparsity_at=lambda count, params: jax.tree.map(
          lambda p: count / 64, params
      ),
      update_at=lambda count: count % 16 == 0,
  )


def test_between_updates_the_sparsity_of_the_last_one_holds():
  plan = make_plan([dict(name=f'{__name__}:drifting')])
  at = lambda step: plans.planned_sparsities(
      plan, step, PARAMS, where
  )
  sparsities = [at(step)['b[0]'].sparsity for step in (0, 15, 16, 31, 32, 39)]
  assert sparsities == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5]
  assert [s.steps for s in spans_of(plan)[0]] == [16, 16, 8]


def test_under_model_wide_every_layer_is_planned_with_the_mean_sparsity():
  plan = make_plan([dict(
      name='static', sparsity=0.5, distribution='model_wide',
  )])
  layers = plans.planned_sparsities(plan, 0, PARAMS, where)
  assert [sparsity.sparsity for sparsity in layers.values()] == [0.5] * 3
  rounds = [dict(steps=20), dict(steps=20, fraction=0.25)]
  plan = make_plan([dict(
      name='iterative', rounds=rounds, distribution='model_wide',
  )])
  for step, sparsity in ((19, 0.0), (20, 0.25)):
    layers = plans.planned_sparsities(plan, step, PARAMS, where)
    assert [layer.sparsity for layer in layers.values()] == [sparsity] * 3


def test_ranges_of_steps_restore_exactly_those_steps():
  rng = np.random.default_rng(0)
  for _ in range(50):
    steps = np.unique(rng.integers(0, 60, size=rng.integers(0, 30)))
    ranges = plan_costs.as_ranges(steps)
    back = [s for a, b, every in ranges for s in range(a, b + 1, every)]
    assert back == steps.tolist()
  assert plan_costs.as_ranges(range(50, 751, 50)) == [[50, 750, 50]]


def test_a_plan_counts_the_sizes_of_kernels():
  kernels = {
      'conv': jax.ShapeDtypeStruct((3, 3, 16, 16), np.float32),
      'down': jax.ShapeDtypeStruct((1, 1, 16, 32), np.float32),
  }
  plan = make_plan([dict(name='static', sparsity=0.8, distribution='erk')])
  layers = plans.planned_sparsities(
      plan, 0, kernels, spdf_jax.where.convolutions
  )
  expected = spdf_jax.erk(
      {'conv': np.ones((1, 144, 16)), 'down': np.ones((1, 16, 32))}, 0.8,
      kernels={'conv': (3, 3), 'down': (1, 1)},
  )
  for name, layer in layers.items():
    assert layer.sparsity == pytest.approx(expected[name], abs=1e-3)
