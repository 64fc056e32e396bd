"""The sparse matmul and its derivatives, as JAX primitives.

Two primitives are closed under differentiation, so that derivatives of any
order are made of them: `sparse_matmul_p` multiplies by kept weights, or by
their transpose, and `sampled_matmul_p` computes the gradient of weights where
it is wanted. Two more join what kernels do faster together: the tangent of a
product in both operands, and its transpose, `sparse_matmul_backward_p`, which
is what training runs; under any other transformation they fall apart into the
first two. A jaxpr shows them with the name of the module they come from; what
they become on a platform is chosen by `lowerings`.
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
from spdf_jax.lowerings import check_lowering
from spdf_jax.lowerings import define_primitive
from spdf_jax.lowerings import REFERENCE
from spdf_jax.packing import PackedMask

sparse_matmul_p = define_primitive('sparse_matmul', reference.sparse_matmul)
"""y = x @ (mask ⊙ w), or by the transpose; operands x, w, mask, grad_mask."""

sampled_matmul_p = define_primitive('sampled_matmul', reference.sampled_matmul)
"""dw = mask ⊙ (xᵀ @ dy); operands x, dy, mask."""

sparse_matmul_tangent_p = define_primitive(
    'sparse_matmul_tangent', reference.sparse_matmul_tangent
)
"""dx @ (mask ⊙ w) + x @ (grad_mask ⊙ dw); operands dx, x, dw, w and masks."""

sparse_matmul_backward_p = define_primitive(
    'sparse_matmul_backward',
    reference.sparse_matmul_backward,
    multiple_results=True,
)
"""dx and dw; operands dy, x, w, mask, grad_mask."""


def sparse_matmul(
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array | PackedMask,
    *,
    grad_mask: jax.Array | None = None,
    accumulation_dtype: Any = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    lowering: str = REFERENCE,
) -> jax.Array:
  r"""Multiplies by the kept weights: y = x @ (mask ⊙ w).

  Weights off the mask never enter: they may be NaN. The gradients are

  .. math::
    dx = dy\,(m \odot w)^\top, \qquad dw = m_g \odot (x^\top dy)

  with :math:`m_g` the `grad_mask`: RigL asks for the gradient of pruned
  weights by giving it all `True`, as data.

  Args:
    x: [..., inputs], float32, bfloat16 or float16 (or float64).
    w: [inputs, outputs], of the dtype of `x`; with a packed mask the values of
      the kept weights, [size].
    mask: `True` where a weight is kept, bool [inputs, outputs], or packed.
    grad_mask: Where `w` gets a gradient; by default `mask`. Not with a packed
      mask: the gradient is [size].
    accumulation_dtype: Type of the sums, of products and gradients alike; by
      default at least float32.
    out_sharding: Of y under explicit sharding, where it is ambiguous.
    lowering: What computes it, e.g. `'native'`; `'reference'` is XLA's masked
      dense matmul, and what every other one falls back to.

  Returns:
    [..., outputs], of the dtype of `x`.

  Raises:
    ValueError: the shapes do not fit or an axis is empty, or the lowering is
      unknown.
    TypeError: dtypes differ, or are not of the kinds above.

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
  )


def matmuls_saveable(primitive: Primitive, *args: Any, **params: Any) -> bool:
  """Tells `jax.checkpoint` to keep the results of matmuls, sparse and dense.

  JAX's `dots_saveable` does not know our primitives and would recompute them.

  Args:
    primitive: The primitive of an equation.
    *args: Its operands.
    **params: Its parameters.

  Returns:
    Whether its result is saved for the backward pass.

  Example:
    >>> f = jax.checkpoint(lambda x: x @ x, policy=matmuls_saveable)
    >>> jax.grad(lambda x: f(x).sum())(jnp.ones((1, 1))).tolist()
    [[2.0]]
  """
  ours = (
      sparse_matmul_p, sampled_matmul_p, sparse_matmul_backward_p,
      packed.packed_matmul_p, packed.packed_gradient_p,
      packed.packed_backward_p,
  )
  return primitive in ours or (
      jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
  )


# Differentiation. Both are linear in each operand that is not a mask.


def _differentiate_sparse_matmul(primals, tangents, **params):
  x, w, mask, grad_mask = primals
  dx, dw, *_ = tangents
  y = sparse_matmul_p.bind(*primals, **params)
  moves = [not isinstance(tangent, ad.Zero) for tangent in (dx, dw)]
  if all(moves) and not params['transpose']:
    del params['transpose']
    return y, sparse_matmul_tangent_p.bind(
        dx, x, dw, w, mask, grad_mask, **params
    )
  parts = []
  if moves[0]:
    parts.append(sparse_matmul_p.bind(dx, w, mask, grad_mask, **params))
  if moves[1]:
    parts.append(sparse_matmul_p.bind(x, dw, grad_mask, grad_mask, **params))
  if not parts:
    return y, ad.Zero.from_primal_value(y)
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


joined.fall_apart(sparse_matmul_tangent_p, _tangent_parts)
joined.fall_apart(sparse_matmul_backward_p, _backward_parts)


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


# Batching. A batch of x alone is more tokens; any other is a stack of
# matrices, which all operands then have as their first axis.


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
  """Gives every operand the batch as its first axis."""
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
  """Returns a type's sharding where the mesh makes it explicit."""
  sharding = aval.sharding
  explicit = AxisType.Explicit in sharding.mesh.axis_types
  return sharding if explicit else None


def _spec(x: jax.Array) -> PartitionSpec:
  return jax.typeof(x).sharding.spec


def _insert_axis(sharding, axis: int, x: jax.Array):
  """Adds a batch axis to the sharding asked for, laid out as that of x."""
  if sharding is None:
    return None
  spec = sharding if isinstance(sharding, PartitionSpec) else sharding.spec
  spec = PartitionSpec(*spec[:axis], _spec(x)[axis], *spec[axis:])
  if isinstance(sharding, PartitionSpec):
    return spec
  return NamedSharding(sharding.mesh, spec)


def _equally_varying(*args: jax.Array) -> list[jax.Array]:
  """Under `shard_map`, makes all operands vary over the same mesh axes."""
  varying = [jax.typeof(arg).manual_axis_type.varying for arg in args]
  union = frozenset().union(*varying)
  return [
      jax.lax.pcast(arg, tuple(union - own), to='varying')
      if union - own else arg
      for arg, own in zip(args, varying)
  ]
