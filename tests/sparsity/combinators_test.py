"""`join` and `partition` of algorithms: masks, updates and labels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from tests.sparse_loop import trajectory

PARAMS = {'w': jnp.linspace(-1, 1, 64).reshape(8, 8), 'b': jnp.zeros(8)}


def run(algorithm, steps):
  """Trains a parabola; returns parameters and masks after every step."""
  tx = spdf.sparsify(optax.adam(0.1), algorithm, key=3)
  pull = lambda _, params: jax.tree.map(lambda p: p - 2.0, params)
  return [
      (params, spdf.get_mask(state)['w'], state)
      for params, state in trajectory(tx, PARAMS, pull, steps)
  ][1:]


def test_kept_counts_are_exact_in_every_segment_of_join():
  sparsities = [0.75, 0.0, 0.5, 0.25]
  algorithm = spdf.join([spdf.static(s) for s in sparsities], [2, 4, 6])
  kept = [int(mask.sum()) for _, mask, _ in run(algorithm, 8)]
  assert kept == [16, 16, 64, 64, 32, 32, 48, 48]


def test_rising_sparsity_prunes_the_smallest_weights():
  algorithm = spdf.join([spdf.dense(), spdf.static(0.75)], [3])
  history = run(algorithm, 4)
  before, after = history[2][0]['w'], history[3][1]
  threshold = jnp.sort(jnp.abs(before).ravel())[-16]
  np.testing.assert_array_equal(after, jnp.abs(before) >= threshold)


def test_falling_sparsity_keeps_what_is_there_and_revives_the_rest():
  algorithm = spdf.join([spdf.static(0.75), spdf.static(0.5)], [3])
  history = run(algorithm, 4)
  old, new = history[2][1], history[3][1]
  assert int((old & ~new).sum()) == 0 and int((new & ~old).sum()) == 16
  # Revived at random, not the first zeros of the matrix.
  revived = np.flatnonzero(np.asarray(new & ~old))
  zeros = np.flatnonzero(np.asarray(~old))
  assert revived.tolist() != zeros[:16].tolist()


def test_dense_phase_equals_training_the_sparse_weights_densely():
  # Oracle: static to the boundary, then the plain inner optimizer, whose
  # state it takes over.
  joined = run(spdf.join([spdf.static(0.75), spdf.dense()], [3]), 6)
  params, _, state = run(spdf.static(0.75), 3)[-1]
  inner, inner_state = optax.adam(0.1), state.inner_state
  update = jax.jit(inner.update)
  for step in range(3, 6):
    grads = jax.tree.map(lambda p: p - 2.0, params)
    updates, inner_state = update(grads, inner_state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(joined[step][0]['w'], params['w'], rtol=1e-6)


@pytest.mark.parametrize('make', [
    lambda: spdf.rigl(0.5, structure='2:4', update_every=5, update_until=9),
    lambda: spdf.iterative([spdf.Round(9, 0.5)], structure='2:4'),
    lambda: spdf.partition(
        {'all': spdf.static(0.5, structure='2:4')}, [('*', 'all')]
    ),
])
def test_the_mask_at_a_boundary_has_the_structure_of_its_member(make):
  algorithm = spdf.join([spdf.dense(), make()], [2])
  mask = np.asarray(run(algorithm, 4)[-1][1])
  assert (mask.reshape(2, 4, 8).sum(1) == 2).all()


LAYERS = {
    f'h_{i}': {
        'attn': {'wq': jnp.ones((8, 8)) * (i + 1)},
        'mlp': {'wi': jnp.linspace(-1, 1, 128).reshape(8, 16) * (i + 2)},
        'bias': jnp.zeros(8),
    }
    for i in range(2)
}
LABELS = [('*/attn/*', 'attention'), ('h_*', 'rest')]


def two(attention, rest, labels=LABELS):
  return spdf.partition({'attention': attention, 'rest': rest}, labels)


def train(algorithm, steps):
  """Pulls weights to different targets; returns masks and parameters."""
  tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=3)
  pull = lambda _, params: jax.tree.map(
      lambda p: p - jnp.cos(jnp.arange(p.size)).reshape(p.shape), params
  )
  return [
      (spdf.get_mask(state), params, state)
      for params, state in trajectory(tx, LAYERS, pull, steps)
  ]


def kept(mask):
  return {
      (layer, room): int(mask[layer][room][name].sum())
      for layer in mask for room, name in (('attn', 'wq'), ('mlp', 'wi'))
  }


@pytest.mark.parametrize('labels', [
    LABELS,
    lambda path, leaf: 'attention' if leaf.shape == (1, 8, 8) else 'rest',
    {h: {'attn': 'attention', 'mlp': 'rest', 'bias': None} for h in LAYERS},
])
def test_every_leaf_follows_the_algorithm_of_its_label(labels):
  algorithm = two(spdf.static(0.25), spdf.static(0.75), labels)
  mask = train(algorithm, 0)[0][0]
  assert kept(mask) == {
      ('h_0', 'attn'): 48, ('h_0', 'mlp'): 32,
      ('h_1', 'attn'): 48, ('h_1', 'mlp'): 32,
  }
  assert mask['h_0']['bias'] is None


def test_algorithms_in_join_count_steps_from_their_start():
  rigl = spdf.rigl(0.5, update_every=2, update_until=6)
  algorithm = spdf.join([spdf.dense(), rigl], [5])
  updates = [t for t in range(14) if algorithm.update_at(t)]
  assert updates == [5, 7, 9, 11]
  gmp = spdf.gmp(spdf.cubic(0.0, 0.75, 4), update_every=2, update_until=4)
  kept, alone = (
      [int(mask.sum()) for _, mask, _ in run(algorithm, steps)]
      for algorithm, steps in (
          (spdf.join([spdf.dense(), gmp], [2]), 8), (gmp, 6),
      )
  )
  assert kept == [64, 64, *alone] and alone[-1] == 16


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


def test_distributions_in_a_partition_apply_within_their_group():
  # ERK over the two attention leaves alone, equal in shape: the same sparsity.
  algorithm = two(
      spdf.static(0.5, distribution=spdf.erk),
      spdf.static(0.5, distribution=spdf.model_wide,
                  init=spdf.init.magnitude),
  )
  sparsities = algorithm.sparsity_at(0, jax.tree.map(
      lambda p: p[None] if p.ndim == 2 else None, LAYERS
  ))
  np.testing.assert_allclose(sparsities['h_0']['attn']['wq'], 0.5)
  assert sparsities['h_0']['mlp']['wi'] == sparsities['h_1']['mlp']['wi'] == 0.5
  assert sparsities['h_0']['bias'] is None
  counts = kept(train(algorithm, 0)[0][0])
  # The weights of the second layer are larger: both are one group.
  assert counts['h_0', 'mlp'] < 64 < counts['h_1', 'mlp']
  assert counts['h_0', 'mlp'] + counts['h_1', 'mlp'] == 128
  assert counts['h_0', 'attn'] == 32


def test_a_partition_updates_masks_whenever_a_member_does():
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


def test_join_and_partition_can_be_nested():
  sparse = two(spdf.static(0.5), spdf.static(0.75))
  inner = spdf.partition(
      {'h_0': spdf.dense(), 'h_1': spdf.static(0.5)},
      [('h_0/*', 'h_0'), ('h_1/*', 'h_1')],
  )
  nested = two(inner, spdf.static(0.75))
  joined = spdf.join([sparse, nested, spdf.dense()], [2, 4])
  counts = [kept(mask) for mask, _, _ in train(joined, 5)]
  assert [c['h_0', 'attn'] for c in counts] == [32, 32, 32, 64, 64, 64]
  assert [c['h_1', 'attn'] for c in counts] == [32, 32, 32, 32, 32, 64]
  assert [c['h_1', 'mlp'] for c in counts] == [32, 32, 32, 32, 32, 128]


@pytest.mark.parametrize('labels, message', [
    ([('*/attn/*', 'attention')],
     "no pattern matches the sparsified leaf 'h_0/mlp/wi'; add"),
    ([*LABELS, ('*/head/*', 'rest')],
     r"the pattern '\*/head/\*' matches none .* h_0/attn/wq, h_0/mlp/wi, h_1"),
    ([('*', 'rest'), ('*/attn/*', 'attention')],
     r"the patterns before '\*/attn/\*' match all of its leaves; put '"),
    ([('*/attn/*', 'atention'), ('*', 'rest')],
     "'h_0/attn/wq' the label 'atention'.*labels 'attention', 'rest'"),
    ([('*', 'rest')], "an entry 'attention', but labels gives that label"),
    ({'h_0': 'rest'}, 'labels is a tree that does not fit the parameters'),
])
def test_labels_that_do_not_fit_are_refused(labels, message):
  with pytest.raises(ValueError, match=message):
    train(two(spdf.static(0.5), spdf.dense(), labels), 0)
