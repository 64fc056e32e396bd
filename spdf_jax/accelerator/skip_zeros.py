# SPDX-License-Identifier: Apache-2.0
"""A function transformation that skips the zeros of masked weights.

The function is traced, and its jaxpr is evaluated by the rules of
`accelerator.interpreter`. `jax.experimental.sparse.sparsify` works likewise;
here masks are data, and control flow and derivatives of any order are kept.
"""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax.accelerator import auto
from spdf_jax.accelerator.explanation import Explanation
from spdf_jax.accelerator.interpreter.evaluation import Evaluation
from spdf_jax.accelerator.interpreter.values import arrays_and_masks
from spdf_jax.accelerator.interpreter.values import Masks
from spdf_jax.accelerator.interpreter.values import Value
from spdf_jax.accelerator.listed_matrix import ListedMatrix
from spdf_jax.sparsity import trees

PyTree = Any


def skip_zeros(
    f: Callable[..., PyTree],
    *,
    argnums: int | Sequence[int] = 0,
    lowering: str = auto.AUTO,
    fast_bfloat16: bool = False,
) -> Callable[..., PyTree]:
  r"""Makes a function skip the zeros of its weights, whatever its model is.

  The result is a function with two more arguments, `mask` and `grad_mask`. Its
  value is that of `f` at the kept weights, its gradient that at `grad_mask`:

  .. math::
    g(w) = f(m \odot w), \qquad \nabla g(w) = m_g \odot \nabla f(m \odot w)

  Matrix products with these weights are computed by `sparse_matmul`. The log
  says how many weights reach kernels, and a warning names those that stay dense
  and the primitive that stopped them; see `explain`.

  Args:
    f: Function, such as the loss of a model in Flax, Equinox or plain JAX. It
      must take the weights as an argument and return arrays.
    argnums: Position of the argument with the weights, or positions of several.
    lowering: Lowering of the products, see `sparse_matmul`. `'auto'`: native
      kernels where they are faster than XLA's dense products on this processor,
      by the sizes of each product and the sparsity of its mask.
    fast_bfloat16: Whether products of bfloat16 without masks are computed by
      `bf16_matmul.einsum` where XLA:CPU is slow, which rounds them likewise.

  Returns:
    A function with the arguments of `f`, `mask` and `grad_mask`. `mask` is a
    tree of the structure of the weights, with `None` for leaves that are not
    sparsified, as `spdf_jax.get_mask` returns it; with several `argnums` a
    tuple of them. `grad_mask` is another, by default `mask`. Both are data:
    changes recompile nothing. Without `mask` the function is `f`, whose own
    arguments must not have these names; but for the few tokens of generation,
    weights may be those of `list_params`, without masks and gradients. It
    composes with all transformations of JAX; apply `jax.grad` to it, rather
    than it to a gradient, whose products of activations have no mask.

  Raises:
    ValueError: the lowering is unknown. When the returned function is called: a
      mask does not fit the weights, `argnums` is out of range, `f` uses no
      weight that has a mask, or it returns no array.
    TypeError: when the returned function is called: a mask is not boolean.

  Example:
    >>> w = jnp.array([[3., 0.], [4., 5.]])
    >>> loss = lambda params, x: jnp.sum(x @ params['w'])
    >>> fast = skip_zeros(loss)
    >>> x, mask = jnp.array([[1., 2.]]), {'w': w != 0}
    >>> jax.grad(fast)({'w': w}, x, mask=mask)['w'].tolist()
    [[1.0, 0.0], [2.0, 2.0]]
  """
  lowerings.check_lowering(lowering)
  logged: set[str] = set()

  @functools.wraps(f)
  def skipping(
      *args: Any, mask: PyTree = None, grad_mask: PyTree = None, **kwargs: Any
  ) -> PyTree:
    if mask is None and grad_mask is not None:
      raise ValueError('grad_mask is given without mask; give both.')
    if mask is None and not _has_lists(_weights(args, argnums)):
      return f(*args, **kwargs)
    evaluation = Evaluation(lowering, fast_bfloat16)
    out, changes, explanation = _call(
        f, argnums, evaluation, args, kwargs, mask, grad_mask
    )
    for variable, value in changes:
      variable.set_value(value)
    if str(explanation) not in logged:
      logged.add(str(explanation))
      explanation.log()
    return out

  skipping.__signature__ = _signature(f)  # type: ignore[attr-defined]
  return skipping


