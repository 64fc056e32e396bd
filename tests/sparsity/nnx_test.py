"""`nnx.Optimizer` and boxes of Linen: masks of variables and of boxes."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import spdf_jax as spdf
from spdf_jax import models
from spdf_jax.sparsity import statistics
from tests.sparse_loop import trajectory

TIMES = dict(update_every=2, update_until=6)


class Model(nnx.Module):

  def __init__(self, rngs):
    self.wi = nnx.Linear(8, 16, rngs=rngs)
    self.wo = nnx.Linear(16, 8, rngs=rngs)

  def __call__(self, x):
    return self.wo(jax.nn.gelu(self.wi(x)))


@nnx.jit
def step(model, optimizer, x):
  loss = lambda m: jnp.mean((m(x) - x) ** 2)
  optimizer.update(model, nnx.grad(loss)(model))


def make(algorithm, where=spdf.where.hidden_matrices):
  model = Model(nnx.Rngs(0))
  tx = spdf.sparsify(
      optax.adamw(1e-2), algorithm, where=where, key=3, track=True
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  mask = spdf.get_mask(optimizer.opt_state)
  nnx.update(model, spdf.apply_mask(nnx.state(model, nnx.Param), mask))
  return model, optimizer, tx


def train(model, optimizer, steps=7):
  for i in range(steps):
    step(model, optimizer, jax.random.normal(jax.random.key(i), (4, 8)))
  return nnx.state(model, nnx.Param)


def test_training_keeps_exact_zeros_and_counts():
  model, optimizer, _ = make(spdf.rigl(0.75, **TIMES))
  params = train(model, optimizer)
  spdf.check_zeros(params, optimizer.opt_state)
  mask = spdf.get_mask(optimizer.opt_state)
  kept = spdf.map_masked(lambda m, p: int(m.sum()), mask, params)
  assert jax.tree.leaves(kept) == [32, 32]
  assert spdf.summarize(mask, params).sparsity == 0.75
  assert 'wi/kernel' in str(spdf.summarize(mask, params))
  changes = statistics.mask_changes(mask, mask, params)
  assert changes['wo/kernel'].surviving == 32


def test_masks_are_those_of_the_same_training_on_plain_arrays():
  model, optimizer, tx = make(spdf.rigl(0.75, **TIMES))
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  pure = nnx.to_pure_dict(params)
  state = tx.init(pure)

  @jax.jit
  def plain_step(pure, state, x):
    def loss(p):
      m = nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, p)), rest)
      return jnp.mean((m(x) - x) ** 2)
    updates, state = tx.update(jax.grad(loss)(pure), state, pure)
    return optax.apply_updates(pure, updates), state

  for i in range(7):
    x = jax.random.normal(jax.random.key(i), (4, 8))
    pure, state = plain_step(pure, state, x)
  train(model, optimizer)
  masks = [spdf.get_mask(s) for s in (state, optimizer.opt_state)]
  for one, other in zip(*map(jax.tree.leaves, masks), strict=True):
    np.testing.assert_array_equal(one, other)


def test_functions_over_the_variables_of_the_state_find_an_array_in_each():
  _, optimizer, _ = make(spdf.rigl(0.75, **TIMES))
  dtypes = jax.tree.map(
      lambda variable: variable.get_value().dtype,
      nnx.state(optimizer, nnx.OptState),
      is_leaf=lambda x: isinstance(x, nnx.Variable),
  )
  assert {str(dtype) for dtype in jax.tree.leaves(dtypes)} >= {'bool', 'int32'}


@pytest.mark.filterwarnings('ignore')
def test_a_restored_checkpoint_continues_bit_for_bit(tmp_path):
  model, optimizer, _ = make(spdf.rigl(0.75, **TIMES))
  train(model, optimizer, 3)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'a', nnx.state((model, optimizer)))
    checkpointer.wait_until_finished()
    other, again, _ = make(spdf.rigl(0.75, **TIMES))
    like = nnx.state((other, again))
    nnx.update((other, again), checkpointer.restore(tmp_path / 'a', like))
  pairs = [
      jax.tree.leaves((train(m, o, 4), spdf.get_mask(o.opt_state)))
      for m, o in ((model, optimizer), (other, again))
  ]
  for one, two in zip(*pairs, strict=True):
    np.testing.assert_array_equal(one, two)


BOXED = {
    'default': dict(),
    'pattern': dict(where={'*/kernel': True}),
    'subtree': dict(where={'wi': True, 'wo': True}),
    'function': dict(where=lambda path, leaf: leaf.ndim == 2),
    'axes': dict(where={'*/kernel': spdf.MatrixAxes(0, 1)}),
}


@pytest.mark.parametrize('name', BOXED)
@pytest.mark.parametrize('make', [
    lambda: spdf.rigl(0.75, **TIMES),
    lambda: spdf.partition(
        {'a': spdf.static(0.5), 'b': spdf.dense()},
        [('wi/*', 'a'), ('*', 'b')],
    ),
])
def test_boxes_of_linen_train_as_the_arrays_in_them(name, make):
  init = nn.with_partitioning(nn.initializers.lecun_normal(), ('a', 'b'))

  class Boxed(nn.Module):

    @nn.compact
    def __call__(self, x):
      hidden = nn.Dense(16, kernel_init=init, name='wi')(x)
      return nn.Dense(8, kernel_init=init, name='wo')(jax.nn.gelu(hidden))

  x = jax.random.normal(jax.random.key(0), (4, 8))
  boxed = Boxed().init(jax.random.key(1), x)['params']
  assert isinstance(boxed['wi']['kernel'], nn.Partitioned)
  loss = lambda p: jnp.mean((Boxed().apply({'params': p}, x) - x) ** 2)

  def train(params):
    tx = spdf.sparsify(
        optax.adamw(1e-2), make(), key=3, track=True, **BOXED[name]
    )
    *_, (params, state) = trajectory(
        tx, params, lambda _, params: jax.grad(loss)(params), 4
    )
    spdf.check_zeros(params, state)
    mask = spdf.get_mask(state)
    sparsity = spdf.summarize(mask, params).sparsity
    assert sparsity > 0
    dense = spdf.get_mask(spdf.densify(state))
    return params, mask, sparsity, dense, spdf.mask_statistics(state)

  jax.tree.map(
      np.testing.assert_array_equal, nn.meta.unbox(train(boxed)),
      train(nn.meta.unbox(boxed)),
  )


@pytest.mark.ci
def test_a_bridged_decoder_trains_as_the_linen_model_does():
  linen = models.create_model(
      'gpt-mini', vocab_size=16, n_layers=1, n_heads=2, d_model=16, d_ff=32,
      max_length=8,
  )
  draw = lambda i: jax.random.randint(jax.random.key(i), (2, 9), 0, 16)
  mean = lambda logits, tokens: (
      optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  ).mean()
  tx = spdf.sparsify(
      optax.adamw(1e-2), spdf.rigl(0.75, **TIMES), where=models.sparsifiable,
      key=3,
  )

  @nnx.jit
  def create(tokens):
    model = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(tokens)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  model, optimizer = create(draw(0)[:, 1:])
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  state = jax.jit(tx.init)(params)

  @nnx.jit
  def bridged_step(model, optimizer, tokens):
    loss = lambda model: mean(model(tokens[:, :-1]), tokens)
    optimizer.update(model, nnx.grad(loss)(model))

  @jax.jit
  def linen_step(params, state, tokens):
    loss = lambda p: mean(linen.apply({'params': p}, tokens[:, :-1]), tokens)
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  for i in range(7):
    bridged_step(model, optimizer, draw(i))
    params, state = linen_step(params, state, draw(i))
  trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  masks = nnx.to_pure_dict(spdf.get_mask(optimizer.opt_state))
  jax.tree.map(
      np.testing.assert_array_equal, (trained, masks),
      (params, spdf.get_mask(state)),
  )
  assert spdf.summarize(masks, params).sparsity == 0.75
