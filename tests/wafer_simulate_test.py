"""Reports, tables and traces of programs, on one system and on several."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from wafer_programs import DEVICE
from wafer_programs import GPT3_XL
from wafer_programs import product_flops
from wafer_programs import scanned
from wafer_programs import W
from wafer_programs import WIDTH
from wafer_programs import WS
from wafer_programs import X

from spdf_jax import sparsity
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.accelerator.wafer import trace_program
from spdf_jax.accelerator.wafer.cost import cost_of
from spdf_jax.accelerator.wafer.program import Elementwise
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import Scores
from spdf_jax.accelerator.wafer.views import format_report
from spdf_jax.accelerator.wafer.views import write_trace
from spdf_jax.costs import ModelShape
from spdf_jax.costs import training_step
from spdf_jax.data import Batch
from spdf_jax.models import create_model
from spdf_jax.models import sparsifiable
from spdf_jax.training import create_state
from spdf_jax.training import train_step

pytestmark = pytest.mark.ci

STEP = training_step(GPT3_XL, 132, 2048, 0.75)


def test_a_layer_that_does_not_fit_is_refused_with_its_numbers():
  x = jax.ShapeDtypeStruct((2**21, 8192), jnp.float16)
  w = jax.ShapeDtypeStruct((8192, 8192), jnp.float16)
  with pytest.raises(ValueError, match=r'68\.7 GB .*2,097,152 .* 40\.0 GB'):
    simulate(jnp.dot, DEVICE)(x, w)
  simulate(jnp.dot, DEVICE, systems=2)(x, w)


def test_works_of_different_types_and_equal_numbers_differ():
  works = Scores(1e12), Elementwise(1e12)
  both = Program(tuple(Operation('', '', 'forward', w) for w in works))
  cycles = [row.cost.cycles for row in report_on(both, DEVICE).rows]
  assert cycles == [cost_of(work, DEVICE).cycles for work in works]
  assert cycles[0] == 2 * cycles[1]


def gpt_step(lengths=(4, 32), **changes):
  sizes = dict(
      vocab_size=64, n_layers=3, n_heads=2, d_model=16, d_ff=64, max_length=32
  )
  model = create_model('gpt-mini', **sizes | changes)
  optimizer = sparsity.sparsify(
      optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
      sparsity.static(0.5), where=sparsifiable, key=0,
  )
  init = lambda: create_state(
      model.init(jax.random.key(0), jnp.zeros((1, 2), int))['params'],
      optimizer,
  )
  step = functools.partial(
      train_step, apply_fn=model.apply, optimizer=optimizer,
      learning_rate=optax.constant_schedule(1e-3),
  )
  tokens = np.zeros(lengths, np.int32)
  batch = Batch(tokens, tokens, np.ones(lengths, np.float32))
  return step, init, batch


@pytest.mark.parametrize(
    'remat, scan_layers', [('none', False), ('full', True)]
)
def test_a_train_step_has_the_products_of_the_closed_form(
    scan_layers, remat
):
  step, init, batch = gpt_step(scan_layers=scan_layers, remat=remat)
  traced = simulate(step, DEVICE, sparsity=0.5)(jax.eval_shape(init), batch)
  shape = ModelShape(3, 16, 2, 64, 64)
  form = report_on(training_step(shape, 4, 32, 0.5), DEVICE)
  names = ('dot_general', 'sparse_matmul', 'sparse_matmul_backward')
  found = traced.by_operation()
  flops = sum(found[name].flops for name in names)
  expected = form.flops - form.by_operation()['elementwise'].flops
  if remat == 'full':
    again = [r for r in traced.rows if r.operation.phase == 'recompute']
    flops -= sum(
        r.cost.flops for r in again if r.operation.name in names
    )
  assert flops == pytest.approx(expected)
  assert not traced.unknown


@pytest.mark.parametrize('changes, message', [
    (dict(sparsity=math.nan), 'sparsity is nan; it is the fraction of zeros'),
    (dict(batch=0), 'batch is 0; it must be positive'),
])
def test_an_impossible_step_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    training_step(
        ModelShape(2, 64, 4, 256, 99), **dict(batch=8, length=8) | changes
    )


def test_a_train_step_from_arrays_is_counted_by_its_masks():
  step, init, batch = gpt_step(scan_layers=True)
  state = jax.jit(init)()
  report = simulate(step, DEVICE)(state, batch)
  mask = jax.tree.leaves(sparsity.get_mask(state.opt_state))
  kept = sum(int(m.sum()) for m in mask)
  head = 3 * 2 * 128 * 16 * 64
  assert product_flops(report) == 3 * 2 * 128 * kept + head
  assert report.by_operation()['optimizer_step'].host == (
      DEVICE.step_seconds * DEVICE.clock
  )


def test_operations_have_the_names_of_their_layers():
  step, init, batch = gpt_step(scan_layers=True)
  report = simulate(step, DEVICE, sparsity=0.5)(jax.eval_shape(init), batch)
  layers = report.by_layer()
  for name in ('wq', 'wk', 'wv', 'wd'):
    assert f'GPT/h/attn/{name}' in layers
  assert 'GPT/h/mlp/wi' in layers and 'GPT/wte.attend' in layers
  assert sum(c.cycles for c in layers.values()) == pytest.approx(report.cycles)


def test_several_systems_share_the_tokens():
  program = trace_program(scanned)(X, WS)
  one, four = (report_on(program, DEVICE, n) for n in (1, 4))
  assert four.flops == pytest.approx(one.flops)
  assert one.seconds / 4 < four.seconds
  low, high = one.energy
  assert 0 < low < high
  with pytest.raises(ValueError, match='systems is 0'):
    report_on(program, DEVICE, 0)
  with pytest.raises(ValueError, match='at most 64'):
    report_on(program, DEVICE, 65)


def sweep(program, clocks):
  at = lambda clock: report_on(
      program, dataclasses.replace(DEVICE, clock=clock)
  ).seconds
  return jax.jit(jax.vmap(at))(clocks)


def test_a_sweep_over_devices_of_a_whole_program_is_one_call():
  nothing = np.zeros((WIDTH, WIDTH), bool)
  for program in (
      trace_program(scanned)(X, WS), trace_program(sparse_matmul)(X, W, nothing)
  ):
    seconds = sweep(program, jnp.linspace(0.5e9, 1.5e9, 1000))
    assert seconds.shape == (1000,)
    slow = dataclasses.replace(DEVICE, clock=0.5e9)
    exact = report_on(program, slow).seconds
    assert float(seconds[0]) == pytest.approx(exact, rel=1e-5)


def test_a_trace_has_all_operations_in_sequence(tmp_path):
  report = report_on(STEP, DEVICE)
  path = write_trace(report, tmp_path / 'trace.json')
  events = json.loads(path.read_text())['traceEvents']
  track = [e for e in events if e['ph'] == 'X' and e['tid'] == 0]
  assert len(track) == len(report.rows)
  # To the last bit: viewers nest what overlaps, be it by rounding.
  for event, after in zip(track, track[1:]):
    assert event['ts'] + event['dur'] == after['ts']
  last = track[-1]
  assert (last['ts'] + last['dur']) / 1e6 == pytest.approx(report.seconds)
  for tid in (1, 2, 3):
    busy = [e for e in events if e['ph'] == 'X' and e['tid'] == tid]
    for event, after in zip(busy, busy[1:]):
      assert event['ts'] + event['dur'] <= after['ts']
  threads = {e['args']['name'] for e in events if e['name'] == 'thread_name'}
  assert threads == {'operation', 'core', 'fabric', 'io'}


def test_a_table_lists_unknown_branches_and_primitives():
  f = lambda p, x: jax.lax.cond(p, lambda: x @ x, lambda: jnp.linalg.inv(x))
  x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  pred = jax.ShapeDtypeStruct((), bool)
  text = format_report(simulate(f, DEVICE)(pred, x))
  assert 'cond_0: ' in text and 'the costliest counts' in text
  text = format_report(simulate(jnp.linalg.inv, DEVICE)(x))
  assert 'NOT COSTED, no rule: lu x 1' in text
