"""Every algorithm's masks, element for element, by an oracle in NumPy.

The oracles are written from the papers, with sorts and Python integers; growth
at random is checked by drawing the same random numbers.
"""

import fractions
import functools
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.masks import leaf_keys

SHAPES = {'deep': (3, 4, 6), 'h_0': (1, 8, 5), 'h_1': (1, 8, 5), 'skip': None}
TIMES = dict(update_every=10, update_until=100)
STEPS = range(10, 101, 10)


def ranked(scores, among):
  """Sorts candidates by descending score; ties are broken by index."""
  order = np.argsort(-scores.astype(np.float64).ravel(), kind='stable')
  return [i for i in order if among.ravel()[i]]


def top(scores, number, among):
  """Keeps the highest scores of one layer."""
  mask = np.zeros(scores.size, bool)
  mask[ranked(scores, among)[:number]] = True
  return mask.reshape(scores.shape)


def share(fraction, number):
  """Returns floor(fraction * number), where the float 0.3 is three tenths."""
  fraction = fractions.Fraction(fraction).limit_denominator(2**24)
  return math.floor(fraction * number)


def kept(sparsity, shape):
  size = shape[-2] * shape[-1]
  return max(1, size - round(float(sparsity) * size))


def cosine(initial, step, until=100):
  return initial / 2 * (1 + math.cos(math.pi * min(step, until) / until))


def cubic(initial, final, steps, step):
  left = 1 - min(step, steps) / steps
  return final + (initial - final) * left ** 3


def rigl(sparsity, drop, regrow=True):
  def layer(mask, w, g, bits, step):
    del bits
    target = kept(sparsity(step), mask.shape)
    number = int(mask.sum())
    survive = min(number - share(drop(step), number), target)
    if not regrow:
      survive = max(survive, target - int((~mask).sum()))
    survivors = top(np.abs(w), survive, mask)
    free = ~survivors if regrow else ~mask
    return survivors | top(np.abs(g), target - survivors.sum(), free)
  return layer


def evolution(sparsity, drop, signed=False):
  def layer(mask, w, g, bits, step):
    del g
    target = kept(sparsity(step), mask.shape)
    if signed:
      survivors = np.zeros_like(mask)
      for side in (mask & (w < 0), mask & (w >= 0)):
        number = int(side.sum())
        survivors |= top(np.abs(w), number - share(drop(step), number), side)
    else:
      number = int(mask.sum())
      survivors = top(np.abs(w), number - share(drop(step), number), mask)
    survivors = top(np.abs(w), target, survivors)
    return survivors | top(bits, target - survivors.sum(), ~survivors)
  return layer


def gradual(sparsity):
  return evolution(sparsity, lambda step: 0.0)


def granet(sparsity, drop):
  def layer(mask, w, g, bits, step):
    del bits
    target = kept(sparsity(step), mask.shape)
    pruned = top(np.abs(w), target, mask)
    dropped = share(drop(step), target)
    survivors = top(np.abs(w), target - dropped, pruned)
    return survivors | top(np.abs(g), target - survivors.sum(), ~survivors)
  return layer


