"""The formula equals the products of the traced train step."""

import functools
import math

import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import pytest
from quickstart_runs import small_config

from experiments.papers.flops_of_models import trace_flops
from spdf_jax.costs import flops
from spdf_jax.data import Batch
from spdf_jax.training import Run
from spdf_jax.training.step import train_step

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


def products_of(jaxpr, density, grad_density):
  """Sums products by their shapes, in an independent traversal of the jaxpr."""
  total = 0
  for eqn in jaxpr.eqns:
    shapes = [v.aval.shape for v in eqn.invars]
    name = str(eqn.primitive)
    if name == 'dot_general':
      summed = [shapes[0][i] for i in eqn.params['dimension_numbers'][0][0]]
      total += 2 * math.prod((*summed, *eqn.outvars[0].aval.shape))
    elif name == 'sparse_matmul':  # x, w
      total += 2 * math.prod(shapes[0][:-1] + shapes[1]) * density
    elif name == 'sparse_matmul_backward':  # dy, x, w: dx, and dw if wanted
      both = density + grad_density
      total += 2 * math.prod(shapes[0][:-1] + shapes[2]) * both
    else:
      assert 'matmul' not in name
      times = eqn.params['length'] if name == 'scan' else 1
      total += times * sum(
          products_of(inner, density, grad_density)
          for inner in jaxprs_in_params(eqn.params)
      )
  return total


def walk(run, density, grad_density):
  shape = lambda dtype: jax.ShapeDtypeStruct((B, L), dtype)
  batch = Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
  step = functools.partial(
      train_step, apply_fn=run.model.apply, optimizer=run.optimizer,
      learning_rate=run.plan.learning_rate, loss=run.config.loss,
  )
  jaxpr = jax.make_jaxpr(step)(run.abstract_state, batch)
  return products_of(jaxpr.jaxpr, density, grad_density)


@pytest.mark.parametrize('kind, sparsity, dense_grads', [
    *((kind, 0.75, True) for kind in KINDS), ('gpt', 0.0, False),
    ('gpt', 0.5, False), ('llama scanned', 0.5, False),
])
def test_the_products_of_a_step_are_those_of_the_formula(
    kind, sparsity, dense_grads
):
  run = run_of(**KINDS[kind])
  found = trace_flops(run, B, L, sparsity, dense_grads=dense_grads)
  assert found.products == found.formula - found.softmax
  assert found.difference == 0 and found.recomputed == 0
  density = 1 - sparsity
  assert walk(run, density, 1.0 if dense_grads else density) == (
      found.products
  )
  shape = run.model.config
  assert found.softmax == 3 * B * flops.softmax_flops(shape, L)
  assert shape.gated == ('llama' in kind)


def test_the_formula_does_not_count_recomputed_layers():
  found = trace_flops(run_of(model__remat='full'), B, L, 0.5)
  plain = trace_flops(run_of(), B, L, 0.5)
  assert found.products == plain.products
  shape = run_of().model.config
  layers = flops.forward_flops(shape, L, 0.5) - flops.softmax_flops(shape, L)
  layers -= 2 * L * shape.d_model * shape.vocab_size
  # All of a layer but its last product, whose result is not looked at again.
  last = shape.n_layers * 2 * L * shape.d_model * shape.d_ff * 0.5
  assert found.recomputed == B * (layers - last)


def test_a_loss_in_chunks_recomputes_the_logits():
  found = trace_flops(run_of(loss__chunk=8), B, L)
  shape = run_of().model.config
  head = 2 * B * L * shape.d_model * shape.vocab_size
  assert found.products == found.formula - found.softmax
  assert found.recomputed == head
