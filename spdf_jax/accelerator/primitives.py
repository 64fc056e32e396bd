# SPDX-License-Identifier: Apache-2.0
"""The sparse matmul and its derivatives, as JAX primitives.

Two primitives are closed under differentiation, so that derivatives of any
order consist of them: `sparse_matmul_p` multiplies by kept weights, or by
their transpose, and `sampled_matmul_p` computes the gradient of the weights at
the entries of a mask. Two joint primitives fuse a pair of these for kernels
that are faster together: `sparse_matmul_tangent_p`, the tangent of a product in
both operands, and its transpose `sparse_matmul_backward_p`, which training
runs; under any other transformation they decompose into the first two. In a
jaxpr, their equations carry the name of the calling module in the name stack;
`spdf_jax.lowerings` selects the lowering of each primitive on a platform.
"""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import batching
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from spdf_jax.accelerator import joined
from spdf_jax.accelerator import operands
from spdf_jax.accelerator import packed
from spdf_jax.accelerator import reference
from spdf_jax.accelerator import rounded
from spdf_jax.lowerings import check_lowering
from spdf_jax.lowerings import define_primitive
from spdf_jax.lowerings import REFERENCE
from spdf_jax.packing import PackedMask

sparse_matmul_p = define_primitive('sparse_matmul', reference.sparse_matmul)
"""Primitive of y = x @ (mask ⊙ w), or x @ (mask ⊙ w)ᵀ.

Operands are x, w, mask and grad_mask.
"""

sampled_matmul_p = define_primitive('sampled_matmul', reference.sampled_matmul)
"""Primitive of dw = mask ⊙ (xᵀ @ dy); operands x, dy, mask."""

sparse_matmul_tangent_p = define_primitive(
    'sparse_matmul_tangent', reference.sparse_matmul_tangent
)
"""Primitive of dx @ (mask ⊙ w) + x @ (grad_mask ⊙ dw).

Operands are dx, x, dw, w, mask and grad_mask.
"""

sparse_matmul_backward_p = define_primitive(
    'sparse_matmul_backward',
    reference.sparse_matmul_backward,
    multiple_results=True,
)
"""Primitive of dx and dw; operands dy, x, w, mask, grad_mask."""


def sparse_matmul(
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array | PackedMask,
    *,
    grad_mask: jax.Array | None = None,
    accumulation_dtype: Any = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    lowering: str = REFERENCE,
    layer: str = '',
) -> jax.Array:
  r"""Multiplies by the kept weights: y = x @ (mask ⊙ w).

  Weights off the mask are ignored and may be NaN. Inputs and cotangents must be
  finite for lowerings to agree: the reference multiplies them by zeros off the
  mask, so that an infinite or NaN entry makes all outputs of its token NaN,
  while native kernels skip these zeros, so that it affects only the outputs
  with a kept weight at this entry. The gradients are

  .. math::
    dx = dy\,(m \odot w)^\top, \qquad dw = m_g \odot (x^\top dy)

  with :math:`m_g` the `grad_mask`, an operand that may change without
  recompilation: RigL sets it to all `True` at a mask update.

  Args:
    x: Inputs [..., inputs], float32, bfloat16 or float16 (or float64).
    w: Weights [inputs, outputs], of the dtype of `x`; with a packed mask the
      values of the kept weights, [size].
    mask: `True` where a weight is kept, bool [inputs, outputs], or packed.
    grad_mask: Mask of the gradient of `w`; by default `mask`. Must be `None`
      with a packed mask, where the gradient is [size].
    accumulation_dtype: Dtype of the accumulators of products and gradients; by
      default at least float32.
    out_sharding: Sharding of the product, if ambiguous under explicit sharding.
    lowering: Name of the lowering, e.g. `'native'`; `'reference'` is XLA's
      masked dense matmul, to which every other lowering falls back.
    layer: Name of the calling layer, for lowerings that count per layer.

  Returns:
    Product [..., outputs], of the dtype of `x`.

  Raises:
    ValueError: the shapes do not fit or an axis is empty, or the lowering is
      unknown.
    TypeError: dtypes differ or are unsupported.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, section 2

  Example:
    >>> x = jnp.array([[1., 2.]])
    >>> w = jnp.array([[3., jnp.nan], [4., 5.]])
    >>> sparse_matmul(x, w, jnp.array([[True, False], [False, True]])).tolist()
    [[3.0, 10.0]]
  """
  x, w = jnp.asarray(x), jnp.asarray(w)
  check_lowering(lowering)
  if isinstance(mask, PackedMask):
    operands.check_packed(x, w, mask, grad_mask, out_sharding)
    return packed.packed_matmul_p.bind(
        *_equally_varying(x, w, mask.bits),
        transpose=False,
        columns=mask.columns,
        accumulation_dtype=operands.accumulation_dtype(
            x.dtype, accumulation_dtype
        ),
        lowering=lowering,
    )
  mask = jnp.asarray(mask)
  grad_mask = mask if grad_mask is None else jnp.asarray(grad_mask)
  operands.check_shapes(x, w, mask, grad_mask)
  operands.check_dtypes(x, w, mask, grad_mask)
  return sparse_matmul_p.bind(
      *_equally_varying(x, w, mask, grad_mask),
      transpose=False,
      accumulation_dtype=operands.accumulation_dtype(
          x.dtype, accumulation_dtype
      ),
      out_sharding=out_sharding,
      lowering=lowering,
      layer=layer,
  )