constant = lambda value: lambda step: value
SETTINGS = {
    'rigl': (
        spdf.rigl(0.9, drop_fraction=0.7, **TIMES),
        rigl(constant(0.9), functools.partial(cosine, 0.7)),
    ),
    'rigl, dropped stay out': (
        spdf.rigl(
            0.4, drop_fraction=constant(0.5), regrow_dropped=False, **TIMES
        ),
        rigl(constant(0.4), constant(0.5), regrow=False),
    ),
    'rigl, few to grow': (
        spdf.rigl(
            0.1, drop_fraction=constant(0.9), regrow_dropped=False, **TIMES
        ),
        rigl(constant(0.1), constant(0.9), regrow=False),
    ),
    'rigl, rising': (
        spdf.rigl(spdf.cubic(0.0, 0.9, 50), drop_fraction=0.2, **TIMES),
        rigl(
            functools.partial(cubic, 0.0, 0.9, 50),
            functools.partial(cosine, 0.2),
        ),
    ),
    'rigl, falling': (
        spdf.rigl(spdf.cubic(0.8, 0.2, 50), **TIMES),
        rigl(
            functools.partial(cubic, 0.8, 0.2, 50),
            functools.partial(cosine, 0.3),
        ),
    ),
    'set': (
        spdf.sparse_evolution(0.75, update_every=10),
        evolution(constant(0.75), constant(0.3)),
    ),
    'set, signed': (
        spdf.sparse_evolution(
            0.5, update_every=10, drop='signed', drop_fraction=0.4
        ),
        evolution(constant(0.5), constant(0.4), signed=True),
    ),
    'gmp': (
        spdf.gmp(spdf.cubic(0.0, 0.9, 60), **TIMES),
        gradual(functools.partial(cubic, 0.0, 0.9, 60)),
    ),
    'gmp, falling': (
        spdf.gmp(spdf.periodic([0.8, 0.2], 20), **TIMES),
        gradual(lambda step: [0.8, 0.2][step // 20 % 2]),
    ),
    'granet': (
        spdf.granet(spdf.cubic(0.0, 0.8, 60), **TIMES),
        granet(
            functools.partial(cubic, 0.0, 0.8, 60),
            functools.partial(cosine, 0.5),
        ),
    ),
}


def make_trees(seed, ties, sparsity):
  """Weights, gradients and a mask, as algorithms see them."""
  rng = np.random.default_rng(seed)
  draw = lambda shape: rng.normal(size=shape).astype(np.float32)
  rounded = lambda x: (np.round(x * ties) / ties if ties else x)
  tree = lambda make: {
      name: None if shape is None else make(shape)
      for name, shape in SHAPES.items()
  }
  params = tree(lambda shape: rounded(draw(shape)))
  grads = tree(lambda shape: rounded(draw(shape)))
  mask = spdf.init.random(jax.random.key(seed), params, sparsity)
  mask = jax.tree.map(np.asarray, mask)
  return spdf.apply_mask(params, mask), grads, mask


@pytest.mark.parametrize('name', SETTINGS)
def test_masks_are_those_of_the_paper(name):
  algorithm, oracle = SETTINGS[name]
  update = jax.jit(algorithm.update)

  @settings(max_examples=12, deadline=None, derandomize=True)
  @given(
      st.integers(0, 999),
      st.sampled_from([None, 1, 4]),
      st.sampled_from(STEPS),
  )
  def check(seed, ties, step):
    before = step - 10 if step > 10 else 0
    sparsity = algorithm.sparsity_at(before, SHAPED)['deep']
    params, grads, mask = make_trees(seed, ties, sparsity)
    # Another key than that of the mask, with which all dropped weights would
    # grow again.
    key = jax.random.key(seed + 1000)
    updated = update(key, jnp.int32(step), mask, params, grads)
    keys = leaf_keys(key, params)
    assert updated['skip'] is None
    for leaf in ('deep', 'h_0', 'h_1'):
      bits = np.asarray(jax.random.bits(keys[leaf], SHAPES[leaf]))
      wanted = [
          oracle(*layer, step) for layer in
          zip(mask[leaf], np.asarray(params[leaf]), grads[leaf], bits)
      ]
      np.testing.assert_array_equal(updated[leaf], np.stack(wanted))

  check()


SHAPED = {
    name: shape and jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in SHAPES.items()
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([None, 1, 4]))
def test_iterative_prunes_a_share_of_what_remains_in_each_layer(seed, ties):
  rounds = [spdf.Round(10), spdf.Round(10, 0.33), spdf.Round(10, 0.2)]
  algorithm = spdf.iterative(rounds)
  params, _, _ = make_trees(seed, ties, 0.0)
  mask = algorithm.init(None, params)
  assert all(np.asarray(m).all() for m in jax.tree.leaves(mask))
  assert [t for t in range(31) if algorithm.update_at(t)] == [10, 20]
  for step, fraction in ((10, 0.33), (20, 0.2)):
    before = jax.tree.map(np.asarray, mask)
    params = spdf.apply_mask(params, before)
    mask = algorithm.update(None, jnp.int32(step), before, params, None)
    for name in ('deep', 'h_0', 'h_1'):
      for new, old, w in zip(mask[name], before[name], params[name]):
        left = int(old.sum()) - round(fraction * int(old.sum()))
        np.testing.assert_array_equal(
            new, top(np.abs(np.asarray(w)), left, old)
        )
        sparsity = algorithm.sparsity_at(step, SHAPED)[name]
        assert kept(sparsity, w.shape) == left


def layers(tree):
  return [np.asarray(x) for name in ('deep', 'h_0', 'h_1') for x in tree[name]]


def top_of_model(magnitudes, number, among):
  """Keeps the best weight of every layer, then the largest of all layers."""
  best = [
      top(w, 1, m) for w, m in zip(magnitudes, among, strict=True)
  ]
  join = lambda layers: np.concatenate([x.ravel() for x in layers])
  first, others = join(best), join(among) & ~join(best)
  mask = first | top(join(magnitudes), number - int(first.sum()), others)
  cuts = np.cumsum([m.size for m in among])[:-1]
  return [
      x.reshape(m.shape) for x, m in zip(np.split(mask, cuts), among)
  ]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(0, 999),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([(0.0, 0.33, 0.6), (0.4, 0.6, 0.05)]),
)
def test_iterative_model_wide_prunes_a_share_of_all_that_remains(
    seed, ties, fractions_pruned
):
  rounds = [spdf.Round(10, fraction) for fraction in fractions_pruned]
  algorithm = spdf.iterative(rounds, distribution='model_wide')
  mask, wanted, total = None, None, 3 * 4 * 6 + 2 * 8 * 5
  left = total
  for i, fraction in enumerate(fractions_pruned):
    # Draws all weights anew, also pruned ones; one layer has the smallest.
    params, _, _ = make_trees(seed + i, ties, 0.0)
    params['h_1'] = params['h_1'] * 2**-9
    if mask is None:
      mask = algorithm.init(None, params)
      wanted = [np.ones(w.shape, bool) for w in layers(params)]
    else:
      mask = algorithm.update(None, jnp.int32(10 * i), mask, params, None)
    left -= round(fraction * left)
    wanted = top_of_model([np.abs(w) for w in layers(params)], left, wanted)
    assert sum(int(m.sum()) for m in layers(mask)) == left
    for actual, want in zip(layers(mask), wanted):
      np.testing.assert_array_equal(actual, want)
    sparsity, = algorithm.sparsity_at(10 * i, SHAPED)
    assert total - round(sparsity * total) == left


def update_model_wide(algorithm, sparsity, params, grads, mask):
  """Returns the masks of an update, and those of pruning by the oracle."""
  updated = algorithm.update(
      jax.random.key(0), jnp.int32(30), mask, params, grads
  )
  total = kept(sparsity(30), (1, sum(w.size for w in layers(params))))
  magnitudes = [np.abs(w) for w in layers(params)]
  return layers(updated), top_of_model(magnitudes, total, layers(mask))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([None, 2]))
