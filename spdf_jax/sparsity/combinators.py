# SPDX-License-Identifier: Apache-2.0
"""Combinators that build algorithms from algorithms."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import masks
from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.reset_state import check_boundaries

PyTree = Any
MaskMaker = Callable[[jax.Array, PyTree, PyTree], PyTree]


def join(
    algorithms: Sequence[Algorithm],
    boundaries: Sequence[int],
    enter: MaskMaker = masks.magnitude_mask,
) -> Algorithm:
  """Applies algorithms in sequence: Variable SPDF, AC/DC, dense to sparse.

  Member i applies from step `boundaries[i - 1]` on, with steps counted from
  there. At a boundary, `enter` makes a new mask from the weights at the
  member's initial sparsity and structure: by default, a sparser member prunes
  by magnitude, and a denser member keeps all kept weights and revives pruned
  weights at random. Boundary steps require dense gradients, so that revived
  weights receive a gradient at their first step.

  Revived weights start with zero moments: under Adam with b2 = 0.999 their
  first updates are several times the learning rate. Warm up the learning rate
  again at such a boundary, or reset the moments with `reset_state`.

  Args:
    algorithms: The members, in order.
    boundaries: Increasing steps >= 1, at each of which the next member begins.
    enter: `(key, params, sparsities) -> mask`, e.g. `random_mask`; must also
      accept `structure=` if a member has a structure.

  Returns:
    The algorithm.

  Raises:
    ValueError: the boundaries are not increasing, or their number is not one
      less than the number of members.

  References:
    Cerebras, Variable Sparse Pre-training and Dense Fine-tuning, 2023

  Example:
    >>> from spdf_jax import dense, static
    >>> variable = join([static(0.9), dense()], [62_500])
    >>> variable.sparsity_at(62_500, {'w': jnp.ones((2, 2))})
    {'w': 0.0}
  """
  algorithms = tuple(algorithms)
  check_boundaries(boundaries)
  if len(algorithms) != len(boundaries) + 1 or 0 in tuple(boundaries):
    raise ValueError(
        f'join got {len(algorithms)} algorithms and boundaries '
        f'{list(boundaries)}; give one boundary, at step 1 or later, between '
        'each two algorithms.'
    )
  starts = (0, *boundaries)
  table = np.asarray(boundaries, np.int32)

  def member_at(count):
    if isinstance(count, int):
      return int(np.searchsorted(table, count, side='right'))
    return jnp.sum(count >= table)

  def at_boundary(count):
    if isinstance(count, int):
      return count in boundaries
    return jnp.any(jnp.asarray(count) == table)

  def choose(flags, count):
    if isinstance(count, int):
      return flags[member_at(count)]
    return jnp.stack([jnp.asarray(flag) for flag in flags])[member_at(count)]

  def sparsity_at(count, params):
    i = member_at(count)
    return algorithms[i].sparsity_at(count - starts[i], params)

  def update(key, count, mask, params, grads):
    def branch(i):
      member, start = algorithms[i], starts[i]
      entered = lambda: mask_by(member, enter, key, params)
      updated = lambda: member.update(key, count - start, mask, params, grads)
      if i == 0:
        return updated
      if member.update_at(count - start) is False:
        return entered
      return lambda: jax.lax.cond(count == start, entered, updated)

    branches = [branch(i) for i in range(len(algorithms))]
    return jax.lax.switch(member_at(count), branches)

  def update_at(count):
    members = [m.update_at(count - s) for m, s in zip(algorithms, starts)]
    if not table.size:
      return members[0]
    return at_boundary(count) | choose(members, count)

  def dense_grads_at(count):
    members = [m.dense_grads_at(count - s) for m, s in zip(algorithms, starts)]
    return at_boundary(count) | choose(members, count)

  def skip_step_at(count):
    members = [m.skip_step_at(count - s) for m, s in zip(algorithms, starts)]
    if all(flag is False for flag in members):
      return False
    return choose(members, count)

  return Algorithm(
      sparsity_at, algorithms[0].init, update, update_at, dense_grads_at,
      skip_step_at,
      mask_by=lambda *args: mask_by(algorithms[0], *args),
  )


def mask_by(
    algorithm: Algorithm, maker: MaskMaker, key: jax.Array, params: PyTree
) -> PyTree:
  """Makes a mask with the initial sparsity and structure of an algorithm."""
  if algorithm.mask_by is None:
    return maker(key, params, algorithm.sparsity_at(0, params))
  return algorithm.mask_by(maker, key, params)
