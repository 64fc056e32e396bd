"""Compact storage: parameters and moments of kept weights alone.

Between changes of the mask an elementwise optimizer never touches a pruned
weight. Compactly stored, a sparsified leaf of the parameters, and every leaf of
the optimizer's state that belongs to it, is the vector of its kept values, and
the mask a bit per weight: under AdamW 12 bytes per kept weight and an eighth of
a byte per weight, where dense arrays take 13 per weight. The optimizer is the
same, and so are its updates.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import packing
from spdf_jax.packing import PackedMask
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import state_matching

PyTree = Any

_is_packed = lambda x: isinstance(x, PackedMask)
_is_leaf = lambda x: x is None or _is_packed(x)
_TINY = 4, 6  # Rows and columns of a layer that an optimizer is tried on.
_TOLERANCE = 1e-4


def is_packed(mask: PyTree) -> bool:
  """Returns whether a mask is stored as bits.

  Example:
    >>> is_packed({'w': packing.pack_mask(jnp.eye(2, dtype=bool)), 'b': None})
    True
  """
  return any(map(_is_packed, jax.tree.leaves(mask, is_leaf=_is_packed)))


def unpack_masks(mask: PyTree) -> PyTree:
  """Returns a mask as booleans, however it is stored.

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
  """Returns how much room compact storage of a mask needs.

  Args:
    mask: bool leaves on the host or a device, the last two axes a layer.

  Returns:
    A tree of its structure: the most weights that a layer of the leaf keeps,
    `None` kept.

  Example:
    >>> kept_sizes({'w': jnp.eye(3, dtype=bool), 'b': None})
    {'b': None, 'w': 3}
  """
  return jax.tree.map(
      lambda m: max(1, int(np.asarray(m).sum((-2, -1), np.int64).max())), mask
  )


def pack_values(tree: PyTree, mask: PyTree, sizes: PyTree) -> PyTree:
  """Takes the kept values out of a tree of the parameters' structure.

  Args:
    tree: Parameters, gradients or moments.
    mask: Packed.
    sizes: Room for the values of a layer of each leaf.

  Returns:
    The tree, its sparsified leaves `[..., size]`.

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
  """Undoes `pack_values`: pruned weights are exactly zero.

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
  """Packs what of an optimizer's state is of a sparsified leaf's shape.

  Args:
    state: Of any transformation; masks are the caller's to pack.
    params: The parameters, or their shapes.
    mask: Packed.
    sizes: Room for the values of a layer of each leaf.

  Returns:
    The state, other leaves unchanged.
  """
  return state_matching.map_like_params(
      lambda x, m, n: x if m is None else packing.gather_kept(x, m, n),
      state, params, _per_leaf(mask, params), _per_leaf(sizes, params),
  )


def unpack_like_params(state: PyTree, params: PyTree, mask: PyTree) -> PyTree:
  """Undoes `pack_like_params`; `params` are packed."""
  return state_matching.map_like_params(
      lambda x, m: x if m is None else packing.scatter_kept(x, m),
      state, params, _per_leaf(mask, params),
  )


def _per_leaf(tree: PyTree, params: PyTree) -> PyTree:
  """Says `None` of every leaf where a tree says it of a subtree."""
  return jax.tree.broadcast(
      tree, params, is_leaf=_is_leaf
  )


def check_room(mask: PyTree, sizes: PyTree) -> None:
  """Raises ValueError where a mask keeps more than there is room for.

  Args:
    mask: bool leaves; traced ones are not checked.
    sizes: Room for the values of a layer of each leaf.

  Raises:
    ValueError: a leaf keeps more.

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
          f'the mask of {selection.path_name(path)} keeps {kept} weights of a '
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
  """Refuses an optimizer that needs more of a matrix than its kept values.

  Its state must be of the same shapes whether it is made for values or was
  packed from that of matrices, and its updates the same for a small model of
  the same leaves: sums over a leaf are, means, rows and singular values not.

  Args:
    inner: The optimizer inside `sparsify`.
    state: Its state, packed.
    params: Packed.
    mask: Packed.
    **extra_args: What its update is given.

  Raises:
    ValueError: it needs matrices.
  """
  shapes = lambda tree: [
      (selection.path_name(path), x.shape, x.dtype)
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]
  try:
    like = jax.eval_shape(inner.init, params)
  except (TypeError, ValueError, IndexError) as error:
    reason = f'it cannot start from them ({error})'
    raise ValueError(_refusal(reason)) from error
  if shapes(like) != shapes(state):
    raise ValueError(_refusal(
        'what it keeps of a matrix is not what it keeps of its values'
    ))
  with jax.ensure_compile_time_eval():
    for matrix, values in _try_on_tiny(inner, params, mask, extra_args):
      if not np.allclose(matrix, values, rtol=_TOLERANCE, atol=1e-7):
        raise ValueError(_refusal(
            'it updates a weight otherwise among its matrix'
        ))


def _refusal(reason: str) -> str:
  return (
      "the optimizer works on whole matrices, and storage 'compact' holds the "
      f'values of kept weights only: {reason}; use an elementwise optimizer, '
      "such as AdamW, or storage 'dense'."
  )


def _try_on_tiny(inner, params, mask, extra_args):
  """Yields updates of small leaves, each as a matrix and as values."""
  rng = np.random.default_rng(0)
  board = np.indices(_TINY).sum(0) % 2 == 0

  def draw():
    def leaf(m, p):
      # As few shapes as can be: each is compiled for.
      stack = p.shape[:-2] if m is None else m.shape[:-2]
      matrix = m is not None or len(p.shape) > 1
      tail = _TINY if matrix else (board.sum(),) * len(p.shape)
      x = rng.normal(size=(*(min(n, 2) for n in stack), *tail))
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
  for _ in range(2):
    grads = draw()
    updates, states[0] = run(grads, states[0], matrices)
    of_values, states[1] = run(take(grads), states[1], values)
    yield from zip(
        map(np.asarray, jax.tree.leaves(take(updates))),
        map(np.asarray, jax.tree.leaves(of_values)),
    )
