"""SNIP, GraSP and SynFlow against NumPy oracles written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import initial_masks
from spdf_jax.sparsity.counts import number_kept
from tests.refusals import refuse

SIZES = (6, 10, 7, 3)


def saliency_mask(
    score, loss_fn, params, batch, sparsity, *,
    where=spdf.where.hidden_matrices, distribution='model_wide', **options
):
  """The mask with which an optimizer starts."""
  init = spdf.init.saliency(score, loss_fn, params, batch, where=where)
  algorithm = spdf.static(
      sparsity, distribution=distribution, init=init, **options
  )
  tx = spdf.sparsify(optax.sgd(0.1), algorithm, where=where, key=0)
  return spdf.get_mask(tx.init(params))


def network(seed=0, dtype=np.float64):
  rng = np.random.default_rng(seed)
  return {
      f'h_{i}': {
          'w': rng.standard_normal(shape).astype(dtype),
          'bias': rng.standard_normal(shape[1]).astype(dtype),
      }
      for i, shape in enumerate(zip(SIZES, SIZES[1:]))
  }


def as_jax(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def quadratic(params, batch):
  """Half of w.A w - b.w over the weights of one leaf, and a bias."""
  a, b = batch
  w = params['w'].ravel()
  return w @ a @ w / 2 - b @ w + jnp.sum(params['bias'] * w.sum())


def quadratic_problem(seed=0):
  rng = np.random.default_rng(seed)
  a = rng.standard_normal((24, 24))
  params = {'w': rng.standard_normal((4, 6)), 'bias': rng.standard_normal(2)}
  return params, (a + a.T, rng.standard_normal(24))


def keep_highest(scores, sparsity):
  """Keeps the highest of the scores of all leaves; a list of masks."""
  flat = np.concatenate([np.ravel(s) for s in scores])
  mask = np.zeros(flat.size, bool)
  kept = number_kept(flat.size, sparsity)
  mask[np.argsort(-flat, kind='stable')[:kept]] = True
  parts = np.split(mask, np.cumsum([np.size(s) for s in scores])[:-1])
  return [m.reshape(np.shape(s)) for m, s in zip(parts, scores)]


def gradient(params, batch):
  a, b = batch
  return a @ params['w'].ravel() - b + params['bias'].sum()


def test_snip_keeps_the_highest_product_of_weight_and_gradient():
  sparsity = 0.5
  params, batch = quadratic_problem()
  scores = np.abs(params['w'].ravel() * gradient(params, batch)).reshape(4, 6)
  mask = saliency_mask(
      'snip', quadratic, as_jax(params), as_jax(batch), sparsity
  )
  np.testing.assert_array_equal(mask['w'], keep_highest([scores], sparsity)[0])
  assert mask['bias'] is None


@pytest.mark.parametrize('seed, sparsity', [(1, 0.9)])
def test_grasp_prunes_what_lowers_the_gradient_norm_least(seed, sparsity):
  # Oracle: the squared norm itself, after shrinking one weight a little.
  params, batch = quadratic_problem(seed)
  norm = lambda w: np.sum(gradient({**params, 'w': w}, batch) ** 2)
  fall = np.zeros((4, 6))
  for at in np.ndindex(4, 6):
    less = params['w'].copy()
    less[at] *= 1 - 1e-6
    fall[at] = norm(params['w']) - norm(less)
  mask = saliency_mask(
      'grasp', quadratic, as_jax(params), as_jax(batch), sparsity
  )
  np.testing.assert_array_equal(mask['w'], keep_highest([fall], sparsity)[0])


def flow(params, batch):
  """R of SynFlow: a chain of linear layers."""
  x = batch
  for name in sorted(params):
    x = x @ params[name]['w'] + params[name]['bias']
  return jnp.sum(x)


def synflow_oracle(params, sparsity, rounds):
  """Tanaka et al., algorithm 1: masks of the layers, in float64."""
  names = sorted(params)
  weights = [np.abs(params[n]['w']) for n in names]
  biases = [np.abs(params[n]['bias']) for n in names]
  masks = [np.ones(w.shape, bool) for w in weights]
  size = sum(w.size for w in weights)
  for k in range(1, rounds + 1):
    current = [w * m for w, m in zip(weights, masks)]
    inputs, outputs = [np.ones(SIZES[0])], [np.ones(SIZES[-1])]
    for w, b in zip(current, biases):
      inputs.append(inputs[-1] @ w + b)
    for w in current[::-1]:
      outputs.append(w @ outputs[-1])
    scores = [
        w * np.outer(x, g)
        for w, x, g in zip(current, inputs, outputs[-2::-1])
    ]
    density = (1 - sparsity) ** (k / rounds)
    threshold = np.sort(np.concatenate([s.ravel() for s in scores]))[
        size - number_kept(size, 1 - density)
    ]
    masks = [m & (s >= threshold) for m, s in zip(masks, scores)]
  return masks


@pytest.mark.ci
@pytest.mark.parametrize('sparsity, rounds', [(0.95, 100), (0.9, 3)])
def test_synflow_equals_the_algorithm_of_the_paper(
    sparsity, rounds, monkeypatch
):
  monkeypatch.setattr(initial_masks, '_SYNFLOW_ROUNDS', rounds)
  params = network()
  actual = saliency_mask(
      'synflow', flow, as_jax(params), jnp.ones(SIZES[0]), sparsity
  )
  wanted = synflow_oracle(params, sparsity, rounds)
  for layer, mask in zip(actual.values(), wanted):
    np.testing.assert_array_equal(layer['w'], mask)
    # Conserving synaptic flow, no layer collapses.
    assert mask.any()


@pytest.mark.ci
def test_synflow_revives_nothing_when_scores_become_zero(monkeypatch):
  # Round one prunes the 0th weight and the last factor of the product; then
  # its other factors score zero, as pruned weights do.
  monkeypatch.setattr(initial_masks, '_SYNFLOW_ROUNDS', 2)

  def flow(params, batch):
    w = params['w'].ravel()
    return 0.01 * w[0] + 0.5 * jnp.prod(w[1:5]) + 5 * jnp.sum(w[5:])

  mask = saliency_mask('synflow', flow, {'w': jnp.ones((2, 4))}, None, 0.5)
  assert np.flatnonzero(mask['w']).tolist() == [1, 5, 6, 7]


def test_saliency_ranks_all_layers_together_except_under_uniform():
  params = as_jax(network())
  scale = {'h_0': 1.0, 'h_1': 2.0, 'h_2': 3.0}

  def loss_fn(params, batch):
    return sum(batch * s * jnp.sum(params[n]['w']) for n, s in scale.items())

  wide = saliency_mask('snip', loss_fn, params, 1.0, 0.6)
  scores = [np.abs(s * params[n]['w']) for n, s in scale.items()]
  for actual, wanted in zip(jax.tree.leaves(wide), keep_highest(scores, 0.6)):
    np.testing.assert_array_equal(actual, wanted)
  apart = saliency_mask(
      'snip', loss_fn, params, 1.0, 0.6, distribution=spdf.uniform
  )
  counts = [int(m.sum()) for m in jax.tree.leaves(apart)]
  assert counts == [number_kept(n, 0.6) for n in (60, 70, 21)]


@pytest.mark.ci
def test_heads_and_stacks_are_restored_in_the_shapes_of_the_parameters():
  axes = optax.contrib.MuonDimensionNumbers(
      reduction_axis=(1,), output_axis=(2, 3)
  )
  where = lambda path, leaf: axes if path == 'w' else False
  w = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))
  mask = saliency_mask(
      'snip', lambda p, batch: jnp.sum(p['w']), {'w': w, 'b': w}, None, 0.75,
      where=where, distribution=spdf.uniform,
  )['w']
  assert mask.shape == w.shape
  assert mask.sum((1, 2, 3)).tolist() == [16, 16, 16]
  assert jnp.abs(w[0])[mask[0]].min() > jnp.abs(w[0])[~mask[0]].max()


@pytest.mark.ci
def test_low_precision_ranks_products_in_float32():
  # In bfloat16 both products round to one value, and the first would win.
  w = jnp.array([[1.015625, 1.0078125]] * 2, jnp.bfloat16)
  loss_fn = lambda p, g: jnp.sum(p['w'] * g)
  g = jnp.array([1.0, 1.0078125], jnp.bfloat16)
  mask = saliency_mask('snip', loss_fn, {'w': w}, g, 0.5)['w']
  assert mask.tolist() == [[False, True]] * 2


@pytest.mark.ci
@pytest.mark.parametrize('name', ['snip', 'grasp', 'synflow'])
def test_a_layer_of_least_scores_keeps_one_weight(name):
  # The gradient of b, but not that of a, is large.
  params = {'a': 1e-6 * jnp.ones((8, 8)), 'b': jnp.ones((8, 8))}
  loss_fn = lambda p, x: jnp.sum((x @ p['a'] @ p['b']) ** 2) + 1e6 * jnp.sum(
      p['b']
  )
  init = spdf.init.saliency(name, loss_fn, params, jnp.ones((2, 8)))
  algorithm = spdf.static(0.6, distribution='model_wide', init=init)
  mask = spdf.get_mask(spdf.sparsify(optax.sgd(0.1), algorithm, key=0).init(
      params
  ))
  assert sorted(int(m.sum()) for m in mask.values()) == [1, 50]


def test_saliency_of_other_leaves_than_those_to_prune_is_refused():
  params = {'mlp': {'w': jnp.ones((8, 8))}, 'out': jnp.ones((8, 8))}
  loss_fn = lambda p, x: jnp.sum((x @ p['mlp']['w'] @ p['out']) ** 2)

  def masks(groups=None, where=None):
    init = spdf.init.saliency(
        'snip', loss_fn, params, jnp.ones((2, 8)), where=where
    )
    algorithm = spdf.static(0.5, init=init)
    if groups:
      algorithm = spdf.partition({'a': algorithm, 'b': spdf.dense()}, groups)
    tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
    return spdf.get_mask(tx.init(params))

  out = {'out': True}
  for arguments in (
      dict(where=out), dict(groups=[('out', 'a'), ('*', 'b')]),
      dict(where=out, groups=[('mlp/*', 'a'), ('*', 'b')]),
  ):
    refuse("and the algorithm prunes .* there; ", masks, **arguments)
  mask = masks(where=out, groups=[('out', 'a'), ('*', 'b')])
  assert int(mask['out'].sum()) == 32 and mask['mlp']['w'].all()


@pytest.mark.parametrize('arguments, message', [
    (('snap', quadratic), "score 'snap' is unknown; did you mean 'snip'"),
    ((lambda w, g: g['w'], quadratic), 'score returns a tree of structure'),
    ((lambda w, g: {'w': jnp.ones(3), 'bias': None}, quadratic),
     r"score returns shape \[3\] for 'w' of shape \[4, 6\]"),
    (('snip', lambda p, b: jnp.sum(p['w']) * jnp.nan),
     "score 'snip' of 'w' is not finite"),
    (('synflow', lambda p, b: jnp.exp(1e3 * jnp.sum(p['w']))),
     "score 'synflow' of 'w' is not finite"),
])
def test_scores_that_make_no_sense_are_refused(arguments, message):
  params, batch = quadratic_problem()
  refuse(message, saliency_mask, *arguments, as_jax(params), as_jax(batch), 0.5)


@pytest.mark.ci
def test_synflow_ends_in_a_structure_with_one_sparsity():
  w = {'w': jnp.abs(jax.random.normal(jax.random.key(0), (8, 6))) + 1.0}
  mask = saliency_mask(
      'synflow', lambda p, x: jnp.sum(x @ p['w']), w, jnp.ones((1, 8)), 0.5,
      distribution=spdf.uniform, structure=spdf.structures.n_of_m(2, 4),
  )['w']
  groups = w['w'].reshape(2, 4, 6)
  wanted = groups >= jnp.sort(groups, axis=1)[:, 2:3]
  np.testing.assert_array_equal(mask, wanted.reshape(8, 6))