def explain(
    f: Callable[..., PyTree],
    *,
    argnums: int | Sequence[int] = 0,
    lowering: str = auto.AUTO,
) -> Callable[..., Explanation]:
  """Returns a function that tells which weights reach kernels in `skip_zeros`.

  Args:
    f: As for `skip_zeros`.
    argnums: As for `skip_zeros`.
    lowering: As for `skip_zeros`.

  Returns:
    A function with the arguments of the result of `skip_zeros`, or their
    shapes, which computes nothing and returns an `Explanation`: printed, a
    table with a row for each use of a weight.

  Raises:
    ValueError: as `skip_zeros`.
    TypeError: as `skip_zeros`.

  Example:
    >>> params = {'w': jnp.ones((4, 2)), 'e': jnp.ones((3, 4))}
    >>> f = lambda params, i: params['e'][i] @ params['w']
    >>> mask = jax.tree.map(lambda x: x != 0, params)
    >>> print(explain(f)(params, jnp.array([0, 2, 1]), mask=mask))
    weight  product  tokens  kernels  dense because
    e                        –        gather
    w       4 × 2    3       –        fewer than 64 tokens
  """
  lowerings.check_lowering(lowering)

  def explained(
      *args: Any, mask: PyTree = None, grad_mask: PyTree = None, **kwargs: Any
  ) -> Explanation:
    operands = args, kwargs, mask, grad_mask
    leaves, treedef = jax.tree.flatten(operands)
    is_shape = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    explanations = []

    def call(arrays):
      given = iter(arrays)
      filled = [next(given) if is_s else x for x, is_s in zip(leaves, is_shape)]
      # Copies of NNX modules share no variables, so it copies for shapes only.
      args, kwargs, mask, grad_mask = (
          jax.tree.unflatten(treedef, filled) if arrays else operands
      )
      out, _, explanation = _call(
          f, argnums, Evaluation(lowering), args, kwargs, mask, grad_mask
      )
      explanations.append(explanation)
      return out

    jax.eval_shape(call, [x for x, is_s in zip(leaves, is_shape) if is_s])
    return explanations[0]

  return explained


def _signature(f):
  """Returns the signature of `f` with `mask` and `grad_mask`."""
  signature = inspect.signature(f)
  kept = [
      parameter for name, parameter in signature.parameters.items()
      if name not in ('mask', 'grad_mask')
  ]
  last = len(kept) - any(p.kind == p.VAR_KEYWORD for p in kept)
  masks = [
      inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
      for name in ('mask', 'grad_mask')
  ]
  return signature.replace(parameters=[*kept[:last], *masks, *kept[last:]])


# From the arguments of a function to a jaxpr of its weights.


def _call(f, argnums, evaluation, args, kwargs, mask, grad_mask):
  """Returns the result of `f`, variables with new values, an explanation."""
  params = _weights(args, argnums)
  boxes = _boxes(params)
  paths, treedef = jax.tree_util.tree_flatten_with_path(
      params, is_leaf=_is_listed
  )
  names = [trees.path_name(path) for path, _ in paths]
  leaves = [leaf for _, leaf in paths]
  if mask is None:
    followed = {
        i: Value(leaf, Masks(None, None, frozenset([names[i]])))
        for i, leaf in enumerate(leaves) if _is_listed(leaf)
    }
  else:
    followed = _with_masks(params, names, leaves, mask, grad_mask)

  def of_weights(weights):
    given = dict(zip(followed, weights))
    filled = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
    copy = jax.tree.unflatten(treedef, filled)
    out = f(*_with_weights(args, argnums, copy), **kwargs)
    _check_arrays(out)
    return out, _changed(names, boxes, filled, copy)

  closed, shapes = jax.make_jaxpr(of_weights, return_shape=True)([
      jax.ShapeDtypeStruct(leaves[i].parameter_shape, leaves[i].values.dtype)
      if _is_listed(leaves[i]) else leaves[i] for i in followed
  ])
  chosen = tuple(names[i] for i in followed)
  _check_used(closed.jaxpr, chosen)
  outs = evaluation.function(closed, 'the function')(
      *arrays_and_masks(list(followed.values()))
  )
  out, changed = jax.tree.unflatten(jax.tree.structure(shapes), outs)
  return (
      out, [(boxes[i], value) for i, value in changed.items()],
      Explanation(chosen, tuple(evaluation.uses.values())),
  )


def _is_listed(x):
  return isinstance(x, ListedMatrix)


def _has_lists(params):
  return any(map(_is_listed, jax.tree.leaves(params, is_leaf=_is_listed)))


def _with_masks(params, names, leaves, mask, grad_mask):
  """Returns the weights with masks, by their index among the leaves."""
  if _has_lists(params):
    raise ValueError(
        'the weights are those of list_params, which include their mask; omit '
        'mask.'
    )
  masks = _matching(params, names, leaves, 'mask', mask)
  of_gradient = masks
  if grad_mask is not None:
    of_gradient = _matching(params, names, leaves, 'grad_mask', grad_mask)
  for name, m, g in zip(names, masks, of_gradient):
    if (m is None) != (g is None):
      raise ValueError(
          f'mask and grad_mask do not select the same weights: only one has '
          f'{name!r}; give both the same structure.'
      )
  return {
      i: Value(leaf, Masks(m, g, frozenset([name])))
      for i, (leaf, m, g, name) in enumerate(
          zip(leaves, masks, of_gradient, names)
      ) if m is not None
  }


