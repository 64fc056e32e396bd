# SPDX-License-Identifier: Apache-2.0
"""Application of masks to trees, by the paths of their leaves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity import storage
from spdf_jax.sparsity.paths import by_name
from spdf_jax.sparsity.paths import like_params
from spdf_jax.sparsity.state import check_state
from spdf_jax.sparsity.state import get_mask
from spdf_jax.sparsity.state import stored_mask

PyTree = Any


def apply_mask(tree: PyTree, mask: PyTree) -> PyTree:
  """Zeroes the pruned entries of a tree.

  Selects entries instead of multiplying by the mask, so a NaN at a pruned
  weight becomes zero.

  Args:
    tree: Parameters, gradients, or any tree with their paths.
    mask: The mask; leaves where it is `None` pass unchanged.

  Returns:
    The masked tree, dtypes unchanged.

  Raises:
    TypeError: a leaf of the mask is not bool.
    ValueError: the mask has a leaf that the tree does not have.

  Example:
    >>> import jax.numpy as jnp
    >>> w = {'w': jnp.array([[1., 2.]])}
    >>> apply_mask(w, {'w': jnp.array([[True, False]])})['w'].tolist()
    [[1.0, 0.0]]
  """
  check_bool(mask)
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(
      x if m is None else jnp.where(m, x, jnp.zeros_like(x))
      for m, x in zip(like_params(mask, tree), leaves)
  )


def map_masked(f: Callable[..., Any], mask: PyTree, *trees: PyTree) -> PyTree:
  """Maps a function over the sparsified leaves of parameters.

  A mask holds `None` for leaves that stay dense, so `jax.tree.map(f, mask,
  params)` fails. Leaves are matched by their paths, so the mask may come from
  an `nnx.Optimizer`.

  Args:
    f: `(mask, *leaves) -> result`, called for every sparsified leaf.
    mask: The mask, as `get_mask` returns it.
    *trees: Parameters, gradients, or other trees of their structure.

  Returns:
    The results in the structure of the first tree; `None` where leaves stay
    dense.

  Raises:
    TypeError: a leaf of the mask is not bool.
    ValueError: the mask has a leaf that a tree does not have, or there is no
      tree.

  Example:
    Counts the kept weights that are below a threshold:

    >>> params = {'w': jnp.array([[1., 3.], [2., 4.]]), 'b': jnp.ones(2)}
    >>> mask = {'w': jnp.array([[True, True], [False, False]]), 'b': None}
    >>> small = lambda m, w: int((m & (w < 2)).sum())
    >>> map_masked(small, mask, params)
    {'b': None, 'w': 1}
  """
  check_bool(mask)
  if not trees:
    raise ValueError(
        'map_masked has no tree beside the mask; give the parameters, '
        'map_masked(f, mask, params).'
    )
  columns = [like_params(tree, trees[0]) for tree in trees]
  treedef: Any = jax.tree.structure(trees[0])
  return treedef.unflatten(
      None if m is None else f(m, *leaves)
      for m, *leaves in zip(like_params(mask, trees[0]), *columns)
  )


def check(params: PyTree, opt_state: PyTree) -> None:
  """Raises an error unless all pruned weights are exactly zero.

  Call it in a test of a training loop: some transformations around `sparsify`
  change its updates, see there. Parameters that are stored compactly hold no
  pruned weights and pass.

  Args:
    params: The parameters.
    opt_state: The state of an optimizer that contains `sparsify`.

  Raises:
    ValueError: pruned weights are not zero; their leaves are named. Or a
      transformation around `sparsify` computed with its state, or there is no
      `SparsifyState` in `opt_state`.

  Example:
    >>> import optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> state = tx.init(params)
    >>> check(apply_mask(params, get_mask(state)), state)
    >>> check(params, state)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: pruned weights are not zero: 12 in 'w'; ...
  """
  check_state(opt_state)
  if storage.is_packed(stored_mask(opt_state)):
    return
  count = lambda m, p: jnp.sum((p != 0) & ~m, dtype=jnp.int32)
  found = {
      name: int(number)
      for name, number in by_name(
          map_masked(count, get_mask(opt_state), params)
      ).items()
  }
  wrong = [f'{n:,} in {name!r}' for name, n in found.items() if n]
  if wrong:
    raise ValueError(
        f'pruned weights are not zero: {", ".join(wrong)}; mask the initial '
        'parameters, apply_mask(params, get_mask(opt_state)), and put '
        'transformations that change updates inside sparsify.'
    )


def check_bool(mask: PyTree) -> None:
  """Raises TypeError unless all leaves of a mask are bool."""
  for name, leaf in by_name(mask).items():
    kind = getattr(leaf, 'dtype', type(leaf).__name__)
    if str(kind) != 'bool':
      raise TypeError(
          f'the mask has {kind} at {name!r}; give what get_mask returns, as '
          'in apply_mask(params, mask) and summarize(mask, params).'
      )
