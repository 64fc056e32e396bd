"""The interpreter counts masks and separates activations from weights."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wafer_programs import DEVICE
from wafer_programs import layer
from wafer_programs import LAYERS
from wafer_programs import MASKS
from wafer_programs import product_flops
from wafer_programs import products
from wafer_programs import scanned
from wafer_programs import scanned_sparse
from wafer_programs import TOKENS
from wafer_programs import W
from wafer_programs import WIDTH
from wafer_programs import WS
from wafer_programs import X

from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import simulate


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


def test_a_sparsity_replaces_masks_that_are_not_known():
  shape = jax.ShapeDtypeStruct(MASKS.shape, bool)
  report = simulate(scanned_sparse, DEVICE, sparsity=0.75)(X, WS, shape)
  assert product_flops(report) == 2 * TOKENS * 0.25 * MASKS.size
  with pytest.raises(ValueError, match='sparsity, the fraction of zeros'):
    simulate(scanned_sparse, DEVICE)(X, WS, shape)


def test_a_sparsity_that_disagrees_with_a_mask_is_warned_about_with_both():
  with pytest.warns(UserWarning, match=r'0\.7\d+ and sparsity is 0\.5'):
    report = simulate(scanned_sparse, DEVICE, sparsity=0.5)(X, WS, MASKS)
  assert product_flops(report) == 2 * TOKENS * MASKS.sum()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    zeros = 1 - MASKS[0].mean()
    simulate(sparse_matmul, DEVICE, sparsity=zeros)(X, W, MASKS[0])


def test_no_zeros_cost_what_dense_costs_and_more_zeros_never_more():
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


def test_activations_are_told_from_weights_by_the_products_they_meet():
  f = lambda x, w: jax.nn.relu(x - 1) @ jnp.tanh(w)
  found = simulate(f, DEVICE)(X, W).by_operation()
  assert found['sub'].flops == TOKENS * WIDTH
  assert found['tanh'].flops == 0
  assert found['tanh'].host_operations == WIDTH * WIDTH
  alone = simulate(lambda x: x - 1, DEVICE)(X)
  assert alone.flops == TOKENS * WIDTH and alone.cycles > 0


def test_weights_may_be_the_first_operand_of_a_product():
  tokens = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
  table = jax.ShapeDtypeStruct((1000, WIDTH), jnp.float32)
  w = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32)
  by_row = lambda e, i, w: jax.vmap(lambda x: w.T @ x)(e[i])
  of_report = lambda f: simulate(f, DEVICE)(table, tokens, w)
  first, second = map(of_report, (by_row, lambda e, i, w: e[i] @ w))
  assert [r.operation.work for r in products(first)] == [
      r.operation.work for r in products(second)
  ]


def test_callbacks_are_not_called():
  calls = []

  def f(x):
    jax.debug.callback(calls.append, jnp.int32(3))
    return x @ x.T

  simulate(f, DEVICE)(jnp.ones((4, 4)))
  jax.effects_barrier()
  assert calls == []


def test_an_update_of_a_slice_moves_the_slice():
  f = lambda x, row: jax.lax.dynamic_update_slice(x, row, (3, 0))
  row = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
  found = simulate(f, DEVICE)(
      jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32), row
  )
  assert found.flops == WIDTH


def test_products_of_weights_alone_are_done_where_weights_are():
  def muon_like(w, momentum, x):
    momentum = 0.9 * momentum + jax.grad(lambda w: layer(x, w).sum())(w)
    return w - 0.1 * (momentum @ momentum.T) @ momentum, momentum

  report = simulate(muon_like, DEVICE)(W, W, X)
  forward = product_flops(simulate(layer, DEVICE)(X, W))
  assert product_flops(report) == 2 * forward
  hosted = report.by_operation()['dot_general'].host_operations
  assert hosted == 2 * WIDTH**3


@pytest.mark.parametrize('sparsity', [1, -0.1, 1.5, float('nan')])
def test_sparsities_out_of_range_are_refused(sparsity):
  with pytest.raises(ValueError, match=f'sparsity is {sparsity}'):
    simulate(layer, DEVICE, sparsity=sparsity)
  mask = jax.ShapeDtypeStruct(W.shape, bool)
  with pytest.raises(ValueError, match=f'sparsity of .* is {sparsity}'):
    simulate(sparse_matmul, DEVICE, sparsity=lambda _: sparsity)(X, W, mask)


def test_what_cannot_be_traced_says_why():
  def decide(x):
    return x if x.sum() > 0 else -x

  with pytest.raises(ValueError, match="'decide' cannot be traced: .*bool"):
    simulate(decide, DEVICE)(X)
