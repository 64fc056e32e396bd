"""Counts of units without inputs or outputs, and the variation of their sizes.

The oracles are NumPy, and averages over all masks of a small matrix.
"""

import itertools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import statistics
from spdf_jax.sparsity.tracking import mask_statistics

AXES = {
    'wi': spdf.MatrixAxes(0, 1),
    'heads': spdf.MatrixAxes(0, (1, 2)),
    'stack': spdf.MatrixAxes(1, 2),
}
SHAPES = {'wi': (6, 9), 'heads': (5, 2, 3), 'stack': (3, 4, 8)}
PARAMS = {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def layers_of(mask):
  """Returns every layer `[inputs, outputs]` by its name."""
  stack = {f'stack[{i}]': m for i, m in enumerate(mask['stack'])}
  return {'wi': mask['wi'], 'heads': mask['heads'].reshape(5, 6)} | stack


def variation(counts, each):
  """Returns the variance of counts over that of hypergeometric ones."""
  total, share = each * len(counts), counts.mean() / each
  random = each * share * (1 - share) * (total - each) / (total - 1)
  return counts.var() / random if random else 1.0


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_units_of_every_layer_are_counted_as_by_numpy(seed, density):
  rng = np.random.default_rng(seed)
  mask = {k: rng.random(s) < density for k, s in SHAPES.items()}
  summary = spdf.summarize(mask, PARAMS, where=AXES)
  wanted = layers_of(mask)
  assert set(summary.layers) == set(wanted)
  for name, m in wanted.items():
    layer = summary.layers[name]
    rows, columns = m.sum(1), m.sum(0)
    assert layer[:6] == (
        m.sum(), m.size, *m.shape, (columns == 0).sum(), (rows == 0).sum()
    )
    np.testing.assert_allclose(
        layer[6:],
        (variation(rows, m.shape[1]), variation(columns, m.shape[0])),
        rtol=1e-5,
    )


def all_masks(rows, columns, kept):
  """Returns all masks of a matrix that keep so many weights."""
  chosen = np.array(list(itertools.combinations(range(rows * columns), kept)))
  masks = np.zeros((len(chosen), rows * columns), bool)
  np.put_along_axis(masks, chosen, True, axis=1)
  return masks.reshape(-1, rows, columns)


@pytest.mark.parametrize('kept', [1, 4, 7])
def test_random_masks_have_variation_1_and_the_expected_cut_units(kept):
  masks = all_masks(3, 4, kept)
  counts = statistics.count_units(masks, spdf.MatrixAxes(1, 2))
  assert np.mean(counts.row_variation) == pytest.approx(1, rel=1e-5)
  assert np.mean(counts.column_variation) == pytest.approx(1, rel=1e-5)
  layer = spdf.summarize({'w': masks[0]}, {'w': masks[0]}).layers['w']
  cut = np.mean(counts.without_inputs) + np.mean(counts.without_outputs)
  assert layer.cut_off_at_random == pytest.approx(cut / 7)


def test_large_dense_layers_have_variation_1():
  mask = jnp.ones((4099, 4097), bool)
  counts = statistics.count_units(mask, spdf.MatrixAxes(0, 1))
  assert [float(x.item()) for x in counts] == [0, 0, 1, 1]


@pytest.mark.parametrize('shape', [(4, 4), (8, 8), (16, 64), (96, 256)])
def test_random_masks_cut_off_no_more_units_than_random_ones(shape):
  rng = np.random.default_rng(0)
  for sparsity in (0.5, 0.75, 0.9, 0.95, 0.99):
    masks = np.zeros((200, *shape), bool)
    number = max(1, round((1 - sparsity) * masks[0].size))
    for m in masks.reshape(200, -1):
      m[rng.choice(m.size, number, replace=False)] = True
    where = {'w': spdf.MatrixAxes(1, 2)}
    params = {'w': jax.ShapeDtypeStruct(masks.shape, jnp.float32)}
    layers = spdf.summarize({'w': masks}, params, where=where).layers
    assert not any(layer.cuts_off_units for layer in layers.values())


def test_layers_that_cut_off_units_are_found():
  gathered = np.zeros((64, 64), bool)
  gathered[:, :13] = True
  gathered[0, 0] = False
  whole = gathered.copy()
  whole[0, 0] = True  # Outputs are pruned whole, as by `channel`.
  few = np.ones((64, 128), bool)
  few[:, :1] = False
  few[0] = np.arange(128) == 9
  mask = {'few': few, 'gathered': gathered, 'whole': whole}
  layers = spdf.summarize(mask, mask).layers
  assert {k: x.cuts_off_units for k, x in layers.items()} == {
      'few': False, 'gathered': True, 'whole': False
  }
  assert layers['gathered'].cut_off == 51 / 128
  assert layers['gathered'].column_variation > 14
  text = str(spdf.summarize(mask, mask))
  assert 'gathered  79.71%  831 of 4,096 kept, 39.8% of units cut off' in text


def test_tracked_statistics_are_those_of_the_summary():
  def one_column(units):
    return jnp.broadcast_to(jnp.arange(units.mask.shape[-1]), units.mask.shape)

  tx = spdf.sparsify(
      optax.sgd(0.1),
      spdf.rigl(
          0.75, update_every=1, update_until=3, grow=one_column,
          drop_fraction=lambda step: 0.8,
      ),
      where=AXES, key=0, track=True,
  )
  state = jax.jit(tx.init)(PARAMS)
  update = jax.jit(tx.update)
  shares = []
  for _ in range(3):
    layers = spdf.summarize(state, PARAMS, where=AXES).layers.values()
    numbers = mask_statistics(state)
    cut = sum(x.without_inputs + x.without_outputs for x in layers)
    assert float(numbers['cut_off']) == np.float32(
        cut / sum(x.inputs + x.outputs for x in layers)
    )
    for name in ('row_variation', 'column_variation'):
      np.testing.assert_allclose(
          numbers[name], np.mean([getattr(x, name) for x in layers]), rtol=1e-5
      )
    shares.append(float(numbers['cut_off']))
    _, state = update(PARAMS, state, PARAMS)
  assert shares[2] > shares[0]
