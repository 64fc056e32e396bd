"""`interop.hosts`: JaxPruner's protocol and its configurations."""

import dataclasses
import re

from flax import linen as nn
from flax import nnx
from flax.training import train_state
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from tiers import slow_except

import spdf_jax as spdf
from spdf_jax.interop import hosts

pytestmark = pytest.mark.ci

# Sizes of which every sparsity below prunes a whole number of weights.
SHAPES = {
    'embed': {'embedding': (50, 20)},
    'mlp': {'wi': {'kernel': (20, 40), 'bias': (40,)},
            'wo': {'kernel': (40, 20)}},
}
KERNELS = ('embed/embedding', 'mlp/wi/kernel', 'mlp/wo/kernel')
CONFIG = dict(
    dist_type='uniform', sparsity=0.8, update_freq=4, update_start_step=4,
    update_end_step=16,
)


def params_of(shapes=None, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda shape: jnp.asarray(rng.standard_normal(shape), 'float32'),
      shapes or SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


def loss_fn(params, x):
  h = jnp.tanh(x @ params['embed']['embedding'])
  h = jnp.tanh(h @ params['mlp']['wi']['kernel'] + params['mlp']['wi']['bias'])
  return jnp.mean((h @ params['mlp']['wo']['kernel'] - 1) ** 2)


def train(updater, steps):
  """Trains by JaxPruner's protocol; returns the state and all parameters."""
  params = params_of()
  tx = updater.wrap_optax(optax.adamw(1e-2))
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state, x):
    params = updater.pre_forward_update(params, opt_state)
    grads = jax.grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return updater.post_gradient_update(params, opt_state), opt_state

  history = []
  for i in range(steps):
    x = np.random.default_rng(i).standard_normal((8, 50), 'float32')
    params, opt_state = step(params, opt_state, x)
    history.append(params)
  return opt_state, history


