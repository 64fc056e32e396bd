# SPDX-License-Identifier: Apache-2.0
"""A function transformation that skips the zeros of masked weights.

The function is traced, and its jaxpr is evaluated with other rules: weights
with masks are followed through the operations that only change their layout,
dtype or place in control flow, and products at which they arrive multiply by
`sparse_matmul`. All other equations are evaluated as they are, on masked
weights. The rules are a table, `RULES`, of one function per kind of primitive.

This is how `jax.experimental.sparse.sparsify` works. Here masks are data.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend import source_info_util
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax.accelerator import jaxprs
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.explanation import Explanation
from spdf_jax.accelerator.explanation import Use
from spdf_jax.sparsity import trees

PyTree = Any


def skip_zeros(
    f: Callable[..., PyTree],
    *,
    argnums: int | Sequence[int] = 0,
    lowering: str = lowerings.NATIVE,
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
    lowering: Lowering of the products, see `sparse_matmul`.

  Returns:
    A function with the arguments of `f`, `mask` and `grad_mask`. `mask` is a
    tree of the structure of the weights, with `None` for leaves that are not
    sparsified, as `spdf_jax.get_mask` returns it; with several `argnums` a
    tuple of them. `grad_mask` is another, by default `mask`. Both are data:
    changes recompile nothing. Without `mask` the function is `f`. It composes
    with all transformations of JAX; apply `jax.grad` to it, rather than it to
    a gradient, whose products of activations have no mask.

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
    if mask is None and grad_mask is None:
      return f(*args, **kwargs)
    out, explanation = _call(
        f, argnums, lowering, args, kwargs, mask, grad_mask
    )
    if str(explanation) not in logged:
      logged.add(str(explanation))
      explanation.log()
    return out

  return skipping


def explain(
    f: Callable[..., PyTree],
    *,
    argnums: int | Sequence[int] = 0,
    lowering: str = lowerings.NATIVE,
) -> Callable[..., Explanation]:
  """Returns a function that tells which weights reach kernels in `skip_zeros`.

  Args:
    f: As for `skip_zeros`.
    argnums: As for `skip_zeros`.
    lowering: As for `skip_zeros`.

  Returns:
    A function with the arguments of the result of `skip_zeros`, which computes
    nothing and returns an `Explanation`: printed, a table with a row for each
    use of a weight.

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
    w       4 × 2    3       native
  """
  lowerings.check_lowering(lowering)

  def explained(
      *args: Any, mask: PyTree, grad_mask: PyTree = None, **kwargs: Any
  ) -> Explanation:
    found = []

    def call(params, mask, grad_mask):
      out, explanation = _call(
          f, argnums, lowering, _with_weights(args, argnums, params), kwargs,
          mask, grad_mask,
      )
      found.append(explanation)
      return out

    # Other arguments may be no arrays.
    jax.eval_shape(call, _weights(args, argnums), mask, grad_mask)
    return found[0]

  return explained


# The masks of a followed weight, and the values of an interpreted jaxpr.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
  """Masks of an array of weights; a pytree node.

  Attributes:
    product: `True` where a weight is kept.
    gradient: `True` where its gradient is computed.
    weights: Paths of the weights of which the array consists.
  """

  product: jax.Array
  gradient: jax.Array
  weights: frozenset[str] = dataclasses.field(metadata={'static': True})


class Value(NamedTuple):
  """A value in a jaxpr.

  Attributes:
    array: The array; with masks, its pruned entries are to be ignored.
    masks: Masks of weights that are followed; `None` for all other arrays.
  """

  array: Any
  masks: Masks | None = None

  def masked(self) -> Any:
    """Returns the array, with zeros in place of pruned weights."""
    if self.masks is None:
      return self.array
    return primitives.kept_weights(
        self.array, self.masks.product, self.masks.gradient
    )


class Interpreter:
  """The state of one evaluation.

  Attributes:
    lowering: Lowering of the products.
    uses: Uses of the weights, by weight and equation: bodies of control flow
      may be traced more than once.
  """

  def __init__(self, lowering: str):
    """Initializes an evaluation."""
    self.lowering = lowering
    self.uses: dict[tuple[str, int], Use] = {}

  def evaluate(
      self, jaxpr: Any, consts: Sequence[Any], values: Iterable[Value]
  ) -> list[Value]:
    """Evaluates an open jaxpr by the rules."""
    env = dict(zip(jaxpr.constvars, map(Value, consts)))
    env.update(zip(jaxpr.invars, values))

    def read(var):
      return Value(var.val) if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
      env.update(zip(eqn.outvars, self._equation(eqn, map(read, eqn.invars))))
    return list(map(read, jaxpr.outvars))

  def _equation(self, eqn: Any, operands: Iterable[Value]) -> list[Value]:
    values = list(operands)
    if any(value.masks for value in values):
      rule = RULES.get(eqn.primitive.name, _no_rule)
      stack = source_info_util.current_name_stack()
      with source_info_util.user_context(
          eqn.source_info.traceback,
          name_stack=stack + eqn.source_info.name_stack,
      ):
        results = rule(self, eqn, values)
        if not isinstance(results, str):
          return results
        self.note(eqn, values, reason=results)
        values = [Value(value.masked()) for value in values]
    return list(map(Value, jaxprs.evaluate(eqn, *(v.array for v in values))))

  def function(self, jaxpr: Any) -> Callable[..., list[Any]]:
    """Returns the function `(arrays, masks) -> arrays` of an inner jaxpr."""
    def call(arrays, masks):
      values = map(Value, arrays, masks)
      outs = self.evaluate(*jaxprs.opened(jaxpr), values)
      return [out.masked() for out in outs]

    return call

  def note(self, eqn: Any, values: Sequence[Value], **fields: Any) -> None:
    """Notes a use of all weights among the operands of an equation."""
    layer = str(source_info_util.current_name_stack())
    use = Use('', '', 0, '', '', layer)._replace(**fields)
    for value in values:
      for name in sorted(value.masks.weights) if value.masks else ():
        self.uses[name, id(eqn)] = use._replace(weight=name)


# The rules. Each is a function of the interpreter, an equation and the values
# of its operands, of which at least one has masks. It returns the values of the
# results, or a string, the reason why the equation must be evaluated as it is.

Rule = Callable[[Interpreter, Any, list[Value]], list[Value] | str]


def _no_rule(interpreter, eqn, values):
  return eqn.primitive.name


def _unchanged(interpreter, eqn, values):
  """Rule of operations on single entries that keep zeros, as a cast does."""
  outs = jaxprs.evaluate(eqn, *(value.array for value in values))
  if any(
      value.masks and not jnp.issubdtype(out.dtype, jnp.floating)
      for out, value in zip(outs, values)
  ):
    return eqn.primitive.name
  return [Value(out, value.masks) for out, value in zip(outs, values)]


def _moved(interpreter, eqn, values):
  """Rule of operations that move entries: they move the masks likewise."""
  outs = jaxprs.evaluate(eqn, *(value.array for value in values))

  def move(kind):
    operands = [
        x if not jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.ones(x.shape, bool) if masks is None
        else getattr(masks, kind)
        for x, masks in ((jnp.asarray(v.array), v.masks) for v in values)
    ]
    moved = eqn.primitive.bind(*operands, **eqn.params)
    return moved if eqn.primitive.multiple_results else [moved]

  weights = frozenset().union(*(v.masks.weights for v in values if v.masks))
  return [
      Value(out, Masks(product, gradient, weights))
      for out, product, gradient in zip(outs, move('product'), move('gradient'))
  ]


def _scaled(interpreter, eqn, values):
  """Rule of multiplication and division by anything: zeros stay zeros."""
  first = next(i for i, value in enumerate(values) if value.masks)
  if first and eqn.primitive.name == 'div':
    return 'div'
  outs = jaxprs.evaluate(eqn, *(value.masked() for value in values))
  masks = values[first].masks
  if outs[0].shape != masks.product.shape:
    return eqn.primitive.name
  # Kept weights, too, may have a derivative, in the other operand.
  return [Value(outs[0], dataclasses.replace(
      masks, gradient=masks.product | masks.gradient
  ))]


def _product(interpreter, eqn, values):
  """Rule of `dot_general`: multiplies by `sparse_matmul`."""
  (of_left, of_right), (batch_left, batch_right) = (
      eqn.params['dimension_numbers']
  )
  on_right = values[1].masks is not None
  sides = [
      (values[0], of_left, batch_left), (values[1], of_right, batch_right)
  ]
  (x, of_x, batch_x), (w, of_w, batch_w) = sides if on_right else sides[::-1]
  array = jnp.asarray(x.masked())
  out = eqn.outvars[0].aval
  reason = _unsupported(array, w.array, out, eqn.params)
  if reason:
    return reason

  def axes(ndim, contracted, batch):
    free = [a for a in range(ndim) if a not in (*contracted, *batch)]
    return list(batch), list(contracted), free

  shape = w.array.shape
  batch, contracted, free = axes(w.array.ndim, of_w, batch_w)
  stack, (inputs, outputs) = [shape[a] for a in batch], [
      math.prod(shape[a] for a in part) for part in (contracted, free)
  ]
  matrices = (math.prod(stack),) if stack else ()

  def matrix(a):
    a = jnp.transpose(a, [*batch, *contracted, *free])
    return a.reshape(*matrices, inputs, outputs)

  batch_x, contracted_x, free_x = axes(array.ndim, of_x, batch_x)
  tokens = jnp.transpose(array, [*batch_x, *free_x, *contracted_x])
  tokens = tokens.reshape(*matrices, -1, inputs)
  # A result wider than the operands is one of their products in its dtype.
  dtype = jnp.promote_types(
      jnp.promote_types(array.dtype, w.array.dtype), out.dtype
  )
  multiply = functools.partial(
      primitives.sparse_matmul, lowering=interpreter.lowering,
      layer=', '.join(sorted(w.masks.weights)),
  )
  operands = (
      tokens.astype(dtype), matrix(w.array).astype(dtype),
      matrix(w.masks.product), matrix(w.masks.gradient),
  )
  y = (jax.vmap if stack else lambda f: f)(
      lambda x, w, mask, grad_mask: multiply(x, w, mask, grad_mask=grad_mask)
  )(*operands).astype(out.dtype)
  of_tokens = [array.shape[a] for a in free_x]
  y = y.reshape(*stack, *of_tokens, *(shape[a] for a in free))
  if not on_right:
    first = len(stack)
    y = jnp.moveaxis(
        y, range(first, first + len(of_tokens)), range(-len(of_tokens), 0)
    )
  interpreter.note(
      eqn, [x], reason='the other operand of a product is sparse'
  )
  interpreter.note(
      eqn, [w], product=' × '.join(map(str, (*stack, inputs, outputs))),
      tokens=tokens.shape[-2], kernels=interpreter.lowering,
  )
  return [Value(y)]


def _unsupported(x, w, out, params):
  """Returns why a product cannot be one of `sparse_matmul`, or `None`."""
  for dtype in (x.dtype, w.dtype, out.dtype):
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      return f'a product of {dtype}'
  if 0 in x.shape + w.shape:
    return 'a product with an empty axis'
  if params['out_sharding'] is not None:
    return 'a product with an out_sharding'
  explicit = jax.sharding.AxisType.Explicit
  if any(explicit in jax.typeof(a).sharding.mesh.axis_types for a in (x, w)):
    return 'explicit sharding'
  return None


def _sparse_product(interpreter, eqn, values):
  """Rule of a product by `sparse_matmul` itself: its masks are intersected."""
  x, w, mask, grad_mask = values
  if w.masks is None:
    return eqn.primitive.name
  interpreter.note(eqn, [x], reason='inputs of sparse_matmul')
  y = eqn.primitive.bind(
      x.masked(), w.array, mask.array & w.masks.product,
      grad_mask.array & w.masks.gradient, **eqn.params,
  )
  *stack, inputs, outputs = w.array.shape
  if eqn.params['transpose']:
    inputs, outputs = outputs, inputs
  interpreter.note(
      eqn, [w], product=' × '.join(map(str, (*stack, inputs, outputs))),
      tokens=x.array.size // inputs // math.prod(stack),
      kernels=eqn.params['lowering'],
  )
  return [Value(y)]


# Control flow: its inner jaxprs are evaluated with the same rules.


def _inlined(interpreter, eqn, values):
  """Rule of `jit` and other calls."""
  return interpreter.evaluate(*jaxprs.only_jaxpr(eqn), values)


def _remat(interpreter, eqn, values):
  policy = eqn.params['policy']
  run = jax.checkpoint(
      interpreter.function(eqn.params['jaxpr']),
      prevent_cse=eqn.params['prevent_cse'],
      policy=policy and functools.partial(_as_dot_general, policy),
  )
  return list(map(Value, run(*_parts(values))))


def _as_dot_general(policy, primitive, *args, **params):
  """Asks a policy of `remat` about the product that a sparse one replaces."""
  if primitive is primitives.sparse_matmul_p:
    x, w = args[:2]
    stack = tuple(range(w.ndim - 2))
    primitive, args = jax.lax.dot_general_p, args[:2]
    params = dict(
        dimension_numbers=(((x.ndim - 1,), (w.ndim - 2,)), (stack, stack)),
        precision=None, preferred_element_type=None, out_sharding=None,
    )
  return policy(primitive, *args, **params)


def _cond(interpreter, eqn, values):
  if eqn.params.get('branches_platforms'):
    return 'platform_dependent'
  branches = map(interpreter.function, eqn.params['branches'])
  out = jax.lax.switch(
      values[0].array, list(branches), *_parts(values[1:])
  )
  return list(map(Value, out))


def _scan(interpreter, eqn, values):
  inner, _ = jaxprs.only_jaxpr(eqn)
  consts, carry = jaxprs.scan_operands(eqn)
  first = consts + carry
  pairs = zip(inner.invars[consts:first], inner.outvars)
  values, kept = _loop(interpreter, eqn, values, consts, pairs)
  step = interpreter.function(eqn.params['jaxpr'])
  fixed, fixed_masks = _parts(values[:consts])

  def body(carried, x):
    arrays, masks = x
    constant = [kept.get(i, Value(c)) for i, c in enumerate(carried)]
    outs = step(
        [*fixed, *_parts(constant)[0], *arrays],
        [*fixed_masks, *_parts(constant)[1], *masks],
    )
    ends = [carried[i] if i in kept else outs[i] for i in range(carry)]
    return ends, outs[carry:]

  ends, ys = jax.lax.scan(
      body, _parts(values[consts:first])[0], _parts(values[first:]),
      length=eqn.params['length'], reverse=eqn.params['reverse'],
      unroll=eqn.params['unroll'],
  )
  ends = [kept.get(i, Value(end)) for i, end in enumerate(ends)]
  return [*ends, *map(Value, ys)]


def _while(interpreter, eqn, values):
  of_test = eqn.params['cond_nconsts']
  of_body = eqn.params['body_nconsts']
  first = of_test + of_body
  body, _ = jaxprs.opened(eqn.params['body_jaxpr'])
  pairs = zip(body.invars[of_body:], body.outvars)
  values, kept = _loop(interpreter, eqn, values, first, pairs)
  test = interpreter.function(eqn.params['cond_jaxpr'])
  step = interpreter.function(eqn.params['body_jaxpr'])

  def call(run, consts, carried):
    constant = [kept.get(i, Value(c)) for i, c in enumerate(carried)]
    return run(*_parts([*consts, *constant]))

  def body_of(carried):
    outs = call(step, values[of_test:first], carried)
    return [carried[i] if i in kept else x for i, x in enumerate(outs)]

  ends = jax.lax.while_loop(
      lambda carried: call(test, values[:of_test], carried)[0], body_of,
      _parts(values[first:])[0],
  )
  return [kept.get(i, Value(end)) for i, end in enumerate(ends)]


def _loop(interpreter, eqn, values, start, carry):
  """Masks the carry of a loop, but for weights that the body does not change.

  Args:
    interpreter: The interpreter.
    eqn: Equation of the loop.
    values: Values of its operands.
    start: Index of the carry in `values`.
    carry: Pairs of variables of the body, before and after an iteration.

  Returns:
    The values, and those of the unchanged weights, by their index in the carry.
  """
  values, kept = list(values), {}
  for i, (before, after) in enumerate(carry):
    value = values[start + i]
    if value.masks is None:
      continue
    if before is after:
      kept[i] = value
    else:
      interpreter.note(eqn, [value], reason=f'the carry of {eqn.primitive}')
      values[start + i] = Value(value.masked())
  return values, kept


def _shard_map(interpreter, eqn, values):
  params = eqn.params
  arrays, masks = _parts(values)
  specs = list(params['in_specs'])
  run = jax.shard_map(
      interpreter.function(params['jaxpr']),
      mesh=params['mesh'],
      in_specs=(specs, [m and spec for m, spec in zip(masks, specs)]),
      out_specs=list(params['out_specs']),
      axis_names=params['newly_manual_axes'],
      check_vma=params['check_vma'],
  )
  return list(map(Value, run(arrays, masks)))


def _parts(values):
  return [v.array for v in values], [v.masks for v in values]


_by_name = dict.fromkeys

RULES: dict[str, Rule] = {
    **_by_name((
        'convert_element_type', 'copy', 'copy_p', 'name', 'neg',
        'optimization_barrier', 'reduce_precision', 'stop_gradient',
    ), _unchanged),
    **_by_name((
        'all_gather', 'broadcast_in_dim', 'concatenate', 'dynamic_slice',
        'dynamic_update_slice', 'expand_dims', 'mesh_cast', 'pad', 'pcast',
        'pvary', 'reshape', 'reshard', 'rev', 'sharding_constraint', 'slice',
        'split', 'squeeze', 'stack', 'tile', 'transpose', 'unstack',
    ), _moved),
    **_by_name(('div', 'mul'), _scaled),
    'dot_general': _product,
    'sparse_matmul': _sparse_product,
    **_by_name(('call', 'closed_call', 'core_call', 'jit', 'pjit'), _inlined),
    **_by_name(('checkpoint', 'remat', 'remat2'), _remat),
    'cond': _cond,
    'scan': _scan,
    'while': _while,
    'shard_map': _shard_map,
}
"""Rules by the name of the primitive. An equation of any other primitive is
evaluated as it is, on masked weights."""


# From the arguments of a function to a jaxpr of its weights.


def _call(f, argnums, lowering, args, kwargs, mask, grad_mask):
  """Returns the result of `f`, and an explanation."""
  params = _weights(args, argnums)
  leaves, treedef = jax.tree.flatten(params)
  names = list(trees.by_name(params))
  masks = _matching(params, names, leaves, 'mask', mask)
  of_gradient = masks
  if grad_mask is not None:
    of_gradient = _matching(params, names, leaves, 'grad_mask', grad_mask)
  chosen = [i for i, m in enumerate(masks) if m is not None]
  others = [names[i] for i, m in enumerate(of_gradient)
            if (m is None) != (masks[i] is None)]
  if others:
    raise ValueError(
        f'mask and grad_mask do not select the same weights: only one has '
        f'{others[0]!r}; give both the same structure.'
    )

  def of_weights(weights):
    given = dict(zip(chosen, weights))
    filled = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
    filled = jax.tree.unflatten(treedef, filled)
    out = f(*_with_weights(args, argnums, filled), **kwargs)
    _check_arrays(out)
    return out

  closed, shapes = jax.make_jaxpr(of_weights, return_shape=True)(
      [leaves[i] for i in chosen]
  )
  _check_used(closed.jaxpr, [names[i] for i in chosen])
  interpreter = Interpreter(lowering)
  outs = interpreter.evaluate(closed.jaxpr, closed.consts, [
      Value(leaves[i], Masks(masks[i], of_gradient[i], frozenset([names[i]])))
      for i in chosen
  ])
  explanation = Explanation(
      tuple(names[i] for i in chosen), tuple(interpreter.uses.values())
  )
  outs = [out.masked() for out in outs]
  return jax.tree.unflatten(jax.tree.structure(shapes), outs), explanation


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
  for name, leaf, m in zip(names, leaves, masks):
    if m is None:
      continue
    found = getattr(m, 'dtype', type(m).__name__)
    if found != bool or not hasattr(m, 'shape'):
      raise TypeError(
          f'{argument} of {name!r} has dtype {found}; give booleans, e.g. '
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
  return [None if m is None else jnp.asarray(m) for m in masks]


def _check_arrays(out):
  leaves = jax.tree.leaves(out)
  wrong = [x for x in leaves if not hasattr(x, 'dtype')
           and not isinstance(x, (bool, int, float, complex))]
  if wrong or not leaves:
    found = type(wrong[0]).__name__ if wrong else out
    raise ValueError(
        f'skip_zeros got a function that returns {found}; let it return '
        'arrays.'
    )


def _check_used(jaxpr, names):
  """Raises ValueError if a jaxpr uses none of its operands."""
  used = {
      id(var) for eqn in jaxpr.eqns for var in eqn.invars
  } | set(map(id, jaxpr.outvars))
  if not any(id(var) in used for var in jaxpr.invars):
    raise ValueError(
        f'the mask selects {", ".join(map(repr, names))}, which the function '
        'does not use; pass it the weights that it multiplies by, as arguments '
        'and not by closure.'
    )
