# SPDX-License-Identifier: Apache-2.0
"""The sparse matmul and its derivatives, as JAX primitives.

There are two families of primitives: for dense weights with masks, and for
packed weights, the values of kept weights and the bits of their mask. In each,
two primitives are closed under differentiation, so that derivatives of any
order consist of them: one multiplies by kept weights, or by their transpose,
and one computes the gradient of the weights at the entries of a mask. Two joint
primitives fuse a pair of these for kernels that are faster together: the
tangent of a product in both operands, and its transpose, the backward pass,
which training runs; under any other transformation they decompose into the
first two. In a jaxpr, their equations carry the name of the calling module in
the name stack; `spdf_jax.lowerings` selects the lowering of each primitive on a
platform.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import batching
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from spdf_jax import lowerings
from spdf_jax import packing
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import operands
from spdf_jax.accelerator import reference


class _Family(NamedTuple):
  """The primitives of one storage of the weights."""

  matmul: Primitive
  """y = x @ W, or x @ Wᵀ; operands x, w, *masks."""

  gradient: Primitive
  """The gradient of the weights, xᵀ @ dy at the mask; operands x, dy, mask."""

  tangent: Primitive
  """dx @ W + x @ dW; operands dx, x, dw, w, *masks."""

  backward: Primitive
  """dx and dw; operands dy, x, w, *masks."""

  masks: int
  """Number of masks: the product's and the gradient's, or the bits of both."""


def _define_joint(matmul, gradient, tangent, backward, *, masks):
  """Defines both joint primitives, by name, and the rules of all four."""
  family = _Family(
      matmul, gradient,
      lowerings.define_joint_primitive(
          tangent, functools.partial(_tangent, matmul)
      ),
      lowerings.define_joint_primitive(
          backward, functools.partial(_backward, matmul, gradient),
          multiple_results=True,
      ),
      masks,
  )
  bind = functools.partial
  ad.primitive_jvps[matmul] = bind(_differentiate_matmul, family)
  ad.defjvp(
      gradient,
      lambda dx, x, dy, mask, **params: gradient.bind(dx, dy, mask, **params),
      lambda ddy, x, dy, mask, **params: gradient.bind(x, ddy, mask, **params),
      None,
  )
  ad.primitive_transposes[matmul] = bind(_transpose_matmul, family)
  ad.primitive_transposes[gradient] = bind(_transpose_gradient, family)
  ad.primitive_transposes[family.tangent] = bind(_transpose_tangent, family)
  ad.primitive_transposes[family.backward] = bind(_transpose_backward, family)
  batching.primitive_batchers[matmul] = bind(_batch_matmul, matmul)
  batching.primitive_batchers[gradient] = bind(_batch_stack, gradient)
  return family.tangent, family.backward


def _tangent(matmul, dx, x, dw, w, *masks, **params):
  multiply = functools.partial(matmul.bind, transpose=False, **params)
  return multiply(dx, w, *masks) + multiply(x, dw, *_of_gradient(masks))


def _backward(matmul, gradient, dy, x, w, *masks, out_sharding, **params):
  of_x, of_w = out_sharding
  return [
      matmul.bind(
          dy, w, *masks, transpose=True, out_sharding=of_x, **params
      ),
      _sample(gradient, x, dy, masks[-1], w, out_sharding=of_w, **params),
  ]


def _of_gradient(masks):
  """Returns the masks of a product with a tangent of the weights."""
  return masks[-1:] * len(masks)


def _sample(gradient, x, dy, mask, w, **params):
  """Computes the gradient of weights; that of packed ones has their size."""
  if gradient is packed_gradient_p:
    params['size'] = w.shape[-1]
  return gradient.bind(x, dy, mask, **params)


# The rules are those of both families. Products are linear in each operand but
# the masks: the mask of the product and that of the gradient, or the bits.


def _differentiate_matmul(family, primals, tangents, **params):
  x, w, *masks = primals
  dx, dw, *_ = tangents
  y = family.matmul.bind(*primals, **params)
  nonzero = [not isinstance(tangent, ad.Zero) for tangent in (dx, dw)]
  if all(nonzero) and not params['transpose']:
    del params['transpose']
    return y, family.tangent.bind(dx, x, dw, w, *masks, **params)
  parts = []
  if nonzero[0]:
    parts.append(family.matmul.bind(dx, w, *masks, **params))
  if nonzero[1]:
    of_w = _of_gradient(masks)
    parts.append(family.matmul.bind(x, dw, *of_w, **params))
  if not parts:
    # jax sets the method after the class, where type checkers do not see it.
    zero = ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]
    return y, zero
  return y, functools.reduce(ad.add_jaxvals, parts)


def _transpose_matmul(family, dy, x, w, *masks, transpose, **params):
  no_masks = [None] * len(masks)
  if ad.is_undefined_primal(x):
    params['out_sharding'] = _sharding(x.aval)
    dx = family.matmul.bind(dy, w, *masks, transpose=not transpose, **params)
    return [dx, None, *no_masks]
  params['out_sharding'] = _sharding(w.aval)
  inputs, outputs = (dy, x) if transpose else (x, dy)
  dw = _sample(family.gradient, inputs, outputs, masks[0], w.aval, **params)
  return [None, dw, *no_masks]


def _transpose_gradient(family, dw, x, dy, mask, **params):
  params.pop('size', None)
  is_x = ad.is_undefined_primal(x)
  params['out_sharding'] = _sharding((x if is_x else dy).aval)
  masks = [mask] * family.masks
  result = family.matmul.bind(
      dy if is_x else x, dw, *masks, transpose=is_x, **params
  )
  return [result, None, None] if is_x else [None, result, None]


def _transpose_tangent(family, dy, *args, out_sharding, **params):
  no_masks = [None] * family.masks
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  if unknown != [True, False, True, False] + [False] * family.masks:
    params['out_sharding'] = out_sharding
    parts = functools.partial(_tangent, family.matmul)
    return lowerings.transpose_parts(parts, dy, args, params)
  dx, x, dw, w, *masks = args
  shardings = _sharding(dx.aval), _sharding(dw.aval)
  of_x, of_w = family.backward.bind(
      dy, x, w, *masks, out_sharding=shardings, **params
  )
  return [of_x, None, of_w, None, *no_masks]


def _transpose_backward(family, cotangents, *args, out_sharding, **params):
  dx, dw = map(ad.instantiate_zeros, cotangents)
  dy, x, w, *masks = args
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  if unknown != [True, False, False] + [False] * family.masks:
    params['out_sharding'] = out_sharding
    parts = functools.partial(_backward, family.matmul, family.gradient)
    return lowerings.transpose_parts(parts, [dx, dw], args, params)
  result = family.tangent.bind(
      dx, x, dw, w, *masks, out_sharding=_sharding(dy.aval), **params
  )
  return [result, None, None] + [None] * family.masks


# A batch of x only is a further token axis. Any other batch makes a stack of
# matrices, with the batch as the leading axis of all operands.


def _batch_matmul(matmul, args, axes, **params):
  x, w, *masks = args
  if any(axis is not None for axis in axes[1:]):
    return _batch_stack(matmul, args, axes, **params)
  stacked = masks[0].ndim - 2
  x = jnp.moveaxis(x, axes[0], stacked)
  params['out_sharding'] = _insert_axis(params['out_sharding'], stacked, x)
  return matmul.bind(x, w, *masks, **params), stacked


def _batch_stack(primitive, args, axes, **params):
  args = _stack(args, axes)
  params['out_sharding'] = _insert_axis(params['out_sharding'], 0, args[0])
  return primitive.bind(*args, **params), 0


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


# Primitives for dense weights and for packed weights.

sparse_matmul_p = lowerings.define_primitive(
    'sparse_matmul', reference.sparse_matmul
)
"""Primitive of y = x @ (mask ⊙ w), or x @ (mask ⊙ w)ᵀ.

