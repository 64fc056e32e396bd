# SPDX-License-Identifier: Apache-2.0
"""The state of `sparsify`, and access to it in nested optimizer states."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax import packing
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import trees

PyTree = Any


class SparsifyState(NamedTuple):
  """State of `sparsify`, the only place where the mask is stored."""

  count: jax.Array  # type: ignore[assignment]  # hides tuple.count
  """Number of steps taken, int32."""

  mask: PyTree
  """`True` where a weight is kept; `None` for leaves that stay dense. Packed
  where the state is stored compactly, see `pack_state`."""

  key: jax.Array
  """Key data of the PRNG key given to `sparsify`; constant."""

  dense_grads: jax.Array
  """Whether the next step needs the gradients of pruned weights, bool."""

  inner_state: PyTree
  """State of the wrapped transformation."""

  algorithm_state: dict[str, PyTree] | tuple[()] = ()
  """State of the algorithm, trees like the parameters; `()`: it has none."""


def check_state(opt_state: PyTree) -> None:
  """Raises ValueError if something computed with the state of `sparsify`.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Raises:
    ValueError: booleans have become numbers.
  """
  for state in _sparsify_states(opt_state):
    dtype = jax.tree.leaves(state.dense_grads)[0].dtype
    if dtype != jnp.bool_:
      raise ValueError(
          f'opt_state.dense_grads has dtype {dtype}, not bool: a '
          'transformation around sparsify computed with its state, as '
          'optax.contrib.sam and optax.lookahead(reset_state=True) do; put '
          'that transformation inside: sparsify(sam(…), …).'
      )


def check_update(name: str, state: PyTree, params: PyTree | None) -> None:
  """Raises ValueError if an `update` got no parameters or a changed state.

  Args:
    name: Name of the transformation.
    state: State of the transformation.
    params: The parameters that it got.

  Raises:
    ValueError: the parameters are `None`, or see `check_state`.
  """
  if params is None:
    raise ValueError(
        f'{name} needs params: call tx.update(grads, opt_state, params).'
    )
  check_state(state)


def check_not_nested(inner_state: PyTree) -> None:
  """Raises ValueError if the state of an inner optimizer holds a mask.

  Args:
    inner_state: The state of the optimizer inside `sparsify` or
      `hard_threshold`.

  Raises:
    ValueError: there is a `SparsifyState` in it.
  """
  if any(map(_is_state, jax.tree.leaves(inner_state, is_leaf=_is_state))):
    raise ValueError(
        'sparsify and hard_threshold, or two of them, are one inside the '
        'other; use one, whose masks are those of the weights.'
    )


def stored_mask(opt_state: PyTree) -> PyTree:
  """Returns the mask in its stored form: booleans, or packed.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    The mask of `get_mask`, with packed leaves as `PackedMask`.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`.

  Example:
    >>> import spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> from spdf_jax.sparsity import storage
    >>> _, state = storage.pack_state(params, tx.init(params))
    >>> stored_mask(state)['w'].bits.shape
    (4, 1)
  """
  stored = [state.mask for state in _sparsify_states(opt_state)]
  merged = functools.reduce(_merge, stored)
  return jax.tree.map(
      lambda leaf: None if _is_empty(leaf) else leaf, merged, is_leaf=_is_empty
  )


def get_mask(opt_state: PyTree) -> PyTree:
  """Returns the mask from any nesting of optimizer states.

  If several `sparsify` each train some leaves, under `optax.partition`, their
  masks are merged, with `None` in place of a subtree that none of them trains.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    The mask, in the structure of the parameters: bool arrays, `True` where a
    weight is kept, and `None` for leaves that stay dense.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`.

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> int(get_mask(tx.init({'w': jnp.ones((4, 4))}))['w'].sum())
    8
  """
  return packing.map_packed(packing.unpack_mask, stored_mask(opt_state))


def dense_mask(opt_state: PyTree) -> PyTree:
  """Returns the mask of the parameters that are stored as dense arrays.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    The mask of `get_mask`, with `None` also for leaves that `pack_state` stores
    as the values of kept weights, which hold no pruned ones.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`.

  Example:
    >>> import spdf_jax as spdf
    >>> from spdf_jax.sparsity import storage
    >>> params = {'w': jnp.ones((2, 2))}
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> dense_mask(storage.pack_state(params, tx.init(params))[1])
    {'w': None}
  """
  return packing.map_packed(lambda _: None, stored_mask(opt_state))


def mask_paths(opt_state: PyTree) -> dict[str, tuple[str, ...]]:
  """Returns where an optimizer state, stored densely, holds each mask.

  Args:
    opt_state: The state of an optimizer.

  Returns:
    The names on the path in `opt_state` to the mask of each sparsified
    parameter, by the path of the parameter. Of two masks of one parameter it is
    that of `get_mask`, the first.

  Example:
    >>> import spdf_jax as spdf
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> tx = optax.chain(optax.scale(1.0), tx)
    >>> mask_paths(tx.init({'h': {'kernel': jnp.ones((4, 4))}}))
    {'h/kernel': ('1', 'mask', 'h', 'kernel')}
  """
  paths: dict[str, tuple[str, ...]] = {}
  for outer, state in jax.tree_util.tree_leaves_with_path(
      opt_state, is_leaf=_is_state
  ):
    if not _is_state(state):
      continue
    outer = (*outer, jax.tree_util.GetAttrKey('mask'))
    for path, _ in jax.tree_util.tree_leaves_with_path(state.mask):
      paths.setdefault(
          trees.path_name(path), trees.path_parts((*outer, *path))
      )
  return paths


def has_algorithm_state(opt_state: PyTree) -> bool:
  """Returns whether an algorithm in an optimizer state has a state."""
  return any(state.algorithm_state for state in _sparsify_states(opt_state))


def get_dense_grads(opt_state: PyTree) -> jax.Array:
  """Returns whether the next step needs the gradients of pruned weights.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    A bool scalar: true if any `sparsify` in `opt_state` needs them.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`.

  Example:
    RigL needs them at its mask updates, of which step 0 is one here:

    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> algorithm = spdf.rigl(
    ...     0.5, update_every=10, update_from=0, update_until=20)
    >>> tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
    >>> bool(get_dense_grads(tx.init({'w': jnp.ones((4, 4))})))
    True
  """
  needs = [state.dense_grads for state in _sparsify_states(opt_state)]
  return jnp.any(jnp.stack(needs))


def get_masks(opt_state: PyTree) -> dict[str, PyTree]:
  """Returns the masks of products and of gradients, arguments of `skip_zeros`.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    `'mask'`, as `get_mask` returns it, and `'grad_mask'`, which is all `True`
    if the next step needs the gradients of pruned weights.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`.

  Example:
    >>> import spdf_jax as spdf
    >>> loss_fn = spdf.skip_zeros(lambda params, x: jnp.sum(x @ params['w']))
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> params, x = {'w': jnp.ones((4, 4))}, jnp.ones((1, 4))
    >>> masks = get_masks(tx.init(params))
    >>> int(jax.grad(loss_fn)(params, x, **masks)['w'].sum())
    8
  """
  mask = get_mask(opt_state)
  dense_grads = get_dense_grads(opt_state)
  grad_mask = jax.tree.map(lambda m: m | dense_grads, mask)
  return {'mask': mask, 'grad_mask': grad_mask}


def densify(opt_state: PyTree) -> PyTree:
  """Sets every mask to all `True`; moments and counters are unchanged.

  The next mask update of the algorithm, if there is one, prunes again; `join`
  it with `dense()` to make training dense from a step on.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    The state with which the same optimizer continues densely.

  Raises:
    ValueError: there is no `SparsifyState` in `opt_state`, or `pack_state`
      stores it compactly.

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> state = densify(tx.init({'w': jnp.ones((4, 4))}))
    >>> bool(get_mask(state)['w'].all())
    True
  """
  check_dense(opt_state)
  all_true = lambda mask: jax.tree.map(jnp.ones_like, mask)
  return jax.tree.map(
      lambda s: s._replace(mask=all_true(s.mask)) if _is_state(s) else s,
      opt_state, is_leaf=_is_state,
  )


def check_dense(opt_state: PyTree) -> None:
  """Raises ValueError if an optimizer state was packed by `pack_state`."""
  if packing.is_packed(stored_mask(opt_state)):
    raise ValueError(
        'the optimizer state is stored compactly; unpack it first, with '
        'spdf_jax.sparsity.storage.unpack_state(params, opt_state).'
    )


_is_state = lambda x: isinstance(x, SparsifyState)
_is_empty = lambda x: x is None or isinstance(x, optax.MaskedNode)


def _merge(one: PyTree, other: PyTree) -> PyTree:
  """Merges two masks, each with leaves that `optax.partition` left empty."""
  if _is_empty(one):
    return other
  if _is_empty(other) or jax.tree_util.all_leaves([one]):
    return one
  treedef: Any
  children, treedef = jax.tree.flatten(one, is_leaf=lambda x: x is not one)
  return treedef.unflatten(map(_merge, children, treedef.flatten_up_to(other)))


def _sparsify_states(opt_state: PyTree) -> list[SparsifyState]:
  leaves = jax.tree.leaves(opt_state, is_leaf=_is_state)
  states = [leaf for leaf in leaves if _is_state(leaf)]
  if not states:
    raise ValueError(
        'the optimizer state holds no SparsifyState; wrap the optimizer with '
        'spdf_jax.sparsify and pass the state of the wrapped optimizer.'
    )
  return states


def check_zeros(params: PyTree, opt_state: PyTree) -> None:
  """Raises an error unless all pruned weights are exactly zero.

  Call it in a test of a training loop: some transformations around `sparsify`
  change its updates, such as `optax.ema`. Parameters that `pack_state` stores
  compactly hold no pruned weights and pass.

  Args:
    params: The parameters.
    opt_state: The state of an optimizer that contains `sparsify`.

  Raises:
    ValueError: pruned weights are not zero (the message names their leaves), a
      transformation around `sparsify` computed with its state, or there is no
      `SparsifyState` in `opt_state`.

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> state = tx.init(params)
    >>> check_zeros(spdf.apply_mask(params, get_mask(state)), state)
    >>> check_zeros(params, state)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: pruned weights are not zero: 12 in 'w'; ...
  """
  check_state(opt_state)
  count = lambda m, p: jnp.sum((p != 0) & ~m, dtype=jnp.int32)
  counts = {
      name: int(number)
      for name, number in trees.by_name(
          masks.map_masked(count, dense_mask(opt_state), params)
      ).items()
  }
  wrong = [f'{n:,} in {name!r}' for name, n in counts.items() if n]
  if wrong:
    raise ValueError(
        f'pruned weights are not zero: {", ".join(wrong)}; mask the initial '
        'parameters, apply_mask(params, get_mask(opt_state)), and put '
        'transformations that change updates inside sparsify.'
    )
