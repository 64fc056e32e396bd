"""Rates and initial weights that follow the density of every layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import packing
from spdf_jax.sparsity import storage
from tests.refusals import refuse

_normal = np.random.default_rng(0).standard_normal
PARAMS = {
    'wi': np.float32(_normal((8, 16))),
    'layers': np.float32(_normal((3, 16, 4))),
    'bias': np.ones(4, np.float32),
}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
WHERE = {'wi': True, 'layers': True}


def sparse(algorithm, *inner, where=WHERE, **kwargs):
  scale = spdf.scale_by_density(where=where, **kwargs)
  return spdf.sparsify(
      optax.chain(*inner, scale), algorithm, where=where, key=0
  )


def updates_of(tx, steps=1):
  """Yields the updates and the state of each step, on masked parameters."""
  state = tx.init(PARAMS)
  for _ in range(steps):
    params = spdf.apply_mask(PARAMS, spdf.get_mask(state))
    updates, state = jax.jit(tx.update)(GRADS, state, params)
    yield updates, state


def test_updates_of_each_layer_are_divided_by_its_kept_inputs():
  # Ranked over the whole model, so that every layer has another density.
  algorithm = spdf.static(
      0.6, distribution=spdf.model_wide, init=spdf.init.magnitude
  )
  tx = sparse(algorithm, base_density=0.25, width_multiplier=2.0)
  ((updates, state),) = updates_of(tx)
  densities = set()
  for name in WHERE:
    mask = np.asarray(spdf.get_mask(state)[name])
    inputs, outputs = mask.shape[-2:]
    kept = mask.sum((-2, -1), keepdims=True) / outputs
    want = mask * 0.25 * inputs / (2 * kept)
    got = np.where(mask, updates[name], 0)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    densities |= set(kept.ravel() / inputs)
  assert len(densities) == 4
  np.testing.assert_array_equal(updates['bias'], 1)


def test_updates_shrink_with_density_when_a_dense_phase_begins():
  algorithm = spdf.join([spdf.static(0.75), spdf.dense()], [2])
  tx = sparse(algorithm, base_density=1.0)
  largest = [float(u['wi'].max()) for u, _ in updates_of(tx, 4)]
  assert largest == [4, 4, 1, 1]


def test_rates_follow_a_schedule_of_sparsity_at_every_step():
  algorithm = spdf.gmp(spdf.cubic(0.0, 0.9, 8), update_every=2, update_until=8)
  for updates, state in updates_of(sparse(algorithm, base_density=1.0), 9):
    kept = np.asarray(spdf.get_mask(state)['wi'])
    np.testing.assert_allclose(
        np.max(np.where(kept, updates['wi'], 0)), 1 / kept.mean(), rtol=1e-6
    )


def test_updates_at_the_base_density_are_unscaled_bit_for_bit():
  tx = sparse(spdf.static(0.5), optax.adam(0.1), base_density=0.5)
  plain = spdf.sparsify(
      optax.adam(0.1), spdf.static(0.5), where=WHERE, key=0
  )
  for (one, _), (other, _) in zip(updates_of(tx, 3), updates_of(plain, 3)):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize('width', [64, 256])
@pytest.mark.parametrize('sparsity', [0.0, 0.75, 0.9375])
def test_outputs_of_scaled_initial_weights_are_as_large_as_at_the_base(
    width, sparsity
):
  key, *others = jax.random.split(jax.random.key(0), 3)
  params = {'w': 0.1 * jax.random.normal(key, (width, 512))}
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(sparsity), key=others[0])
  mask = spdf.get_mask(tx.init(params))
  params = spdf.scale_init(
      spdf.apply_mask(params, mask), mask, 1.0, width_multiplier=width / 64
  )
  x = jax.random.normal(others[1], (512, width))
  rms = float(jnp.sqrt(jnp.mean((x @ params['w']) ** 2)))
  assert rms == pytest.approx(0.1 * 64**0.5, rel=0.05)


def test_scaled_initial_weights_are_zero_where_they_were():
  mask = {'wi': PARAMS['wi'] > 0.5, 'layers': None, 'bias': None}
  params = spdf.apply_mask(PARAMS, mask)
  scaled = spdf.scale_init(params, mask, 1.0, where={'wi': True})
  np.testing.assert_array_equal(scaled['wi'] != 0, params['wi'] != 0)
  np.testing.assert_array_equal(scaled['layers'], params['layers'])


def test_kept_values_of_a_layer_of_three_axes_are_scaled_as_in_its_array():
  where = {'heads': spdf.MatrixAxes((0, 1), 2)}
  params = {'heads': jnp.ones((8, 4, 6))}
  tx = spdf.sparsify(
      spdf.scale_by_density(1.0, where=where), spdf.static(0.75), where=where,
      key=0,
  )
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  packed = storage.pack_state(params, state)
  want, got = (
      np.unique(tx.update(p, s, p)[0]['heads'])
      for p, s in ((params, state), packed)
  )
  np.testing.assert_array_equal(got[got > 0], want[want > 0])


def test_kept_values_along_other_axes_than_those_of_a_layer_are_refused():
  mask = packing.pack_mask(jnp.ones((2, 4, 6), bool))
  refuse('has layers along the axes .0, 1.', packing.count_kept, mask, (0, 1))


@pytest.mark.parametrize('wrong, message', [
    (dict(base_density=0.0), 'base_density is 0.0; give the density at which'),
    (dict(base_density=1.5), 'base_density is 1.5; give'),
    (
        dict(base_density=1.0, width_multiplier=0.5),
        'width_multiplier is 0.5, so that the base width is above the width; ',
    ),
])
def test_numbers_out_of_range_are_refused(wrong, message):
  refuse(message, spdf.scale_by_density, **wrong)
  refuse(message, spdf.scale_init, PARAMS, {'wi': PARAMS['wi'] > 0}, **wrong)


def test_another_where_than_that_of_sparsify_is_refused():
  scale = spdf.scale_by_density(1.0, where={'layers': True})
  tx = spdf.sparsify(scale, spdf.static(0.5), where={'wi': True}, key=0)
  message = "where selects no matrix in 'wi', which sparsify prunes; give both"
  refuse(message, tx.update, GRADS, tx.init(PARAMS), PARAMS)
  mask = {'wi': PARAMS['wi'] > 0, 'layers': None, 'bias': None}
  refuse(message, spdf.scale_init, PARAMS, mask, 1.0, where={'layers': True})
