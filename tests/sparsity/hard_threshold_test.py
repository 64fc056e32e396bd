"""`hard_threshold`: masks and weights by an oracle in NumPy, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import storage
from spdf_jax.sparsity import tracking
from spdf_jax.sparsity.algorithms import largest

STEPS, ANNEAL = 60, 30
WHERE = {
    '*/bias': spdf.MatrixAxes((), 0), 'stack': spdf.MatrixAxes(1, 2),
    '*': spdf.where.matrices,
}
SHAPES = {
    'h': {'kernel': (12, 10), 'bias': (10,)}, 'stack': (3, 8, 6),
    'wte': (7, 12), 'scale': (5,), 'log_scale': (),
}
SPARSITY = optax.linear_schedule(0.0, 0.85, ANNEAL)


def draw(rng):
  return jax.tree.map(
      lambda shape: np.round(rng.normal(size=shape), 2), SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


def top(scores, number, among=None):
  """Keeps the highest scores of one layer; ties are broken by index."""
  order = np.argsort(-scores.ravel(), kind='stable')
  if among is not None:
    order = [i for i in order if among.ravel()[i]]
  mask = np.zeros(scores.size, bool)
  mask[order[:number]] = True
  return mask.reshape(scores.shape)


def threshold(layer, sparsity, least=0):
  """Returns the mask of `[inputs, outputs]`, of the definition."""
  kept = layer.size - round(sparsity * layer.size)
  sizes = np.abs(layer)
  sure = np.stack([top(column, least) for column in sizes.T], axis=1)
  return sure | top(sizes, kept - int(sure.sum()), ~sure)


class AdamW:
  """AdamW of one leaf, after Loshchilov and Hutter."""

  def __init__(self, w, rate, decay):
    self.w, self.rate, self.decay = w, rate, decay
    self.mu = self.nu = 0.0 * w
    self.step = 0

  def __call__(self, g):
    self.step += 1
    self.mu = 0.9 * self.mu + 0.1 * g
    self.nu = 0.999 * self.nu + 0.001 * g * g
    mu = self.mu / (1 - 0.9 ** self.step)
    nu = self.nu / (1 - 0.999 ** self.step)
    self.w = self.w - self.rate * (
        mu / (np.sqrt(nu) + 1e-8) + self.decay * self.w
    )
    return self.w


def oracle(initial, grads, least):
  """Yields masks and weights after each step, leaves flattened."""
  names = [jax.tree_util.keystr(p, simple=True, separator='/')
           for p, _ in jax.tree_util.tree_leaves_with_path(initial)]
  adam = [AdamW(w, 0.4, 0.1) for w in jax.tree.leaves(initial)]

  def cut(step):
    sparsity = float(SPARSITY(step))
    masks = []
    for name, leaf in zip(names, adam):
      if name in ('scale', 'log_scale'):
        masks.append(None)
        continue
      layers = leaf.w.reshape(-1, *([1] * (leaf.w.ndim < 2)),
                              *leaf.w.shape[-2:])
      by_layer = [
          threshold(w, sparsity, 0 if name == 'h/bias' else least)
          for w in layers.reshape(-1, *layers.shape[-2:])
      ]
      masks.append(np.stack(by_layer).reshape(leaf.w.shape))
      leaf.w = np.where(masks[-1], leaf.w, 0)
    return masks

  yield cut(0), [leaf.w for leaf in adam]
  for step in range(STEPS):
    for leaf, g in zip(adam, jax.tree.leaves(grads(step))):
      leaf(g)
    yield cut(step), [leaf.w for leaf in adam]


@pytest.mark.parametrize('least', [0, 1])
@pytest.mark.parametrize('jit', [False, True])
def test_masks_and_weights_are_those_of_numpy_for_60_steps(least, jit):
  rng = np.random.default_rng(0)
  initial = draw(rng)
  noise = [draw(rng) for _ in range(STEPS)]
  grads = lambda step: noise[step]
  with jax.enable_x64(True):
    tx = spdf.hard_threshold(
        optax.adamw(0.4, weight_decay=0.1), SPARSITY, update_until=ANNEAL,
        least=least, where=WHERE,
    )
    update = jax.jit(tx.update) if jit else tx.update
    params = jax.tree.map(jnp.asarray, initial)
    state = tx.init(params)
    params = spdf.apply_mask(params, spdf.get_mask(state))
    returned = 0
    for step, (masks, weights) in enumerate(oracle(initial, grads, least)):
      if step:
        before = spdf.get_mask(state)
        updates, state = update(
            jax.tree.map(jnp.asarray, grads(step - 1)), state, params
        )
        params = optax.apply_updates(params, updates)
        returned += sum(
            int((m & ~b).sum()) for m, b in zip(
                jax.tree.leaves(spdf.get_mask(state)), jax.tree.leaves(before)
            )
        )
      mask = jax.tree.leaves(
          spdf.get_mask(state), is_leaf=lambda m: m is None
      )
      for wanted, found in zip(masks, mask, strict=True):
        assert (wanted is None) == (found is None)
        if wanted is not None:
          np.testing.assert_array_equal(found, wanted, strict=True)
      for wanted, found in zip(weights, jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
        assert ((np.asarray(found) == 0) == (wanted == 0)).all()
      spdf.check_zeros(params, state)
  assert returned > 20  # Pruned weights return.


def test_moments_and_gradients_of_pruned_weights_are_dense():
  tx = spdf.hard_threshold(optax.adam(0.1), 0.9)
  params = {'w': jax.random.normal(jax.random.key(0), (8, 8))}
  state = tx.init(params)
  assert bool(spdf.get_dense_grads(state))
  _, state = tx.update({'w': jnp.ones((8, 8))}, state, params)
  assert bool(state.inner_state[0].mu['w'].all())


def test_rows_are_ranked_by_themselves_with_a_structure():
  params = {'w': jnp.arange(1.0, 33.0).reshape(4, 8)}
  tx = spdf.hard_threshold(
      optax.sgd(0.0), 0.75, structure=spdf.structures.balanced(None, 'inputs')
  )
  _, state = tx.update(params, tx.init(params), params)
  assert spdf.get_mask(state)['w'].sum(axis=1).tolist() == [2, 2, 2, 2]
  assert spdf.get_mask(state)['w'][:, -2:].all()


def test_a_tree_of_sparsities_and_summaries_are_those_of_sparsify():
  params = {'a': jnp.ones((4, 8)), 'b': jnp.ones((8, 8)), 'bias': jnp.ones(8)}
  tx = spdf.hard_threshold(
      optax.adam(0.1), {'a': 0.5, 'b': 0.75, 'bias': None}
  )
  state = jax.jit(tx.init)(params)
  summary = spdf.summarize(state, params)
  assert {k: v.kept for k, v in summary.layers.items()} == {'a': 16, 'b': 16}
  assert bool(spdf.get_mask(spdf.densify(state))['a'].all())


def test_the_largest_weights_of_a_whole_model_stay():
  tx = spdf.hard_threshold(optax.sgd(0.0), 0.75, distribution='model_wide')
  params = {'a': jnp.arange(32.0).reshape(4, 8), 'b': -jnp.ones((4, 8))}
  _, state = tx.update(params, tx.init(params), params)
  mask = spdf.get_mask(state)
  # One weight of each layer stays in any case.
  assert mask['a'].ravel().tolist() == [False] * 17 + [True] * 15
  assert mask['b'].ravel().tolist() == [True] + [False] * 31


def test_a_list_of_changes_without_the_first_step_starts_at_its_sparsity():
  tx = spdf.hard_threshold(
      optax.sgd(0.0), lambda step: jnp.where(step < 2, 0.0, 0.75),
      update_every=[2, 4],
  )
  params = {'w': jnp.ones((4, 8))}
  state = tx.init(params)
  kept = [int(spdf.get_mask(state)['w'].sum())]
  for _ in range(4):
    _, state = tx.update(params, state, params)
    kept.append(int(spdf.get_mask(state)['w'].sum()))
  assert kept == [32, 32, 32, 8, 8]


def test_statistics_count_vectors_too():
  params = {'w': jnp.ones((4, 8)), 'bias': jnp.arange(8.0)}
  where = {'w': True, 'bias': spdf.MatrixAxes((), 0)}
  tx = spdf.hard_threshold(optax.sgd(1.0), 0.75, where=where)
  tracked = tracking.track_masks(tx, largest.largest(0.75), where)
  state = tracked.init(params)
  grads = {'w': jnp.zeros((4, 8)), 'bias': -jnp.arange(16.0, 0.0, -2.0)}
  params = spdf.apply_mask(params, spdf.get_mask(state))
  _, state = tracked.update(grads, state, params)
  assert spdf.get_mask(state)['bias'].tolist() == [True] * 2 + [False] * 6
  statistics = spdf.mask_statistics(state)
  assert [int(statistics[n]) for n in ('grown', 'dropped', 'surviving')] == [
      2, 2, 8
  ]
  bias = spdf.summarize(state, params, where=where).layers['bias']
  assert (bias.kept, bias.cut_off) == (2, 0.0)
  assert float(statistics['cut_off']) == spdf.summarize(
      {'w': spdf.get_mask(state)['w'], 'bias': None}, params
  ).layers['w'].cut_off


def test_without_zeros_it_is_the_inner_optimizer():
  tx, inner = spdf.hard_threshold(optax.adamw(0.1), 0.0), optax.adamw(0.1)
  params = {'w': jax.random.normal(jax.random.key(0), (8, 8))}
  state, plain = tx.init(params), inner.init(params)
  ours = theirs = params
  for i in range(5):
    grads = {'w': jax.random.normal(jax.random.key(i), (8, 8))}
    updates, state = tx.update(grads, state, ours)
    ours = optax.apply_updates(ours, updates)
    updates, plain = inner.update(grads, plain, theirs)
    theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_array_equal(ours['w'], theirs['w'])


def test_bfloat16_masks_rank_the_weights_as_they_are_applied():
  params = {'w': jax.random.normal(jax.random.key(0), (16, 16), 'bfloat16')}
  tx = spdf.hard_threshold(optax.sgd(1e-3), 0.5)
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  grads = {'w': jax.random.normal(jax.random.key(1), (16, 16), 'bfloat16')}
  updates, state = tx.update(grads, state, params)
  dense = optax.apply_updates(params, optax.sgd(1e-3).update(
      grads, state.inner_state, params)[0])
  params = optax.apply_updates(params, updates)
  assert params['w'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(
      spdf.get_mask(state)['w'],
      top(np.abs(np.asarray(dense['w'], np.float64)), 128),
  )
  spdf.check_zeros(params, state)


def test_an_optimizer_of_nnx_has_the_same_zeros():
  nnx = pytest.importorskip('flax.nnx')
  model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  tx = spdf.hard_threshold(optax.adam(0.1), 0.75)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  for _ in range(3):
    optimizer.update(
        model, nnx.grad(lambda m: m(jnp.eye(8)).sum() ** 2)(model)
    )
  spdf.check_zeros(nnx.state(model, nnx.Param), optimizer.opt_state)
  assert int((model.kernel[...] != 0).sum()) == 16


PARAMS = {'w': jnp.ones((4, 8)), 'bias': jnp.ones(8), 'scalar': jnp.ones(())}


def init(sparsity=0.75, **arguments):
  return spdf.hard_threshold(optax.adam(0.1), sparsity, **arguments).init(
      PARAMS
  )


@pytest.mark.parametrize('make, message', [
    (lambda: init(0.99), "sparsity is 0.99, which keeps none of the 32 weights "
     "of 'w'; lower it"),
    (lambda: init(1.0), r'sparsity is 1.0; .* \[0, 1\)'),
    (lambda: init(SPARSITY), 'update_every is 1 and update_until is None'),
    (lambda: init(
        optax.linear_schedule(0.0, 0.99, 9), update_until=9),
     'keeps none of the 32 weights'),
    (lambda: init(least=2), r"least is 2 for each of the 8 outputs of 'w', "
     'which is more than the 8 weights that sparsity 0.75 keeps; lower it'),
    (lambda: init(0.5, least=-1), 'least is -1; give a whole number'),
    (lambda: init(0.5, least=1.5), 'least is 1.5; give a whole number'),
    (lambda: init(0.5, least=1, structure='2:4'),
     'least is 1, which needs an unstructured mask'),
    (lambda: init(0.5, least=1, distribution='model_wide'),
     "least is 1 and distribution is 'model_wide'"),
    (lambda: init(where=lambda path, leaf: path == 'scalar'),
     r'gives the axes .* for scalar of shape \(\).*at least one output'),
    (lambda: init(where=lambda path, leaf: path == 'bias'),
     r'for bias of shape \(8,\).*MatrixAxes\(\(\), 0\)'),
    (lambda: spdf.hard_threshold(
        spdf.sparsify(optax.adam(0.1), spdf.static(0.5), key=0), 0.5
    ).init(PARAMS), 'one inside the other'),
    (lambda: spdf.sparsify(
        spdf.hard_threshold(optax.adam(0.1), 0.5), spdf.static(0.5), key=0
    ).init(PARAMS), 'one inside the other'),
    (lambda: spdf.hard_threshold(
        spdf.with_age(optax.scale_by_adam()), 0.5).init(PARAMS),
     'with_age is inside hard_threshold'),
    (lambda: spdf.hard_threshold(optax.adam(0.1), 0.5).update(
        PARAMS, init(0.5)), 'hard_threshold needs params'),
])
def test_bad_input_is_refused_in_one_sentence(make, message):
  with pytest.raises(ValueError, match=message) as caught:
    make()
  assert '\n' not in str(caught.value) and str(caught.value).endswith('.')


def test_a_compact_state_is_refused():
  params = {'w': jnp.ones((4, 8))}
  tx = spdf.hard_threshold(optax.adam(0.1), 0.5)
  packed, state = storage.pack_state(params, tx.init(params))
  with pytest.raises(ValueError, match='is stored compactly'):
    tx.update(packed, state, packed)


def test_other_types_are_refused():
  with pytest.raises(TypeError, match='inner is 3; give an optimizer'):
    spdf.hard_threshold(3, 0.5)
