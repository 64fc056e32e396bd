"""Parameterizations of a config: rates, initial weights and multipliers."""

import functools

import jax
import numpy as np
import pytest

from spdf_jax.training import initial_state
from spdf_jax.training.configs.config import parse
from tests.tiny_run import make_config
from tests.tiny_run import run_of

SPARSE = dict(
    name='sparse-mup', base_width=8, base_density=1.0, embeddings_scale=2.0,
    logits_scale=3.0,
)
MUP = SPARSE | dict(name='mup', base_density=None)


def first_state(**changes):
  return initial_state.create(run_of(make_config(**changes)).programs)


def kernel(params):
  return np.asarray(params['h_0']['mlp']['wi']['kernel'])


@functools.cache
def first_update(decay=0.0, parameterization=()):
  """Returns the change of the parameters by the first step."""
  run = run_of(make_config(
      parameterization=dict(parameterization) or None,
      phases__pretrain__weight_decay=decay,
  ))
  state = initial_state.create(run.programs)
  before = jax.device_get(state.params)
  state, _ = run.programs.step(state, run.programs.device_batch_at(0))
  return jax.tree.map(np.subtract, jax.device_get(state.params), before)


def test_the_standard_parameterization_changes_nothing():
  standard = dict(
      name='standard', base_width=None, base_density=None,
      embeddings_scale=1.0, logits_scale=1.0,
  )
  config = make_config(parameterization=standard, revival_warmup=None)
  assert config == make_config()
  assert config.parameterization is None


def test_a_parameterization_sets_the_multipliers_of_the_model():
  sizes = make_config(parameterization=SPARSE).model.sizes
  assert sizes.embeddings_scale == 2
  assert sizes.logits_scale == 3 / (16 / 8)
  assert sizes.attention_by_size


def test_a_stored_config_is_read_as_it_was():
  config = make_config(parameterization=MUP, revival_warmup=3)
  assert parse(config.as_dict()) == config


@pytest.mark.ci
@pytest.mark.parametrize('given, factor', [
    (MUP, 0.5), (SPARSE, 2.0), (SPARSE | dict(base_density=0.25), 0.5),
])
def test_weights_and_rates_follow_width_and_density(given, factor):
  # The width is twice the base width, the density a quarter.
  plain = kernel(first_state().params)
  state = first_state(parameterization=given)
  np.testing.assert_allclose(
      kernel(state.params), factor**0.5 * plain, rtol=1e-6
  )
  # Without decay, Adam's first update is the rate wherever a gradient is.
  largest = lambda update: np.abs(kernel(update)).max()
  update = first_update(parameterization=tuple(given.items()))
  assert largest(update) / largest(first_update()) == pytest.approx(
      factor, rel=1e-3
  )


@pytest.mark.ci
def test_the_weight_decay_of_a_layer_does_not_follow_its_rate():
  def decayed(given):
    updates = [first_update(d, tuple(given.items())) for d in (0.1, 0.0)]
    before = kernel(first_state(parameterization=given or None).params)
    decay = kernel(updates[0]) - kernel(updates[1])
    return np.median(decay[before != 0] / before[before != 0])

  assert decayed(SPARSE) == pytest.approx(decayed({}), rel=1e-2)


def test_weights_that_another_run_trained_are_not_scaled():
  run = run_of(make_config(parameterization=SPARSE))
  params = jax.tree.map(lambda x: x + 1, run.programs.init_params())
  weights = kernel(initial_state.from_params(run.programs, params).params)
  kept = weights != 0
  np.testing.assert_array_equal(weights[kept], kernel(params)[kept])


def test_ages_are_in_the_state_only_if_they_are_requested():
  names = lambda **changes: {
      jax.tree_util.keystr(path) for path, _ in
      jax.tree_util.tree_leaves_with_path(first_state(**changes).opt_state)
  }
  new = names(revival_warmup=0) - names()
  ages = {name for name in new if '.age' in name}
  assert len(ages) == 6  # One for each hidden matrix.


scaled = lambda **changes: dict(parameterization=SPARSE | changes)
LION = dict(optimizer=dict(name='lion', clip_norm=1.0))
ADAPTER = dict(adapter=dict(rank=2, scale=2.0))


@pytest.mark.parametrize('changes, message', [
    (scaled(base_density=None), "'sparse-mup' needs the density at which"),
    (scaled(base_density=0.0), 'base_density is 0.0, but'),
    (scaled(base_width=32), 'base_width is 32, above the width of the m'),
    (scaled(base_width=None), "base_width' is None; it must be a whole number"),
    (scaled(base_width=0), 'parameterization.base_width is 0; it must be at l'),
    (scaled(name='mup'), "base_density is 1.0, but 'mup' does not follow"),
    (scaled(name='sparse_mup'),
     "parameterization 'sparse_mup' is unknown; did"),
    (scaled(logits_scale=0.0), 'parameterization.logits_scale is 0.0; it must'),
    (scaled() | dict(model__logits_scale=0.1),
     'model.logits_scale is 0.1, but param'),
    (scaled() | LION, 'parameterization is set, which needs Ad'),
    (scaled() | ADAPTER, 'adapter.rank is 2, whose factors have'),
    (dict(revival_warmup=3) | LION,
     "revival_warmup is set.*optimizer is 'lion'"),
    (dict(revival_warmup=3) | ADAPTER, 'adapter.rank is 2, whose factors have'),
    (dict(revival_warmup=-1), 'revival_warmup is -1; give 0 or more'),
])
def test_settings_that_do_not_suit_each_other_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    make_config(**changes)