def _weights(args, argnums):
  try:
    if isinstance(argnums, int):
      return args[argnums]
    return tuple(args[i] for i in argnums)
  except IndexError:
    raise ValueError(
        f'argnums is {argnums} and the function got {len(args)} positional '
        'arguments; pass the weights by position, at argnums.'
    ) from None


def _with_weights(args, argnums, params):
  args = list(args)
  pairs = [(argnums, params)] if isinstance(argnums, int) else (
      zip(argnums, params)
  )
  for i, x in pairs:
    args[i] = x
  return args


def _matching(params, names, leaves, argument, mask):
  """Returns the mask of each leaf, or `None`; checks shapes and dtypes."""
  try:
    masks = trees.matching_leaves(mask, params)
  except ValueError as error:
    raise ValueError(
        f'{argument} does not fit the weights: {error}'
    ) from error
  for i, (name, leaf) in enumerate(zip(names, leaves)):
    boxed = jax.tree.leaves(masks[i])  # E.g. in a flax.linen.Partitioned.
    masks[i] = m = boxed[0] if len(boxed) == 1 else masks[i]
    if m is None:
      continue
    dtype = getattr(m, 'dtype', type(m).__name__)
    if str(dtype) != 'bool' or not hasattr(m, 'shape'):
      raise TypeError(
          f'{argument} of {name!r} has dtype {dtype}; give booleans, e.g. '
          'mask != 0, and None for weights that are not sparsified.'
      )
    shape = jnp.shape(leaf)
    if m.shape != shape or not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
          f'{argument} of {name!r} is {list(m.shape)} and the weight is '
          f'{leaf.dtype}{list(shape)}; give a mask of the shape of a weight of '
          'floating-point numbers.'
      )
  if all(m is None for m in masks):
    raise ValueError(
        f'{argument} selects no weight, all its leaves are None; give the '
        'mask of the weights, as spdf_jax.get_mask(opt_state) returns it.'
    )
  masks = _of_shared(params, masks)
  return [None if m is None else jnp.asarray(m) for m in masks]


def _of_shared(params, masks):
  """Returns the masks, also of variables that NNX's states list elsewhere."""
  boxes = _boxes(params)
  of_box = {
      id(box): m for box, m in zip(boxes, masks)
      if m is not None and trees.is_box(box)
  }
  return [
      of_box.get(id(box)) if m is None else m for box, m in zip(boxes, masks)
  ]


def _boxes(params):
  """Returns the variable of each leaf, or the leaf if it is in none."""
  return [
      box for box in jax.tree.leaves(
          params, is_leaf=lambda x: trees.is_box(x) or _is_listed(x)
      )
      for _ in jax.tree.leaves(box, is_leaf=_is_listed)
  ]


def _changed(names, boxes, before, copy):
  """Returns the new values of variables that `f` changed, by their index.

  NNX modules have state, such as averages of batch norm, and `f` changes that
  of a copy.
  """
  after = jax.tree.leaves(copy, is_leaf=_is_listed)
  if len(after) != len(before):
    raise ValueError(
        'the function adds variables to its model, as sow does, which '
        'skip_zeros cannot; return their values as results.'
    )
  changed = {
      i: new for i, (old, new) in enumerate(zip(before, after))
      if new is not old
  }
  for i in changed:
    # Each place of a shared variable has a copy of its own.
    is_shared = sum(boxes[j] is boxes[i] for j in changed) > 1
    if is_shared or not hasattr(type(boxes[i]), 'set_value'):
      what = 'a variable of several modules' if is_shared else 'no variable'
      raise ValueError(
          f'the function changes {names[i]!r} in place, which is {what}; '
          'return the new value as a result.'
      )
  return changed


def _check_arrays(out):
  leaves = jax.tree.leaves(out)
  wrong = [x for x in leaves if not hasattr(x, 'dtype')
           and not isinstance(x, (bool, int, float, complex))]
  if wrong or not leaves:
    returned = type(wrong[0]).__name__ if wrong else out
    raise ValueError(
        f'skip_zeros got a function that returns {returned}; let it return '
        'arrays.'
    )


def _check_used(jaxpr, names):
  """Raises ValueError if a jaxpr uses none of its operands, or has none."""
  used = {
      id(var) for eqn in jaxpr.eqns for var in eqn.invars
  } | set(map(id, jaxpr.outvars))
  if not any(id(var) in used for var in jaxpr.invars):
    raise ValueError(
        f'the mask selects {", ".join(map(repr, names))}, which the function '
        'does not use; pass it the weights that it multiplies by, as arguments '
        'and not by closure.'
    )