Operands are x, w, mask and grad_mask.
"""

sampled_matmul_p = lowerings.define_primitive(
    'sampled_matmul', reference.sampled_matmul
)
"""Primitive of dw = mask ⊙ (xᵀ @ dy); operands x, dy, mask."""

sparse_matmul_tangent_p, sparse_matmul_backward_p = _define_joint(
    sparse_matmul_p, sampled_matmul_p,
    'sparse_matmul_tangent', 'sparse_matmul_backward', masks=2,
)

packed_matmul_p = lowerings.define_primitive(
    'packed_matmul', reference.packed_matmul
)
"""Primitive of y = x @ W, or x @ Wᵀ; operands x, values, bits."""

packed_gradient_p = lowerings.define_primitive(
    'packed_gradient', reference.packed_gradient
)
"""Primitive of the gradient of the values; operands x, dy, bits."""

packed_tangent_p, packed_backward_p = _define_joint(
    packed_matmul_p, packed_gradient_p,
    'packed_tangent', 'packed_backward', masks=1,
)


kept_weights_p = lowerings.define_primitive(
    'kept_weights', reference.kept_weights
)
"""Primitive of mask ⊙ w, whose derivative is that of grad_mask ⊙ w.

Operands are w, mask and grad_mask. It is no `jax.custom_jvp`, whose rule
`jax.lax.scan` drops where a gradient is differentiated again.
"""


def _differentiate_kept(primals, tangents, **params):
  w, _, grad_mask = primals
  kept = kept_weights_p.bind(*primals, **params)
  if isinstance(tangents[0], ad.Zero):
    # jax sets the method after the class, where type checkers do not see it.
    return kept, ad.Zero.from_primal_value(w)  # type: ignore[attr-defined]
  return kept, kept_weights_p.bind(tangents[0], grad_mask, grad_mask, **params)


def _transpose_kept(dy, w, mask, grad_mask, **params):
  del w, grad_mask
  return [kept_weights_p.bind(dy, mask, mask, **params), None, None]


def _batch_kept(args, axes, **params):
  return kept_weights_p.bind(*_stack(args, axes), **params), 0


ad.primitive_jvps[kept_weights_p] = _differentiate_kept
ad.primitive_transposes[kept_weights_p] = _transpose_kept
batching.primitive_batchers[kept_weights_p] = _batch_kept


def kept_weights(
    w: jax.Array, mask: jax.Array, grad_mask: jax.Array
) -> jax.Array:
  """Returns the kept weights, and zero in place of the pruned ones.

  Args:
    w: Weights, of any shape.
    mask: `True` where a weight is kept, bool of the shape of `w`.
    grad_mask: Mask of the gradient of `w`, as for `sparse_matmul`.

  Returns:
    The weights, of which pruned ones are zero, even if they were NaN.

  Example:
    >>> w, mask = jnp.array([1.0, 2.0]), jnp.array([True, False])
    >>> kept_weights(w, mask, ~mask).tolist()
    [1.0, 0.0]
    >>> jax.grad(lambda w: kept_weights(w, mask, ~mask).sum())(w).tolist()
    [0.0, 1.0]
  """
  operands = _equally_varying(w, mask, grad_mask)
  return kept_weights_p.bind(*operands, lowering=lowerings.REFERENCE)


def sparse_matmul(
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array | packing.PackedMask,
    *,
    grad_mask: jax.Array | None = None,
    accumulation_dtype: Any = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    lowering: str = lowerings.REFERENCE,
    layer: str = '',
) -> jax.Array:
  r"""Multiplies by the kept weights: y = x @ (mask ⊙ w).

  Pruned weights are ignored and may be NaN. Inputs and cotangents must be
  finite for all lowerings to agree: the reference multiplies them by zeros in
  place of pruned weights, and infinity or NaN times zero is NaN, while native
  kernels skip these zeros. The gradients are

  .. math::
    dx = dy\,(m \odot w)^\top, \qquad dw = m_g \odot (x^\top dy)

  with :math:`m` the `mask` and :math:`m_g` the `grad_mask`, which may change
  without recompilation: RigL sets it to all `True` at a mask update. XLA
  multiplies in the precision of `jax.default_matmul_precision`, as for
  `jnp.matmul`; native kernels always multiply in float32.

  Args:
    x: Inputs [..., inputs], float32, bfloat16 or float16 (or float64).
    w: Weights [inputs, outputs], of the dtype of `x`. With a packed mask, the
      values of the kept weights, [size], as `spdf_jax.packing.gather_kept`
      returns them.
    mask: `True` where a weight is kept, bool [inputs, outputs]; or packed, as
      `spdf_jax.packing.pack_mask` returns it.
    grad_mask: Mask of the gradient of `w`; by default `mask`. Must be `None`
      with a packed mask, where the gradient is [size], as `w` is.
    accumulation_dtype: Dtype of the accumulators of products and gradients:
      that of `x`, or the default, its promotion with float32.
    out_sharding: Sharding of the product, if ambiguous under explicit sharding.
      Must be `None` with a packed mask.
    lowering: Name of the lowering: `'reference'`, XLA's masked dense matmul, to
      which every other lowering falls back; `'native'`, the native CPU kernels;
      or a name that `accelerator.wafer.lowering` returns.
    layer: Name of the calling layer, for `accelerator.wafer.record`.

  Returns:
    Product [..., outputs], of the dtype of `x`.

  Raises:
    ValueError: the shapes do not fit, an axis is empty, the lowering is
      unknown, or `grad_mask` or `out_sharding` is given with a packed mask.
    TypeError: `x` and `w` have different dtypes, a mask is not boolean, or a
      dtype is not supported.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, section 2

  Example:
    >>> x = jnp.array([[1., 2.]])
    >>> w = jnp.array([[3., jnp.nan], [4., 5.]])
    >>> sparse_matmul(x, w, jnp.array([[True, False], [False, True]])).tolist()
    [[3.0, 10.0]]
  """
  x, w = jnp.asarray(x), jnp.asarray(w)
  lowerings.check_lowering(lowering)
  config: Any = jax.config  # JAX adds its options when it is imported.
  params = dict(
      transpose=False, out_sharding=out_sharding, lowering=lowering,
      precision=config.jax_default_matmul_precision,
  )
  if isinstance(mask, packing.PackedMask):
    operands.check_packed(x, w, mask, grad_mask, out_sharding)
    params['accumulation_dtype'] = operands.accumulation_dtype(
        x.dtype, accumulation_dtype
    )
    bits = jnp.asarray(mask.bits)
    return packed_matmul_p.bind(
        *_equally_varying(x, w, bits), columns=mask.columns, **params
    )
  mask = jnp.asarray(mask)
  grad_mask = mask if grad_mask is None else jnp.asarray(grad_mask)
  operands.check_dense(x, w, mask, grad_mask)
  params['accumulation_dtype'] = operands.accumulation_dtype(
      x.dtype, accumulation_dtype
  )
  return sparse_matmul_p.bind(
      *_equally_varying(x, w, mask, grad_mask), layer=layer, **params
  )


def matmuls_saveable(primitive: Primitive, *args: Any, **params: Any) -> bool:
  """Decides whether to save a result: a policy of `jax.checkpoint` for matmuls.

  It saves the results of sparse and dense matmuls. JAX's `dots_saveable` does
  not know the primitives of `sparse_matmul` and `accelerator.bf16_matmul`, and
  would recompute their results in the backward pass.

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
      packed_matmul_p, packed_gradient_p, packed_backward_p,
      bf16_matmul.einsum_p,
  )
  return primitive in ours or (
      jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
  )
