"""A GPT's training step is made of the sparse primitives, named by module."""

import collections
import functools

import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax import training
from spdf_jax.accelerator import matmuls_saveable
from spdf_jax.data import Batch
from spdf_jax.training.step.matmul import SparseSteps

MODULES = ('attn/wq', 'attn/wk', 'attn/wv', 'attn/wd', 'mlp/wi', 'mlp/wo')
SIZES = dict(
    attention='blocks',  # That of CPUs, without a branch for other platforms.
    vocab_size=32, n_layers=2, n_heads=2, d_model=16, d_ff=32, max_length=8
)
PRODUCTS = {
    'sparse_matmul': 'y',
    'sparse_matmul_backward': 'dx and dw',
    'sampled_matmul': 'dw',
}
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)
BATCH = Batch(TOKENS, TOKENS, np.ones((2, 6), np.float32))
REMATS = {
    'none': lambda f: f,
    'saving matmuls': lambda f: jax.checkpoint(f, policy=matmuls_saveable),
    'saving dots': lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    'saving nothing': jax.checkpoint,
}


def matmuls(jaxpr):
  """Yields (product, module) of every sparse primitive, however nested."""
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name in PRODUCTS:
      parts = str(eqn.source_info.name_stack).split('/')
      yield PRODUCTS[name], '/'.join(parts[-3:])
    for inner in jaxprs_in_params(eqn.params):
      yield from matmuls(inner)


def trace_step(remat, sparse_steps=None, **changes):
  model = models.create_model('gpt-mini', **SIZES | changes)
  optimizer = sparsity.sparsify(
      optax.adamw(1e-3), sparsity.static(0.5), where=models.sparsifiable, key=0
  )
  init = lambda: training.create_state(
      model.init(jax.random.key(0), TOKENS)['params'], optimizer
  )
  step = functools.partial(
      training.train_step,
      apply_fn=remat(model.apply),
      optimizer=optimizer,
      learning_rate=optax.constant_schedule(1e-3),
      sparse_steps=sparse_steps,
  )
  return jax.make_jaxpr(step)(jax.eval_shape(init), BATCH).jaxpr


@pytest.mark.parametrize('remat, scan_layers', [
    ('none', False), ('saving matmuls', True), ('saving dots', False),
    ('saving nothing', True),
])
def test_every_matrix_has_its_products_under_its_own_name(
    remat, scan_layers
):
  products = collections.Counter(
      matmuls(trace_step(REMATS[remat], scan_layers=scan_layers))
  )
  layers = ['h'] if scan_layers else ['h_0', 'h_1']
  names = [f'{layer}/{module}' for layer in layers for module in MODULES]
  # Recomputed or not: the policy of ours saves every product.
  forward = 1 if remat in ('none', 'saving matmuls') else 2
  assert products == {
      ('y', name): forward for name in names
  } | {('dx and dw', name): 1 for name in names}


def count_primitives(jaxpr):
  names = collections.Counter()

  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      names[eqn.primitive.name] += 1
      for inner in jaxprs_in_params(eqn.params):
        visit(inner)

  visit(jaxpr)
  return names


def test_a_step_has_one_branch_on_sparsity_with_sparse_kernels_only():
  names = count_primitives(trace_step(REMATS['none']))
  assert names['sparse_matmul'] == names['sparse_matmul_backward'] == 12
  assert names['cond'] == 0
  model = models.create_model('gpt-mini', **SIZES)
  names = count_primitives(
      trace_step(REMATS['none'], SparseSteps(model.apply, 0.0))
  )
  assert names['sparse_matmul'] == names['sparse_matmul_backward'] == 24
  assert names['cond'] == 1


def test_gradients_are_where_the_gradient_mask_is():
  model = models.create_model('gpt-mini', **SIZES, scan_layers=True)
  params = model.init(jax.random.key(0), TOKENS)['params']
  optimizer = sparsity.sparsify(
      optax.sgd(0.1), sparsity.static(0.5), where=models.sparsifiable, key=0
  )
  mask = sparsity.get_mask(optimizer.init(params))

  @jax.jit
  @jax.grad
  def gradient(params, **masks):
    variables = {'params': params, 'masks': mask} | masks
    return (model.apply(variables, TOKENS) ** 2).sum()

  without = gradient(params)
  everywhere = gradient(params, grad_masks=jax.tree.map(jnp.ones_like, mask))
  masked = gradient(sparsity.apply_mask(params, mask))
  for m, few, many, same in zip(*(
      jax.tree.leaves(tree, is_leaf=lambda x: x is None)
      for tree in (mask, without, everywhere, masked)
  )):
    np.testing.assert_array_equal(few, same)
    if m is not None:
      np.testing.assert_array_equal(few, np.where(m, many, 0))
      assert (np.asarray(many)[~np.asarray(m)] != 0).all()