def test_model_wide_sparsities_prune_the_least_of_all_layers(seed, ties):
  sparsity = spdf.cubic(0.0, 0.8, 60)
  algorithm = spdf.gmp(sparsity, distribution=spdf.model_wide, **TIMES)
  params, grads, mask = make_trees(seed, ties, 0.0)
  params['h_1'] = params['h_1'] * 2**-9  # One weight of the layer remains.
  masks = update_model_wide(algorithm, sparsity, params, grads, mask)
  for one, other in zip(*masks):
    np.testing.assert_array_equal(one, other)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 999))
def test_granet_model_wide_prunes_the_model_and_regrows_in_layers(seed):
  sparsity = spdf.cubic(0.5, 0.8, 60)
  algorithm = spdf.granet(
      sparsity, distribution=spdf.model_wide, drop_fraction=constant(0.3),
      **TIMES,
  )
  params, grads, mask = make_trees(seed, None, 0.5)
  updated, pruned = update_model_wide(
      algorithm, sparsity, params, grads, mask
  )
  for m, w, g, old in zip(updated, layers(params), layers(grads), pruned):
    number = int(old.sum())
    survivors = top(np.abs(w), number - share(0.3, number), old)
    grown = top(np.abs(g), number - survivors.sum(), ~survivors)
    np.testing.assert_array_equal(m, survivors | grown)


# Trained by `sparsify`: every number is a small multiple of a power of two, so
# that float32 computes it exactly, in any order.
DECAY, RATE, EVERY = 0.5, 0.25, 2
MATRICES = {name: spdf.MatrixAxes(-2, -1) for name in ('deep', 'h_0', 'h_1')}


def evolving(sparsity):
  return (
      spdf.sparse_evolution(sparsity, update_every=EVERY, drop_fraction=0.4),
      evolution(constant(sparsity), constant(0.4)),
  )