def kept_in(params):
  leaves = {
      jax.tree_util.keystr(path, simple=True, separator='/'): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  return {path: int(jnp.count_nonzero(leaves[path])) for path in KERNELS}


def published_erk(shapes, sparsity):
  """Densities of RigL's appendix, with dense layers fixed one by one."""
  dense = set()
  while True:
    rest = {k: s for k, s in shapes.items() if k not in dense}
    total = (1 - sparsity) * sum(map(np.prod, shapes.values()))
    left = total - sum(np.prod(shapes[k]) for k in dense)
    scale = left / sum(map(np.sum, rest.values()))
    density = {k: scale * np.sum(s) / np.prod(s) for k, s in rest.items()}
    over = {k for k, d in density.items() if d > 1}
    if not over:
      return density | dict.fromkeys(dense, 1.0)
    dense.add(max(over, key=density.get))


SIZES = {'embed/embedding': 1000, 'mlp/wi/kernel': 800, 'mlp/wo/kernel': 800}


@pytest.mark.parametrize('algorithm, dist_type', slow_except(
    [('magnitude', 'uniform'), ('static_sparse', 'erk')],
    [
        ('magnitude', 'uniform'), ('static_sparse', 'erk'), ('rigl', 'erk'),
        ('magnitude', 'erk'), ('random', 'erk'), ('saliency', 'erk'),
        ('set', 'erk'),
    ],
))
def test_twenty_steps_end_at_the_published_counts(algorithm, dist_type):
  config = CONFIG | dict(algorithm=algorithm, dist_type=dist_type)
  updater = hosts.create_updater_from_config(ml_collections.ConfigDict(config))
  opt_state, history = train(updater, 20)
  spdf.check(history[-1], opt_state)
  if dist_type == 'uniform':
    density = dict.fromkeys(KERNELS, 0.2)
  else:
    density = published_erk(
        {'embed/embedding': (50, 20), 'mlp/wi/kernel': (20, 40),
         'mlp/wo/kernel': (40, 20)}, 0.8,
    )
  assert kept_in(history[-1]) == {
      k: round(density[k] * n) for k, n in SIZES.items()
  }


def test_the_ramp_is_that_of_jaxpruner():
  # At steps 4, 8, 12 and 16, 0.8 (1 - (1 - p)³) with p = (step - 3) / 12,
  # cut at 1.
  updater = hosts.create_updater_from_config(CONFIG | dict(algorithm='random'))
  _, history = train(updater, 20)
  for step, found in enumerate(map(kept_in, history)):
    updates = [t for t in (4, 8, 12, 16) if t <= step]
    progress = min((updates[-1] - 3) / 12, 1) if updates else 0
    sparsity = 0.8 * (1 - (1 - progress) ** 3)
    assert found == {
        k: round(n * (1 - sparsity)) for k, n in SIZES.items()
    }, step


def test_equal_start_and_end_prune_once():
  updater = hosts.create_updater_from_config(
      CONFIG | dict(algorithm='magnitude', update_start_step=16)
  )
  _, history = train(updater, 18)
  kept = [kept_in(params) for params in history]
  assert kept[15] == SIZES
  assert kept[16] == kept[17] == {k: n // 5 for k, n in SIZES.items()}


def test_the_largest_magnitudes_are_kept_as_jaxpruner_ranks_whole_leaves():
  params = {'conv': {'kernel': jax.random.normal(jax.random.key(0), (3, 5, 4))}}
  updater = hosts.create_updater_from_config(CONFIG | dict(
      algorithm='magnitude', update_start_step=0, update_end_step=0
  ))
  tx = updater.wrap_optax(optax.sgd(0.0))
  state = tx.init(params)
  _, state = tx.update(params, state, params)
  kept = spdf.get_mask(state)['conv']['kernel']
  threshold = np.sort(np.abs(params['conv']['kernel']), None)[-12]
  np.testing.assert_array_equal(
      kept, np.abs(params['conv']['kernel']) >= threshold
  )


def test_global_magnitude_ranks_all_leaves_together():
  updater = hosts.create_updater_from_config(
      {k: v for k, v in CONFIG.items() if k != 'dist_type'}
      | dict(algorithm='global_magnitude')
  )
  _, history = train(updater, 20)
  kept = kept_in(history[-1]).values()
  assert sum(kept) == 520
  assert len(set(kept)) > 1


@pytest.mark.parametrize('kind, units', [
    ('nm_2,4', lambda m: m.reshape(-1, 4).sum(1) == 2),
    ('block_4,4', lambda m: np.isin(
        m.reshape(-1, 4, m.shape[1] // 4, 4).sum((1, 3)), (0, 16)
    )),
    ('channel_-1', lambda m: np.isin(m.sum(0), (0, m.shape[0]))),
])
def test_structures_are_along_the_last_axis(kind, units):
  updater = hosts.create_updater_from_config(CONFIG | dict(
      algorithm='magnitude', sparsity_type=kind,
      filter_fn=lambda path, leaf: path[-1] == 'kernel',
  ))
  opt_state, history = train(updater, 20)
  mask = spdf.get_mask(opt_state)
  assert mask['embed']['embedding'] is None
  assert units(np.asarray(mask['mlp']['wi']['kernel'])).all()
  sparsity = 0.5 if kind == 'nm_2,4' else 0.8
  assert kept_in(history[-1])['mlp/wi/kernel'] == round(800 * (1 - sparsity))


@pytest.mark.parametrize('algorithm, skip', [
    ('rigl', True), ('set', True), ('set', False),
])
def test_a_mask_update_replaces_the_gradient_step(algorithm, skip):
  updater = hosts.create_updater_from_config(CONFIG | dict(
      algorithm=algorithm, drop_fraction=0.3, skip_gradients=skip
  ))
  _, history = train(updater, 5)  # Step 4 updates the mask.
  before, after = (params['mlp']['wi']['bias'] for params in history[3:])
  assert bool((before == after).all()) == skip


def test_a_dynamic_algorithm_without_update_steps_keeps_its_mask():
  updater = hosts.create_updater_from_config(
      dict(algorithm='rigl', dist_type='erk', sparsity=0.5)
  )
  assert not updater.algorithm.update_at(jnp.array(10))


def test_no_prune_returns_the_optimizer_itself():
  updater = hosts.create_updater_from_config(
      ml_collections.ConfigDict(dict(algorithm='no_prune'))
  )
  inner = optax.sgd(0.1)
  assert updater.wrap_optax(inner) is inner
  params = params_of()
  assert updater.pre_forward_update(params, inner.init(params)) is params
  assert updater.post_gradient_update(params, inner.init(params)) is params


@pytest.mark.parametrize('changes, message', [
    (dict(algorithm='magnitude_ste'), 'straight-through'),
    (dict(algorithm='random_ste'), 'straight-through'),
    (dict(algorithm='global_saliency'), 'within layers'),
    (dict(algorithm='magnitud'), "did you mean 'magnitude'"),
    (dict(algorithm=None), 'algorithm None is unknown'),
    (dict(dist_type='er'), "dist_type 'er' is unknown"),
    (dict(custom_sparsity_map={('a',): 0.5}), "'custom_sparsity_map'"),
    (dict(topk_fn=max), "'topk_fn'"),
    (dict(use_packed_masks=True), 'give False'),
    (dict(is_sparse_gradients=False), 'give True'),
    (dict(sparsity_type='channel_0'), "sparsity_type is 'channel_0'"),
    (dict(sparsity_type='nm_4,2'), 'n is 4 and m is 2'),
    (dict(algorithm='saliency', sparsity_type='nm_2,4'), 'need magnitude'),
    (dict(update_start_step=None), "no 'update_start_step'"),
    (dict(sparsity=1.0), r'in \[0, 1\)'),
])
def test_what_has_no_counterpart_is_refused(changes, message):
  config = CONFIG | dict(algorithm='magnitude') | changes
  with pytest.raises(ValueError, match=message) as error:
    hosts.create_updater_from_config(ml_collections.ConfigDict(config))
  assert re.fullmatch(r'[^\n]+[.?]', str(error.value))


@pytest.mark.parametrize('seed', [
    3, jax.random.key(3), jax.random.PRNGKey(3), np.array([0, 3], np.uint32),
])
def test_a_seed_may_be_any_kind_of_key(seed):
  updater = hosts.create_updater_from_config(
      CONFIG | dict(algorithm='static_sparse', rng_seed=seed)
  )
  reference = dataclasses.replace(updater, key=3)
  params = params_of()
  masks = [
      spdf.get_mask(u.wrap_optax(optax.sgd(0.1)).init(params))
      for u in (updater, reference)
  ]
  jax.tree.map(np.testing.assert_array_equal, *masks)


def test_masks_are_found_in_a_chain():
  updater = hosts.Updater(spdf.static(0.75), where=spdf.matrices, key=0)
  params = params_of()
  chained = optax.chain(
      optax.clip(1.0), updater.wrap_optax(optax.adam(1e-2))
  )
  masked = updater.post_gradient_update(params, chained.init(params))
  assert kept_in(masked) == {k: n // 4 for k, n in SIZES.items()}


def test_the_protocol_changes_nothing_after_an_update():
  updater = hosts.Updater(
      spdf.rigl(0.75, update_every=2, update_until=6), where=spdf.matrices,
      key=0,
  )
  opt_state, history = train(updater, 8)
  params = history[-1]
  for again in (
      updater.pre_forward_update(params, opt_state),
      updater.post_gradient_update(params, opt_state),
  ):
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_state_without_a_mask_is_named():
  updater = hosts.Updater(spdf.static(0.75), key=0)
  with pytest.raises(ValueError, match='no SparsifyState'):
    updater.pre_forward_update(params_of(), optax.sgd(0.1).init(params_of()))


class Model(nnx.Module):

  def __init__(self, rngs):
    self.wi = nnx.Linear(8, 16, rngs=rngs)
    self.wo = nnx.Linear(16, 8, rngs=rngs)

  def __call__(self, x):
    return self.wo(jax.nn.relu(self.wi(x)))


def opt_state_dtypes(optimizer):
  """Reads the dtype of every variable of a state, as Tunix's trainer does."""
  return jax.tree.map(
      lambda variable: variable.get_value().dtype,
      nnx.state(optimizer, nnx.OptState),
      is_leaf=lambda x: isinstance(x, nnx.Variable),
  )


def test_every_variable_of_an_nnx_optimizer_holds_an_array():
  model = Model(nnx.Rngs(0))
  tx = spdf.sparsify(
      optax.adamw(1e-2),
      spdf.rigl(0.75, update_every=2, update_until=6), key=0,
  )
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
  updater = hosts.Updater(
      spdf.rigl(0.75, update_every=2, update_until=6), key=0
  )
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
  spdf.check(params, opt_state)
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
      spdf.rigl(0.75, update_every=2, update_until=6),
      where={'*/layers': spdf.stacked(spdf.per_head, axis=1)}, key=0,
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
  spdf.check(state.params, state.opt_state)
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
  # Kauldron makes the optimizer state so.
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.75), key=0)
  init = checkify.checkify(jax.jit(tx.init))
  params = {'w': jnp.ones((8, 8)), 'v': jnp.ones((8, 4))}
  _, opt_state = init(params)
  jax.tree.map(
      np.testing.assert_array_equal,
      spdf.get_mask(opt_state), spdf.get_mask(tx.init(params)),
  )
