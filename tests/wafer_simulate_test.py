"""Traced programs: what is counted, through every kind of control flow."""

import functools
import warnings

import jax
from jax.extend.core import Primitive
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax import sparsity
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import register_cost
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.accelerator.wafer import trace_program
from spdf_jax.accelerator.wafer.decoders import Decoder
from spdf_jax.accelerator.wafer.decoders import training_step
from spdf_jax.accelerator.wafer.work import Elementwise
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.data import Batch
from spdf_jax.models import create_model
from spdf_jax.models import sparsifiable
from spdf_jax.training import create_state
from spdf_jax.training import train_step

DEVICE = create_device('cs2')
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


def test_a_scanned_model_is_as_many_layers():
  one = simulate(layer, DEVICE)(X, W)
  ten = simulate(scanned, DEVICE)(X, WS)
  assert ten.cycles == pytest.approx(LAYERS * one.cycles, rel=1e-12)
  assert ten.flops == LAYERS * one.flops
  assert (one * LAYERS).cycles == ten.cycles


@pytest.mark.parametrize('wrap', [jax.jit, jax.vmap, jax.checkpoint])
def test_wrappers_around_a_layer_cost_nothing(wrap):
  xs, ws = (jax.ShapeDtypeStruct((1, *a.shape), a.dtype) for a in (X, W))
  args = (xs, ws) if wrap is jax.vmap else (X, W)
  plain = simulate(layer, DEVICE)(X, W)
  assert simulate(wrap(layer), DEVICE)(*args).flops == plain.flops


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


def test_non_zeros_are_those_of_the_masks_through_scan_and_gradients():
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


def test_a_density_stands_for_masks_that_are_not_known():
  shape = jax.ShapeDtypeStruct(MASKS.shape, bool)
  report = simulate(scanned_sparse, DEVICE, density=0.25)(X, WS, shape)
  assert product_flops(report) == 2 * TOKENS * 0.25 * MASKS.size
  with pytest.raises(ValueError, match='density'):
    simulate(scanned_sparse, DEVICE)(X, WS, shape)


def test_a_density_that_disagrees_with_a_mask_is_warned_about_with_both():
  with pytest.warns(UserWarning, match=r'0\.2\d+ and density is 0\.5'):
    report = simulate(scanned_sparse, DEVICE, density=0.5)(X, WS, MASKS)
  assert product_flops(report) == 2 * TOKENS * MASKS.sum()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    simulate(sparse_matmul, DEVICE, density=MASKS[0].mean())(X, W, MASKS[0])


def test_no_zeros_cost_what_dense_costs_and_more_zeros_never_more():
  dense = simulate(scanned, DEVICE)(X, WS)
  mask = jax.ShapeDtypeStruct(MASKS.shape, bool)
  cycles = [
      simulate(scanned_sparse, DEVICE, density=1 - s)(X, WS, mask).cycles
      for s in (0.0, 0.1, 0.5, 0.75, 0.9, 0.99)
  ]
  assert cycles[0] == dense.cycles
  assert cycles == sorted(cycles, reverse=True)
  full = simulate(scanned_sparse, DEVICE)(X, WS, np.ones_like(MASKS))
  assert full.cycles == pytest.approx(dense.cycles)


@pytest.mark.parametrize('transposed', [False, True])
def test_an_all_true_grad_mask_makes_only_the_gradient_dense(transposed):
  def loss(w, x, mask, grad_mask):
    return sparse_matmul(x, w, mask, grad_mask=grad_mask).sum()

  grad = jax.grad(loss, argnums=(0, 1) if transposed else 0)
  report = simulate(grad, DEVICE)(W, X, MASKS[0], np.ones_like(MASKS[0]))
  kept = {True: [], False: []}
  for row in products(report):
    kept[row.operation.work.sampled].append(row.operation.work.kept)
  assert kept[True] == [MASKS[0].size]
  assert kept[False] == [MASKS[0].sum()] * (2 if transposed else 1)


def test_a_stack_of_masks_is_counted_one_by_one():
  xs = jax.ShapeDtypeStruct((LAYERS, TOKENS, WIDTH), jnp.float32)
  report = simulate(jax.vmap(sparse_matmul), DEVICE)(xs, WS, MASKS)
  assert [r.operation.work.kept for r in products(report)] == (
      MASKS.sum(axis=(1, 2)).tolist()
  )


