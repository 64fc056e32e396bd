"""`skip_zeros` on models of others, as they are: Linen, NNX, Equinox, optax."""

import functools

import equinox as eqx
import flax
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.benchmarks import other_gpts
from experiments.benchmarks import skip_zeros as suite
import spdf_jax as spdf
from spdf_jax.accelerator import explain
from spdf_jax.accelerator import list_params
from spdf_jax.accelerator import skip_zeros
from tests.accelerator.skip_zeros_test import needs_kernels
from tests.refusals import refuse

pytestmark = [pytest.mark.ci, needs_kernels]
WIDTH = 16


class Block(nn.Module):

  @nn.compact
  def __call__(self, x, _=None):
    mask = nn.make_causal_mask(x[..., 0])
    x += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
    h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
    return x + nn.Dense(WIDTH)(h), None


class GPT(nn.Module):
  scanned: bool = False

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(32, WIDTH, name='embed')
    x = embed(tokens)
    if self.scanned:
      block = nn.scan(
          nn.remat(Block), variable_axes={'params': 0}, length=2,
          split_rngs={'params': True},
      )
      x, _ = block(name='blocks')(x, None)
    else:
      for i in range(2):
        x, _ = Block(name=f'block_{i}')(x)
    return embed.attend(nn.LayerNorm()(x))


def next_token_loss(logits, tokens):
  return optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], tokens[:, 1:]
  ).mean()


TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12))


def masks_of(params, where, sparsity=0.75):
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(sparsity), where=where, key=0)
  return spdf.get_mask(tx.init(params))


def check(loss, params, mask, *args, grad=jax.value_and_grad, reached=None):
  """Checks values and gradients, and that all sparsified weights reach."""
  kept = spdf.apply_mask(params, mask)
  everywhere = jax.tree.map(jnp.ones_like, mask)
  fast = skip_zeros(loss, lowering='native')
  value, grads = jax.jit(grad(fast))(
      kept, *args, mask=mask, grad_mask=everywhere
  )
  expected, dense = jax.jit(grad(loss))(kept, *args)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  jax.tree.map(
      lambda one, other: np.testing.assert_allclose(
          one, other, atol=1e-5, rtol=1e-4
      ), grads, dense,
  )
  table = explain(loss, lowering='native')(kept, *args, mask=mask)
  assert not table.dense, str(table)
  assert len(table.reached) == len(jax.tree.leaves(mask))


@pytest.mark.parametrize('scanned', [False, True], ids=['plain', 'scan, remat'])
def test_gradients_of_a_linen_gpt_equal_dense_ones(scanned):
  model = GPT(scanned)
  params = model.init(jax.random.key(0), TOKENS)['params']
  where = spdf.where.per_head
  if scanned:
    where = {'blocks': spdf.where.stacked(where), '*': False}
  loss = lambda p, t: next_token_loss(model.apply({'params': p}, t), t)
  mask = masks_of(params, where)
  assert len(jax.tree.leaves(mask)) == (6 if scanned else 12)
  check(loss, params, mask, TOKENS)
  frozen = flax.core.freeze(params)
  check(loss, frozen, masks_of(frozen, where), TOKENS)


def test_gradients_of_boxed_parameters_equal_dense_ones():
  class Boxed(nn.Module):

    @nn.compact
    def __call__(self, x):
      init = nn.with_partitioning(
          nn.initializers.lecun_normal(), (None, 'model')
      )
      return nn.Dense(WIDTH, kernel_init=init)(x)

  x = jnp.ones((4, 8))
  params = Boxed().init(jax.random.key(0), x)['params']
  loss = lambda p, x: jnp.mean(Boxed().apply({'params': p}, x) ** 2)
  mask = jax.tree.map(lambda w: w > 0 if w.ndim == 2 else None, params)
  for given in (mask, nn.unbox(mask)):
    grads = jax.grad(skip_zeros(loss))(params, x, mask=given)
    kernel = nn.unbox(params)['Dense_0']['kernel']
    kept = jax.tree.map(lambda w: jnp.where(w > 0, w, 0), params)
    expected = nn.unbox(jax.grad(loss)(kept, x))['Dense_0']['kernel']
    np.testing.assert_allclose(
        nn.unbox(grads)['Dense_0']['kernel'],
        np.where(kernel > 0, expected, 0), atol=1e-6,
    )


class Attention(nnx.Module):

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(
        num_heads=2, in_features=WIDTH, rngs=rngs, decode=False
    )
    self.wi = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
    self.wo = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    x += self.attention(x)
    return x + self.wo(nnx.gelu(self.wi(x)))


def test_gradients_of_an_nnx_state_equal_dense_ones():
  graph, params = nnx.split(Attention(nnx.Rngs(0)), nnx.Param)
  x = jax.random.normal(jax.random.key(1), (2, 5, WIDTH))
  loss = lambda params, x: jnp.mean((nnx.merge(graph, params)(x) - 1) ** 2)
  check(loss, params, masks_of(params, spdf.where.per_head), x)


