# SPDX-License-Identifier: Apache-2.0
"""Control flow: handlers of loops, branches and calls for the interpreter."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import numpy as np

from spdf_jax.accelerator.rounded import einsum
from spdf_jax.accelerator.wafer.equations import layer_of
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import result_of
from spdf_jax.accelerator.wafer.equations import strongest
from spdf_jax.accelerator.wafer.program import Branches
from spdf_jax.accelerator.wafer.program import join
from spdf_jax.accelerator.wafer.program import Program

Walked = tuple[Program, list[Operand]]
_MOST_ITERATIONS = 4096  # Longer loops are not unrolled.


def call(
    walker: Any, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks the only jaxpr of `jit`, `remat` or a custom derivative."""
  jaxpr, consts = _only_jaxpr(eqn)
  return walker.walk(jaxpr, consts, operands, path)


def rounded_einsum(
    walker: Any, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks the product of the reference of a `rounded_einsum`."""
  params = {k: eqn.params[k] for k in ('subscripts', 'dtype')}
  avals = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]
  closed = jax.make_jaxpr(functools.partial(einsum, **params))(*avals)
  return walker.walk(closed.jaxpr, closed.consts, operands, path)


def shard_map(
    walker: Any, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks the work of one shard and multiplies it by the number of shards."""
  jaxpr, consts = _only_jaxpr(eqn)
  inside = [
      o._replace(shape=v.aval.shape, known=None)
      for o, v in zip(operands, jaxpr.invars)
  ]
  walker.shards += 1
  program, outs = walker.walk(jaxpr, consts, inside, path)
  walker.shards -= 1
  mesh, axes = eqn.params['mesh'], eqn.params['newly_manual_axes']
  shards = int(np.prod([mesh.shape[a] for a in axes]))
  return program * shards, _with_spaces(eqn, outs)


def scan(
    walker: Any, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks every step if masks are scanned, else one step times the length."""
  jaxpr, consts = _only_jaxpr(eqn)
  length = eqn.params['length']
  # The carry is found by ranks, since scanned arrays have one more axis outside
  # than inside: the names of parameters that count it depend on JAX's version.
  carried = len(eqn.outvars) - _sliced(eqn.outvars, jaxpr.outvars)
  carry_end = len(eqn.invars) - _sliced(eqn.invars, jaxpr.invars)
  consts_end = carry_end - carried
  fixed = operands[:consts_end]
  carry = list(operands[consts_end:carry_end])
  xs = operands[carry_end:]
  if not length:
    return Program(), [*carry, *map(result_of, eqn.outvars[len(carry):])]
  known = any(x.known is not None and x.size > length for x in xs)
  steps = length if known and length <= _MOST_ITERATIONS else 1
  order = range(length)[::-1 if eqn.params['reverse'] else 1]
  parts = []
  for _, i in zip(range(steps), order):
    row = [
        x._replace(
            shape=x.shape[1:],
            known=None if x.known is None or steps == 1 < length
            else x.known[i],
        )
        for x in xs
    ]
    if steps == 1 < length:
      carry = [c._replace(known=None) for c in carry]
    program, outs = walker.walk(
        jaxpr, consts, [*fixed, *carry, *row], path
    )
    parts.append(program)
    carry = outs[:carried]
  program = join(parts) if steps == length else parts[0] * length
  return program, _with_spaces(eqn, outs)


def _with_spaces(eqn: Any, outs: Sequence[Operand]) -> list[Operand]:
  """Returns the results of an equation, with the memory spaces of `outs`."""
  return [
      result_of(v)._replace(space=o.space) for v, o in zip(eqn.outvars, outs)
  ]


def _sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
  """Returns the number of variables that a scan slices or stacks."""
  rank = lambda var: len(getattr(var.aval, 'shape', ()))
  return sum(rank(o) > rank(i) for o, i in zip(outside, inside))


def while_loop(
    walker: Any, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks all iterations if their number is known, else one times `trips`."""
  params = eqn.params
  test, test_consts = _opened(params['cond_jaxpr'])
  body, body_consts = _opened(params['body_jaxpr'])
  of_test = params['cond_nconsts']
  of_body = of_test + params['body_nconsts']
  carry = list(operands[of_body:])
  parts: list[Program] = []
  while len(parts) < _MOST_ITERATIONS:
    _, (again,) = walker.walk(
        test, test_consts, [*operands[:of_test], *carry], path
    )
    if again.known is None:
      break
    if not again.known:
      return join(parts), carry
    program, carry = walker.walk(
        body, body_consts, [*operands[of_test:of_body], *carry], path
    )
    parts.append(program)
  if walker.trips is None:
    raise ValueError(
        f'the length of a while loop in {layer_of(path)[0] or "the program"} '
        'depends on its data; give trips, the number of its iterations.'
    )
  unknown = [c._replace(known=None) for c in operands[of_body:]]
  tests, _ = walker.walk(
      test, test_consts, [*operands[:of_test], *unknown], path
  )
  program, _ = walker.walk(
      body, body_consts, [*operands[of_test:of_body], *unknown], path
  )
  return (program + tests) * walker.trips, unknown


def cond(
    walker: Any, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks one branch if the predicate is known, all of them otherwise."""
  index, *rest = operands
  branches = eqn.params['branches']
  name = walker.conds.setdefault(id(eqn), f'cond_{len(walker.conds)}')
  if index.known is not None:
    taken = int(np.clip(int(index.known), 0, len(branches) - 1))
    jaxpr, consts = _opened(branches[taken])
    return walker.walk(jaxpr, consts, rest, path)
  programs, outs = zip(*(
      walker.walk(*_opened(b), rest, path) for b in branches
  ))
  results = []
  for i, var in enumerate(eqn.outvars):
    space = strongest([o[i].space for o in outs])
    results.append(result_of(var)._replace(space=space))
  shares = _shares(walker.frequencies.get(name), name, len(branches))
  return Program(branches=(Branches(name, programs, shares),)), results


def _opened(closed: Any) -> tuple[Any, Sequence[Any]]:
  """Returns an open jaxpr and its constants."""
  return getattr(closed, 'jaxpr', closed), getattr(closed, 'consts', ())


def _only_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]]:
  for value in eqn.params.values():
    if hasattr(value, 'eqns') or hasattr(value, 'jaxpr'):
      return _opened(value)
  raise ValueError(f'{eqn.primitive} has no jaxpr to walk.')


def _shares(
    given: float | Sequence[float] | None, name: str, branches: int
) -> tuple[float, ...] | None:
  """Returns the frequency of each branch; a number applies to the last one."""
  if given is None:
    return None
  several = (
      (1 - given, given) if isinstance(given, (int, float)) else given
  )
  shares = tuple(map(float, several))
  if len(shares) != branches or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
    raise ValueError(
        f'the frequencies of {name} are {given}; give a share for each of its '
        f'{branches} branches, together 1.'
    )
  return shares


CONTROL = {
    'cond': cond,
    'rounded_einsum': rounded_einsum,
    'scan': scan,
    'shard_map': shard_map,
    'while': while_loop,
}
"""Handlers `(walker, equation, operands, path) -> (program, results)`, by
primitive."""
