# SPDX-License-Identifier: Apache-2.0
"""Joint primitives: rules that decompose a primitive into several others."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import batching


def register_parts(primitive: Primitive, parts: Callable[..., Any]) -> None:
  """Registers rules that differentiate and batch a primitive by its parts.

  Args:
    primitive: The primitive.
    parts: `(*operands, **params) -> results`, computed by other primitives.
  """

  def differentiate(primals, tangents, **params):
    nonzero = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    chosen = lambda xs: tuple(x for x, is_chosen in zip(xs, nonzero)
                              if is_chosen)
    f = _of_chosen(parts, primals, nonzero, params)
    return jax.jvp(f, chosen(primals), chosen(tangents))

  def batch(args, axes, **params):
    f = functools.partial(parts, **params)
    results = jax.vmap(f, in_axes=tuple(axes))(*args)
    return results, jax.tree.map(lambda _: 0, results)

  ad.primitive_jvps[primitive] = differentiate
  batching.primitive_batchers[primitive] = batch


def transpose_parts(
    parts: Callable[..., Any],
    cotangents: Any,
    args: Sequence[Any],
    params: Mapping[str, Any],
) -> list[Any]:
  """Transposes `parts` with respect to its undefined primals.

  Args:
    parts: `(*operands, **params) -> results`, linear in the undefined primals.
    cotangents: Cotangents of the results.
    args: Operands of a transpose rule, some of them undefined primals.
    params: Parameters of the primitive.

  Returns:
    Cotangents of the operands, `None` for known operands.
  """
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  f = _of_chosen(parts, args, unknown, params)
  types = [arg.aval for arg, u in zip(args, unknown) if u]
  found = iter(jax.linear_transpose(f, *types)(cotangents))
  return [next(found) if u else None for u in unknown]


def _of_chosen(parts, args, chosen, params):
  """Returns `parts` as a function of the chosen operands only."""
  def f(*values):
    given = iter(values)
    return parts(
        *(next(given) if c else arg for arg, c in zip(args, chosen)), **params
    )
  return f