def test_an_nnx_module_trains_as_with_dense_products():
  model = Attention(nnx.Rngs(0))
  tx = spdf.sparsify(
      optax.adam(1e-2), spdf.static(0.75), where=spdf.where.per_head, key=0
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  mask = spdf.get_mask(optimizer.opt_state)
  nnx.update(model, spdf.apply_mask(nnx.state(model, nnx.Param), mask))
  x = jax.random.normal(jax.random.key(1), (2, 5, WIDTH))
  loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)

  @nnx.jit
  def step(model, optimizer, x):
    # nnx.grad takes positional arguments only.
    fast = functools.partial(
        skip_zeros(loss), mask=spdf.get_mask(optimizer.opt_state)
    )
    value, grads = nnx.value_and_grad(fast)(model, x)
    optimizer.update(model, grads)
    return value

  dense = loss(model, x)
  np.testing.assert_allclose(step(model, optimizer, x), dense, rtol=1e-5)
  assert step(model, optimizer, x) < dense
  spdf.check_zeros(nnx.state(model, nnx.Param), optimizer.opt_state)
  table = explain(loss, lowering='native')(model, x, mask=mask)
  assert len(table.reached) == len(jax.tree.leaves(mask)) == 6


class Stateful(nnx.Module):

  def __init__(self, rngs, place=None):
    self.wi = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.rngs = rngs
    self.other = self.norm if place == 'shared' else None
    self.place = place

  def __call__(self, x):
    y = self.dropout(self.norm(self.wi(x)))
    y += self.rngs.normal(y.shape)
    if self.place == 'shared':
      y = self.other(y)
    if self.place == 'new':
      self.seen = nnx.Intermediate(y)
    return y


def test_the_state_of_an_nnx_module_changes_as_with_dense_products():
  x = jax.random.normal(jax.random.key(1), (128, WIDTH))
  results = []
  for make in (lambda f, mask: f, lambda f, mask: functools.partial(
      skip_zeros(f, lowering='native'), mask=mask
  )):
    model = Stateful(nnx.Rngs(0))
    mask = masks_of(nnx.state(model, nnx.Param), {'wi/kernel': True})
    nnx.update(model, spdf.apply_mask(nnx.state(model, nnx.Param), mask))
    loss = make(lambda model, x: jnp.mean(model(x) ** 4), mask)
    step = nnx.jit(nnx.value_and_grad(loss))
    values = [float(step(model, x)[0]) for _ in range(3)]
    results.append((values, nnx.state(model, nnx.BatchStat)))
    assert model.dropout.rngs.count[...] == 3 and len(set(values)) == 3
  (want, averages), (got, skipped) = results
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for one, other in zip(*map(jax.tree.leaves, (averages, skipped))):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('place, message', [
    ('new', 'adds variables to its model'),
    ('shared', "'norm/mean' in place, which is a variable of several modules"),
])
def test_state_that_cannot_be_returned_is_refused(place, message):
  model = Stateful(nnx.Rngs(0), place)
  mask = masks_of(nnx.state(model, nnx.Param), {'wi/kernel': True})
  x = jnp.ones((4, WIDTH))
  refuse(message, skip_zeros(lambda m, x: m(x)), model, x, mask=mask)


class Shared(nnx.Module):

  def __init__(self, rngs):
    self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.second = self.first

  def __call__(self, x):
    return self.second(nnx.tanh(self.first(x)))


def test_a_variable_that_nnx_modules_share_has_its_mask_at_all_places():
  model = Shared(nnx.Rngs(0))
  mask = masks_of(nnx.state(model, nnx.Param), spdf.where.per_head)
  kept = nnx.clone(model)
  nnx.update(kept, spdf.apply_mask(nnx.state(kept, nnx.Param), mask))
  loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)
  x = jax.random.normal(jax.random.key(1), (5, WIDTH))
  fast = functools.partial(skip_zeros(loss), mask=mask)
  value, grads = nnx.value_and_grad(fast)(model, x)
  expected, dense = nnx.value_and_grad(loss)(kept, x)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  wanted = spdf.apply_mask(dense, mask)
  jax.tree.map(
      lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6),
      grads, wanted,
  )
  table = explain(loss, lowering='native')(model, x, mask=mask)
  assert table.reached == ('first/kernel', 'second/kernel')


