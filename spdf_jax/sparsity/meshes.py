# SPDX-License-Identifier: Apache-2.0
"""Computation on meshes with Explicit axes, the default of `jax.make_mesh`."""

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def auto_axes(f: Callable[..., PyTree], like: PyTree) -> Callable[..., PyTree]:
  """Makes the axes of a mesh Auto inside a function.

  On a mesh with Explicit axes, JAX requires the sharding of every reshaped
  array; selection of masks leaves it to the compiler instead. Without such a
  mesh, returns `f`.

  Args:
    f: Function of arrays that closes over no sharded arrays.
    like: A tree of the structure of what `f` returns, arrays with its
      shardings.

  Returns:
    A function with the arguments and results of `f`.

  Example:
    >>> w = jax.numpy.ones((4, 4))
    >>> auto_axes(lambda w: w.reshape(2, 8).reshape(4, 4), w)(w).shape
    (4, 4)
  """
  shardings = jax.tree.map(_sharding, like)
  meshes = [s.mesh for s in jax.tree.leaves(shardings)]
  if not any(jax.sharding.AxisType.Explicit in m.axis_types for m in meshes):
    return f
  # The arrays of `like` are arguments too, because they determine the devices
  # of the compiled function, where `f` has no other sharded arrays.
  inside = jax.jit(
      jax.sharding.auto_axes(
          lambda _, *args: f(*args), out_sharding=shardings
      ),
      keep_unused=True,
  )
  return lambda *args: inside(like, *args)


def _sharding(x: Any) -> jax.NamedSharding:
  return jax.typeof(x).sharding
