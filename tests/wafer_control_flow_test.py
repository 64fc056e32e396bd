"""Work is counted through every kind of control flow."""

import jax
import pytest
from wafer_programs import DEVICE
from wafer_programs import layer
from wafer_programs import LAYERS
from wafer_programs import MASKS
from wafer_programs import product_flops
from wafer_programs import products
from wafer_programs import scanned
from wafer_programs import W
from wafer_programs import WS
from wafer_programs import X

from spdf_jax.accelerator.wafer import simulate


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
