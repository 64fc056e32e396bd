"""`scaled_normal` values of revived weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity.sparsify import scaled_normal


def problem(layers=3, size=(200, 100)):
  """Layers of different means and widths, half of them pruned to junk."""
  rng = np.random.default_rng(0)
  widths = 10.0 ** -np.arange(layers)[:, None, None]
  weights = 0.5 * widths + widths * rng.standard_normal((layers, *size))
  mask = rng.random(weights.shape) < 0.5
  weights[~mask] = 99.0
  return (
      {'w': jnp.asarray(weights, jnp.float32), 'b': None},
      {'w': jnp.asarray(mask), 'b': None},
  )


def test_values_are_as_wide_as_asked_in_every_layer():
  params, mask = problem()
  values = scaled_normal(0.5)(jax.random.key(0), 0, params, mask)
  assert values['b'] is None
  for found, weights, kept in zip(values['w'], params['w'], mask['w']):
    wanted = 0.5 * np.std(np.asarray(weights, np.float64)[np.asarray(kept)])
    # 20,000 draws: the deviation is known to 0.5 %, the mean to 0.7 %.
    np.testing.assert_allclose(np.std(found), wanted, rtol=0.02)
    assert abs(np.mean(found)) < 0.03 * wanted


def test_values_are_exactly_normal_draws_times_the_deviation():
  params, mask = problem(1)
  small, large = (
      scaled_normal(scale)(jax.random.key(0), 0, params, mask)['w']
      for scale in (0.5, 2)
  )
  np.testing.assert_allclose(4 * small, large, rtol=1e-6)
  width = np.std(np.asarray(params['w'], np.float64)[np.asarray(mask['w'])])
  normal = np.sort(np.ravel(large)) / (2 * width)
  # The empirical quantiles of a standard normal.
  np.testing.assert_allclose(
      normal[[3173, 10000, 16827]], [-1, 0, 1], atol=0.03
  )


def test_pruned_weights_do_not_count():
  params, mask = problem()
  other = {'w': jnp.where(mask['w'], params['w'], jnp.nan), 'b': None}
  draw = lambda p: scaled_normal(1.0)(jax.random.key(0), 0, p, mask)['w']
  np.testing.assert_array_equal(draw(params), draw(other))


def test_leaves_and_keys_draw_different_numbers():
  params, mask = problem(1)
  params, mask = ({'u': t['w'], 'v': t['w']} for t in (params, mask))
  draw = lambda seed: scaled_normal(1.0)(jax.random.key(seed), 0, params, mask)
  one, other = draw(0), draw(1)
  assert (one['u'] != one['v']).any() and (one['u'] != other['u']).any()
  # Another leaf in the tree changes nothing.
  alone = scaled_normal(1.0)(
      jax.random.key(0), 0, {'u': params['u']}, {'u': mask['u']}
  )
  np.testing.assert_array_equal(alone['u'], one['u'])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_values_have_the_dtype_of_the_parameters(dtype):
  params, mask = problem()
  params = {'w': (params['w'] / 100).astype(dtype), 'b': None}
  values = scaled_normal(1.0)(jax.random.key(0), 0, params, mask)['w']
  assert values.dtype == dtype and jnp.isfinite(values).all()


def test_a_layer_without_kept_weights_gets_zeros():
  params, mask = problem(2)
  mask = {'w': mask['w'].at[1].set(False), 'b': None}
  values = scaled_normal(1.0)(jax.random.key(0), 0, params, mask)['w']
  assert (values[1] == 0).all() and (values[0] != 0).any()


@pytest.mark.parametrize('scale', [0, -1.0, float('nan'), float('inf')])
def test_a_scale_that_is_not_positive_is_refused(scale):
  with pytest.raises(ValueError, match='scale is .* positive'):
    scaled_normal(scale)