def rigging(sparsity):
  falling = lambda step: 0.75 * 0.5 ** (step // 4)
  return (
      spdf.rigl(
          sparsity, update_every=EVERY, update_until=100, drop_fraction=falling
      ),
      rigl(constant(sparsity), falling),
  )


EVOLVING, RIGGING = evolving(0.5), rigging(0.5)


def entering(sparsity):
  """Returns the oracle of a boundary: by magnitude, ties by the key's bits."""
  def layer(mask, w, g, bits, step):
    del mask, g, step
    order = np.lexsort((-bits.astype(np.int64).ravel(), -np.abs(w).ravel()))
    highest = np.zeros(w.size, bool)
    highest[order[:kept(sparsity, w.shape)]] = True
    return highest.reshape(w.shape)
  return layer


def oracle_of(kind):
  """Returns an algorithm, and `(step, leaf) -> oracle of an update or None`."""
  evolve, rig = EVOLVING, RIGGING
  every = lambda layer: lambda step, leaf: (
      (layer, step) if step and step % EVERY == 0 else None
  )
  if kind == 'static':
    return spdf.static(0.5), lambda step, leaf: None
  if kind == 'set':
    return evolve[0], every(evolve[1])
  if kind == 'rigl':
    return rig[0], every(rig[1])
  if kind == 'partition':
    groups = [('h_*', 'a'), ('*', 'b')]
    return spdf.partition({'a': evolve[0], 'b': rig[0]}, groups), (
        lambda step, leaf: every((rig if leaf == 'deep' else evolve)[1])(
            step, leaf
        )
    )
  sparser = rigging(0.75)

  def joined(step, leaf):
    if step < 3:
      return every(evolve[1])(step, leaf)
    if step == 3:
      return entering(0.75), 0
    if step < 8:
      return every(sparser[1])(step - 3, leaf)
    return (entering(0.0), 0) if step == 8 else None

  members = [evolve[0], sparser[0], spdf.dense()]
  return spdf.join(members, [3, 8]), joined


@pytest.mark.parametrize('kind', ['static', 'set', 'rigl', 'join', 'partition'])
def test_training_by_sparsify_is_that_of_the_oracle(kind):
  key = jax.random.key(5)
  algorithm, oracle = oracle_of(kind)
  inner = optax.sgd(RATE, momentum=DECAY)
  tx = spdf.sparsify(inner, algorithm, where=MATRICES, key=key)
  init, update = jax.jit(tx.init), jax.jit(tx.update)

  @settings(max_examples=8, deadline=None, derandomize=True)
  @given(st.integers(0, 999), st.integers(4, 11))
  def check(seed, steps):
    rng = np.random.default_rng(seed)
    draw = lambda scale: {
        name: (rng.integers(-8, 9, shape or (7,)) / scale).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    params = draw(4)
    state = init(params)
    mask = {name: np.asarray(spdf.get_mask(state)[name]) for name in MATRICES}
    for name, m in mask.items():
      assert {int(x.sum()) for x in m} == {kept(0.5, m.shape)}
      params[name] = np.where(m, params[name], 0)
    trace = {name: np.zeros_like(p) for name, p in params.items()}
    for step in range(steps):
      grads = draw(4)
      keys = leaf_keys(jax.random.fold_in(key, step), {
          name: params[name] for name in MATRICES
      })
      for name in MATRICES:
        change = oracle(step, name)
        if change is not None:
          layer, own_step = change
          bits = np.asarray(
              jax.random.bits(keys[name], SHAPES[name], 'uint32')
          )
          mask[name] = np.stack([
              layer(*given, own_step)
              for given in zip(mask[name], params[name], grads[name], bits)
          ])
      updates, state = update(grads, state, params)
      for name in params:
        m = mask.get(name, True)
        trace[name] = np.where(m, grads[name] + DECAY * trace[name] * m, 0)
        wanted = np.where(m, params[name] * m - RATE * trace[name], 0)
        actual = params[name] + np.asarray(updates[name])
        np.testing.assert_array_equal(actual, wanted, err_msg=f'{step} {name}')
        params[name] = wanted.astype(np.float32)
      assert int(state.count) == step + 1
      later = [oracle(step + 1, name) for name in MATRICES]
      assert bool(state.dense_grads) == any(
          change is not None and change[0] is not EVOLVING[1]
          for change in later
      )
      for name, m in mask.items():
        np.testing.assert_array_equal(spdf.get_mask(state)[name], m)
      np.testing.assert_array_equal(
          state.inner_state[0].trace['h_0'], trace['h_0']
      )

  check()
