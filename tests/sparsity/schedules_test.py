"""Schedules and update times: on the host exactly, under tracing alike."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax.sparsity.algorithms.leafwise import update_times_of
from spdf_jax.sparsity.schedules import cosine
from spdf_jax.sparsity.schedules import cubic
from spdf_jax.sparsity.schedules import periodic
from spdf_jax.sparsity.schedules import rising
from spdf_jax.sparsity.schedules import sparsity_at
from spdf_jax.sparsity.schedules import update_times
from spdf_jax.sparsity.schedules import value_at

LEVELS = st.floats(0, 1, exclude_max=True)


@settings(deadline=None)
@given(LEVELS, LEVELS, st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_cubic_stays_between_its_ends_and_reaches_the_last(
    initial, final, steps, start
):
  sparsity = cubic(initial, final, steps, start)
  assert sparsity(start) == sparsity(0) == initial
  assert sparsity(start + steps) == sparsity(start + 2 * steps) == final
  middle = [sparsity(start + steps * i // 7) for i in range(8)]
  assert all(isinstance(s, float) and 0 <= s <= 1 for s in middle)
  assert middle == sorted(middle, reverse=initial > final)


@settings(deadline=None)
@given(LEVELS, LEVELS, st.integers(1, 10**6), st.floats(0, 1))
def test_cubic_is_the_formula_of_zhu_and_gupta(initial, final, steps, part):
  t = int(part * steps)
  expected = final + (initial - final) * (1 - t / steps) ** 3
  assert cubic(initial, final, steps, 40)(40 + t) == pytest.approx(expected)


def test_periodic_cycles_through_its_sparsities():
  sparsity = periodic([0.0, 0.9, 0.5], period=4)
  actual = [sparsity(step) for step in range(26)]
  assert actual == ([0.0] * 4 + [0.9] * 4 + [0.5] * 4) * 2 + [0.0, 0.0]


def test_cosine_falls_from_its_start_to_exactly_zero():
  fraction = cosine(0.3, 100)
  values = [fraction(step) for step in range(101)]
  assert values[0] == 0.3 and values[50] == pytest.approx(0.15)
  assert values == sorted(values, reverse=True)
  assert fraction(100) == fraction(10**9) == 0


@pytest.mark.parametrize('schedule', [
    cubic(0.5, 0.8, 90, 7), periodic([0.0, 0.9], 9), cosine(0.3, 90),
])
def test_schedules_agree_on_host_and_under_tracing(schedule):
  steps = range(120)
  traced = jax.jit(jax.vmap(schedule))(jnp.arange(120))
  np.testing.assert_allclose(traced, [schedule(t) for t in steps], atol=1e-6)
  assert schedule(np.int32(30)) == schedule(30)


def test_sparsity_at_evaluates_every_leaf_and_keeps_none():
  sparsity = {
      'a': 0.25,
      'b': None,
      'c': [cubic(0.0, 0.8, 10), np.float32(0.5)],
      'd': optax.constant_schedule(0.75),
      'e': jax.tree_util.Partial(lambda s, t: s, 0.5),
      'f': functools.partial(lambda s, t: s * t, 0.5),
  }
  assert sparsity_at(sparsity, 0) == {
      'a': 0.25, 'b': None, 'c': [0.0, 0.5], 'd': 0.75, 'e': 0.5, 'f': 0.0
  }
  assert sparsity_at(0.5, 3) == 0.5 and sparsity_at(None, 3) is None


def test_a_callable_pytree_node_is_not_taken_for_a_schedule():
  @functools.partial(
      jax.tree_util.register_dataclass, data_fields=['w'], meta_fields=[]
  )
  class Linear:
    def __init__(self, w):
      self.w = w

    def __call__(self, x):
      raise AssertionError

  assert sparsity_at(Linear(cubic(0.5, 0.5, 1)), 0).w == 0.5


@pytest.mark.parametrize('schedule', [
    optax.cosine_decay_schedule(0.8, 100),
    jax.jit(lambda t: jax.lax.cond(t > 3, lambda: 0.5, lambda: 0.2)),
    lambda t: 0.5 if t > 3 else 0.2,
])
def test_any_schedule_is_evaluated_on_the_host_even_while_jax_traces(schedule):
  expected = float(schedule(50))

  @jax.jit
  def step(x):
    def branch():
      value = value_at(schedule, 50)
      assert isinstance(value, float)
      return x + value

    return jax.lax.cond(x >= 0, branch, lambda: x)

  assert float(step(0.0)) == pytest.approx(expected)
  assert sparsity_at(schedule, 50) == expected


@st.composite
def times_and_steps(draw):
  """Draws update times of each kind and the steps they are, up to 60."""
  start, stop = draw(st.integers(0, 20)), draw(st.integers(20, 60))
  kind = draw(st.sampled_from(['every', 'endless', 'list', 'callable']))
  if kind in ('every', 'endless'):
    every = draw(st.integers(1, 25))
    stop = stop if kind == 'every' else None
    steps = [t for t in range(start, 61) if (t - start) % every == 0]
    steps = [t for t in steps if stop is None or t <= stop]
    return update_times(every, start, stop), steps
  chosen = sorted(draw(st.sets(st.integers(0, 70), min_size=1)) | {20})
  steps = [t for t in chosen if start <= t <= stop]
  every = chosen if kind == 'list' else lambda t: jnp.array(t in chosen)
  return update_times(every, start, stop), steps


COUNTS = np.arange(-30, 61)


@settings(deadline=None, max_examples=40)
@given(times_and_steps())
def test_update_times_agree_with_a_list_of_steps_on_the_host_and_traced(drawn):
  times, steps = drawn
  contained = [t in steps for t in COUNTS.tolist()]
  numbers = [sum(s <= t for s in steps) - 1 for t in COUNTS.tolist()]
  for count, inside, number in zip(COUNTS.tolist(), contained, numbers):
    assert times.contains(count) is inside
    assert type(times.index(count)) is int and times.index(count) == number
    assert times.index(np.int32(count)) == number
  np.testing.assert_array_equal(times.contains(jnp.asarray(COUNTS)), contained)
  np.testing.assert_array_equal(times.index(jnp.asarray(COUNTS)), numbers)
  if not times.endless:
    assert times.steps.dtype == np.int32 and times.steps.tolist() == steps


@pytest.mark.parametrize('every', [7, [1, 5, 30]])
def test_update_times_accept_traced_scalars(every):
  times = update_times(every, stop=40)
  both = jax.jit(lambda t: (times.contains(t), times.index(t)))
  for count in (-5, 0, 1, 7, 30, 35, 36, 1000):
    inside, index = both(jnp.int32(count))
    assert inside.dtype == bool and index.dtype == jnp.int32
    assert inside.shape == index.shape == ()
    assert (bool(inside), int(index)) == (
        times.contains(count), times.index(count)
    )


def test_lookups_in_a_list_of_update_times_compile_without_a_loop():
  times = update_times([1, 5, 30])
  both = lambda t: (times.contains(t), times.index(t))
  assert 'while' not in jax.jit(both).lower(jnp.int32(0)).compile().as_text()


@pytest.mark.parametrize('number', [float, np.float32, np.array, jnp.float32])
def test_a_number_of_any_library_rises(number):
  assert rising(number(0.5), 100)(50) == cubic(0.0, 0.5, 100)(50)


@pytest.mark.parametrize('number', [int, np.int64, np.array, jnp.int32])
def test_an_interval_of_any_library_ends_with_the_schedule(number):
  times = update_times_of(cubic(0.0, 0.5, 100), number(30), None, 100)
  assert times.steps.tolist() == [30, 60, 90, 100]


def test_update_times_without_an_end_last_through_int32():
  times = update_times(100)
  assert times.endless and times.contains(2**31 - 48)
  assert bool(times.contains(jnp.int32(2**31 - 48)))
  assert int(times.index(jnp.int32(2**31 - 1))) == 2**31 // 100 - 1
  with pytest.raises(ValueError, match='no last one.* give update_until'):
    _ = times.steps
