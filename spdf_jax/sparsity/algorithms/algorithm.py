# SPDX-License-Identifier: Apache-2.0
"""The protocol of sparse-training algorithms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from spdf_jax import names
from spdf_jax.sparsity.masks import MaskMaker

PyTree = Any


def never(count: Any) -> bool:
  """Returns `False` for every step, also for a traced one.

  A field of `Algorithm` that is true at no step is this function, or returns
  the Python value `False`: callers test `is False` and then trace nothing.

  Args:
    count: The step, not used.

  Returns:
    `False`.

  Example:
    >>> never(100)
    False
  """
  del count
  return False


class Algorithm(NamedTuple):
  """A sparse-training algorithm: pure functions of the step and the weights.

  `sparsify` holds the mask and calls these functions. An algorithm that needs
  more than the mask, such as a momentum of gradients or a second mask, has a
  state: `init_state` makes it, `update_state` changes it at every step, and
  `update` receives it. It lies in the state of `sparsify`, is saved and sharded
  like the parameters, and costs nothing where there is none.

  In the trees of parameters, gradients and masks that they receive, every
  sparsified leaf has the shape `[layers, inputs, outputs]` and every other leaf
  is `None`. The layers of one leaf are independent. `count` is the number of
  optimizer steps taken before this one: a traced int32 scalar inside a train
  step, a Python int on the host, where sparsities are tabulated and runs are
  planned.

  `update_at`, `dense_grads_at` and `skip_step_at` return whether something
  happens at a step: a Python bool for an int and a bool array for a traced
  count. The Python value `False` for a traced count means that it happens at no
  step: `sparsify` then leaves that code out of the compiled step. An array that
  is false at every step gives the same results, but its branch is compiled.

  Example:
    This algorithm keeps the weights of largest magnitude and selects them again
    at every hundredth step:

    >>> import jax.numpy as jnp
    >>> import optax
    >>> import spdf_jax as spdf
    >>> by_magnitude = Algorithm(
    ...     sparsity_at=lambda count, params: spdf.uniform(params, 0.75),
    ...     init=lambda key, params: spdf.init.random(key, params, 0.75),
    ...     update=lambda key, count, mask, params, grads: (
    ...         spdf.init.magnitude(key, params, 0.75)),
    ...     update_at=lambda count: count % 100 == 0,
    ...     dense_grads_at=never,
    ... )
    >>> tx = spdf.sparsify(optax.sgd(0.1), by_magnitude, key=0)
    >>> int(spdf.get_mask(tx.init({'w': jnp.ones((4, 4))}))['w'].sum())
    4
  """

  sparsity_at: Callable[[int, PyTree], PyTree]
  """`(count, params) -> sparsities`: the planned sparsities of a step, computed
  on the host: a float for each sparsified leaf, or a `ModelWide`. `params` may
  be shapes."""

  init: Callable[[jax.Array, PyTree], PyTree]
  """`(key, params) -> mask`: the initial mask, bool leaves of the parameters'
  shapes. The key is the one given to `sparsify`."""

  update: Callable[..., PyTree]
  """`(key, count, mask, params, grads) -> mask`: the next mask, with the shapes
  of the current one; called at steps where `update_at` is true. The key differs
  between steps. `grads` of pruned weights are zero unless `dense_grads_at` is
  true. With `init_state`, the state of the step is a sixth
  argument."""

  update_at: Callable[[Any], Any]
  """`(count) -> bool`: whether the mask is updated at this step, before the
  optimizer's update. `False`: the mask is constant."""

  dense_grads_at: Callable[[Any], Any]
  """`(count) -> bool`: whether `update` needs the gradients of pruned weights
  at this step. `False`: never, so that kernels may leave them out."""

  skip_step_at: Callable[[Any], Any] = never
  """`(count) -> bool`: whether the step only updates the mask: kept weights and
  moments do not change, counters advance. `False`: every step also updates the
  weights."""

  sparsity_changes_at: Callable[[Any], Any] | None = None
  """`(count) -> bool`: whether `sparsity_at` may change at this step. `None`:
  at any mask update."""

  mask_by: Callable[..., PyTree] | None = None
  """`(maker, key, params) -> mask`: the mask that `maker(key, params,
  sparsities)` makes at the initial sparsity; where there is a structure, the
  maker also gets `structure=`. `join` makes its masks at boundaries so.
  `None`: there is no structure."""

  init_state: Callable[[PyTree, PyTree], dict[str, PyTree]] | None = None
  """`(mask, params) -> state`: trees of the structure and shapes of the
  parameters, by name. `join` calls it at the start of a later algorithm, with
  the mask of the step before. `None`: the algorithm has no state."""

  update_state: Callable[..., dict[str, PyTree]] | None = None
  """`(count, state, mask, params, grads) -> state`, called at every step before
  `update`, with the mask of the step before, and `grads` as for `update`.
  `None`: the state is constant."""

  for_kernels: Callable[[Mapping[str, Sequence[int]]], Any] | None = None
  """`(kernels) -> algorithm`: the algorithm for parameters of which some are
  kernels of convolutions, with their spatial sizes by path. `None`: its masks
  do not depend on them, as with every distribution but `erk`."""

  name: str = ''
  """How the algorithm is printed; by default, with its two functions."""

  def __repr__(self) -> str:
    shown = (f'{f}={names.show(getattr(self, f))}' for f in ('init', 'update'))
    return self.name or f'Algorithm({", ".join(shown)}, …)'


def sparsity_changes_at(algorithm: Algorithm, count: Any) -> Any:
  """Returns whether the planned sparsity of an algorithm may change."""
  return (algorithm.sparsity_changes_at or algorithm.update_at)(count)


def for_kernels(
    algorithm: Algorithm, kernels: Mapping[str, Sequence[int]]
) -> Algorithm:
  """Returns the algorithm for kernels of convolutions of given sizes."""
  if not kernels or algorithm.for_kernels is None:
    return algorithm
  return algorithm.for_kernels(kernels)


def with_init(algorithm: Algorithm, init: MaskMaker) -> Algorithm:
  """Replaces the initial mask by one of the same sparsities."""
  def bound(kernels):
    return with_init(for_kernels(algorithm, kernels), init)

  return algorithm._replace(
      init=lambda key, params: init(
          key, params, algorithm.sparsity_at(0, params)
      ),
      for_kernels=algorithm.for_kernels and bound,
  )


def mask_by(
    algorithm: Algorithm, maker: MaskMaker, key: jax.Array, params: PyTree
) -> PyTree:
  """Makes a mask with the initial sparsity and structure of an algorithm."""
  if algorithm.mask_by is None:
    return maker(key, params, algorithm.sparsity_at(0, params))
  return algorithm.mask_by(maker, key, params)
