"""Primitives that stand for two others: what they are when they fall apart."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import batching


def fall_apart(primitive: Primitive, parts: Callable[..., Any]) -> None:
  """Differentiates and batches a primitive as what it is made of.

  Args:
    primitive: The primitive.
    parts: `(*operands, **params) -> results`, of other primitives.
  """

  def differentiate(primals, tangents, **params):
    moves = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    chosen = lambda xs: tuple(x for x, moved in zip(xs, moves) if moved)
    f = _of_chosen(parts, primals, moves, params)
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
  """Transposes `parts` in the operands that are not known.

  Args:
    parts: `(*operands, **params) -> results`, linear in those.
    cotangents: Of the results.
    args: The operands, as a transpose rule is given them.
    params: The parameters.

  Returns:
    Cotangents of the operands, `None` of known ones.
  """
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  f = _of_chosen(parts, args, unknown, params)
  types = [arg.aval for arg, u in zip(args, unknown) if u]
  found = iter(jax.linear_transpose(f, *types)(cotangents))
  return [next(found) if u else None for u in unknown]


def _of_chosen(parts, args, chosen, params):
  """Returns `parts` as a function of the chosen operands alone."""
  def f(*values):
    values = iter(values)
    return parts(
        *(next(values) if c else arg for arg, c in zip(args, chosen)), **params
    )
  return f
