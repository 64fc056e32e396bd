# SPDX-License-Identifier: Apache-2.0
"""Rules of control flow: inner jaxprs are evaluated with the same rules."""

import functools
from typing import Any

import jax

from spdf_jax.accelerator import jaxprs
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.interpreter.values import arrays_and_masks
from spdf_jax.accelerator.interpreter.values import dense
from spdf_jax.accelerator.interpreter.values import Value


def inlined(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value]:
  """Evaluates the jaxpr of `jit` and other calls in place."""
  return evaluation.evaluate(*jaxprs.only_jaxpr(eqn), values)


def remat(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value]:
  """Rematerializes the inner jaxpr, by the same policy."""
  policy = eqn.params['policy']
  run = jax.checkpoint(
      evaluation.function(eqn.params['jaxpr'], 'checkpoint'),
      prevent_cse=eqn.params['prevent_cse'],
      policy=policy and functools.partial(_as_dot_general, policy),
  )
  return list(map(Value, run(*arrays_and_masks(values))))


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


def cond(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Evaluates the branches; the index has no masks."""
  if eqn.params.get('branches_platforms'):
    return 'platform_dependent'
  branches = [
      evaluation.function(branch, eqn.primitive)
      for branch in eqn.params['branches']
  ]
  out = jax.lax.switch(
      values[0].array, branches, *arrays_and_masks(values[1:])
  )
  return list(map(Value, out))


def scan(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value]:
  """Evaluates a `scan`; weights among its constants and inputs keep masks."""
  inner, _ = jaxprs.only_jaxpr(eqn)
  consts, carry = jaxprs.scan_operands(eqn)
  first = consts + carry
  pairs = zip(inner.invars[consts:first], inner.outvars)
  values, kept = _loop(evaluation, eqn, values, consts, pairs)
  step = evaluation.function(eqn.params['jaxpr'], eqn.primitive, kept)
  fixed, fixed_masks = arrays_and_masks(values[:consts])

  def body(carried, x):
    arrays, masks = x
    constant = [kept.get(i, Value(c)) for i, c in enumerate(carried)]
    outs = step(
        [*fixed, *arrays_and_masks(constant)[0], *arrays],
        [*fixed_masks, *arrays_and_masks(constant)[1], *masks],
    )
    ends = [carried[i] if i in kept else outs[i] for i in range(carry)]
    return ends, outs[carry:]

  ends, ys = jax.lax.scan(
      body, arrays_and_masks(values[consts:first])[0],
      arrays_and_masks(values[first:]), length=eqn.params['length'],
      reverse=eqn.params['reverse'], unroll=eqn.params['unroll'],
  )
  ends = [kept.get(i, Value(end)) for i, end in enumerate(ends)]
  return [*ends, *map(Value, ys)]


def while_(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Evaluates a `while_loop`; weights among its constants keep masks."""
  condition, _ = jaxprs.opened(eqn.params['cond_jaxpr'])
  if condition.outvars[0].aval.shape:  # Only jax.vmap makes such equations.
    return 'a while_loop with a batch of conditions'
  of_test = eqn.params['cond_nconsts']
  of_body = eqn.params['body_nconsts']
  first = of_test + of_body
  body, _ = jaxprs.opened(eqn.params['body_jaxpr'])
  pairs = zip(body.invars[of_body:], body.outvars)
  values, kept = _loop(evaluation, eqn, values, first, pairs)
  test = evaluation.function(eqn.params['cond_jaxpr'], eqn.primitive)
  step = evaluation.function(eqn.params['body_jaxpr'], eqn.primitive, kept)

  def call(run, consts, carried):
    constant = [kept.get(i, Value(c)) for i, c in enumerate(carried)]
    return run(*arrays_and_masks([*consts, *constant]))

  def body_of(carried):
    outs = call(step, values[of_test:first], carried)
    return [carried[i] if i in kept else x for i, x in enumerate(outs)]

  ends = jax.lax.while_loop(
      lambda carried: call(test, values[:of_test], carried)[0], body_of,
      arrays_and_masks(values[first:])[0],
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
      values[start + i] = Value(dense(eqn.invars[start + i], value))
  return values, kept


def shard_map(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value]:
  """Evaluates the inner jaxpr on shards of weights and masks alike."""
  params = eqn.params
  arrays, masks = arrays_and_masks(values)
  specs = list(params['in_specs'])
  run = jax.shard_map(
      evaluation.function(params['jaxpr'], eqn.primitive),
      mesh=params['mesh'],
      in_specs=(specs, [m and spec for m, spec in zip(masks, specs)]),
      out_specs=list(params['out_specs']),
      axis_names=params['newly_manual_axes'],
      check_vma=params['check_vma'],
  )
  return list(map(Value, run(arrays, masks)))
