# SPDX-License-Identifier: Apache-2.0
"""Compact storage: parameters and moments of kept weights only.

Between mask updates an elementwise optimizer never changes a pruned weight.
Compact storage holds a sparsified leaf of the parameters, and every leaf of the
optimizer state that belongs to it, as the vector of its kept values, and the
mask as one bit per weight: with AdamW 12 bytes per kept weight and an eighth of
a byte per weight, instead of 13 bytes per weight in dense arrays. The same
optimizer runs on these vectors and computes the same updates.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import packing
from spdf_jax.sparsity import age
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import state
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.state import SparsifyState

PyTree = Any

_TINY = 4, 6  # Shape of the layers on which `_check_elementwise` compares.
_TOLERANCE = 1e-4


def kept_sizes(mask: PyTree) -> PyTree:
  """Returns the vector lengths that compact storage of a mask needs.

  Args:
    mask: bool leaves on the host or a device; the last two axes are a layer.

  Returns:
    A tree of the structure of `mask`: the largest number of weights that a
    layer of the leaf keeps; `None` leaves stay `None`.

  Example:
    >>> kept_sizes({'w': jnp.eye(3, dtype=bool), 'b': None})
    {'b': None, 'w': 3}
  """
  return jax.tree.map(
      lambda m: max(1, int(np.asarray(m).sum((-2, -1), np.int64).max())), mask
  )


def pack_values(tree: PyTree, mask: PyTree, sizes: PyTree) -> PyTree:
  """Gathers the kept values of a tree with the parameters' structure.

  Args:
    tree: Parameters, gradients or moments.
    mask: The packed mask.
    sizes: Length of the vector of values of a layer, for each leaf.

  Returns:
    The tree, with sparsified leaves as values `[..., size]`.

  Example:
    >>> mask = pack_masks({'w': jnp.eye(2, dtype=bool), 'b': None})
    >>> tree = {'w': jnp.array([[3, 0], [0, 5]]), 'b': jnp.array([7])}
    >>> pack_values(tree, mask, {'w': 2, 'b': None})['w'].tolist()
    [3, 5]
  """
  return _pack_like_params(tree, tree, mask, sizes)


def pack_masks(mask: PyTree) -> PyTree:
  """Packs the leaves of a mask."""
  return jax.tree.map(packing.pack_mask, mask)


def _pack_like_params(
    state: PyTree, params: PyTree, mask: PyTree, sizes: PyTree
) -> PyTree:
  """Packs the leaves of an optimizer state that match a sparsified parameter.

  The state holds no masks; `mask` is packed, and `sizes` has the length of the
  vector of values of a layer for each leaf.
  """
  return like_params.map_like_params(
      lambda x, m, n: x if m is None else packing.gather_kept(x, m, n),
      state, params, mask, sizes,
  )


def _check_room(mask: PyTree, sizes: PyTree) -> None:
  """Raises ValueError if a layer keeps more weights than its leaf's size.

  Traced leaves are not checked.
  """
  leaves = jax.tree_util.tree_leaves_with_path(mask)
  for (path, m), size in zip(leaves, jax.tree.leaves(sizes)):
    if isinstance(m, jax.core.Tracer):
      continue
    kept = kept_sizes(m)
    if kept > size:
      raise ValueError(
          f'sizes is {size} for {trees.path_name(path)!r}, but its mask keeps '
          f'{kept} weights of a layer; give a size of {kept} or more, or keep '
          'the state dense.'
      )


def _check_elementwise(
    inner: optax.GradientTransformationExtraArgs,
    state: PyTree,
    params: PyTree,
    mask: PyTree,
    **extra_args: Any,
) -> None:
  """Raises ValueError if an optimizer needs more than the kept values.

  The optimizer must give a state of the same shapes when it is initialized with
  packed parameters as when its dense state is packed, and the same updates for
  small random leaves as matrices and as packed values. Optimizers that use sums
  over a leaf pass; those that use means, rows or singular values do not.
  """
  shapes = lambda tree: [
      (trees.path_name(path), x.shape, x.dtype)
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]
  try:
    like = jax.eval_shape(inner.init, params)
  except (TypeError, ValueError, IndexError) as error:
    reason = f'it cannot be initialized with them ({error})'
    raise ValueError(_refusal(reason)) from error
  if shapes(like) != shapes(state):
    raise ValueError(_refusal(
        'its state has other shapes for these values than for matrices'
    ))
  with jax.ensure_compile_time_eval():
    for matrix, values in _try_on_tiny(inner, params, mask, extra_args):
      if not np.allclose(matrix, values, rtol=_TOLERANCE, atol=1e-7):
        raise ValueError(_refusal(
            'its update of a weight depends on the rest of the matrix'
        ))


def _refusal(reason: str) -> str:
  return (
      "the optimizer works on whole matrices, and storage 'compact' holds the "
      f'values of kept weights only: {reason}; use an elementwise optimizer, '
      "such as AdamW, or storage 'dense'."
  )


def _try_on_tiny(inner, params, mask, extra_args):
  """Yields pairs of updates of small leaves: as matrix and as values."""
  rng = np.random.default_rng(0)
  board = np.indices(_TINY).sum(0) % 2 == 0

  def draw(scale=1):
    def leaf(p, m):
      # Few distinct shapes, because each one is compiled separately.
      stack = p.shape[:-2] if m is None else m.shape[:-2]
      matrix = m is not None or len(p.shape) > 1
      tail = _TINY if matrix else (board.sum(),) * len(p.shape)
      x = scale * rng.normal(size=(*(min(n, 2) for n in stack), *tail))
      return np.asarray(x if m is None else np.where(board, x, 0), p.dtype)
    return jax.tree.map(leaf, params, mask)

  take = lambda tree: jax.tree.map(
      lambda x, m: x if m is None else np.asarray(x)[..., board], tree, mask
  )
  run = lambda tree, state, params, mask: inner.update(
      *jax.tree.map(jnp.asarray, (tree, state, params)), **extra_args,
      **age.mask_argument(state, mask),
  )
  boards = packing.map_packed(
      lambda m: jnp.broadcast_to(
          board, (*(min(n, 2) for n in m.shape[:-2]), *_TINY)
      ),
      mask,
  )
  extra_args = jax.tree.map(
      lambda x: jnp.ones(jnp.shape(x), jnp.result_type(x)), extra_args
  )
  matrices = draw()
  values = take(matrices)
  states = [
      inner.init(jax.tree.map(jnp.asarray, p)) for p in (matrices, values)
  ]
  # Clipping shows at some scales of the gradients only.
  for scale in (1, 1, 1e3):
    grads = draw(scale)
    updates, states[0] = run(grads, states[0], matrices, boards)
    of_values, states[1] = run(
        take(grads), states[1], values, pack_masks(boards)
    )
    yield from zip(
        map(np.asarray, jax.tree.leaves(take(updates))),
        map(np.asarray, jax.tree.leaves(of_values)),
    )


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
    ValueError: there is no `SparsifyState`, the algorithm has a state, a vector
      is sparsified, a layer keeps more weights than its leaf's size, or
      `optax.MultiSteps` holds gradients of pruned weights.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> import spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> state = tx.init(params)
    >>> params = spdf.apply_mask(params, spdf.get_mask(state))
    >>> packed, packed_state = pack_state(params, state)
    >>> packed['w'].shape, packed_state.inner_state[0].mu['w'].shape
    ((4,), (4,))
    >>> unpack_state(packed, packed_state)[0]['w'].tolist() == (
    ...     params['w'].tolist())
    True
  """
  mask = state.get_mask(opt_state)
  if state.has_algorithm_state(opt_state):
    raise ValueError(
        'the algorithm has a state (init_state), which cannot be packed; keep '
        'the optimizer state dense, without pack_state.'
    )
  for name, m in trees.by_name(mask).items():
    if m.ndim < 2:
      raise ValueError(
          f'{name!r} is a vector, and compact storage is of matrices; keep the '
          'optimizer state dense, without pack_state.'
      )
  if sizes is None:
    sizes = kept_sizes(mask)
  _check_room(mask, sizes)
  packed = pack_masks(mask)

  def pack(tree):
    return _pack_like_params(tree, params, packed, sizes)

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

  return pack(params), _map_states(pack_masks, pack, pack_grads, opt_state)


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
  packed = state.stored_mask(opt_state)

  def unpack(tree):
    return like_params.map_like_params(
        packing.unpack_values, tree, params, packed
    )

  unpack_masks = functools.partial(packing.map_packed, packing.unpack_mask)
  return unpack(params), _map_states(unpack_masks, unpack, unpack, opt_state)


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
        f'parameters {shapes(params)!s:.80}; pack the gradients too, or unpack '
        'parameters and state where a transformation around sparsify returns '
        'dense arrays.'
    )
  if algorithm.skip_step_at(state.count) is not False:
    raise ValueError(
        'the algorithm skips steps (skip_step_at), which compact storage does '
        'not support; unpack parameters and state with '
        'spdf_jax.sparsity.storage.unpack_state.'
    )
  _check_elementwise(
      inner, state.inner_state, params, state.mask, **extra_args
  )
  updates, inner_state = inner.update(
      updates, state.inner_state, params, **extra_args,
      **age.mask_argument(state.inner_state, state.mask),
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
