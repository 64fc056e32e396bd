"""The formula equals the products of the traced train step."""

import functools

import pytest

from experiments.papers.flops_of_models import trace_flops
from spdf_jax.costs import flops
from spdf_jax.training import Run
from tests.quickstart_runs import small_config

pytestmark = pytest.mark.ci

B, L = 3, 16
# The attention of CPUs, without a branch for other platforms.
SIZES = dict(
    model__n_layers=3, model__max_length=48, model__attention='blocks'
)
LLAMA = SIZES | dict(model__preset='llama-1.3b', model__n_heads=4)


@functools.cache
def run_of(**changes):
  without_task = dict(data__task='', phases__order=('pretrain',))
  return Run.create(small_config(**SIZES | without_task | changes))


KINDS = {
    'gpt': SIZES | dict(model__d_ff=56, model__n_heads=4),
    'gpt scanned': SIZES | dict(model__scan_layers=True),
    'llama scanned': LLAMA | dict(model__scan_layers=True),
}


@pytest.mark.parametrize('kind, sparsity, dense_grads', [
    *((kind, 0.75, True) for kind in KINDS), ('gpt', 0.0, False),
    ('gpt', 0.5, False), ('llama scanned', 0.5, False),
])
def test_the_products_of_a_step_are_those_of_the_formula(
    kind, sparsity, dense_grads
):
  run = run_of(**KINDS[kind])
  traced = trace_flops(run, B, L, sparsity, dense_grads=dense_grads)
  assert traced.products == traced.formula - traced.softmax
  assert traced.difference == 0 and traced.recomputed == 0
  shape = run.model.config
  assert traced.softmax == 3 * B * flops.softmax_flops(shape, L)
  assert shape.gated == ('llama' in kind)


def test_the_formula_does_not_count_recomputed_layers():
  traced = trace_flops(run_of(model__remat='full'), B, L, 0.5)
  plain = trace_flops(run_of(), B, L, 0.5)
  assert traced.products == plain.products
  shape = run_of().model.config
  layers = flops.forward_flops(shape, L, 0.5) - flops.softmax_flops(shape, L)
  layers -= 2 * L * shape.d_model * shape.vocab_size
  # All of a layer except its last product, whose result no gradient needs.
  last = shape.n_layers * 2 * L * shape.d_model * shape.d_ff * 0.5
  assert traced.recomputed == B * (layers - last)


def test_a_loss_in_chunks_recomputes_the_logits():
  traced = trace_flops(run_of(loss__chunk=8), B, L)
  shape = run_of().model.config
  head = 2 * B * L * shape.d_model * shape.vocab_size
  assert traced.products == traced.formula - traced.softmax
  assert traced.recomputed == head
