"""Events of a program are matched with the operations of its simulation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.wafer.executions import compare
from experiments.wafer.executions import executed_table
from experiments.wafer.executions import largest_errors
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator import wafer

DEVICE = wafer.create_device('cs2', cores=256, latency=0)
X = np.ones((2048, 32), np.float32)
W = np.ones((2, 32, 32), np.float32)
MASK = np.random.default_rng(0).random(W.shape) < 0.25


def gradients(w, mask, x):
  def loss(w):
    y = x
    for i, name in enumerate(('first', 'second')):
      with jax.named_scope('Model'), jax.named_scope(name):
        y = sparse_matmul(
            y, w[i], mask[i], lowering=wafer.lowering(DEVICE), layer=name
        )
    return (y**2).mean()
  return jax.grad(loss)(w)


@pytest.fixture(scope='module')
def executed():
  jitted = jax.jit(gradients)
  with wafer.record() as events:
    jax.block_until_ready(jitted(W, MASK, X))
  shape = jax.ShapeDtypeStruct(X.shape, jnp.float32)
  return events, wafer.simulate(gradients, DEVICE)(W, MASK, shape)


def test_every_operation_is_executed_as_it_is_costed(executed):
  found = compare(*executed)
  names = [(entry.layer, entry.name, entry.sampled) for entry in found]
  assert names == [
      ('first', 'sparse_matmul', False), ('second', 'sparse_matmul', False),
      ('second', 'sparse_matmul_backward', False),
      ('second', 'sparse_matmul_backward', True),
      ('first', 'sampled_matmul', True),
  ]
  for entry in found:
    nonzeros = MASK[int(entry.layer == 'second')].sum()
    assert entry.total('nonzeros') == nonzeros
  errors = largest_errors(found)
  assert errors['non-zeros'] == errors['multiply-adds'] == errors['bytes'] == 0
  for entry in found:
    # The cost leaves out how long the last wavelet takes to cross the grid.
    crossing = sum(e.grid.rows + e.grid.columns for e in entry.events)
    assert entry.total('cycles') - crossing == pytest.approx(
        entry.costed.cycles, rel=0.02
    )
  lines = executed_table(found).splitlines()
  assert len(lines) == 6 and f'{MASK[0].sum():,}' in lines[1]


def test_events_of_another_program_are_refused(executed):
  events, report = executed
  with pytest.raises(ValueError, match='2 times and simulated 1 time; give'):
    compare([*events, *events], report)
  with pytest.raises(ValueError, match='first was executed 1 time and simul'):
    compare(events, report * 0)


def repeated_and_wide(x, w, mask, wide, wide_mask):
  multiply = functools.partial(
      sparse_matmul, lowering=wafer.lowering(DEVICE), layer='layer'
  )
  with jax.named_scope('Model'), jax.named_scope('layer'):
    y, _ = jax.lax.scan(
        lambda y, _: (multiply(y, w, mask), None), x, length=3
    )
    return y, multiply(x, wide, wide_mask)


def test_shapes_of_a_layer_are_compared_each_with_all_its_executions():
  rng = np.random.default_rng(1)
  wide = np.ones((32, 96), np.float32)
  wide_mask = rng.random(wide.shape) < 0.25
  args = X, W[0], MASK[0], wide, wide_mask
  with wafer.record() as events:
    jax.block_until_ready(jax.jit(repeated_and_wide)(*args))
  report = wafer.simulate(repeated_and_wide, DEVICE)(*args)
  scanned, once = compare(events[::-1], report)
  assert [len(x.events) for x in (scanned, once)] == [3, 1]
  assert scanned.total('nonzeros') == 3 * MASK[0].sum()
  assert once.total('nonzeros') == wide_mask.sum()
  errors = largest_errors([scanned, once])
  assert errors['non-zeros'] == errors['multiply-adds'] == 0
  assert errors['bytes'] == pytest.approx(0, abs=1e-12)
  assert abs(errors['hops']) < 0.1 and abs(errors['cycles']) < 0.1
