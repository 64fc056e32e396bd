# SPDX-License-Identifier: Apache-2.0
"""Primitives with a reference lowering and registered lowerings by name."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.sharding import AxisType

from spdf_jax import names

REFERENCE = 'reference'
"""Name of the lowering that every primitive has on every platform."""

NATIVE = 'native'
"""Name of the lowering to the native CPU kernels."""

Lowering = Callable[..., Any]

_references: dict[Primitive, Lowering] = {}
_parts: dict[Primitive, Lowering] = {}
_registered: dict[tuple[Primitive, str, str], Lowering] = {}
_take_layer: set[tuple[Primitive, str, str]] = set()


def define_primitive(
    name: str, reference: Lowering, *, multiple_results: bool = False
) -> Primitive:
  """Defines a primitive with the semantics of a traceable function.

  The primitive takes the operands and parameters of the function and three
  further parameters: `lowering`, the name of the lowering to use, and, if they
  are given, `layer`, the name of the calling layer, and `precision`, the
  `jax.default_matmul_precision` of the lowering.

  Args:
    name: Name of the primitive in jaxprs.
    reference: `(*arrays, **params) -> array`, traceable.
    multiple_results: Whether `reference` returns a list of arrays.

  Returns:
    The primitive with its abstract evaluation, its implementation outside of
    jit and its reference lowering. The caller adds the rules for
    differentiation and batching.
  """
  primitive = Primitive(name)
  primitive.multiple_results = multiple_results
  _references[primitive] = reference

  @primitive.def_abstract_eval
  def _(*avals, lowering, layer='', precision=None, **params):
    del lowering, layer, precision
    # Traces the reference because that propagates shardings as well as shapes.
    jaxpr = jax.make_jaxpr(functools.partial(reference, **params))(*avals)
    return jaxpr.out_avals if multiple_results else jaxpr.out_avals[0]

  @functools.partial(jax.jit, static_argnames='params')
  def evaluate(*args, params):
    return primitive.bind(*args, **dict(params))

  @primitive.def_impl
  def _(*args, lowering, layer='', precision=None, **params):
    # jax adds its options to the class when it is imported.
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      with _precision(precision):
        return reference(*args, **params)
    params |= dict(lowering=lowering, layer=layer, precision=precision)
    return evaluate(*args, params=tuple(params.items()))

  mlir.register_lowering(primitive, _lowering_rule(primitive, platform=''))
  return primitive


def define_joint_primitive(
    name: str, parts: Lowering, *, multiple_results: bool = False
) -> Primitive:
  """Defines a primitive that fuses several others, its parts.

  Its lowerings are those of the parts, unless others are registered, and it is
  differentiated and batched by the rules of the parts.

  Args:
    name: Name of the primitive in jaxprs.
    parts: `(*operands, **params) -> results`, computed by other primitives;
      `params` include `lowering` and may include `layer`.
    multiple_results: Whether `parts` returns a list of arrays.

  Returns:
    The primitive; the caller adds a rule for transposition, see
    `transpose_parts`.
  """
  primitive = define_primitive(
      name, functools.partial(parts, lowering=REFERENCE),
      multiple_results=multiple_results,
  )
  _parts[primitive] = parts

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
  return primitive


def transpose_parts(
    parts: Lowering,
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
  transposed = iter(jax.linear_transpose(f, *types)(cotangents))
  return [next(transposed) if u else None for u in unknown]


def _of_chosen(parts, args, chosen, params):
  """Returns `parts` as a function of the chosen operands only."""
  def f(*values):
    given = iter(values)
    return parts(
        *(next(given) if c else arg for arg, c in zip(args, chosen)), **params
    )
  return f


def register_lowering(
    name: str,
    primitive: Primitive,
    lowering: Lowering,
    *,
    platform: str,
    takes_layer: bool = False,
) -> None:
  """Registers a lowering of a primitive for one platform.

  The lowering is used where the primitive's parameter `lowering` is `name`. On
  other platforms, and where the function returns `NotImplemented`, the
  primitive falls back to its reference, a function of JAX operations that
  defines its semantics, see `accelerator.reference`.

  Args:
    name: Value of the parameter `lowering` that selects it, e.g. `'native'`.
    primitive: A primitive of `spdf_jax.accelerator`, e.g. `sparse_matmul_p`.
    lowering: `(*arrays, **params) -> array`, or a list of arrays if the
      primitive has several results; traceable, with the operands and parameters
      of the primitive's reference.
    platform: Platform of the lowering: `'cpu'`, `'cuda'`, `'tpu'`, …
    takes_layer: Whether the function has one more parameter, `layer`: the name
      of the calling layer, `''` if it has none.

  Raises:
    ValueError: `name` is `'reference'` or already registered for this
      primitive and platform.

  Example:
    >>> from spdf_jax.accelerator import reference, sparse_matmul_p
    >>> register_lowering(
    ...     'mine', sparse_matmul_p, reference.sparse_matmul, platform='tpu')
  """
  key = primitive, platform, name
  if name == REFERENCE or key in _registered:
    raise ValueError(
        f'lowering {name!r} of {primitive} on {platform!r} exists; give '
        'another name.'
    )
  _registered[key] = lowering
  if takes_layer:
    _take_layer.add(key)
  mlir.register_lowering(
      primitive, _lowering_rule(primitive, platform), platform=platform
  )


def check_lowering(name: str) -> None:
  """Raises ValueError unless `name` is a lowering of some primitive."""
  names.lookup('lowering', name, {n: n for n in (REFERENCE, *_names())})


def is_local(x: jax.Array) -> bool:
  """Returns whether an operand is on one device, also inside `shard_map`.

  XLA would gather sharded operands of a kernel.
  """
  if jax.device_count() == 1:
    return True
  axis_types = jax.typeof(x).sharding.mesh.axis_types
  return bool(axis_types) and set(axis_types) == {AxisType.Manual}


def _names() -> list[str]:
  return [name for _, _, name in _registered]


def _precision(name: str | None) -> contextlib.AbstractContextManager[Any]:
  if name is None:
    return contextlib.nullcontext()
  return jax.default_matmul_precision(name)


def _lowering_rule(primitive: Primitive, platform: str) -> Callable[..., Any]:
  def compute(*args, lowering, layer='', precision=None, **params):
    key = primitive, platform, lowering
    function = _registered.get(key)
    named = {'layer': layer} if key in _take_layer else {}
    with _precision(precision):
      result = (
          function(*args, **named, **params) if function else NotImplemented
      )
      if result is NotImplemented and primitive in _parts:
        params |= dict(lowering=lowering, layer=layer, precision=precision)
        return _parts[primitive](*args, **params)
      if result is NotImplemented:
        return _references[primitive](*args, **params)
      return result

  return mlir.lower_fun(compute, multiple_results=primitive.multiple_results)