def branching(pred, x, w):
  return jax.lax.cond(pred, lambda: layer(layer(x, w), w), lambda: layer(x, w))


def test_a_known_predicate_takes_its_branch():
  one = simulate(layer, DEVICE)(X, W)
  for pred, layers in ((True, 2), (False, 1)):
    report = simulate(branching, DEVICE)(pred, X, W)
    assert report.cycles == pytest.approx(layers * one.cycles)
    assert not report.branches
  # Also where it has to be worked out.
  mostly = lambda mask, x, w: branching(mask.mean() > 0.5, x, w)
  report = simulate(mostly, DEVICE)(MASKS[0], X, W)
  assert report.cycles == pytest.approx(one.cycles)


def test_an_open_predicate_is_weighted_by_its_frequency():
  one = simulate(layer, DEVICE)(X, W)
  pred = jax.ShapeDtypeStruct((), bool)
  report = simulate(branching, DEVICE)(pred, X, W)
  (branch,) = report.branches
  assert not branch.given
  assert [r.cycles for r in branch.reports] == pytest.approx(
      [one.cycles, 2 * one.cycles]
  )
  assert report.cycles == pytest.approx(2 * one.cycles)  # The costliest.
  for given in (0.01, (0.99, 0.01)):
    report = simulate(
        branching, DEVICE, frequencies={'cond_0': given}
    )(pred, X, W)
    assert report.branches[0].given
    assert report.cycles == pytest.approx(1.01 * one.cycles)
  with pytest.raises(ValueError, match='cond_0 are 1.5'):
    simulate(branching, DEVICE, frequencies={'cond_0': 1.5})(pred, X, W)
  with pytest.raises(ValueError, match="'cond_1' is unknown; did you mean"):
    simulate(branching, DEVICE, frequencies={'cond_1': 0.5})(pred, X, W)


def test_loops_are_counted_or_ask_for_their_trips():
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

  with pytest.raises(ValueError, match='give trips'):
    simulate(converging, DEVICE)(X, W)
  report = simulate(converging, DEVICE, trips=3)(X, W)
  assert product_flops(report) == 3 * product_flops(one)


