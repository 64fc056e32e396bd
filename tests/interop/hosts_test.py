"""Training loops of other libraries, and `Updater`, JaxPruner's protocol."""

from flax import linen as nn
from flax import nnx
from flax.training import train_state
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import interop
from tests.sparse_loop import trajectory
from tests.sparsity.nnx_test import Model

pytestmark = pytest.mark.ci
RIGL = spdf.rigl(0.75, update_every=2, update_until=6)


def params_of():
  draw = np.random.default_rng(0).standard_normal
  return {
      'wi': {'kernel': jnp.asarray(draw((20, 40)), 'float32'),
             'bias': jnp.zeros(40)},
      'wo': {'kernel': jnp.asarray(draw((40, 20)), 'float32')},
  }


def test_the_protocol_trains_as_sparsify_does():
  updater = interop.Updater(RIGL, key=0)
  tx = spdf.sparsify(optax.adamw(1e-2), RIGL, key=0)
  wrapped = updater.wrap_optax(optax.adamw(1e-2))

  def loss_fn(params, x):
    h = jnp.tanh(x @ params['wi']['kernel'] + params['wi']['bias'])
    return jnp.mean((h @ params['wo']['kernel'] - 1) ** 2)

  @jax.jit
  def step_by_protocol(params, opt_state, x):
    params = updater.pre_forward_update(params, opt_state)
    grads = jax.grad(loss_fn)(params, x)
    updates, opt_state = wrapped.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return updater.post_gradient_update(params, opt_state), opt_state

  draw = lambda i: np.random.default_rng(i).standard_normal((8, 20), 'float32')
  gradients = lambda i, params: jax.grad(loss_fn)(params, draw(i))
  *_, (expected, expected_state) = trajectory(tx, params_of(), gradients, 8)
  params = params_of()
  state = wrapped.init(params)
  for i in range(8):
    params, state = step_by_protocol(params, state, draw(i))
  spdf.check_zeros(params, state)
  jax.tree.map(
      lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5),
      (params, spdf.get_mask(state)),
      (expected, spdf.get_mask(expected_state)),
  )


def test_no_algorithm_returns_the_optimizer_itself():
  updater, inner, params = interop.Updater(None), optax.sgd(0.1), params_of()
  assert updater.wrap_optax(inner) is inner
  assert updater.pre_forward_update(params, inner.init(params)) is params
  assert updater.post_gradient_update(params, inner.init(params)) is params


def test_masks_are_found_in_a_chain():
  updater = interop.Updater(spdf.static(0.75), where=spdf.where.matrices, key=0)
  params = params_of()
  chained = optax.chain(
      optax.clip(1.0), updater.wrap_optax(optax.adam(1e-2))
  )
  masked = updater.post_gradient_update(params, chained.init(params))
  for name in ('wi', 'wo'):
    assert int(jnp.count_nonzero(masked[name]['kernel'])) == 200


def test_a_state_without_a_mask_is_named():
  updater = interop.Updater(spdf.static(0.75), key=0)
  with pytest.raises(ValueError, match='no SparsifyState'):
    updater.pre_forward_update(params_of(), optax.sgd(0.1).init(params_of()))


def opt_state_dtypes(optimizer):
  """Reads the dtype of every variable of a state, as Tunix's trainer does."""
  return jax.tree.map(
      lambda variable: variable.get_value().dtype,
      nnx.state(optimizer, nnx.OptState),
      is_leaf=lambda x: isinstance(x, nnx.Variable),
  )


def test_every_variable_of_an_nnx_optimizer_holds_an_array():
  model = Model(nnx.Rngs(0))
  tx = spdf.sparsify(optax.adamw(1e-2), RIGL, key=0)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    before = opt_state_dtypes(optimizer)
    optimizer.update(model, grads)
    after = opt_state_dtypes(optimizer)
    assert before == after

  for i in range(8):
    step(model, optimizer, jax.random.normal(jax.random.key(i), (4, 8)))
  for layer in (model.wi, model.wo):
    assert int(jnp.sum(layer.kernel[...] == 0)) == 96


