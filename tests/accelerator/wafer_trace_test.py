"""Tracing counts the work of programs, their masks and control flow."""

import dataclasses
import functools
import json
import warnings

import jax
from jax.extend.core import Primitive
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.wafer.training_step import training_step
from spdf_jax import models
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import register_cost
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.accelerator.wafer import trace_program
from spdf_jax.accelerator.wafer import views
from spdf_jax.accelerator.wafer.cost import cost_of
from spdf_jax.accelerator.wafer.program import Elementwise
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import ScoreProduct
from tests.refusals import refuse

DEVICE = create_device('cs2')
GPT3_XL = models.PRESETS['gpt3-xl']
TOKENS, WIDTH, LAYERS = 512, 64, 10
X = jax.ShapeDtypeStruct((8, TOKENS // 8, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
WS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
MASKS = np.random.default_rng(0).random((LAYERS, WIDTH, WIDTH)) < 0.25


def layer(x, w):
  return jax.nn.relu(x @ w)


def scanned(x, ws):
  return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def scanned_sparse(x, ws, masks):
  step = lambda x, w: (jax.nn.relu(sparse_matmul(x, *w)), None)
  return jax.lax.scan(step, x, (ws, masks))[0]


def products(report):
  return [r for r in report.rows if isinstance(r.operation.work, Product)]


def product_flops(report):
  return sum(row.cost.flops for row in products(report))


def test_a_scanned_model_costs_as_many_layers():
  one = simulate(layer, DEVICE)(X, W)
  ten = simulate(scanned, DEVICE)(X, WS)
  assert ten.cycles == pytest.approx(LAYERS * one.cycles, rel=1e-12)
  assert ten.flops == LAYERS * one.flops
  assert (one * LAYERS).cycles == ten.cycles


def test_remat_adds_exactly_the_forward_products_computed_again():
  def grads(f):
    return jax.grad(lambda ws, x: f(x, ws).sum())

  def rematted(x, ws):
    step = jax.checkpoint(lambda x, w: (layer(x, w), None))
    return jax.lax.scan(step, x, ws)[0]

  plain = simulate(grads(scanned), DEVICE)(WS, X)
  again = simulate(grads(rematted), DEVICE)(WS, X)
  forward = product_flops(simulate(scanned, DEVICE)(X, WS))
  assert product_flops(plain) == 3 * forward
  assert product_flops(again) == 4 * forward
  phases = {r.operation.phase for r in products(again)}
  assert phases == {'forward', 'backward', 'recompute'}


def branching(pred, x, w):
  return jax.lax.cond(pred, lambda: layer(layer(x, w), w), lambda: layer(x, w))


def test_a_known_predicate_counts_the_branch_it_selects():
  one = simulate(layer, DEVICE)(X, W)
  for pred, layers in ((True, 2), (False, 1)):
    report = simulate(branching, DEVICE)(pred, X, W)
    assert report.cycles == pytest.approx(layers * one.cycles)
    assert not report.branches
  # The same where the predicate is computed from the mask.
  mostly = lambda mask, x, w: branching(mask.mean() > 0.5, x, w)
  report = simulate(mostly, DEVICE)(MASKS[0], X, W)
  assert report.cycles == pytest.approx(one.cycles)


def test_the_costliest_branch_of_an_unknown_predicate_counts():
  one = simulate(layer, DEVICE)(X, W)
  pred = jax.ShapeDtypeStruct((), bool)
  report = simulate(branching, DEVICE)(pred, X, W)
  (branch,) = report.branches
  assert [r.cycles for r in branch.reports] == pytest.approx(
      [one.cycles, 2 * one.cycles]
  )
  assert report.cycles == pytest.approx(2 * one.cycles)


def test_loops_of_unknown_length_need_trips():
  one = simulate(layer, DEVICE)(X, W)
  fixed = lambda x, w: jax.lax.fori_loop(0, 7, lambda _, x: layer(x, w), x)
  assert product_flops(simulate(fixed, DEVICE)(X, W)) == (
      7 * product_flops(one)
  )

  def given(n, x, w):
    return jax.lax.fori_loop(0, n, lambda _, x: layer(x, w), x)

  known = simulate(given, DEVICE)(5, X, W)
  assert product_flops(known) == 5 * product_flops(one)

  def converging(x, w):
    return jax.lax.while_loop(
        lambda x: x.sum() > 1, lambda x: layer(x, w), x
    )

  refuse('as trips', simulate(converging, DEVICE), X, W)
  report = simulate(converging, DEVICE, trips=3)(X, W)
  assert product_flops(report) == 3 * product_flops(one)


def test_every_shard_of_a_mesh_is_counted():
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.sharding.AbstractMesh(
      (4, 2), ('data', 'model'), axis_types=auto
  )
  x, w = (jax.sharding.PartitionSpec(s) for s in ('data', None))
  sharded = jax.shard_map(layer, mesh=mesh, in_specs=(x, w), out_specs=x)
  whole = product_flops(simulate(layer, DEVICE)(X, W))
  # Twice: the axis that nothing is split over computes the same again.
  assert product_flops(simulate(sharded, DEVICE)(X, W)) == 2 * whole


def test_nonzeros_are_counted_from_masks_in_scans_and_gradients():
  report = simulate(scanned_sparse, DEVICE)(X, WS, MASKS)
  assert product_flops(report) == 2 * TOKENS * MASKS.sum()
  assert report.skipped_flops == 2 * TOKENS * (~MASKS).sum()
  kept = [row.operation.work.kept for row in products(report)]
  assert kept == MASKS.sum(axis=(1, 2)).tolist()

  grad = jax.grad(lambda ws, x, m: scanned_sparse(x, ws, m).sum())
  report = simulate(grad, DEVICE)(WS, X, MASKS)
  assert product_flops(report) == 3 * 2 * TOKENS * MASKS.sum()
  backward = [
      row.operation.work for row in products(report)
      if row.operation.work.sampled
  ]
  # The backward scan walks the layers from the last one.
  assert [w.kept for w in backward] == MASKS.sum(axis=(1, 2))[::-1].tolist()


def test_block_masks_take_the_flops_of_random_ones_but_more_cycles():
  rng = np.random.default_rng(0)
  x = jax.ShapeDtypeStruct((65 * 2048, 2048), jnp.float16)
  w = jax.ShapeDtypeStruct((2048, 2048), jnp.float16)

  def report(side):
    shape = 2048 // side, 2048 // side
    kept = rng.permutation(np.arange(np.prod(shape)) % 4 == 0).reshape(shape)
    mask = kept.repeat(side, 0).repeat(side, 1)
    return simulate(sparse_matmul, create_device('cs2'))(x, w, mask)

  blocks, unstructured = report(32), report(1)
  assert blocks.flops == unstructured.flops
  # A dry run does not know masks: it assumes zeros at random positions.
  planned = simulate(sparse_matmul, create_device('cs2'), sparsity=0.75)(
      x, w, jax.ShapeDtypeStruct(w.shape, bool)
  )
  assert planned.flops == unstructured.flops
  assert planned.cycles == pytest.approx(unstructured.cycles, rel=0.05)
  assert blocks.cycles > 1.1 * unstructured.cycles


def test_a_sparsity_replaces_masks_that_are_not_known():
  shape = jax.ShapeDtypeStruct(MASKS.shape, bool)
  report = simulate(scanned_sparse, DEVICE, sparsity=0.75)(X, WS, shape)
  assert product_flops(report) == 2 * TOKENS * 0.25 * MASKS.size
  with pytest.raises(ValueError, match='sparsity, the fraction of zeros'):
    simulate(scanned_sparse, DEVICE)(X, WS, shape)


def test_a_sparsity_that_disagrees_with_a_mask_gives_a_warning():
  with pytest.warns(UserWarning, match=r'0\.7\d+ and sparsity is 0\.5'):
    report = simulate(scanned_sparse, DEVICE, sparsity=0.5)(X, WS, MASKS)
  assert product_flops(report) == 2 * TOKENS * MASKS.sum()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    zeros = 1 - MASKS[0].mean()
    simulate(sparse_matmul, DEVICE, sparsity=zeros)(X, W, MASKS[0])


def test_a_full_mask_costs_what_dense_costs_and_zeros_only_lower_it():
  dense = simulate(scanned, DEVICE)(X, WS)
  mask = jax.ShapeDtypeStruct(MASKS.shape, bool)
  cycles = [
      simulate(scanned_sparse, DEVICE, sparsity=s)(X, WS, mask).cycles
      for s in (0.0, 0.1, 0.5, 0.75, 0.9, 0.99)
  ]
  assert cycles[0] == dense.cycles
  assert cycles == sorted(cycles, reverse=True)
  full = simulate(scanned_sparse, DEVICE)(X, WS, np.ones_like(MASKS))
  assert full.cycles == pytest.approx(dense.cycles)


def test_an_all_true_grad_mask_makes_only_the_gradient_dense():
  def loss(w, x, mask, grad_mask):
    return sparse_matmul(x, w, mask, grad_mask=grad_mask).sum()

  grad = jax.grad(loss, argnums=(0, 1))
  report = simulate(grad, DEVICE)(W, X, MASKS[0], np.ones_like(MASKS[0]))
  kept = {True: [], False: []}
  for row in products(report):
    kept[row.operation.work.sampled].append(row.operation.work.kept)
  assert kept[True] == [MASKS[0].size]
  assert kept[False] == [MASKS[0].sum()] * 2


def test_callbacks_are_not_called():
  calls = []

  def f(x):
    jax.debug.callback(calls.append, jnp.int32(3))
    return x @ x.T

  simulate(f, DEVICE)(jnp.ones((4, 4)))
  jax.effects_barrier()
  assert calls == []


def test_products_of_weights_alone_run_on_the_hosts():
  def muon_like(w, momentum, x):
    momentum = 0.9 * momentum + jax.grad(lambda w: layer(x, w).sum())(w)
    return w - 0.1 * (momentum @ momentum.T) @ momentum, momentum

  report = simulate(muon_like, DEVICE)(W, W, X)
  forward = product_flops(simulate(layer, DEVICE)(X, W))
  assert product_flops(report) == 2 * forward
  hosted = report.by_operation()['dot_general'].host_operations
  assert hosted == 2 * WIDTH**3


def test_numbers_out_of_range_are_refused():
  with pytest.raises(ValueError, match='batch is 0; it must be positive'):
    training_step(GPT3_XL, batch=0, length=8)
  sparsity = float('nan')
  refuse(f'sparsity is {sparsity}', simulate, layer, DEVICE, sparsity=sparsity)
  mask = jax.ShapeDtypeStruct(W.shape, bool)
  with pytest.raises(ValueError, match=f'sparsity of .* is {sparsity}'):
    simulate(sparse_matmul, DEVICE, sparsity=lambda _: sparsity)(X, W, mask)


def test_a_function_that_cannot_be_traced_is_refused_with_the_cause():
  def decide(x):
    return x if x.sum() > 0 else -x

  # Followed by the lines of jax.
  with pytest.raises(ValueError, match="'decide' cannot be traced: .*bool"):
    simulate(decide, DEVICE)(X)


def define(name):
  primitive = Primitive(name)
  primitive.def_abstract_eval(lambda x: x)
  return primitive


def test_primitives_without_a_rule_are_counted_and_listed():
  mystery = define('mystery')
  f = lambda x: jax.lax.scan(
      lambda x, _: (mystery.bind(x), None), x, None, length=6
  )[0]
  report = simulate(f, DEVICE)(X)
  assert report.unknown == {'mystery': 6} and report.cycles == 0
  assert (report * 2 + report).unknown == {'mystery': 18}


def test_users_register_the_cost_of_their_primitives():
  taught = define('taught')
  register_cost(taught, lambda eqn: [Elementwise(3 * eqn.size)])
  report = simulate(lambda x: taught.bind(x), DEVICE)(X)
  assert report.flops == 3 * TOKENS * WIDTH and not report.unknown
  with pytest.raises(ValueError, match="'taught' already has a cost rule"):
    register_cost('taught', lambda eqn: [])


def test_the_backward_product_has_the_transposed_mask():
  mask = np.zeros((8, 32), bool)
  mask[0] = True
  x = jax.ShapeDtypeStruct((TOKENS, 8), jnp.float32)
  w = jax.ShapeDtypeStruct(mask.shape, jnp.float32)
  loss = lambda x, w: sparse_matmul(x, w, mask).sum()
  backward = jax.grad(loss, argnums=(0, 1))
  works = [row.operation.work for row in products(simulate(backward, DEVICE)(
      x, w
  ))]
  (dx,) = (v for v in works if (v.inputs, v.outputs) == (32, 8))
  # All non-zeros of dx's matrix are in one output, hence in every column.
  assert dx.mask.imbalance(4, 8) == 1
  assert dx.kept == 32 and not dx.sampled
  assert [(v.inputs, v.outputs) for v in works if v.sampled] == [(8, 32)]
  assert all(
      v.mask.imbalance(4, 32) == 4 for v in works if v is not dx
  )


def test_rounded_products_of_bfloat16_are_counted_as_plain_ones():
  f = functools.partial(bf16_matmul.einsum, 'btk,kn->btn')
  x, w = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (X, W))
  loss = lambda product: jax.grad(
      lambda x, w: product(x, w).astype(jnp.float32).sum(), (0, 1)
  )
  rounded, wanted = (
      simulate(loss(product), DEVICE)(x, w) for product in (f, jnp.matmul)
  )
  assert not rounded.unknown
  assert product_flops(rounded) == product_flops(wanted) > 0


STEP = training_step(GPT3_XL, 132, 2048, 0.75)


def test_a_layer_that_does_not_fit_is_refused_with_its_numbers():
  x = jax.ShapeDtypeStruct((2**21, 8192), jnp.float16)
  w = jax.ShapeDtypeStruct((8192, 8192), jnp.float16)
  refuse(r'68\.7 GB .*2,097,152 .* 40\.0 GB', simulate(jnp.dot, DEVICE), x, w)
  simulate(jnp.dot, DEVICE, systems=2)(x, w)


def test_kinds_of_work_with_equal_numbers_have_their_own_costs():
  works = ScoreProduct(1e12), Elementwise(1e12)
  both = Program(tuple(Operation('', '', 'forward', w) for w in works))
  cycles = [row.cost.cycles for row in report_on(both, DEVICE).rows]
  assert cycles == [cost_of(work, DEVICE).cycles for work in works]
  assert cycles[0] == 2 * cycles[1]


def test_several_systems_share_the_tokens():
  program = trace_program(scanned)(X, WS)
  one, four = (report_on(program, DEVICE, n) for n in (1, 4))
  assert four.flops == pytest.approx(one.flops)
  assert one.seconds / 4 < four.seconds
  low, high = one.energy
  assert 0 < low < high
  refuse('systems is 0', report_on, program, DEVICE, 0)
  refuse('at most 64', report_on, program, DEVICE, 65)


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
  path = views.write_trace(report, tmp_path / 'trace.json')
  events = json.loads(path.read_text())['traceEvents']
  track = [e for e in events if e['ph'] == 'X' and e['tid'] == 0]
  assert len(track) == len(report.rows)
  # Exactly equal, since viewers nest events that overlap by a rounding error.
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
  text = views.format_report(simulate(f, DEVICE)(pred, x))
  assert 'cond_0: ' in text and 'the costliest counts' in text
  text = views.format_report(simulate(jnp.linalg.inv, DEVICE)(x))
  assert 'NOT COSTED, no rule: lu x 1' in text


def test_a_sparsity_without_a_masked_product_is_warned_of():
  x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4), (4, 2)))
  masked = lambda x, w: x @ jnp.where(w > 0, w, 0)
  with pytest.warns(UserWarning, match='no product of fn has a mask'):
    trace_program(masked, sparsity=0.9)(x, w)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    trace_program(masked)(x, w)


def test_gradients_of_strided_convolutions_do_not_count_inserted_zeros():
  x = jax.ShapeDtypeStruct((2, 16, 16, 8), jnp.float32)
  w = jax.ShapeDtypeStruct((3, 3, 8, 4), jnp.float32)
  loss = lambda x, w: jnp.sum(jax.lax.conv_general_dilated(
      x, w, (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  ) ** 2)
  count = lambda f: sum(
      o.work.multiply_adds for o in trace_program(f)(x, w).operations
      if isinstance(o.work, ScoreProduct)
  )
  # 8 x 8 positions of the result; the gradient of x adds as many products.
  forward = 2 * 8 * 8 * 4 * 9 * 8
  assert count(loss) == forward
  assert count(jax.grad(loss)) == 2 * forward