def test_custom_derivatives_and_shards_are_looked_into():
  @jax.custom_vjp
  def f(x, w):
    return layer(x, w)

  f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda xw, dy: (dy @ xw[1].T, xw[1]))
  one = simulate(layer, DEVICE)(X, W)
  assert simulate(f, DEVICE)(X, W).flops == one.flops
  grad = jax.grad(lambda x, w: f(x, w).sum())
  assert product_flops(simulate(grad, DEVICE)(X, W)) == (
      2 * product_flops(one)
  )
  spec = jax.sharding.PartitionSpec('x')
  mesh = jax.make_mesh(
      (1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  sharded = jax.shard_map(
      layer, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()),
      out_specs=spec,
  )
  assert product_flops(simulate(sharded, DEVICE)(X, W)) == product_flops(one)


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


def define(name):
  primitive = Primitive(name)
  primitive.def_abstract_eval(lambda x: x)
  return primitive


def test_what_has_no_rule_is_counted_and_listed():
  mystery = define('mystery')
  f = lambda x: jax.lax.scan(
      lambda x, _: (mystery.bind(x), None), x, None, length=6
  )[0]
  report = simulate(f, DEVICE)(X)
  assert report.unknown == {'mystery': 6} and report.cycles == 0
  assert (report * 2 + report).unknown == {'mystery': 18}


def test_users_teach_the_cost_of_their_primitives():
  taught = define('taught')
  register_cost(taught, lambda eqn: [Elementwise(3 * eqn.size)])
  report = simulate(lambda x: taught.bind(x), DEVICE)(X)
  assert report.flops == 3 * TOKENS * WIDTH and not report.unknown
  with pytest.raises(ValueError, match="'taught' has a rule"):
    register_cost('taught', lambda eqn: [])


def test_activations_are_told_from_weights_by_the_products_they_meet():
  f = lambda x, w: jax.nn.relu(x - 1) @ jnp.tanh(w)
  found = simulate(f, DEVICE)(X, W).by_operation()
  assert found['sub'].flops == TOKENS * WIDTH
  assert found['tanh'].flops == 0
  assert found['tanh'].host_operations == WIDTH * WIDTH
  alone = simulate(lambda x: x - 1, DEVICE)(X)
  assert alone.flops == TOKENS * WIDTH and alone.cycles > 0


def test_products_of_weights_alone_are_done_where_weights_are():
  def muon_like(w, momentum, x):
    momentum = 0.9 * momentum + jax.grad(lambda w: layer(x, w).sum())(w)
    return w - 0.1 * (momentum @ momentum.T) @ momentum, momentum

  report = simulate(muon_like, DEVICE)(W, W, X)
  forward = product_flops(simulate(layer, DEVICE)(X, W))
  assert product_flops(report) == 2 * forward
  hosted = report.by_operation()['dot_general'].host_operations
  assert hosted == 2 * WIDTH**3


def test_a_layer_that_does_not_fit_is_refused_with_its_numbers():
  x = jax.ShapeDtypeStruct((2**21, 8192), jnp.float16)
  w = jax.ShapeDtypeStruct((8192, 8192), jnp.float16)
  with pytest.raises(ValueError, match=r'68\.7 GB .*2,097,152 .* 40\.0 GB'):
    simulate(jnp.dot, DEVICE)(x, w)
  simulate(jnp.dot, DEVICE, systems=2)(x, w)


@pytest.mark.parametrize('density', [0, -0.1, 1.5, float('nan')])
def test_densities_that_cannot_be_are_refused(density):
  with pytest.raises(ValueError, match=f'density is {density}'):
    simulate(layer, DEVICE, density=density)
  mask = jax.ShapeDtypeStruct(W.shape, bool)
  with pytest.raises(ValueError, match=f'density of .* is {density}'):
    simulate(sparse_matmul, DEVICE, density=lambda _: density)(X, W, mask)


def test_what_cannot_be_traced_says_why():
  def decide(x):
    return x if x.sum() > 0 else -x

  with pytest.raises(ValueError, match="'decide' cannot be traced: .*bool"):
    simulate(decide, DEVICE)(X)


def test_reports_of_different_devices_are_not_added():
  reports = [simulate(layer, create_device(d))(X, W) for d in ('cs2', 'cs3')]
  with pytest.raises(ValueError, match='one device'):
    reports[0] + reports[1]


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


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_a_train_step_asks_for_the_products_of_the_closed_form(
    scan_layers, remat
):
  step, init, batch = gpt_step(scan_layers=scan_layers, remat=remat)
  traced = simulate(step, DEVICE, density=0.5)(jax.eval_shape(init), batch)
  form = report_on(training_step(Decoder(3, 16, 64, 2, 64), 4, 32, 0.5), DEVICE)
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


def test_only_a_step_that_updates_pays_for_its_optimizer():
  step, init, batch = gpt_step()
  state = jax.eval_shape(init)
  assert simulate(step, DEVICE, density=0.5)(state, batch).total.host > 0
  model = create_model('gpt-mini', vocab_size=64)
  params = jax.eval_shape(
      lambda: model.init(jax.random.key(0), batch.inputs)['params']
  )
  loss = lambda p: model.apply({'params': p}, batch.inputs).sum()
  assert simulate(jax.grad(loss), DEVICE)(params).total.host == 0


def test_operations_have_the_names_of_their_layers():
  step, init, batch = gpt_step(scan_layers=True)
  report = simulate(step, DEVICE, density=0.5)(jax.eval_shape(init), batch)
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


def test_a_sweep_over_devices_of_a_whole_program_is_one_call():
  import dataclasses

  program = trace_program(scanned)(X, WS)

  @jax.jit
  def sweep(clocks):
    at = lambda clock: report_on(
        program, dataclasses.replace(DEVICE, clock=clock)
    ).seconds
    return jax.vmap(at)(clocks)

  seconds = sweep(jnp.linspace(0.5e9, 1.5e9, 1000))
  assert seconds.shape == (1000,)
  exact = report_on(program, dataclasses.replace(DEVICE, clock=0.5e9)).seconds
  assert float(seconds[0]) == pytest.approx(exact, rel=1e-5)
