# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a jaxpr, with a rule for each primitive.

It follows weights with masks through the operations that only change their
layout, dtype or place in control flow. Products at which they arrive multiply
by `sparse_matmul`; all other equations are evaluated as they are, on masked
weights.
"""

from collections.abc import Callable, Container, Iterable, Sequence
import dataclasses
from typing import Any

from jax.extend import core
from jax.extend import source_info_util
import jax.numpy as jnp

from spdf_jax.accelerator import jaxprs
from spdf_jax.accelerator.explanation import Use
from spdf_jax.accelerator.interpreter import control_flow
from spdf_jax.accelerator.interpreter import products
from spdf_jax.accelerator.interpreter.values import dense
from spdf_jax.accelerator.interpreter.values import Masks
from spdf_jax.accelerator.interpreter.values import Value


class Evaluation:
  """The state of one evaluation.

  Attributes:
    lowering: Lowering of the products.
    fast_bfloat16: Whether dense products, too, are replaced, see `skip_zeros`.
    uses: Uses of the weights, by weight and equation or jaxpr: bodies of
      control flow may be traced more than once.
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
      rule = MASKED.get(eqn.primitive.name, _no_rule)
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
        values = list(map(Value, map(dense, eqn.invars, values)))
    return list(map(Value, jaxprs.evaluate(eqn, *(v.array for v in values))))

  def function(
      self, jaxpr: Any, owner: Any, kept: Container[int] = ()
  ) -> Callable[..., list[Any]]:
    """Returns the function `(arrays, masks) -> arrays` of an inner jaxpr.

    Args:
      jaxpr: The inner jaxpr.
      owner: Primitive whose results are those of the jaxpr, for explanations.
      kept: Indices of results that are not used.
    """
    def call(arrays, masks):
      inner, consts = jaxprs.opened(jaxpr)
      outs = self.evaluate(inner, consts, map(Value, arrays, masks))
      used = [out for i, out in enumerate(outs) if i not in kept]
      self.note(jaxpr, used, reason=f'a result of {owner}')
      return list(map(dense, inner.outvars, outs))

    return call

  def layer(self) -> str:
    """Returns the name stack of the equation that is being evaluated."""
    return str(source_info_util.current_name_stack())

  def note(self, place: Any, values: Sequence[Value], **fields: Any) -> None:
    """Notes a use of all weights among values, by an equation or a jaxpr."""
    use = Use('', '', 0, '', '', self.layer())._replace(**fields)
    for value in values:
      for name in sorted(value.masks.weights) if value.masks else ():
        self.uses[name, id(place)] = use._replace(weight=name)


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

  weights = _weights(values)
  return [
      Value(out, Masks(product, gradient, weights))
      for out, product, gradient in zip(outs, move('product'), move('gradient'))
  ]


def _weights(values):
  return frozenset().union(*(v.masks.weights for v in values if v.masks))


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
      masks, gradient=masks.product | masks.gradient, weights=_weights(values)
  ))]


CONTROL_FLOW: dict[str, Rule] = {
    **dict.fromkeys(
        ('call', 'closed_call', 'core_call', 'jit', 'pjit'),
        control_flow.inlined,
    ),
    **dict.fromkeys(('checkpoint', 'remat', 'remat2'), control_flow.remat),
    'cond': control_flow.cond,
    'scan': control_flow.scan,
    'while': control_flow.while_,
    'shard_map': control_flow.shard_map,
}
"""Rules of control flow, for operands of all kinds."""

MASKED: dict[str, Rule] = CONTROL_FLOW | {
    **dict.fromkeys((
        'convert_element_type', 'copy', 'copy_p', 'name', 'neg',
        'optimization_barrier', 'reduce_precision', 'stop_gradient',
    ), _unchanged),
    **dict.fromkeys((
        'all_gather', 'broadcast_in_dim', 'concatenate', 'dynamic_slice',
        'dynamic_update_slice', 'expand_dims', 'mesh_cast', 'pad', 'pcast',
        'pvary', 'reshape', 'reshard', 'rev', 'sharding_constraint', 'slice',
        'split', 'squeeze', 'stack', 'tile', 'transpose', 'unstack',
    ), _moved),
    **dict.fromkeys(('div', 'mul'), _scaled),
    'dot_general': products.masked,
    'bf16_einsum': products.einsum,
    'sparse_matmul': products.sparse,
}
"""Rules for operands with masks."""

LISTED: dict[str, Rule] = CONTROL_FLOW | {
    'convert_element_type': products.listed_cast,
    'dot_general': products.listed,
}
"""Rules for operands of which one is a `ListedMatrix`."""

FAST_BFLOAT16: dict[str, Rule] = CONTROL_FLOW | {'dot_general': products.dense}
"""Rules for operands without masks, where dense products are replaced too."""
