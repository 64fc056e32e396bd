"""`partition` of algorithms: labels, sparsities, masks and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.combinators import partition

PARAMS = {
    f'h_{i}': {
        'attn': {'wq': jnp.ones((8, 8)) * (i + 1)},
        'mlp': {'wi': jnp.linspace(-1, 1, 128).reshape(8, 16) * (i + 2)},
        'bias': jnp.zeros(8),
    }
    for i in range(2)
}
LABELS = [('*/attn/*', 'attention'), ('h_*', 'rest')]


def two(attention, rest, labels=LABELS):
  return partition({'attention': attention, 'rest': rest}, labels)


def train(algorithm, steps, params=PARAMS, inner=None, **options):
  """Pulls weights to different targets; returns masks and parameters."""
  tx = spdf.sparsify(inner or optax.sgd(0.1), algorithm, key=3, **options)
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  update = jax.jit(tx.update)
  target = jax.tree.map(
      lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), params
  )
  history = [(spdf.get_mask(state), params, state)]
  for _ in range(steps):
    grads = jax.tree.map(lambda p, t: p - t, params, target)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    history.append((spdf.get_mask(state), params, state))
  return history


def kept(mask):
  return {
      (layer, room): int(mask[layer][room][name].sum())
      for layer in mask for room, name in (('attn', 'wq'), ('mlp', 'wi'))
  }


@pytest.mark.parametrize('labels', [
    LABELS,
    [['*/attn/*', 'attention'], ['*', 'rest']],
    lambda path, leaf: 'attention' if 'attn' in path else 'rest',
    lambda path, leaf: 'attention' if leaf.shape == (1, 8, 8) else 'rest',
    {h: {'attn': 'attention', 'mlp': 'rest', 'bias': None} for h in PARAMS},
    {h: {'attn': {'wq': 'attention'}, 'mlp': {'wi': 'rest'}, 'bias': 'any'}
     for h in PARAMS},
])
def test_every_leaf_follows_the_algorithm_of_its_label(labels):
  algorithm = two(spdf.static(0.25), spdf.static(0.75), labels)
  mask = train(algorithm, 0)[0][0]
  assert kept(mask) == {
      ('h_0', 'attn'): 48, ('h_0', 'mlp'): 32,
      ('h_1', 'attn'): 48, ('h_1', 'mlp'): 32,
  }
  assert mask['h_0']['bias'] is None


def test_a_prefix_of_the_parameters_labels_whole_modules():
  labels = {'h_0': 'attention', 'h_1': 'rest'}
  mask = train(two(spdf.dense(), spdf.static(0.5), labels), 0)[0][0]
  assert kept(mask) == {
      ('h_0', 'attn'): 64, ('h_0', 'mlp'): 128,
      ('h_1', 'attn'): 32, ('h_1', 'mlp'): 64,
  }


def test_the_first_pattern_that_matches_counts():
  labels = [('h_0/attn/wq', 'rest'), *LABELS]
  mask = train(two(spdf.dense(), spdf.static(0.5), labels), 0)[0][0]
  assert kept(mask)['h_0', 'attn'] == 32
  assert kept(mask)['h_1', 'attn'] == 64


def test_one_algorithm_for_all_labels_is_that_algorithm_bit_for_bit():
  make = lambda: spdf.rigl(0.75, update_every=2, update_until=4)
  ours = train(two(make(), make()), 3)
  theirs = train(make(), 3)
  for one, other in zip(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, one[:2], other[:2])


def test_members_change_their_masks_at_their_own_steps():
  algorithm = two(
      spdf.gmp(0.75, update_every=1, update_from=2, update_until=2,
               init=lambda key, params, sparsities: jax.tree.map(
                   lambda p: jnp.ones(p.shape, bool), params)),
      spdf.join([spdf.dense(), spdf.static(0.5)], [4]),
  )
  counts = [kept(mask) for mask, _, _ in train(algorithm, 6)]
  assert [c['h_0', 'attn'] for c in counts] == [64] * 3 + [16] * 4
  assert [c['h_0', 'mlp'] for c in counts] == [128] * 5 + [64] * 2


def test_a_member_is_asked_for_masks_at_its_own_steps_only():
  def inverting(at):
    return spdf.static(0.5)._replace(
        update=lambda key, count, mask, *_: jax.tree.map(jnp.invert, mask),
        update_at=lambda count: count == at,
    )

  masks = [mask for mask, _, _ in train(two(inverting(1), inverting(2)), 3)]
  for (room, name), at in ((('attn', 'wq'), 1), (('mlp', 'wi'), 2)):
    first, *later = (mask['h_0'][room][name] for mask in masks)
    for step, mask in enumerate(later):
      np.testing.assert_array_equal(mask, first if step < at else ~first)


def test_a_static_member_keeps_its_mask_while_the_other_moves():
  algorithm = two(
      spdf.static(0.5), spdf.sparse_evolution(0.5, update_every=1)
  )
  first, *_, last = (mask for mask, _, _ in train(algorithm, 3))
  for layer in PARAMS:
    np.testing.assert_array_equal(
        first[layer]['attn']['wq'], last[layer]['attn']['wq']
    )
    assert (first[layer]['mlp']['wi'] != last[layer]['mlp']['wi']).any()


def test_members_see_none_where_leaves_are_not_theirs():
  seen = []

  def watcher(name):
    def note(*trees):
      seen.append((name, [len(jax.tree.leaves(tree)) for tree in trees]))

    def init(key, params):
      note(params)
      return jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)

    def update(key, count, mask, params, grads):
      note(mask, params, grads)
      return mask

    return spdf.Algorithm(
        sparsity_at=lambda count, params: jax.tree.map(lambda p: 0.0, params),
        init=init,
        update=update,
        update_at=lambda count: count >= 0,
        dense_grads_at=lambda count: False,
    )

  labels = {'h_0': {'attn': 'a', 'mlp': 'b', 'bias': 'b'}, 'h_1': 'b'}
  algorithm = partition({'a': watcher('a'), 'b': watcher('b')}, labels)
  train(algorithm, 1)
  assert seen == [('a', [1]), ('b', [3]), ('a', [1] * 3), ('b', [3] * 3)]


def test_sparsities_of_a_whole_are_of_the_group():
  # ERK over the two attention leaves alone, equal in shape: the same sparsity.
  algorithm = two(
      spdf.static(0.5, distribution=spdf.erk),
      spdf.static(0.5, distribution=spdf.model_wide,
                  init=spdf.magnitude_mask),
  )
  sparsities = algorithm.sparsity_at(0, jax.tree.map(
      lambda p: p[None] if p.ndim == 2 else None, PARAMS
  ))
  np.testing.assert_allclose(sparsities['h_0']['attn']['wq'], 0.5)
  assert sparsities['h_0']['mlp']['wi'] == sparsities['h_1']['mlp']['wi'] == 0.5
  assert sparsities['h_0']['bias'] is None
  counts = kept(train(algorithm, 0)[0][0])
  # The weights of the second layer are larger: both are one group.
  assert counts['h_0', 'mlp'] < 64 < counts['h_1', 'mlp']
  assert counts['h_0', 'mlp'] + counts['h_1', 'mlp'] == 128
  assert counts['h_0', 'attn'] == 32


def test_times_are_those_of_any_member():
  members = [
      spdf.rigl(0.5, update_every=4, update_until=8, skip_gradient_step=True),
      spdf.sparse_evolution(0.5, update_every=6, update_until=12),
  ]
  algorithm = two(*members)
  for count in range(14):
    for at in (count, jnp.int32(count)):
      assert bool(algorithm.update_at(at)) == (count in (4, 6, 8, 12))
      assert bool(algorithm.dense_grads_at(at)) == (count in (4, 8))
      assert bool(algorithm.skip_step_at(at)) == (count in (4, 8))


def test_static_members_never_change_masks():
  algorithm = two(spdf.static(0.5), spdf.dense())
  traced = jnp.int32(3)
  assert algorithm.update_at(traced) is False
  assert algorithm.dense_grads_at(traced) is False
  assert algorithm.skip_step_at(traced) is False


def test_partitions_join_and_nest():
  sparse = two(spdf.static(0.5), spdf.static(0.75))
  inner = partition(
      {'h_0': spdf.dense(), 'h_1': spdf.static(0.5)},
      [('h_0/*', 'h_0'), ('h_1/*', 'h_1')],
  )
  nested = two(inner, spdf.static(0.75))
  joined = spdf.join([sparse, nested, spdf.dense()], [2, 4])
  counts = [kept(mask) for mask, _, _ in train(joined, 5)]
  assert [c['h_0', 'attn'] for c in counts] == [32, 32, 32, 64, 64, 64]
  assert [c['h_1', 'attn'] for c in counts] == [32, 32, 32, 32, 32, 64]
  assert [c['h_1', 'mlp'] for c in counts] == [32, 32, 32, 32, 32, 128]


def test_modules_are_frozen_by_optax_partition_around_it():
  # The frozen module's leaves are no business of the algorithm's labels.
  algorithm = partition({'rest': spdf.static(0.75)}, [('h_1/*', 'rest')])
  tx = optax.partition(
      {
          'train': spdf.sparsify(optax.adam(0.1), algorithm, key=0),
          'frozen': optax.set_to_zero(),
      },
      {'h_0': 'frozen', 'h_1': 'train'},
  )
  state = tx.init(PARAMS)
  params = PARAMS
  update = jax.jit(tx.update)
  for _ in range(3):
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  jax.tree.map(np.testing.assert_array_equal, params['h_0'], PARAMS['h_0'])
  assert int((params['h_1']['mlp']['wi'] != 0).sum()) == 32
  assert (params['h_1']['bias'] != 0).all()


def test_map_params_survives_its_placeholder():
  algorithm = two(spdf.static(0.5), spdf.dense())
  tx = spdf.sparsify(optax.adam(0.1), algorithm, key=0)
  state = tx.init(PARAMS)
  doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)
  assert jax.tree.structure(doubled) == jax.tree.structure(state)


@pytest.mark.parametrize('labels, message', [
    ([('*/attn/*', 'attention')],
     "no pattern matches the sparsified leaf 'h_0/mlp/wi'; add"),
    ([], "no pattern matches the sparsified leaf 'h_0/attn/wq'"),
    ([*LABELS, ('*/head/*', 'rest')],
     r"the pattern '\*/head/\*' matches none .* h_0/attn/wq, h_0/mlp/wi, h_1"),
    ([('*', 'rest'), ('*/attn/*', 'attention')],
     r"the patterns before '\*/attn/\*' match all of its leaves; put it"),
    ([('*/attn/*', 'atention'), ('*', 'rest')],
     "'h_0/attn/wq' the label 'atention'.*are 'attention', 'rest'"),
    ([('*', 'rest')], "an entry 'attention', but labels gives that label"),
    (lambda path, leaf: None, "'h_0/attn/wq' the label None"),
    ({'h_0': 'rest'}, 'labels is a tree that does not fit the parameters'),
    ({'h_0': 'rest', 'h_1': {'attn': 'attention'}}, 'labels is a tree that'),
    ('rest', "an entry 'attention', but labels gives that label"),
])
def test_labels_that_do_not_fit_are_refused(labels, message):
  algorithm = two(spdf.static(0.5), spdf.dense(), labels)
  for use in (
      lambda: train(algorithm, 0),
      lambda: algorithm.sparsity_at(0, jax.tree.map(
          lambda p: p[None] if p.ndim == 2 else None, PARAMS
      )),
  ):
    with pytest.raises(ValueError, match=message):
      use()


def test_a_partition_needs_algorithms():
  with pytest.raises(ValueError, match='algorithms is empty'):
    partition({}, [])
