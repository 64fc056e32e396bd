# SPDX-License-Identifier: Apache-2.0
"""Compact storage: parameters and moments of kept weights only.

Between mask updates an elementwise optimizer never changes a pruned weight.
Compact storage holds a sparsified leaf of the parameters, and every leaf of the
optimizer state that belongs to it, as the vector of its kept values, and the
mask as one bit per weight: with AdamW 12 bytes per kept weight and an eighth of
a byte per weight, instead of 13 bytes per weight in dense arrays. The same
optimizer runs on these vectors and computes the same updates.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import packing
from spdf_jax.packing import PackedMask
from spdf_jax.sparsity import state_matching
from spdf_jax.sparsity.paths import path_name

PyTree = Any

_is_packed = lambda x: isinstance(x, PackedMask)
_is_leaf = lambda x: x is None or _is_packed(x)
_TINY = 4, 6  # Shape of the layers on which `check_elementwise` compares.
_TOLERANCE = 1e-4


def is_packed(mask: PyTree) -> bool:
  """Returns whether a mask is stored as bits.

  Example:
    >>> is_packed({'w': packing.pack_mask(jnp.eye(2, dtype=bool)), 'b': None})
    True
  """
  return any(map(_is_packed, jax.tree.leaves(mask, is_leaf=_is_packed)))


def unpack_masks(mask: PyTree) -> PyTree:
  """Returns a mask as booleans; unpacks packed leaves.

  Example:
    >>> mask = {'w': jnp.eye(2, dtype=bool), 'b': None}
    >>> unpack_masks(pack_masks(mask))['w'].tolist()
    [[True, False], [False, True]]
  """
  return jax.tree.map(
      lambda m: packing.unpack_mask(m) if _is_packed(m) else m,
      mask, is_leaf=_is_packed,
  )


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
  return jax.tree.map(
      lambda m, x, n: x if m is None else packing.gather_kept(x, m, n),
      mask, tree, sizes, is_leaf=_is_leaf,
  )


def unpack_values(tree: PyTree, mask: PyTree) -> PyTree:
  """Unpacks what `pack_values` returned; pruned weights are exactly zero.

  Example:
    >>> mask = pack_masks({'w': jnp.eye(2, dtype=bool)})
    >>> unpack_values({'w': jnp.array([3, 5])}, mask)['w'].tolist()
    [[3, 0], [0, 5]]
  """
  return jax.tree.map(
      lambda m, x: x if m is None else packing.scatter_kept(x, m),
      mask, tree, is_leaf=_is_leaf,
  )


def pack_masks(mask: PyTree) -> PyTree:
  """Packs the leaves of a mask."""
  return jax.tree.map(packing.pack_mask, mask)


def pack_like_params(
    state: PyTree, params: PyTree, mask: PyTree, sizes: PyTree
) -> PyTree:
  """Packs the leaves of an optimizer state that match a sparsified parameter.

  Args:
    state: State of any transformation, without masks; the caller packs those.
    params: The parameters, or their shapes.
    mask: The packed mask.
    sizes: Length of the vector of values of a layer, for each leaf.

  Returns:
    The state, other leaves unchanged.
  """
  return state_matching.map_like_params(
      lambda x, m, n: x if m is None else packing.gather_kept(x, m, n),
      state, params, _per_leaf(mask, params), _per_leaf(sizes, params),
  )


def unpack_like_params(state: PyTree, params: PyTree, mask: PyTree) -> PyTree:
  """Unpacks what `pack_like_params` returned; `params` are packed."""
  return state_matching.map_like_params(
      lambda x, m: x if m is None else packing.scatter_kept(x, m),
      state, params, _per_leaf(mask, params),
  )


def _per_leaf(tree: PyTree, params: PyTree) -> PyTree:
  """Broadcasts `None` at a subtree to all leaves of this subtree."""
  return jax.tree.broadcast(
      tree, params, is_leaf=_is_leaf
  )


def check_room(mask: PyTree, sizes: PyTree) -> None:
  """Raises ValueError if a mask keeps more weights than compact storage holds.

  Args:
    mask: bool leaves; traced leaves are not checked.
    sizes: Length of the vector of values of a layer, for each leaf.

  Raises:
    ValueError: a layer keeps more weights than its leaf's size.

  Example:
    >>> check_room({'w': jnp.eye(3, dtype=bool)}, {'w': 3})
  """
  leaves = jax.tree_util.tree_leaves_with_path(mask)
  for (path, m), size in zip(leaves, jax.tree.leaves(sizes)):
    if isinstance(m, jax.core.Tracer):
      continue
    kept = kept_sizes(m)
    if kept > size:
      raise ValueError(
          f'the mask of {path_name(path)} keeps {kept} weights of a '
          f'layer and its compact storage was built for {size}; build it for '
          f'{kept}, or store it densely.'
      )


def check_elementwise(
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

  Args:
    inner: The optimizer inside `sparsify`.
    state: The packed state of `inner`.
    params: The packed parameters.
    mask: The packed mask.
    **extra_args: Extra arguments of the optimizer's update.

  Raises:
    ValueError: the optimizer works on whole matrices.
  """
  shapes = lambda tree: [
      (path_name(path), x.shape, x.dtype)
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
    def leaf(m, p):
      # Few distinct shapes, because each one is compiled separately.
      stack = p.shape[:-2] if m is None else m.shape[:-2]
      matrix = m is not None or len(p.shape) > 1
      tail = _TINY if matrix else (board.sum(),) * len(p.shape)
      x = scale * rng.normal(size=(*(min(n, 2) for n in stack), *tail))
      return np.asarray(x if m is None else np.where(board, x, 0), p.dtype)
    return jax.tree.map(leaf, mask, params, is_leaf=_is_leaf)

  take = lambda tree: jax.tree.map(
      lambda m, x: x if m is None else np.asarray(x)[..., board],
      mask, tree, is_leaf=_is_leaf,
  )
  run = lambda tree, state, params: inner.update(
      *jax.tree.map(jnp.asarray, (tree, state, params)), **extra_args
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
    updates, states[0] = run(grads, states[0], matrices)
    of_values, states[1] = run(take(grads), states[1], values)
    yield from zip(
        map(np.asarray, jax.tree.leaves(take(updates))),
        map(np.asarray, jax.tree.leaves(of_values)),
    )
