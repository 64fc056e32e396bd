"""Low-rank adapters: gradients, merged zeros, and agreement of both forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.models import create_model
from spdf_jax.sparsity.adapters import Adapter

MODEL = create_model(
    'gpt-mini', vocab_size=16, n_layers=2, d_model=16, d_ff=32, n_heads=2
)
TOKENS = np.random.default_rng(0).integers(16, size=(4, 12))


@pytest.fixture(scope='module')
def sparse():
  """Parameters, half of whose hidden weights are zero, and their mask."""
  params = MODEL.init(jax.random.key(0), TOKENS)['params']
  tx = spdf.sparsify(
      optax.sgd(0.1), spdf.static(0.5), where=MODEL.where, key=0
  )
  mask = spdf.get_mask(tx.init(params))
  return spdf.apply_mask(params, mask), mask


def loss(params):
  logits = MODEL.apply({'params': params}, TOKENS)[:, :-1]
  return optax.softmax_cross_entropy_with_integer_labels(
      logits, TOKENS[:, 1:]
  ).mean()


def draw(rng, *shape):
  return rng.standard_normal(shape).astype(np.float32)


def test_the_first_step_is_that_of_the_factors_gradients():
  rng = np.random.default_rng(1)
  w, g = draw(rng, 6, 5), draw(rng, 6, 5)
  tx = spdf.lora(optax.sgd(0.5), 2, key=0, scale=3.0)
  state = tx.init({'w': w, 'bias': np.ones(5, np.float32)})
  a, b = (np.asarray(x[0], np.float64) for x in state.adapters['w'])
  assert 0.1 < a.std() < 1 and not b.any()
  grads = {'w': g, 'bias': np.ones(5, np.float32)}
  for _ in range(3):
    updates, state = tx.update(grads, state, {'w': w, 'bias': grads['bias']})
    # W + s A B has the gradients s g B^T and s A^T g.
    before = a @ b
    a, b = a - 0.5 * 3 * g @ b.T, b - 0.5 * 3 * a.T @ g
    np.testing.assert_allclose(
        updates['w'], 3 * (a @ b - before), rtol=1e-4, atol=1e-4
    )
    assert not updates['bias'].any()


@pytest.mark.parametrize('keep_zeros', [True, False])
def test_weights_in_training_are_those_of_merged_adapters(sparse, keep_zeros):
  params, mask = sparse
  inner = optax.adamw(1e-2)
  algorithm = spdf.static(0.5, init='nonzero') if keep_zeros else spdf.dense()
  tx = spdf.sparsify(
      spdf.lora(inner, 4, key=1, where=MODEL.where), algorithm,
      where=MODEL.where, key=0,
  )
  trained, state = params, tx.init(params)
  adapters = spdf.create_adapters(
      jax.random.key(1), params, 4, where=MODEL.where
  )
  inner_state = inner.init(adapters)

  def merge(adapters):
    return spdf.merge_adapters(
        params, adapters, mask if keep_zeros else None, where=MODEL.where
    )

  @jax.jit
  def step(trained, state, adapters, inner_state):
    updates, state = tx.update(jax.grad(loss)(trained), state, trained)
    trained = optax.apply_updates(trained, updates)
    grads = jax.grad(lambda x: loss(merge(x)))(adapters)
    updates, inner_state = inner.update(grads, inner_state, adapters)
    return trained, state, optax.apply_updates(adapters, updates), inner_state

  for _ in range(10):
    trained, state, adapters, inner_state = step(
        trained, state, adapters, inner_state
    )
  assert loss(trained) < loss(params) - 0.1
  logits = lambda params: MODEL.apply({'params': params}, TOKENS)
  np.testing.assert_allclose(
      logits(trained), logits(merge(adapters)), atol=1e-5
  )
  for weights in (trained, merge(adapters)):
    kept = spdf.map_masked(
        lambda m, w: float(np.mean((w != 0) == m)), mask, weights
    )
    shares = jax.tree.leaves(kept)
    assert all(x == 1 for x in shares) if keep_zeros else max(shares) < 0.6
    np.testing.assert_array_equal(
        weights['wte']['embedding'], params['wte']['embedding']
    )


def test_merged_adapters_keep_the_zeros_of_stacked_layers():
  rng = np.random.default_rng(2)
  w = draw(rng, 3, 4, 6) * (rng.random((3, 4, 6)) > 0.5)
  params = {'h': {'w': w}}
  adapters = {'h': {'w': Adapter(draw(rng, 3, 4, 2), draw(rng, 3, 2, 6))}}
  merged = spdf.merge_adapters(
      params, adapters, {'h': {'w': w != 0}}, where={'h/w': True}
  )
  expected = w + 2 * (w != 0) * (adapters['h']['w'].a @ adapters['h']['w'].b)
  np.testing.assert_allclose(merged['h']['w'], expected, rtol=1e-5)
  assert not np.asarray(merged['h']['w'])[w == 0].any()


@pytest.mark.parametrize('change, message', [
    (lambda x: {'w': x, 'v': x}, "the adapters have a matrix 'v' and the para"),
    (lambda x: {'w': None}, "the parameters have a matrix 'w' and the adapter"),
    (lambda x: {'w': Adapter(x.a, x.b[..., :3])}, 'has factors .1, 4, 2. and'),
    (lambda x: {'w': Adapter(*(y.astype(jnp.bfloat16) for y in x))},
     "the adapter of 'w' is bfloat16 and the matrix float32; merge in the pre"),
])
def test_other_adapters_are_refused(change, message):
  params = {'w': jnp.ones((4, 8))}
  adapters = spdf.create_adapters(jax.random.key(0), params, 2)
  with pytest.raises(ValueError, match=message):
    spdf.merge_adapters(params, change(adapters['w']))
