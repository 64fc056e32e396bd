# SPDX-License-Identifier: Apache-2.0
"""The sparse primitives by kernels that skip pruned blocks."""

from collections.abc import Mapping
import functools
import logging
import math
import types

from jax.extend.core import Primitive
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax.accelerator import primitives

BLOCKS = 'blocks-64', 'blocks-128'
"""Names of the lowerings, with the size of the blocks that they skip."""

# Vector registers of a TPU have 128 lanes.
_SIZES = {'cuda': (64, 128), 'tpu': (128,)}


def lower_blocks(
    platform: str, size: int, *, interpret: bool = False
) -> Mapping[Primitive, lowerings.Lowering]:
  """Returns lowerings of the products of dense weights with masks.

  They decline, so that the reference is used, where a size of the weights is no
  multiple of the size of the blocks, the tokens cannot be tiled, or operands
  are sharded or are stacks of matrices.

  Args:
    platform: `'cuda'` or `'tpu'`.
    size: Rows and columns of a block: 128, or 64 on `'cuda'`.
    interpret: Whether to interpret the kernels, on any device.

  Returns:
    Functions by their primitive, as `register_lowering` takes them.
  """
  def supports(x, mask, accumulation_dtype):
    if mask.ndim > 2 or accumulation_dtype != jnp.float32:
      return False
    if not lowerings.is_local(x):
      return False
    tokens = math.prod(x.shape[:-1])
    fits = not any(n % size for n in mask.shape)
    if not fits or not _kernels(platform).tokens_per_tile(tokens):
      _warn_once(
          f'blocks of {size} do not divide weights {list(mask.shape)} or '
          f'{tokens} tokens; XLA multiplies them, zeros included.'
      )
      return False
    return True

  def kept_blocks(mask):
    inputs, outputs = mask.shape
    blocks = mask.reshape(inputs // size, size, outputs // size, size)
    return jnp.any(blocks, axis=(1, 3))

  def sparse_matmul(x, w, mask, grad_mask, *, transpose, accumulation_dtype,
                    out_sharding):
    del grad_mask, out_sharding
    if not supports(x, mask, accumulation_dtype):
      return NotImplemented
    w = jnp.where(mask, w, jnp.zeros((), w.dtype))
    if transpose:
      w, mask = w.T, mask.T
    y = _kernels(platform).multiply(
        x.reshape(-1, x.shape[-1]), w, kept_blocks(mask), interpret=interpret
    )
    return y.reshape(*x.shape[:-1], w.shape[1])

  def sampled_matmul(x, dy, mask, *, accumulation_dtype, out_sharding):
    del out_sharding
    if not supports(x, mask, accumulation_dtype):
      return NotImplemented
    dw = _kernels(platform).sample(
        x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]),
        kept_blocks(mask), interpret=interpret,
    )
    return jnp.where(mask, dw, jnp.zeros((), dw.dtype))

  return {
      primitives.sparse_matmul_p: sparse_matmul,
      primitives.sampled_matmul_p: sampled_matmul,
  }


def _kernels(platform: str) -> types.ModuleType:
  # Imported here because the import of Pallas takes a third of a second.
  from spdf_jax.accelerator.pallas import gpu
  from spdf_jax.accelerator.pallas import tpu
  return {'cuda': gpu, 'tpu': tpu}[platform]


@functools.cache
def _warn_once(message: str) -> None:
  logging.getLogger(__name__).warning('%s', message)


for _platform, _sizes in _SIZES.items():
  for _size in _sizes:
    for _primitive, _function in lower_blocks(_platform, _size).items():
      lowerings.register_lowering(
          f'blocks-{_size}', _primitive, _function, platform=_platform
      )
