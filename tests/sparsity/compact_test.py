"""Optimizers update kept values exactly as they update the whole matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import storage
from spdf_jax.sparsity import tracking
from spdf_jax.sparsity.state import stored_mask
from tests.refusals import refuse
from tests.sparse_loop import trajectory
from tests.tiers import slow_except
from tests.tiny_run import assert_same_arrays

pytestmark = pytest.mark.ci

OPTIMIZERS = {
    'adamw': lambda: optax.adamw(0.1, weight_decay=0.1),
    'momentum': lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    'lion': lambda: optax.lion(0.1),
    'rmsprop': lambda: optax.rmsprop(0.1),
    'adagrad': lambda: optax.adagrad(0.1),
    'schedule_free': lambda: optax.contrib.schedule_free_adamw(0.1),
    'bfloat16 moments': lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    'restarted chain': lambda: optax.chain(
        optax.clip_by_global_norm(1e6),
        spdf.reset_state(optax.scale_by_adam(), [2]),
        optax.add_decayed_weights(0.1, mask={
            'stack': True, 'w': True, 'bias': False
        }),
        optax.scale_by_learning_rate(0.1),
    ),
    'ages': lambda: spdf.with_age(optax.scale_by_adam(), where=where),
    'density': lambda: optax.chain(
        optax.scale_by_adam(), spdf.scale_by_density(1.0, where=where)
    ),
}
SHAPES = {'w': (5, 9), 'stack': (2, 4, 6), 'bias': (9,)}
where = lambda path, leaf: path != 'bias'


def draw(seed):
  rng = np.random.default_rng(seed)
  return {
      name: jnp.asarray(rng.normal(size=shape), jnp.float32)
      for name, shape in SHAPES.items()
  }


def start(inner, algorithm=None):
  tx = spdf.sparsify(
      inner, algorithm or spdf.static(0.6), where=where, key=0
  )
  params = draw(0)
  state = tx.init(params)
  return tx, spdf.apply_mask(params, spdf.get_mask(state)), state


def grads_at(step, mask):
  """Random gradients, as matrices and as the values of a packed mask."""
  grads = spdf.apply_mask(draw(step + 1), mask)
  sizes = spdf.sparsity.storage.kept_sizes(mask)
  packed = spdf.sparsity.storage.pack_masks(mask)
  return grads, spdf.sparsity.storage.pack_values(grads, packed, sizes)


def run_both(inner, steps=4, wrap=lambda tx: tx, jit=lambda f: f):
  tx, params, state = start(inner)
  tx = wrap(tx)
  state = tx.init(params)
  mask = spdf.get_mask(state)
  packed, packed_state = storage.pack_state(params, state)
  update = jit(tx.update)
  for step in range(steps):
    grads, values = grads_at(step, mask)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    updates, packed_state = update(values, packed_state, packed)
    packed = optax.apply_updates(packed, updates)
  return (params, state), (packed, packed_state)


@pytest.mark.parametrize(
    'name', slow_except(['adamw', 'lion', 'ages', 'density'], OPTIMIZERS)
)
def test_updates_are_those_of_dense_storage_bit_for_bit(name):
  dense, packed = run_both(OPTIMIZERS[name]())
  assert_same_arrays(storage.unpack_state(*packed), dense)
  assert_same_arrays(storage.pack_state(*dense), packed)


def assert_close(packed, dense):
  unpacked = storage.unpack_state(*packed)
  for a, b in zip(jax.tree.leaves(unpacked), jax.tree.leaves(dense)):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_under_jit_updates_agree_up_to_rounding():
  dense, packed = run_both(OPTIMIZERS['restarted chain'](), jit=jax.jit)
  assert_close(packed, dense)


def test_optimizers_that_sum_over_a_leaf_agree_up_to_rounding():
  dense, packed = run_both(optax.chain(
      optax.clip_by_global_norm(0.5), optax.lamb(0.1)
  ))
  assert_close(packed, dense)


@pytest.mark.parametrize('wrap', [
    functools.partial(optax.MultiSteps, every_k_schedule=2),
    functools.partial(optax.apply_if_finite, max_consecutive_errors=3),
])
def test_transformations_inside_sparsify_are_packed_with_the_optimizer(wrap):
  # Both wrappers compile the transformation, so results agree up to rounding.
  assert_close(*reversed(run_both(optax.adam(0.1), wrap=wrap)))


def test_parameters_under_optax_partition_are_packed():
  labels = {'w': 'a', 'stack': 'b', 'bias': 'b'}
  _, params, _ = start(optax.adam(0.1))
  tx = optax.partition({
      'a': spdf.sparsify(optax.adam(0.1), spdf.static(0.5), where=where, key=1),
      'b': spdf.sparsify(optax.sgd(0.1), spdf.static(0.7), where=where, key=2),
  }, labels)
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  packed = storage.pack_state(params, state)
  assert packed[0]['w'].shape == (23,) and packed[0]['stack'].ndim == 2
  assert_same_arrays(storage.unpack_state(*packed), (params, state))


def test_the_mask_is_unpacked_on_demand_and_an_eighth_of_a_byte_per_weight():
  _, params, state = start(optax.adam(0.1))
  _, packed_state = storage.pack_state(params, state)
  assert_same_arrays(spdf.get_mask(packed_state), spdf.get_mask(state))
  stored = stored_mask(packed_state)
  assert stored['w'].bits.nbytes == 5 * 2 and stored['bias'] is None
  assert_same_arrays(storage.unpack_state(params, state), (params, state))


@pytest.mark.parametrize('sparsity, most', [(0.75, 6.5), (0.9, 2.7)])
def test_the_state_of_a_layer_takes_few_bytes_per_weight(sparsity, most):
  params = {'w': jax.ShapeDtypeStruct((768, 3072), jnp.float32)}
  tx = spdf.sparsify(optax.adamw(0.1), spdf.static(sparsity), key=0)
  size = 768 * 3072
  kept = spdf.sparsity.counts.number_kept(size, sparsity)
  packed = jax.eval_shape(
      lambda p: storage.pack_state(p, tx.init(p), {'w': kept}), params
  )
  total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(packed))
  assert 12 * (1 - sparsity) < total / size < 12 * (1 - sparsity) + 0.2 <= most


@pytest.mark.parametrize('inner', [
    optax.contrib.muon(0.1),
    optax.adafactor(0.1, min_dim_size_to_factor=4),
    optax.adafactor(0.1),
    optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    optax.chain(optax.clip_by_block_rms(2.0), optax.sgd(0.1)),
], ids=[
    'muon', 'factored', 'adafactor', 'unit norms', 'rms', 'high rms',
])
def test_optimizers_that_need_the_matrix_are_refused(inner):
  refuse_packed('works on whole matrices.*adamw|AdamW', inner)


def refuse_packed(message, *given):
  """Asserts that an update of packed parameters is refused."""
  tx, params, state = start(*given)
  _, values = grads_at(0, spdf.get_mask(state))
  packed, packed_state = storage.pack_state(params, state)
  refuse(message, jax.eval_shape, tx.update, values, packed_state, packed)


def test_an_algorithm_that_skips_steps_is_refused():
  rigl = spdf.rigl(
      0.5, update_every=2, update_until=4, skip_gradient_step=True
  )
  refuse_packed('skips steps', optax.adam(0.1), rigl)


def test_packing_more_weights_than_the_given_size_is_refused():
  _, params, state = start(optax.adam(0.1))
  with pytest.raises(ValueError, match="is 17 for 'w', .* keeps 18 weights"):
    storage.pack_state(params, state, {'w': 17, 'stack': 24, 'bias': None})


def test_a_sparsified_vector_is_refused():
  where = {'bias': spdf.MatrixAxes((), 0)}
  params = {'bias': jnp.ones(6)}
  state = spdf.sparsify(
      optax.sgd(1.0), spdf.static(0.5), where=where, key=0
  ).init(params)
  refuse("'bias' is a vector", storage.pack_state, params, state)


def test_a_packed_state_is_not_made_dense_by_its_mask_alone():
  _, params, state = start(optax.adam(0.1))
  refuse('unpack it first', spdf.densify, storage.pack_state(params, state)[1])


@pytest.mark.parametrize('wrap', [
    lambda tx, _: optax.chain(optax.trace(0.9), tx),
    lambda tx, algorithm: tracking.track_masks(tx, algorithm, where),
    lambda tx, _: spdf.rewind_weights(tx, [9], snapshot_at=2),
], ids=['chain', 'tracking', 'rewinding'])
def test_state_outside_of_sparsify_stays_dense_and_loses_nothing(wrap):
  algorithm = spdf.rigl(
      0.6, update_every=1, update_until=3, drop_fraction=lambda step: 0.5
  )
  tx = wrap(
      spdf.sparsify(optax.adam(0.1), algorithm, where=where, key=0), algorithm
  )
  *_, (params, state) = trajectory(
      tx, draw(0), lambda step, _: draw(step + 1), 3
  )
  packed = storage.pack_state(params, state)
  assert_same_arrays(storage.unpack_state(*packed), (params, state))


def test_tracked_masks_follow_packed_steps():
  algorithm = spdf.join(
      [spdf.static(0.5), spdf.static(0.75), spdf.static(0.6)], [2, 4]
  )
  tx = spdf.sparsify(
      optax.adam(0.1), algorithm, where=where, key=0, track=True
  )

  def run(packed_step):
    params = draw(0)
    state = tx.init(params)
    params = spdf.apply_mask(params, spdf.get_mask(state))
    for step in range(5):
      grads, values = grads_at(step, spdf.get_mask(state))
      if step == packed_step:
        params, state = storage.pack_state(params, state)
        grads = values
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      params, state = storage.unpack_state(params, state)
    return params, state

  assert_close(run(3), run(None))


def test_gradients_of_pruned_weights_that_multi_steps_holds_are_not_dropped():
  _, params, _ = start(optax.adam(0.1))
  tx = optax.MultiSteps(
      spdf.sparsify(optax.adam(0.1), spdf.static(0.6), where=where, key=0), 2
  )
  state = tx.init(params)
  _, state = tx.update(draw(1), state, params)
  with pytest.raises(ValueError, match='MultiSteps holds gradients of pruned'):
    storage.pack_state(params, state)


def test_dense_updates_of_packed_parameters_are_refused():
  _, params, _ = start(optax.adam(0.1))
  tx = optax.chain(optax.scale(2.0), spdf.sparsify(
      optax.adam(0.1), spdf.static(0.6), where=where, key=0
  ))
  packed, state = storage.pack_state(params, tx.init(params))
  refuse('updates .* pack the grad', tx.update, draw(1), state, packed)
