"""`interop.hosts`: JaxPruner's protocol and its configurations."""

import dataclasses
import re

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.interop import hosts

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
  keys = iter(jax.random.split(jax.random.key(seed), 8))
  return jax.tree.map(
      lambda shape: jax.random.normal(next(keys), shape), shapes or SHAPES,
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
    x = jax.random.normal(jax.random.key(i), (8, 50))
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


@pytest.mark.parametrize('algorithm, dist_type', [
    ('magnitude', 'erk'), ('random', 'erk'), ('saliency', 'erk'),
    ('static_sparse', 'erk'), ('set', 'erk'), ('rigl', 'erk'),
    ('magnitude', 'uniform'), ('rigl', 'uniform'),
])
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
