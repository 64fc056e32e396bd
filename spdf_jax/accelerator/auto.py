# SPDX-License-Identifier: Apache-2.0
"""The lowering `'auto'`: native kernels where they are faster than XLA.

Whether they can be is decided for each product when it is lowered, by its dtype
and its sizes. The sparsity of the mask is data: where it is above the crossover
of the processor, the kernels multiply, and otherwise XLA does, without the mask
if nothing is pruned. A branch encloses one product or one backward pass, so
that derivatives save nothing but operands.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax.accelerator import crossovers
from spdf_jax.accelerator import mask_counts
from spdf_jax.accelerator import native
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator import reference
from spdf_jax.accelerator.native import lowering as kernels

AUTO = 'auto'

# With 32 tokens layers are not faster than XLA's (`--suite=matmul`); matrices
# narrower than 64 were not measured.
LEAST_TOKENS = 64
LEAST_WIDTH = 64

DENSE, MASKED, FAST = range(3)
"""Branches: XLA multiplies without the mask, XLA with it, or kernels do."""


class Crossovers(NamedTuple):
  """The sparsities above which kernels multiply; 1: never."""

  anywhere: float
  """That of zeros in any place."""

  in_blocks: float
  """That of zeros in whole, aligned blocks of `crossovers.BLOCK`."""


def choose(
    x: jax.Array, shape: Sequence[int], accumulation_dtype: Any = None
) -> Crossovers | str:
  """Decides whether a product can be faster by kernels.

  Args:
    x: Inputs, [*stack, *tokens, inputs].
    shape: Shape of the weights, [*stack, inputs, outputs].
    accumulation_dtype: Dtype of the accumulators; `None`: float32.

  Returns:
    The crossovers, or the reason why XLA multiplies at any sparsity.
  """
  *stack, inputs, outputs = shape
  if 0 in x.shape:
    return 'an empty axis'
  tokens = x.size // x.shape[-1] // math.prod(stack)
  width = min(inputs, outputs)
  if tokens < LEAST_TOKENS:
    return f'fewer than {LEAST_TOKENS} tokens'
  if width < LEAST_WIDTH:
    return f'narrower than {LEAST_WIDTH}'
  reason = _unsupported(x, accumulation_dtype)
  if reason:
    return reason
  dtype = x.dtype.name
  anywhere = crossovers.crossover(dtype, width, tokens)
  in_blocks = crossovers.known_crossover(dtype, in_blocks=True)
  choice = Crossovers(anywhere, anywhere if in_blocks is None else in_blocks)
  return 'slower kernels' if min(choice) == crossovers.NEVER else choice


def _unsupported(x: jax.Array, accumulation_dtype: Any = None) -> str:
  """Returns why native kernels cannot multiply, or `''`."""
  if jax.default_backend() != 'cpu':
    return f'no kernels on {jax.default_backend()}'
  if accumulation_dtype not in (None, jnp.float32) or not (
      native.is_available(x.dtype)
  ):
    return f'no kernels for {x.dtype}'
  return '' if lowerings.is_local(x) else 'several devices'


def describe(
    lowering: str, x: jax.Array, shape: Sequence[int]
) -> tuple[str, str]:
  """Describes the kernels of a product, or the reason why it is dense.

  Args:
    lowering: Name of the lowering.
    x: As for `choose`.
    shape: As for `choose`.

  Returns:
    The kernels and the reason; one of the two is `''`.
  """
  if lowering == lowerings.REFERENCE:
    return '', 'the reference multiplies zeros'
  if lowering == lowerings.NATIVE:
    reason = _unsupported(x)
    return '' if reason else lowering, reason
  if lowering != AUTO:
    return lowering, ''
  choice = choose(x, shape)
  if isinstance(choice, str):
    return '', choice
  return f'native above {choice.anywhere:.0%} zeros', ''


def _branch(
    choice: Crossovers, mask: jax.Array, *, fast: Any, masked: Any, dense: Any
) -> Any:
  """Multiplies in the fastest of three ways, by the sparsity of the mask."""
  return jax.lax.switch(_fastest(choice, mask), (dense, masked, fast))


def _fastest(choice: Crossovers, mask: jax.Array) -> jax.Array:
  """Returns the fastest way to multiply: `DENSE`, `MASKED` or `FAST`.

  Kept weights are counted exactly: a mask that prunes one weight is a mask.
  """
  inputs, outputs = mask.shape[-2:]
  bands = mask_counts.kept_in_bands(mask)
  kept = mask_counts.count_kept(bands)
  threshold: Any = choice.anywhere
  if choice.in_blocks != threshold:
    in_blocks = mask_counts.are_in_blocks(bands, inputs)
    threshold = jnp.where(in_blocks, choice.in_blocks, threshold)
  sparsity = 1 - jnp.mean(kept / (inputs * outputs), dtype=jnp.float32)
  is_pruned = jnp.any(kept < inputs * outputs)
  return jnp.where(
      is_pruned, jnp.where(sparsity > threshold, FAST, MASKED), DENSE
  )


def sparse_matmul(
    x: jax.Array, w: jax.Array, mask: jax.Array, grad_mask: jax.Array,
    **params: Any,
) -> jax.Array:
  """Multiplies by the kept weights; see `reference.sparse_matmul`."""
  choice = choose(x, w.shape, params['accumulation_dtype'])
  if isinstance(choice, str):
    return NotImplemented
  of: Callable[..., Any] = lambda multiply, mask: lambda: multiply(
      x, w, mask, grad_mask, **params
  )
  return _branch(
      choice, mask, fast=of(kernels.sparse_matmul, mask),
      masked=of(reference.sparse_matmul, mask),
      dense=of(reference.sparse_matmul, None),
  )


def sampled_matmul(
    x: jax.Array, dy: jax.Array, mask: jax.Array, **params: Any
) -> jax.Array:
  """Multiplies over the tokens at masked entries; see `reference`."""
  choice = choose(x, mask.shape, params['accumulation_dtype'])
  if isinstance(choice, str):
    return NotImplemented
  of: Callable[..., Any] = lambda multiply: lambda: multiply(
      x, dy, mask, **params
  )
  masked = of(reference.sampled_matmul)
  return _branch(
      choice, mask, fast=of(kernels.sampled_matmul), masked=masked, dense=masked
  )


def sparse_matmul_backward(
    dy: jax.Array, x: jax.Array, w: jax.Array, mask: jax.Array,
    grad_mask: jax.Array, **params: Any,
) -> list[jax.Array]:
  """Computes dx and dw; see `primitives.sparse_matmul_backward_p`."""
  choice = choose(x, w.shape, params['accumulation_dtype'])
  if isinstance(choice, str):
    return NotImplemented
  of_x, of_w = params.pop('out_sharding')

  def by_xla(mask):
    return lambda: [
        reference.sparse_matmul(
            dy, w, mask, grad_mask, transpose=True, out_sharding=of_x, **params
        ),
        reference.sampled_matmul(x, dy, grad_mask, out_sharding=of_w, **params),
    ]

  return _branch(
      choice, mask, masked=by_xla(mask), dense=by_xla(None),
      fast=lambda: kernels.sparse_matmul_backward(
          dy, x, w, mask, grad_mask, out_sharding=(of_x, of_w), **params
      ),
  )


for _primitive, _function in (
    (primitives.sparse_matmul_p, sparse_matmul),
    (primitives.sampled_matmul_p, sampled_matmul),
    (primitives.sparse_matmul_backward_p, sparse_matmul_backward),
):
  lowerings.register_lowering(AUTO, _primitive, _function, platform='cpu')
