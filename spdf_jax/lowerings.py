# SPDX-License-Identifier: Apache-2.0
"""Primitives with a reference lowering and registered lowerings by name."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from spdf_jax.names import lookup

REFERENCE = 'reference'
"""Name of the lowering that every primitive has on every platform."""

NATIVE = 'native'
"""Name of the lowering to the native CPU kernels."""

Lowering = Callable[..., Any]

_references: dict[Primitive, Lowering] = {}
_registered: dict[tuple[Primitive, str, str], Lowering] = {}


def define_primitive(
    name: str, reference: Lowering, *, multiple_results: bool = False
) -> Primitive:
  """Defines a primitive with the semantics of a traceable function.

  The primitive takes the operands and parameters of the function and one
  further parameter, `lowering`: the name of the lowering to use.

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
  def _(*avals, lowering, **params):
    del lowering
    # Traces the reference because that propagates shardings as well as shapes.
    jaxpr = jax.make_jaxpr(functools.partial(reference, **params))(*avals)
    return jaxpr.out_avals if multiple_results else jaxpr.out_avals[0]

  @functools.partial(jax.jit, static_argnames='params')
  def evaluate(*args, params):
    return primitive.bind(*args, **dict(params))

  @primitive.def_impl
  def _(*args, lowering, **params):
    # jax adds its options to the class when it is imported.
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      return reference(*args, **params)
    return evaluate(*args, params=(*params.items(), ('lowering', lowering)))

  mlir.register_lowering(primitive, _lowering_rule(primitive, platform=''))
  return primitive


def register_lowering(
    name: str,
    primitive: Primitive,
    lowering: Lowering,
    *,
    platform: str,
) -> None:
  """Registers a lowering of a primitive for one platform.

  The lowering is used where the primitive's parameter `lowering` is `name`. On
  other platforms, and where the function returns `NotImplemented`, the
  primitive falls back to its reference.

  Args:
    name: Value of the parameter `lowering` that selects it, e.g. `'native'`.
    primitive: Primitive made by `define_primitive`.
    lowering: `(*arrays, **params) -> array`, traceable, with the operands and
      parameters of the primitive's reference.
    platform: Platform of the lowering: `'cpu'`, `'cuda'`, `'tpu'`, …

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
  mlir.register_lowering(
      primitive, _lowering_rule(primitive, platform), platform=platform
  )


def check_lowering(name: str) -> None:
  """Raises ValueError unless `name` is a lowering of some primitive."""
  lookup('lowering', name, {n: n for n in (REFERENCE, *_names())})


def _names() -> list[str]:
  return [name for _, _, name in _registered]


def _lowering_rule(primitive: Primitive, platform: str) -> Callable[..., Any]:
  def compute(*args, lowering, **params):
    function = _registered.get((primitive, platform, lowering))
    result = function(*args, **params) if function else NotImplemented
    if result is NotImplemented:
      result = _references[primitive](*args, **params)
    return result

  return mlir.lower_fun(compute, multiple_results=primitive.multiple_results)
