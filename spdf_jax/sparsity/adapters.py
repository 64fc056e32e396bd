# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters, LoRA, which keep the zeros of sparse weights or not."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import Where

PyTree = Any

_is_adapter = lambda x: x is None or isinstance(x, Adapter)


class Adapter(NamedTuple):
  """Factors of the change of a matrix; their product is zero at first."""

  a: jax.Array
  """First factor, `[layers, inputs, rank]`, drawn from a normal distribution of
  variance 1 / inputs."""

  b: jax.Array
  """Second factor, `[layers, rank, outputs]`, initially zero."""


def create_adapters(
    key: jax.Array, params: PyTree, rank: int, *, where: Where | None = None
) -> PyTree:
  """Creates an adapter for every selected matrix.

  Args:
    key: A typed PRNG key.
    params: Parameters.
    rank: Rank of the changes, at most the inputs and outputs of a matrix.
    where: The matrices, as `sparsify` selects them.

  Returns:
    A tree of the structure of `params` with an `Adapter` in the dtype of each
    selected matrix, and `None` for other leaves.

  Raises:
    ValueError: the rank is not positive or too large for a matrix, or no leaf
      is selected.

  Example:
    >>> params = {'w': jnp.ones((4, 8)), 'bias': jnp.ones(8)}
    >>> adapters = create_adapters(jax.random.key(0), params, rank=2)
    >>> adapters['w'].a.shape, adapters['w'].b.shape, adapters['bias']
    ((1, 4, 2), (1, 2, 8), None)
  """
  axes = selection.select(_selector(where), params)
  layers = selection.to_layers(params, params, axes)
  for name, w in trees.by_name(layers).items():
    if not 0 < rank <= min(w.shape[1:]):
      raise ValueError(
          f'rank is {rank}, and {name!r} has {w.shape[1]} inputs and '
          f'{w.shape[2]} outputs; give 1 to {min(w.shape[1:])}.'
      )

  def create(w, leaf_key):
    depth, inputs, outputs = w.shape
    a = jax.random.normal(leaf_key, (depth, inputs, rank), jnp.float32)
    a = a / inputs**0.5
    return Adapter(
        a.astype(w.dtype), jnp.zeros((depth, rank, outputs), w.dtype)
    )

  return jax.tree.map(create, layers, masks.leaf_keys(key, layers))


def merge_adapters(
    params: PyTree,
    adapters: PyTree,
    mask: PyTree = None,
    *,
    scale: float = 2.0,
    where: Where | None = None,
) -> PyTree:
  r"""Adds the changes of adapters to the weights.

  A weight :math:`W` becomes :math:`W + s\, m \odot (A B)`, so that pruned
  weights stay exactly zero, or :math:`W + s\, A B` without a mask, which makes
  them nonzero. The gradient with respect to the adapters trains them in any
  loop, with `params` as constants.

  Args:
    params: Parameters, zero off the mask.
    adapters: Result of `create_adapters` for them.
    mask: The mask, as `get_mask` returns it; `None`: changes are dense.
    scale: The factor :math:`s`, in LoRA :math:`\alpha / r`.
    where: Argument of `create_adapters`.

  Returns:
    The merged parameters.

  Raises:
    ValueError: adapters are of matrices that the parameters do not have, or of
      another shape or dtype.

  References:
    Hu et al., `LoRA <https://arxiv.org/abs/2106.09685>`_, 2021;
    Munoz et al., `SQFT <https://arxiv.org/abs/2410.03750>`_, 2024, section 3

  Example:
    >>> params = {'w': jnp.array([[1., 0.], [0., 2.]])}
    >>> mask = {'w': params['w'] != 0}
    >>> ones = {'w': Adapter(jnp.ones((1, 2, 1)), jnp.ones((1, 1, 2)))}
    >>> merge_adapters(params, ones, mask)['w'].tolist()
    [[3.0, 0.0], [0.0, 4.0]]
  """
  axes = selection.select(_selector(where), params)
  _check(params, adapters, axes)
  changes_of = functools.partial(
      _changes, shapes=jax.eval_shape(lambda x: x, params), axes=axes,
      scale=scale,
  )
  changes = trees.auto_axes(
      changes_of, selection.selected(params, params, axes)
  )(adapters)
  if mask is not None:
    changes = masks.apply_mask(changes, mask)
  return jax.tree.map(
      lambda c, p: p if c is None else p + c, changes, params,
      is_leaf=lambda x: x is None,
  )


class LoraState(NamedTuple):
  """State of `lora`."""

  adapters: PyTree
  """The adapters, whose changes the parameters include."""

  inner_state: PyTree
  """State of the optimizer of the adapters."""


def map_adapters(
    f: Callable[..., jax.Array], opt_state: PyTree, *rest: PyTree
) -> PyTree:
  """Maps a function over the adapters in optimizer states.

  Args:
    f: Function of one array of an adapter, of every state.
    opt_state: An optimizer state, with or without `LoraState`.
    *rest: States of the same structure.

  Returns:
    The first state with the results in place of its adapters.
  """
  is_lora = lambda node: isinstance(node, LoraState)

  def of_node(node, *others):
    if not is_lora(node):
      return node
    adapters = [other.adapters for other in others]
    return node._replace(adapters=jax.tree.map(f, node.adapters, *adapters))

  return jax.tree.map(of_node, opt_state, *rest, is_leaf=is_lora)