def matmuls_saveable(primitive: Primitive, *args: Any, **params: Any) -> bool:
  """Returns whether to save a result: a `jax.checkpoint` policy for matmuls.

  It saves the results of sparse and dense matmuls. JAX's `dots_saveable` does
  not include our primitives, sparse ones and `rounded_einsum`, and would
  recompute them.

  Args:
    primitive: The primitive of an equation.
    *args: Operands of the equation.
    **params: Parameters of the equation.

  Returns:
    Whether the equation's result is saved for the backward pass.

  Example:
    >>> f = jax.checkpoint(lambda x: x @ x, policy=matmuls_saveable)
    >>> jax.grad(lambda x: f(x).sum())(jnp.ones((1, 1))).tolist()
    [[2.0]]
  """
  ours = (
      sparse_matmul_p, sampled_matmul_p, sparse_matmul_backward_p,
      packed.packed_matmul_p, packed.packed_gradient_p,
      packed.packed_backward_p, rounded.rounded_einsum_p,
  )
  return primitive in ours or (
      jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
  )


# Differentiation. Both primitives are linear in each operand but the masks.


def _differentiate_sparse_matmul(primals, tangents, **params):
  x, w, mask, grad_mask = primals
  dx, dw, *_ = tangents
  y = sparse_matmul_p.bind(*primals, **params)
  nonzero = [not isinstance(tangent, ad.Zero) for tangent in (dx, dw)]
  if all(nonzero) and not params['transpose']:
    del params['transpose']
    return y, sparse_matmul_tangent_p.bind(
        dx, x, dw, w, mask, grad_mask, **params
    )
  parts = []
  if nonzero[0]:
    parts.append(sparse_matmul_p.bind(dx, w, mask, grad_mask, **params))
  if nonzero[1]:
    parts.append(sparse_matmul_p.bind(x, dw, grad_mask, grad_mask, **params))
  if not parts:
    # jax sets the method after the class, where type checkers do not see it.
    zero = ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]
    return y, zero
  return y, functools.reduce(ad.add_jaxvals, parts)


ad.primitive_jvps[sparse_matmul_p] = _differentiate_sparse_matmul
ad.defjvp(
    sampled_matmul_p,
    lambda dx, x, dy, mask, **params: sampled_matmul_p.bind(
        dx, dy, mask, **params
    ),
    lambda ddy, x, dy, mask, **params: sampled_matmul_p.bind(
        x, ddy, mask, **params
    ),
    None,
)


def _transpose_sparse_matmul(dy, x, w, mask, grad_mask, *, transpose, **params):
  if ad.is_undefined_primal(x):
    params['out_sharding'] = _sharding(x.aval)
    dx = sparse_matmul_p.bind(
        dy, w, mask, grad_mask, transpose=not transpose, **params
    )
    return [dx, None, None, None]
  params['out_sharding'] = _sharding(w.aval)
  inputs, outputs = (dy, x) if transpose else (x, dy)
  dw = sampled_matmul_p.bind(inputs, outputs, mask, **params)
  return [None, dw, None, None]


def _transpose_sampled_matmul(dw, x, dy, mask, **params):
  is_x = ad.is_undefined_primal(x)
  params['out_sharding'] = _sharding((x if is_x else dy).aval)
  result = sparse_matmul_p.bind(
      dy if is_x else x, dw, mask, mask, transpose=is_x, **params
  )
  return [result, None, None] if is_x else [None, result, None]


ad.primitive_transposes[sparse_matmul_p] = _transpose_sparse_matmul
ad.primitive_transposes[sampled_matmul_p] = _transpose_sampled_matmul


def _tangent_parts(dx, x, dw, w, mask, grad_mask, **params):
  multiply = functools.partial(
      sparse_matmul_p.bind, transpose=False, **params
  )
  return multiply(dx, w, mask, grad_mask) + multiply(
      x, dw, grad_mask, grad_mask
  )


def _backward_parts(dy, x, w, mask, grad_mask, *, out_sharding, **params):
  of_x, of_w = out_sharding
  return [
      sparse_matmul_p.bind(
          dy, w, mask, grad_mask, transpose=True, out_sharding=of_x, **params
      ),
      sampled_matmul_p.bind(x, dy, grad_mask, out_sharding=of_w, **params),
  ]