def test_gradients_of_an_equinox_module_with_functions_equal_dense_ones():
  model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, 8))
  loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
  arrays = eqx.filter(model, eqx.is_inexact_array)
  where = lambda path, leaf: spdf.MatrixAxes(1, 0) if leaf.ndim == 2 else None
  mask = masks_of(arrays, where)
  kept = eqx.combine(spdf.apply_mask(arrays, mask), model)
  value, grads = eqx.filter_jit(eqx.filter_value_and_grad(skip_zeros(loss)))(
      kept, x, mask=mask
  )
  expected, dense = eqx.filter_value_and_grad(loss)(kept, x)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  jax.tree.map(
      lambda m, one, other: None if m is None else np.testing.assert_allclose(
          one, np.where(m, other, 0), atol=1e-6
      ), mask, grads, dense, is_leaf=lambda m: m is None,
  )
  table = explain(loss, lowering='native')(kept, x, mask=mask)
  assert len(table.reached) == 3


def test_explain_needs_only_shapes():
  model = GPT()
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']
  mask = jax.tree_util.tree_map_with_path(
      lambda path, x: None if 'bias' in str(path) or x.ndim < 2
      else jax.ShapeDtypeStruct(x.shape, bool), params,
  )
  loss = lambda p, t: next_token_loss(model.apply({'params': p}, t), t)
  tokens = jax.ShapeDtypeStruct(TOKENS.shape, 'int32')
  table = explain(loss, lowering='native')(params, tokens, mask=mask)
  # The embedding is also the head.
  assert table.dense == {} and 'gather' in str(table)


def test_gradients_accumulated_in_a_scan_equal_dense_ones():
  model = GPT()
  params = model.init(jax.random.key(0), TOKENS)['params']
  loss = lambda p, t: next_token_loss(model.apply({'params': p}, t), t)
  mask = masks_of(params, spdf.where.per_head)
  kept = spdf.apply_mask(params, mask)

  @functools.partial(jax.jit, static_argnums=0)
  def accumulated(f, params):
    def add(total, tokens):
      grads = jax.grad(f)(params, tokens[None])
      return jax.tree.map(jnp.add, total, grads), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), TOKENS)[0]

  fast = functools.partial(skip_zeros(loss), mask=mask)
  jax.tree.map(
      lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
      accumulated(fast, kept), spdf.apply_mask(accumulated(loss, kept), mask),
  )


def check_twenty_steps(params, logits, where, vocabulary):
  """Compares losses of 20 steps with dense ones; returns the explanation."""
  plain = lambda params, x: next_token_loss(logits(params, x), x)
  tx = spdf.sparsify(optax.adamw(1e-3), spdf.static(0.75), where=where, key=0)

  def losses(loss):
    opt_state = tx.init(params)
    kept = spdf.apply_mask(params, spdf.get_mask(opt_state))

    @jax.jit
    def step(params, opt_state, tokens):
      masks = spdf.get_masks(opt_state)
      value, grads = jax.value_and_grad(loss)(params, tokens, masks)
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, value

    values = []
    for i in range(20):
      tokens = jax.random.randint(jax.random.key(i), (2, 32), 0, vocabulary)
      kept, opt_state, value = step(kept, opt_state, tokens)
      values.append(float(value))
    spdf.check_zeros(kept, opt_state)
    return values

  fast = skip_zeros(plain, lowering='native')
  np.testing.assert_allclose(
      losses(lambda p, x, masks: fast(p, x, **masks)),
      losses(lambda p, x, masks: plain(p, x)), rtol=1e-4,
  )
  mask = jax.eval_shape(lambda p: spdf.get_mask(tx.init(p)), params)
  return explain(plain, lowering='native')(
      params, jnp.zeros((2, 32), int), mask=mask
  )


@pytest.mark.parametrize('name', other_gpts.GPTS)
def test_twenty_steps_of_other_gpts_have_the_losses_of_dense_ones(name):
  sizes = other_gpts.Sizes(64, layers=2, vocabulary=32)
  params, logits = other_gpts.GPTS[name](sizes)
  table = check_twenty_steps(params, logits, suite.hidden_matrices, 32)
  assert table.dense == {}
  hidden = {'Linen': 12, 'NNX': 12, 'Equinox': 12, 'plain JAX': 8}
  assert len(table.weights) == hidden.get(name, 6)


@pytest.mark.parametrize('name', other_gpts.GPTS)
def test_listed_matrices_of_other_gpts_work_in_any_layout(name):
  # A width of 128 has two heads.
  sizes = other_gpts.Sizes(128, layers=2, vocabulary=32)
  params, logits = other_gpts.GPTS[name](sizes)
  mask = masks_of(params, suite.hidden_matrices)
  kept = spdf.apply_mask(params, mask)
  listed = list_params(kept, mask, where=suite.hidden_matrices)
  fast = skip_zeros(logits)
  np.testing.assert_allclose(
      jax.jit(fast)(listed, TOKENS), logits(kept, TOKENS), atol=1e-4
  )
  table = explain(logits)(listed, TOKENS)
  assert table.dense == {} and len(table.reached) == len(jax.tree.leaves(mask))