def lora(
    inner: optax.GradientTransformation,
    rank: int,
    *,
    key: int | jax.Array,
    scale: float = 2.0,
    where: Where | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Restricts an optimizer to low-rank changes of the selected matrices.

  `inner` trains adapters, by the gradients of the weights, and the updates are
  the differences of their products. So the parameters are those of
  `merge_adapters` at every step, up to the rounding of sums, any training loop
  and export takes them, and the optimizer has moments of the adapters only.
  Other parameters do not change.

  Inside `sparsify(lora(…), static(…, init='nonzero'), …)` the changes are
  masked, and pruned weights stay exactly zero. Alone, or with `dense()`, they
  become nonzero.

  Args:
    inner: The optimizer of the adapters, e.g. `optax.adamw(1e-4)`.
    rank: Rank of the changes.
    key: Seed or typed PRNG key of the first factors.
    scale: Factor of the changes, in LoRA alpha / r.
    where: The matrices to change, as `sparsify` selects them.

  Returns:
    The optimizer; its `update` needs `params`.

  Raises:
    TypeError: `inner` is not an optimizer.
    ValueError: on `init`, as `create_adapters`; on `update`, if `params` is
      missing.

  References:
    Hu et al., `LoRA <https://arxiv.org/abs/2106.09685>`_, 2021;
    Munoz et al., `SQFT <https://arxiv.org/abs/2410.03750>`_, 2024, section 3

  Example:
    >>> import spdf_jax as spdf
    >>> params = {'w': jnp.eye(4)}
    >>> inner = lora(optax.sgd(0.1), 1, key=0)
    >>> tx = spdf.sparsify(inner, spdf.static(0.75, init='nonzero'), key=0)
    >>> state = tx.init(params)
    >>> updates, state = tx.update({'w': jnp.ones((4, 4))}, state, params)
    >>> (updates['w'] != 0).astype(int).tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
  """
  like_params.check_optimizer('inner', inner)
  inner = optax.with_extra_args_support(inner)
  where = _selector(where)
  key = masks.typed_key(key)

  def init_fn(params):
    adapters = create_adapters(key, params, rank, where=where)
    return LoraState(adapters, inner.init(adapters))

  def update_fn(updates, state, params=None, **extra_args):
    if params is None:
      raise ValueError(
          'lora needs params: call tx.update(grads, opt_state, params).'
      )
    axes = selection.select(where, params)
    chosen = selection.selected(updates, params, axes)
    shapes = jax.eval_shape(lambda x: x, params)

    def gradients(adapters, chosen):
      grads = selection.to_layers(chosen, shapes, axes)
      return jax.tree.map(
          lambda x, g: None if x is None else Adapter(
              scale * jnp.matmul(g, x.b.mT), scale * jnp.matmul(x.a.mT, g)
          ),
          adapters, grads, is_leaf=_is_adapter,
      )

    def differences(new, old):
      changes = functools.partial(
          _changes, shapes=shapes, axes=axes, scale=scale
      )
      return jax.tree.map(jnp.subtract, changes(new), changes(old))

    steps, inner_state = inner.update(
        trees.auto_axes(gradients, state.adapters)(state.adapters, chosen),
        state.inner_state, state.adapters, **extra_args,
    )
    adapters = optax.apply_updates(state.adapters, steps)
    deltas = trees.auto_axes(differences, chosen)(adapters, state.adapters)
    updates = jax.tree.map(
        lambda change, p: jnp.zeros_like(p) if change is None else change,
        deltas, params, is_leaf=lambda x: x is None,
    )
    return updates, LoraState(adapters, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _selector(where: Where | None) -> Where:
  return selectors.hidden_matrices if where is None else where


def _changes(
    adapters: PyTree, *, shapes: PyTree, axes: list[Any], scale: float
) -> PyTree:
  """Returns the changes of the selected matrices, `None` for other leaves."""
  products = jax.tree.map(
      lambda x: None if x is None else scale * jnp.matmul(x.a, x.b),
      adapters, is_leaf=_is_adapter,
  )
  return selection.from_layers(products, shapes, axes)


def _check(params: PyTree, adapters: PyTree, axes: list[Any]) -> None:
  """Raises ValueError unless adapters are those of the parameters."""
  layers = trees.by_name(selection.to_layers(params, params, axes))
  factors = {
      trees.path_name(path): x for path, x in
      jax.tree_util.tree_leaves_with_path(adapters, is_leaf=_is_adapter)
      if x is not None
  }
  for name in sorted(factors.keys() ^ layers.keys()):
    holder, other = 'adapters', 'parameters'
    if name in layers:
      holder, other = other, holder
    raise ValueError(
        f'the {holder} have a matrix {name!r} and the {other} do not; give '
        'merge_adapters those that create_adapters made for the parameters, '
        'and the same `where`.'
    )
  for name, (a, b) in factors.items():
    w = layers[name]
    if (a.shape[:2], b.shape[::2]) != (w.shape[:2], w.shape[::2]):
      raise ValueError(
          f'the adapter of {name!r} has factors {list(a.shape)} and '
          f'{list(b.shape)}, and the matrix is {list(w.shape)}; give the '
          'adapters of these parameters.'
      )
    if {a.dtype, b.dtype} != {w.dtype}:
      raise ValueError(
          f'the adapter of {name!r} is {a.dtype} and the matrix {w.dtype}; '
          'merge in the precision of the training, and cast the result.'
      )
