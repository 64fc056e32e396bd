# SPDX-License-Identifier: Apache-2.0
"""Packing, updates and unpacking of compactly stored optimizer states."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity import storage
from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.state import get_mask
from spdf_jax.sparsity.state import SparsifyState
from spdf_jax.sparsity.state import stored_mask

PyTree = Any


def pack_state(
    params: PyTree, opt_state: PyTree, sizes: PyTree = None
) -> tuple[PyTree, PyTree]:
  """Packs parameters and optimizer state into the values of kept weights.

  `tx.update` takes and returns parameters and state in this form, with packed
  gradients, as `sparse_matmul` computes them with a packed mask. It never
  updates the mask: unpack before a step at which `update_at` is true. The
  optimizer must be elementwise. The state of transformations around `sparsify`
  stays dense, except the gradients of `optax.MultiSteps`.

  Args:
    params: The parameters, zero off the mask.
    opt_state: The state of an optimizer that contains `sparsify`.
    sizes: Length of the vector of values of a layer, for each leaf; by default
      the lengths that the mask needs, which must then not be traced.

  Returns:
    Parameters and state; sparsified leaves and parameter-shaped state inside
    `sparsify` that belongs to them have the shape `[..., size]`.

  Raises:
    ValueError: there is no `SparsifyState`, a layer keeps more weights than its
      leaf's size, or `optax.MultiSteps` holds gradients of pruned weights.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> import spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> state = tx.init(params)
    >>> params = spdf.apply_mask(params, get_mask(state))
    >>> packed, packed_state = pack_state(params, state)
    >>> packed['w'].shape, packed_state.inner_state[0].mu['w'].shape
    ((4,), (4,))
    >>> unpack_state(packed, packed_state)[0]['w'].tolist() == (
    ...     params['w'].tolist())
    True
  """
  mask = get_mask(opt_state)
  if sizes is None:
    sizes = storage.kept_sizes(mask)
  storage.check_room(mask, sizes)
  packed = storage.pack_masks(mask)

  def pack(state):
    return storage.pack_like_params(state, params, packed, sizes)

  def pack_grads(grads):
    values = pack(grads)
    for dense, kept in zip(jax.tree.leaves(grads), jax.tree.leaves(values)):
      if isinstance(dense, jax.core.Tracer):
        continue
      if jnp.count_nonzero(dense) != jnp.count_nonzero(kept):
        raise ValueError(
            'optax.MultiSteps holds gradients of pruned weights, which packing '
            'would drop; pack after a step that updates the parameters.'
        )
    return values

  return storage.pack_values(params, packed, sizes), _map_states(
      storage.pack_masks, pack, pack_grads, opt_state
  )


def unpack_state(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
  """Restores what `pack_state` packed, bit for bit.

  Dense arrays pass unchanged.

  Args:
    params: The parameters.
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    Parameters and state as dense arrays.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`.
  """
  packed = stored_mask(opt_state)
  if not storage.is_packed(packed):
    return params, opt_state

  def unpack(state):
    return storage.unpack_like_params(state, params, packed)

  return storage.unpack_values(params, packed), _map_states(
      storage.unpack_masks, unpack, unpack, opt_state
  )


def update_packed(
    inner: optax.GradientTransformationExtraArgs,
    algorithm: Algorithm,
    updates: PyTree,
    state: SparsifyState,
    params: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, SparsifyState]:
  """Computes the optimizer's update of packed values; the mask is constant.

  Args:
    inner: The optimizer inside `sparsify`.
    algorithm: The algorithm inside `sparsify`.
    updates: The gradients, packed.
    state: The state of `sparsify`, packed.
    params: The parameters, packed.
    **extra_args: Extra arguments of the optimizer's update.

  Returns:
    The updates and the next state, packed.

  Raises:
    ValueError: the algorithm skips steps, the optimizer is not elementwise, or
      updates and parameters have different shapes.
  """
  shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
  if shapes(updates) != shapes(params):
    raise ValueError(
        f'updates have the shapes {shapes(updates)!s:.80} and the packed '
        f'parameters {shapes(params)!s:.80}; pack them too, or unpack the '
        'state where transformations around sparsify hold dense arrays.'
    )
  if algorithm.skip_step_at(state.count) is not False:
    raise ValueError(
        'the algorithm skips steps, which compact storage does not support; '
        'unpack the state with unpack_state.'
    )
  storage.check_elementwise(
      inner, state.inner_state, params, state.mask, **extra_args
  )
  updates, inner_state = inner.update(
      updates, state.inner_state, params, **extra_args
  )
  count = optax.safe_increment(state.count)
  return updates, state._replace(
      count=count,
      dense_grads=jnp.asarray(algorithm.dense_grads_at(count), bool),
      inner_state=inner_state,
  )


def _map_states(
    of_masks: Callable[[PyTree], PyTree],
    of_inner: Callable[[PyTree], PyTree],
    of_grads: Callable[[PyTree], PyTree],
    opt_state: PyTree,
) -> PyTree:
  """Maps masks and states inside `sparsify`, and gradients of `MultiSteps`."""
  kinds = SparsifyState, optax.MultiStepsState

  def convert(state):
    if isinstance(state, SparsifyState):
      return state._replace(
          mask=of_masks(state.mask), inner_state=of_inner(state.inner_state)
      )
    if isinstance(state, optax.MultiStepsState):
      return state._replace(
          acc_grads=of_grads(state.acc_grads),
          inner_opt_state=_map_states(
              of_masks, of_inner, of_grads, state.inner_opt_state
          ),
      )
    return state

  return jax.tree.map(
      convert, opt_state, is_leaf=lambda x: isinstance(x, kinds)
  )
