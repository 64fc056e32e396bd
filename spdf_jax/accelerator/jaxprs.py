# SPDX-License-Identifier: Apache-2.0
"""Equations of jaxprs: their inner jaxprs, their operands, their evaluation.

Both interpreters use it: that of `skip_zeros`, and that of the modeled wafer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """Returns an open jaxpr and its constants, of an open or a closed one.

  Example:
    >>> import jax
    >>> opened(jax.make_jaxpr(abs)(1.0))[1]
    []
  """
  return getattr(jaxpr, 'jaxpr', jaxpr), getattr(jaxpr, 'consts', ())


def only_jaxpr(eqn: core.JaxprEqn) -> tuple[Any, Sequence[Any]]:
  """Returns the one inner jaxpr of an equation, such as `jit`, opened.

  Raises:
    ValueError: the equation has none.

  Example:
    >>> import jax
    >>> jaxpr = jax.make_jaxpr(jax.jit(jax.numpy.tanh))(1.0)
    >>> [str(e.primitive) for e in only_jaxpr(jaxpr.eqns[0])[0].eqns]
    ['tanh']
  """
  for value in eqn.params.values():
    if hasattr(value, 'eqns') or hasattr(value, 'jaxpr'):
      return opened(value)
  raise ValueError(
      f'{eqn.primitive} has no jaxpr in its parameters, so that its operations '
      'are not known; please report it.'
  )


class ScanOperands(NamedTuple):
  """The numbers of a scan's operands of each kind, in their order."""

  consts: int
  """Number of operands that every step reads."""

  carry: int
  """Number of operands that a step replaces."""


def scan_operands(eqn: core.JaxprEqn) -> ScanOperands:
  """Returns how many operands of a scan are constants, and how many the carry.

  They are found by ranks, since scanned arrays have one more axis outside than
  inside: the names of parameters that count them depend on JAX's version.

  Example:
    >>> import jax
    >>> cumsum = lambda xs: jax.lax.scan(lambda c, x: (c + x, None), 0., xs)[0]
    >>> scan_operands(jax.make_jaxpr(cumsum)(jax.numpy.ones(3)).eqns[0])
    ScanOperands(consts=0, carry=1)
  """
  inner, _ = only_jaxpr(eqn)
  carry = len(eqn.outvars) - _sliced(eqn.outvars, inner.outvars)
  return ScanOperands(
      len(eqn.invars) - _sliced(eqn.invars, inner.invars) - carry, carry
  )


def _sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
  """Returns the number of variables that a scan slices or stacks."""
  rank = lambda var: len(getattr(var.aval, 'shape', ()))
  return sum(rank(o) > rank(i) for o, i in zip(outside, inside))


def evaluate(eqn: core.JaxprEqn, *operands: Any) -> list[Any]:
  """Evaluates an equation unchanged, with its name stack and source lines.

  Args:
    eqn: The equation.
    *operands: Values of its operands, of literals too; those of one variable
      must be equal.

  Returns:
    The results.

  Example:
    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: 2.0 * x)(1.0)
    >>> evaluate(jaxpr.eqns[0], 2.0, 3.0)[0].tolist()
    6.0
  """
  given = [
      (var, x) for var, x in zip(eqn.invars, operands)
      if not isinstance(var, core.Literal)
  ]
  jaxpr = core.Jaxpr(
      (), [var for var, _ in given], eqn.outvars, [eqn], eqn.effects,
      core.DebugInfo('evaluate', str(eqn.primitive), None, None),
  )
  return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*(x for _, x in given))
