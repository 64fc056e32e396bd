"""`map_leaves`: one loop for leaves that are alike, the same results."""

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.trees import map_leaves


def model(number, shape=(1, 3, 4)):
  rng = np.random.default_rng(0)
  return {
      f'h_{i}': {'w': jnp.asarray(rng.standard_normal(shape), jnp.float32)}
      for i in range(number)
  }


def count(jaxpr, names):
  """Counts primitives by name, in all inner jaxprs too."""
  number = 0
  for equation in jaxpr.eqns:
    number += equation.primitive.name in names
    for value in jax.tree.leaves(
        equation.params, is_leaf=lambda x: hasattr(x, 'eqns')
        or hasattr(x, 'jaxpr'),
    ):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        number += count(inner, names)
  return number


def loops_and_sines(f, *trees):
  jaxpr = jax.make_jaxpr(f)(*trees).jaxpr
  return count(jaxpr, ('while', 'scan')), count(jaxpr, ('sin',))


def test_map_leaves_compiles_five_equal_leaves_to_one_loop():
  f = lambda tree: map_leaves(jnp.sin, tree)
  assert loops_and_sines(f, model(5)) == (1, 1)


def test_map_leaves_does_not_join_other_shapes_dtypes_and_names():
  tree = model(3) | {
      'v_0': {'w': jnp.ones((1, 3, 4))},
      'h_7': {'w': jnp.ones((1, 4, 3))},
      'h_8': {'w': jnp.ones((1, 3, 4), jnp.bfloat16)},
  }
  f = lambda tree: map_leaves(jnp.sin, tree)
  # Three leaves are a loop; each of the others is called directly.
  assert loops_and_sines(f, tree) == (1, 4)


def test_map_leaves_returns_results_in_the_order_of_leaves():
  tree = model(4) | {'x': jnp.ones((2, 2)), 'none': None}
  numbers = jax.tree.map(
      lambda x: x, {f'h_{i}': {'w': np.int32(i)} for i in range(4)}
  ) | {'x': np.int32(9), 'none': None}
  keys = {
      f'h_{i}': {'w': jax.random.key(i)} for i in range(4)
  } | {'x': jax.random.key(9), 'none': None}

  def f(x, number, key):
    return {'sum': x.sum() * number, 'noise': jax.random.bits(key, x.shape)}

  looped = jax.jit(lambda *trees: map_leaves(f, *trees))(tree, numbers, keys)
  direct = map_leaves(f, tree, numbers, keys)
  assert looped['none'] is None and direct['none'] is None
  for one, other in zip(jax.tree.leaves(looped), jax.tree.leaves(direct)):
    np.testing.assert_allclose(one, other, rtol=1e-6)
