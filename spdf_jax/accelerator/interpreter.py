# SPDX-License-Identifier: Apache-2.0
"""The interpreter of `skip_zeros`, and its rules.

It evaluates a jaxpr, and follows weights with masks through the operations that
only change their layout, dtype or place in control flow. Products at which they
arrive multiply by `sparse_matmul`; all other equations are evaluated as they
are, on masked weights. `RULES` has a rule for each primitive.
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
from spdf_jax.accelerator import auto
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import jaxprs
from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.explanation import Use


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
  """Masks of an array of weights; a pytree node.

  Attributes:
    product: `True` where a weight is kept; `None` for a `ListedMatrix`.
    gradient: `True` where its gradient is computed, or `None`.
    weights: Paths of the weights of which the array consists.
  """

  product: Any
  gradient: Any
  weights: frozenset[str] = dataclasses.field(metadata={'static': True})


class Value(NamedTuple):
  """A value in a jaxpr.

  Attributes:
    array: The array; with masks, its pruned entries are to be ignored. Or the
      `ListedMatrix` in its place, which has lists instead of masks.
    masks: Masks of weights that are followed; `None` for all other arrays.
  """

  array: Any
  masks: Masks | None = None

  @property
  def is_listed(self) -> bool:
    """Whether the array is a `ListedMatrix`."""
    return isinstance(self.array, listed_matrix.ListedMatrix)

  def masked(self) -> Any:
    """Returns the array, with zeros in place of pruned weights."""
    if self.masks is None:
      return self.array
    if self.is_listed:
      return listed_matrix.dense_parameter(self.array)
    return primitives.kept_weights(
        self.array, self.masks.product, self.masks.gradient
    )


class Evaluation:
  """The state of one evaluation.

  Attributes:
    lowering: Lowering of the products.
    fast_bfloat16: Whether dense products, too, are replaced, see `skip_zeros`.
    uses: Uses of the weights, by weight and equation: bodies of control flow
      may be traced more than once.
  """

  def __init__(self, lowering: str, fast_bfloat16: bool = False):
    """Initializes an evaluation."""
    self.lowering = lowering
    self.fast_bfloat16 = fast_bfloat16
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
    rule: Rule | None = None
    if any(value.is_listed for value in values):
      rule = LISTED.get(eqn.primitive.name, _no_rule)
    elif any(value.masks for value in values):
      rule = RULES.get(eqn.primitive.name, _no_rule)
    elif self.fast_bfloat16:
      rule = FAST_BFLOAT16.get(eqn.primitive.name)
    if rule is not None:
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

  def layer(self) -> str:
    """Returns the name stack of the equation that is being evaluated."""
    return str(source_info_util.current_name_stack())

  def note(self, eqn: Any, values: Sequence[Value], **fields: Any) -> None:
    """Notes a use of all weights among the operands of an equation."""
    use = Use('', '', 0, '', '', self.layer())._replace(**fields)
    for value in values:
      for name in sorted(value.masks.weights) if value.masks else ():
        self.uses[name, id(eqn)] = use._replace(weight=name)


# The rules. Each is a function of the evaluation, an equation and the values
# of its operands, of which at least one has masks. It returns the values of the
# results, or a string, the reason why the equation must be evaluated as it is.

Rule = Callable[[Evaluation, Any, list[Value]], list[Value] | str]


def _no_rule(evaluation, eqn, values):
  return eqn.primitive.name


def _unchanged(evaluation, eqn, values):
  """Keeps the masks, for operations that keep zeros, such as a cast."""
  outs = jaxprs.evaluate(eqn, *(value.array for value in values))
  if any(
      value.masks and not jnp.issubdtype(out.dtype, jnp.floating)
      for out, value in zip(outs, values)
  ):
    return eqn.primitive.name
  return [Value(out, value.masks) for out, value in zip(outs, values)]


def _moved(evaluation, eqn, values):
  """Moves the masks as the equation moves the entries."""
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


def _scaled(evaluation, eqn, values):
  """Multiplies or divides weights by anything: zeros stay zeros."""
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


def _product(evaluation, eqn, values):
  """Multiplies by `sparse_matmul` in place of `dot_general`."""
  if eqn.params['out_sharding'] is not None:
    return 'a product with an out_sharding'
  # A result wider than the operands is their product in its dtype.
  dtype = functools.reduce(
      jnp.promote_types, [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
  )
  numbers = eqn.params['dimension_numbers']
  return _multiply(evaluation, eqn, values, numbers, dtype)


def _dense_product(evaluation, eqn, values):
  """Multiplies by `bf16_matmul.einsum` where XLA is slower."""
  del evaluation
  types = {var.aval.dtype.name for var in (*eqn.invars, *eqn.outvars)}
  if types != {'bfloat16'} or not bf16_matmul.is_faster(jnp.bfloat16):
    return eqn.primitive.name
  subscripts = bf16_matmul.subscripts(
      eqn.params['dimension_numbers'], [var.aval.ndim for var in eqn.invars]
  )
  return [Value(bf16_matmul.einsum(subscripts, *(v.array for v in values)))]


def _einsum(evaluation, eqn, values):
  """Multiplies by `sparse_matmul` in place of `bf16_matmul.einsum`."""
  numbers = bf16_matmul.dimension_numbers(eqn.params['subscripts'])
  if numbers is None:
    return eqn.primitive.name
  # Kernels sum in float32, too; callers round the result to 16 bits.
  dtype = eqn.invars[0].aval.dtype
  return _multiply(evaluation, eqn, values, numbers, dtype)


def _multiply(evaluation, eqn, values, dimension_numbers, dtype):
  """Multiplies by `sparse_matmul` in a dtype, or returns what it lacks."""
  contracted, batches = dimension_numbers
  side = int(values[1].masks is not None)  # That of the weights.
  x, w = values[1 - side], values[side]
  array, out = jnp.asarray(x.masked()), eqn.outvars[0].aval
  reason = _unsupported(array, w.array, out)
  if reason:
    return reason
  evaluation.note(eqn, [x], reason='the other operand of a product is sparse')

  stacked, summed, free = _axes(w.array, contracted[side], batches[side])
  stacked_x, summed_x, tokens = _axes(
      array, contracted[1 - side], batches[1 - side]
  )
  sizes = lambda a, axes: [a.shape[axis] for axis in axes]
  stack, inputs, outputs = (
      math.prod(sizes(w.array, axes)) for axes in (stacked, summed, free)
  )
  shape = (stack, inputs, outputs) if stacked else (inputs, outputs)
  array = jnp.transpose(array, stacked_x + tokens + summed_x)
  array = array.reshape(
      *shape[:-2], *array.shape[len(stacked):][:len(tokens)], inputs
  )
  matrix = lambda a: (
      jnp.transpose(a, stacked + summed + free).reshape(shape)
  )
  array = array.astype(dtype)
  multiply = lambda x, w, mask, grad_mask: primitives.sparse_matmul(
      x, w, mask, grad_mask=grad_mask, lowering=evaluation.lowering,
      layer=evaluation.layer(),
  )
  y = (jax.vmap(multiply) if stacked else multiply)(
      array, matrix(w.array).astype(dtype),
      matrix(w.masks.product), matrix(w.masks.gradient),
  )
  y = y.astype(out.dtype).reshape(
      *sizes(w.array, stacked), *array.shape[len(shape) - 2:-1],
      *sizes(w.array, free),
  )
  if not side:
    first = len(stacked)
    y = jnp.moveaxis(
        y, range(first, first + len(tokens)), range(-len(tokens), 0)
    )
  kernels, reason = auto.describe(evaluation.lowering, array, shape)
  evaluation.note(
      eqn, [w], product=' × '.join(map(str, shape)),
      tokens=array.size // inputs // stack, kernels=kernels, reason=reason,
  )
  return [Value(y)]


def _listed_product(evaluation, eqn, values):
  """Multiplies by `listed_matmul`, if the product sums over all inputs."""
  contracted, batches = eqn.params['dimension_numbers']
  side = int(values[1].is_listed)
  x, w = values[1 - side].masked(), values[side].array
  inputs, outputs, outputs_first = w.axes
  first = len(outputs) if outputs_first else 0
  pairs = sorted(zip(contracted[side], contracted[1 - side]))
  summed = [axis for _, axis in pairs]
  if len(w.shape) != 2 or any(batches) or (
      [axis for axis, _ in pairs] != [*range(first, first + len(inputs))]
  ):
    return 'a product with other axes of a listed matrix'
  x = jnp.moveaxis(x, summed, range(-len(summed), 0))
  tokens = x.shape[:-len(summed)]
  lowering = evaluation.lowering
  lowering = lowerings.NATIVE if lowering == auto.AUTO else lowering
  y = listed_matrix.listed_matmul(
      x.reshape(*tokens, w.inputs), w, lowering=lowering
  ).reshape(*tokens, *outputs)
  if not side:
    y = jnp.moveaxis(y, range(len(tokens)), range(-len(tokens), 0))
  evaluation.note(
      eqn, [values[side]], product=' × '.join(map(str, w.shape)),
      tokens=math.prod(tokens), kernels=f'lists, {lowering}',
  )
  return [Value(y.astype(eqn.outvars[0].aval.dtype))]


def _listed_cast(evaluation, eqn, values):
  """Leaves the values as they are: products sum in float32 in any case."""
  return values


def _axes(a, summed, stacked):
  """Returns the batch, contracted and other axes of an operand of a product."""
  free = [i for i in range(a.ndim) if i not in (*summed, *stacked)]
  return list(stacked), list(summed), free


def _unsupported(x, w, out):
  """Returns why a product cannot be one of `sparse_matmul`, or `None`."""
  for dtype in (x.dtype, w.dtype, out.dtype):
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      return f'a product of {dtype}'
  if 0 in x.shape + w.shape:
    return 'a product with an empty axis'
  explicit = jax.sharding.AxisType.Explicit
  if any(explicit in jax.typeof(a).sharding.mesh.axis_types for a in (x, w)):
    return 'explicit sharding'
  return None


def _sparse_product(evaluation, eqn, values):
  """Intersects the masks of a product by `sparse_matmul` itself."""
  x, w, mask, grad_mask = values
  if w.masks is None:
    return eqn.primitive.name
  evaluation.note(eqn, [x], reason='inputs of sparse_matmul')
  y = eqn.primitive.bind(
      x.masked(), w.array, mask.array & w.masks.product,
      grad_mask.array & w.masks.gradient, **eqn.params,
  )
  *stack, _, _ = w.array.shape
  lowering = eqn.params['lowering']
  kernels, reason = auto.describe(lowering, x.array, w.array.shape)
  evaluation.note(
      eqn, [w], product=' × '.join(map(str, w.array.shape)),
      tokens=x.array.size // x.array.shape[-1] // math.prod(stack),
      kernels=kernels, reason=reason,
  )
  return [Value(y)]


# Control flow: its inner jaxprs are evaluated with the same rules.


def _inlined(evaluation, eqn, values):
  """Evaluates the jaxpr of `jit` and other calls in place."""
  return evaluation.evaluate(*jaxprs.only_jaxpr(eqn), values)


def _remat(evaluation, eqn, values):
  policy = eqn.params['policy']
  run = jax.checkpoint(
      evaluation.function(eqn.params['jaxpr']),
      prevent_cse=eqn.params['prevent_cse'],
      policy=policy and functools.partial(_as_dot_general, policy),
  )
  return list(map(Value, run(*_parts(values))))


def _as_dot_general(policy, primitive, *args, **params):
  """Applies a policy of `remat` to the product that a sparse one replaces."""
  if primitive is primitives.sparse_matmul_p:
    x, w = args[:2]
    stack = tuple(range(w.ndim - 2))
    primitive, args = jax.lax.dot_general_p, args[:2]
    params = dict(
        dimension_numbers=(((x.ndim - 1,), (w.ndim - 2,)), (stack, stack)),
        precision=None, preferred_element_type=None, out_sharding=None,
    )
  return policy(primitive, *args, **params)


def _cond(evaluation, eqn, values):
  if eqn.params.get('branches_platforms'):
    return 'platform_dependent'
  branches = map(evaluation.function, eqn.params['branches'])
  out = jax.lax.switch(
      values[0].array, list(branches), *_parts(values[1:])
  )
  return list(map(Value, out))


def _scan(evaluation, eqn, values):
  inner, _ = jaxprs.only_jaxpr(eqn)
  consts, carry = jaxprs.scan_operands(eqn)
  first = consts + carry
  pairs = zip(inner.invars[consts:first], inner.outvars)
  values, kept = _loop(evaluation, eqn, values, consts, pairs)
  step = evaluation.function(eqn.params['jaxpr'])
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


def _while(evaluation, eqn, values):
  of_test = eqn.params['cond_nconsts']
  of_body = eqn.params['body_nconsts']
  first = of_test + of_body
  body, _ = jaxprs.opened(eqn.params['body_jaxpr'])
  pairs = zip(body.invars[of_body:], body.outvars)
  values, kept = _loop(evaluation, eqn, values, first, pairs)
  test = evaluation.function(eqn.params['cond_jaxpr'])
  step = evaluation.function(eqn.params['body_jaxpr'])

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


def _loop(evaluation, eqn, values, start, carry):
  """Masks the carry of a loop, but for weights that the body does not change.

  Args:
    evaluation: The evaluation.
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
      evaluation.note(eqn, [value], reason=f'the carry of {eqn.primitive}')
      values[start + i] = Value(value.masked())
  return values, kept


def _shard_map(evaluation, eqn, values):
  params = eqn.params
  arrays, masks = _parts(values)
  specs = list(params['in_specs'])
  run = jax.shard_map(
      evaluation.function(params['jaxpr']),
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
    'bf16_einsum': _einsum,
    'sparse_matmul': _sparse_product,
    **_by_name(('call', 'closed_call', 'core_call', 'jit', 'pjit'), _inlined),
    **_by_name(('checkpoint', 'remat', 'remat2'), _remat),
    'cond': _cond,
    'scan': _scan,
    'while': _while,
    'shard_map': _shard_map,
}
"""Rules by the name of the primitive, for operands with masks. An equation of
any other primitive is evaluated as it is, on masked weights."""

_CONTROL: dict[str, Rule] = {
    name: rule for name, rule in RULES.items()
    if rule in (_inlined, _remat, _cond, _scan, _while, _shard_map)
}

LISTED: dict[str, Rule] = _CONTROL | {
    'convert_element_type': _listed_cast, 'dot_general': _listed_product,
}
"""Rules for operands of which one is a `ListedMatrix`."""

FAST_BFLOAT16: dict[str, Rule] = _CONTROL | {'dot_general': _dense_product}
"""Rules for operands without masks, where dense products are replaced too."""