def test_variables_may_be_updated_without_an_optimizer_object():
  # EasyDeL passes the variables themselves to `tx.init` and `tx.update`.
  graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
  updater = interop.Updater(RIGL, key=0)
  tx = updater.wrap_optax(optax.adamw(1e-2))
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state, x):
    loss = lambda params: jnp.mean((nnx.merge(graph, params)(x) - x) ** 2)
    updates, opt_state = tx.update(
        updates=jax.grad(loss)(params), state=opt_state, params=params
    )
    return optax.apply_updates(params, updates), opt_state

  for i in range(8):
    params = updater.pre_forward_update(params, opt_state)
    x = jax.random.normal(jax.random.key(i), (4, 8))
    params, opt_state = step(params, opt_state, x)
    params = updater.post_gradient_update(params, opt_state)
  spdf.check_zeros(params, opt_state)
  for layer in ('wi', 'wo'):
    assert int(jnp.sum(params[layer]['kernel'][...] == 0)) == 96


class Attention(nn.Module):

  @nn.compact
  def __call__(self, x):
    project = lambda name: nn.DenseGeneral((2, 8), use_bias=False, name=name)(x)
    mixed = jax.nn.dot_product_attention(*map(
        project, ('query', 'key', 'value')
    ))
    return nn.DenseGeneral(
        16, axis=(-2, -1), use_bias=False, name='out'
    )(mixed)


class GatedMlp(nn.Module):

  @nn.compact
  def __call__(self, x):
    gate, up = (nn.Dense(32, use_bias=False, name=f'wi_{i}')(x) for i in (0, 1))
    return nn.Dense(16, use_bias=False, name='wo')(nn.silu(gate) * up)


class DecoderLayer(nn.Module):

  @nn.compact
  def __call__(self, x, _):
    x = x + Attention(name='self_attention')(nn.RMSNorm(name='norm')(x))
    return x + GatedMlp(name='mlp')(x), None


class Decoder(nn.Module):

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(64, 16, name='token_embedder')(tokens)
    layers = nn.scan(
        DecoderLayer, variable_axes={'params': 1}, split_rngs={'params': True},
        length=3,
    )
    x, _ = layers(name='layers')(x, None)
    return nn.Dense(64, use_bias=False, name='logits_dense')(x)


@pytest.fixture(scope='module')
def scanned():
  """Rebuilds MaxText's step: scanned along axis 1, clipped before `tx`."""
  model = Decoder()
  tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 64)
  params = model.init(jax.random.key(0), tokens)

  def loss(params):
    logits = model.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
    ).mean()

  tx = spdf.sparsify(
      optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
      RIGL,
      where={'*/layers': spdf.where.stacked(spdf.where.per_head, axis=1)},
      key=0,
  )
  state = train_state.TrainState.create(
      apply_fn=model.apply, params=params, tx=tx
  )

  @jax.jit
  def step(state, clip=np.inf):
    grads = jax.grad(loss)(state.params)
    grads, _ = optax.clip_by_global_norm(clip).update(grads, None)
    return state.apply_gradients(grads=grads), grads

  return state, step


@pytest.mark.slow
def test_layers_scanned_along_axis_1_keep_exact_counts(scanned):
  state, step = scanned
  for _ in range(8):
    state, _ = step(state)
  spdf.check_zeros(state.params, state.opt_state)
  params = state.params['params']
  query = params['layers']['self_attention']['query']['kernel']
  assert query.shape == (16, 3, 2, 8)
  for leaf in jax.tree.leaves(
      [params['layers'][name] for name in ('self_attention', 'mlp')]
  ):
    inside = tuple(i for i in range(leaf.ndim) if i != 1)
    assert set(np.mean(np.asarray(leaf == 0), inside).tolist()) == {0.75}
  for name in ('token_embedder', 'logits_dense'):
    assert all(jnp.all(leaf != 0) for leaf in jax.tree.leaves(params[name]))


@pytest.mark.slow
def test_a_clip_before_the_optimizer_shrinks_kept_gradients(scanned):
  state, step = scanned
  mask = spdf.get_mask(state.opt_state)
  _, dense = step(state)
  _, clipped = step(state, clip=1e-3)
  kept = float(optax.tree.norm(spdf.apply_mask(clipped, mask)))
  assert float(optax.tree.norm(dense)) > 1e-3
  assert kept < 0.9e-3


def test_masks_may_be_made_under_checkify():
  # Kauldron creates the optimizer state in this way.
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.75), key=0)
  init = checkify.checkify(jax.jit(tx.init))
  params = {'w': jnp.ones((8, 8)), 'v': jnp.ones((8, 4))}
  _, opt_state = init(params)
  jax.tree.map(
      np.testing.assert_array_equal,
      spdf.get_mask(opt_state), spdf.get_mask(tx.init(params)),
  )