joined.register_parts(sparse_matmul_tangent_p, _tangent_parts)
joined.register_parts(sparse_matmul_backward_p, _backward_parts)


def _transpose_tangent(dy, *args, out_sharding, **params):
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  if unknown != [True, False, True, False, False, False]:
    params['out_sharding'] = out_sharding
    return joined.transpose_parts(_tangent_parts, dy, args, params)
  dx, x, dw, w, mask, grad_mask = args
  shardings = _sharding(dx.aval), _sharding(dw.aval)
  of_x, of_w = sparse_matmul_backward_p.bind(
      dy, x, w, mask, grad_mask, out_sharding=shardings, **params
  )
  return [of_x, None, of_w, None, None, None]


def _transpose_backward(cotangents, *args, out_sharding, **params):
  dx, dw = map(ad.instantiate_zeros, cotangents)
  dy, x, w, mask, grad_mask = args
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  if unknown != [True, False, False, False, False]:
    params['out_sharding'] = out_sharding
    return joined.transpose_parts(_backward_parts, [dx, dw], args, params)
  result = sparse_matmul_tangent_p.bind(
      dx, x, dw, w, mask, grad_mask, out_sharding=_sharding(dy.aval), **params
  )
  return [result, None, None, None, None]


ad.primitive_transposes[sparse_matmul_tangent_p] = _transpose_tangent
ad.primitive_transposes[sparse_matmul_backward_p] = _transpose_backward


# Batching. A batch of x only is a further token axis. Any other batch makes a
# stack of matrices, with the batch as the leading axis of all operands.


def _batch_sparse_matmul(args, axes, **params):
  x, w, mask, grad_mask = args
  if all(axis is None for axis in axes[1:]):
    stacked = w.ndim - 2
    x = jnp.moveaxis(x, axes[0], stacked)
    params['out_sharding'] = _insert_axis(params['out_sharding'], stacked, x)
    return sparse_matmul_p.bind(x, w, mask, grad_mask, **params), stacked
  return _batch_stack(sparse_matmul_p, args, axes, params)


def _batch_sampled_matmul(args, axes, **params):
  return _batch_stack(sampled_matmul_p, args, axes, params)


def _batch_stack(primitive, args, axes, params):
  args = _stack(args, axes)
  params['out_sharding'] = _insert_axis(params['out_sharding'], 0, args[0])
  return primitive.bind(*args, **params), 0


batching.primitive_batchers[sparse_matmul_p] = _batch_sparse_matmul
batching.primitive_batchers[sampled_matmul_p] = _batch_sampled_matmul


def _stack(args, axes):
  """Moves or broadcasts the batch to the leading axis of every operand."""
  batched = [
      None if axis is None else jnp.moveaxis(arg, axis, 0)
      for arg, axis in zip(args, axes)
  ]
  first = next(arg for arg in batched if arg is not None)
  leading = _spec(first)[:1]

  def repeat(arg):
    sharding = _sharding(jax.typeof(arg))
    if sharding is not None:
      sharding = sharding.update(
          spec=PartitionSpec(*leading, *_spec(arg))
      )
    return jax.lax.broadcast(arg, first.shape[:1], out_sharding=sharding)

  return [
      repeat(arg) if moved is None else moved
      for arg, moved in zip(args, batched)
  ]


# Sharding.


def _sharding(aval: Any) -> NamedSharding | None:
  """Returns the sharding of an aval on a mesh with explicit axes, or `None`."""
  sharding = aval.sharding
  explicit = AxisType.Explicit in sharding.mesh.axis_types
  return sharding if explicit else None


def _spec(x: jax.Array) -> PartitionSpec:
  return jax.typeof(x).sharding.spec


def _insert_axis(
    sharding: NamedSharding | PartitionSpec | None, axis: int, x: jax.Array
) -> NamedSharding | PartitionSpec | None:
  """Inserts a batch axis into a sharding, partitioned as the same axis of x."""
  if sharding is None:
    return None
  spec = sharding if isinstance(sharding, PartitionSpec) else sharding.spec
  spec = PartitionSpec(*spec[:axis], _spec(x)[axis], *spec[axis:])
  if isinstance(sharding, PartitionSpec):
    return spec
  return NamedSharding(sharding.mesh, spec)


def _equally_varying(*args: jax.Array) -> list[jax.Array]:
  """Casts operands to vary over the same mesh axes, under `shard_map`."""
  varying = [jax.typeof(arg).manual_axis_type.varying for arg in args]
  union = frozenset().union(*varying)
  return [
      jax.lax.pcast(arg, tuple(union - own), to='varying')
      if union - own else arg
      for arg, own in zip(args, varying)
  ]
