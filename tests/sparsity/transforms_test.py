"""`reset_state`, `map_like_params`, layouts of leaves, summaries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import selection

Axes = optax.contrib.MuonDimensionNumbers


@pytest.mark.parametrize('shape, axes, second', [
    # A scanned per-head kernel [model, layers, heads, head size].
    ((4, 2, 3, 5), Axes(0, (2, -1)), lambda x: x[:, 1].reshape(4, 15)),
    # Stacked vectors, which are matrices of one row.
    ((3, 4), Axes((), 1), lambda x: x[1:2]),
])
def test_layers_of_any_layout_become_matrices_and_back(shape, axes, second):
  params = {'q': jnp.arange(np.prod(shape)).reshape(shape)}
  selected = selection.select(lambda path, _: axes, params)
  layers = selection.to_layers(params, params, selected)
  np.testing.assert_array_equal(layers['q'][1], second(params['q']))
  back = selection.from_layers(layers, params, selected)
  np.testing.assert_array_equal(back['q'], params['q'])


@pytest.mark.parametrize('answer', [
    Axes(0, 0), Axes(0, ()), Axes(0, 3), 'kernel',
])
def test_impossible_axes_are_named(answer):
  with pytest.raises(ValueError, match='for w'):
    selection.select(lambda path, _: answer, {'w': jnp.ones((2, 2))})


def test_summary_counts_layers_and_the_whole_model():
  params = {'w': jnp.ones((4, 4)), 'v': jnp.ones((2, 4)), 'b': jnp.ones(6)}
  tx = spdf.sparsify(
      optax.sgd(0.1),
      spdf.static({'w': 0.75, 'v': 0.5, 'b': None}), key=0,
  )
  summary = spdf.summarize(spdf.get_mask(tx.init(params)), params)
  assert summary.layers['w'][:2] == (4, 16)
  assert summary.layers['v'][:2] == (4, 8)
  assert (summary.kept, summary.sparsified, summary.parameters) == (8, 24, 30)
  assert summary.sparsity == pytest.approx(16 / 24)
  assert summary.overall_sparsity == pytest.approx(16 / 30)
  assert '75.00%' in str(summary) and '53.33%' in str(summary)


@pytest.mark.parametrize('optimizer', [
    'muon', 'schedule_free', 'prodigy', 'partition', 'inject', 'multi_steps',
])
def test_parameter_shaped_state_is_found_in_any_nesting(optimizer):
  matrix = jnp.ones((4, 6))
  params = {'a': {'w': matrix}, 'w': matrix, 'b': jnp.ones(6)}
  label = lambda p: jax.tree.map(lambda x: 'm' if x.ndim > 1 else 'v', p)
  tx = {
      'muon': lambda: optax.contrib.muon(0.1),
      'schedule_free': lambda: optax.contrib.schedule_free_adamw(0.1),
      'prodigy': lambda: optax.contrib.prodigy(0.1),
      'partition': lambda: optax.partition(
          {'m': optax.adam(0.1), 'v': optax.sgd(0.1)}, label
      ),
      'inject': lambda: optax.inject_hyperparams(optax.adam)(0.1),
      'multi_steps': lambda: optax.MultiSteps(optax.adam(0.1), 2),
  }[optimizer]()
  state = tx.init(params)
  marks = {'a': {'w': 'a/w'}, 'w': 'w', 'b': 'b'}
  seen = []
  like_params.map_like_params(
      lambda x, mark: seen.append((mark, x.shape)), state, params, marks
  )
  matrices = [x for x in jax.tree.leaves(state) if x.shape == (4, 6)]
  assert matrices and len([m for m, _ in seen if m != 'b']) == len(matrices)
  assert sum(m == 'a/w' for m, _ in seen) == sum(m == 'w' for m, _ in seen)


def test_reset_state_begins_the_moments_anew_and_nothing_else():
  schedule = optax.linear_schedule(1.0, 0.0, 10)
  build = lambda boundaries: optax.chain(
      spdf.reset_state(optax.scale_by_adam(), boundaries),
      optax.scale_by_learning_rate(schedule),
  )
  params = {'w': jnp.ones(3)}
  grads = [{'w': jnp.array([1.0, -2.0, 0.5]) * (i + 1)} for i in range(6)]

  def updates_of(tx, grads, state):
    out = []
    for g in grads:
      u, state = tx.update(g, state, params)
      out.append(u['w'])
    return out, state

  tx = build([4])
  ours, state = updates_of(tx, grads, tx.init(params))
  plain, _ = updates_of(build([]), grads, build([]).init(params))
  np.testing.assert_array_equal(ours[3], plain[3])
  fresh = optax.scale_by_adam()
  wanted, _ = updates_of(fresh, grads[4:], fresh.init(params))
  for i, direction in enumerate(wanted):
    np.testing.assert_allclose(
        ours[4 + i], -schedule(4 + i) * direction, rtol=1e-6
    )
  assert int(state[0].count) == 6 and int(state[0].inner_state.count) == 2
