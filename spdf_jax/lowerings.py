"""How primitives become programs: by their reference, or as registered."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from spdf_jax.names import lookup

REFERENCE = 'reference'
"""The lowering that every primitive has on every platform."""

NATIVE = 'native'
"""The lowering of the kernels for CPUs."""

Lowering = Callable[..., Any]

_references: dict[Primitive, Lowering] = {}
_registered: dict[tuple[Primitive, str, str], Lowering] = {}


def define_primitive(
    name: str, reference: Lowering, *, multiple_results: bool = False
) -> Primitive:
  """Makes a primitive that means what a function computes.

  It takes the function's operands and parameters, and one parameter more:
  `lowering`, the name of the lowering wished for.

  Args:
    name: What jaxprs call it.
    reference: `(*arrays, **params) -> array`, traceable.
    multiple_results: Whether it returns a list of arrays.

  Returns:
    The primitive: its shapes, evaluation outside of jit and reference
    lowering. Rules of differentiation and batching are the caller's.
  """
  primitive = Primitive(name)
  primitive.multiple_results = multiple_results
  _references[primitive] = reference

  @primitive.def_abstract_eval
  def _(*avals, lowering, **params):
    del lowering
    # Traced, not worked out from the shapes: this knows shardings as well.
    jaxpr = jax.make_jaxpr(functools.partial(reference, **params))(*avals)
    return jaxpr.out_avals if multiple_results else jaxpr.out_avals[0]

  @functools.partial(jax.jit, static_argnames='params')
  def evaluate(*args, params):
    return primitive.bind(*args, **dict(params))

  @primitive.def_impl
  def _(*args, lowering, **params):
    if jax.config.jax_disable_jit:
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
  """Registers a way to compute a primitive on one platform.

  It is used where the primitive's parameter `lowering` is `name`: users opt
  in. On other platforms, and where the function returns `NotImplemented`, the
  reference is used.

  Args:
    name: What users ask for, e.g. `'native'`.
    primitive: One that `define_primitive` made.
    lowering: `(*arrays, **params) -> array`, traceable, with the operands and
      parameters of the primitive's reference.
    platform: Where it works: `'cpu'`, `'cuda'`, `'tpu'`, …

  Raises:
    ValueError: the name is that of the reference, or is taken.

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
