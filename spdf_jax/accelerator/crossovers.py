# SPDX-License-Identifier: Apache-2.0
"""Crossovers: the sparsity above which kernels are faster than XLA's products.

They are known for the kinds of processors on which whole steps were measured.
On any other one, a layer is measured once, and the result is cached.
"""

import functools
import json
import logging
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import files
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import native
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator import processor
from spdf_jax.accelerator.native import library

logger = logging.getLogger('spdf_jax')

MEASURED = {
    ('AuthenticAMD', 'avx512'): 0.3,
    ('AuthenticAMD', 'avx512bf16'): 0.45,
    ('AuthenticAMD', 'avx2'): 0.5,
    ('AuthenticAMD', 'portable'): 0.9,
    ('AuthenticAMD from Zen 5 on', 'avx512'): 0.3,
    ('AuthenticAMD from Zen 5 on', 'avx512bf16'): 0.6,
    ('GenuineIntel with AMX', 'avx512'): 0.5,
    ('GenuineIntel with AMX', 'avx512bf16'): 0.95,
    ('GenuineIntel with AMX', 'avx512-blocks'): 0.2,
    ('GenuineIntel with AMX', 'amx'): 0.2,
}
"""Crossovers by vendor and kernels, those of masks of blocks by their own.

Measured with whole steps: on AMD of the quickstart, with AVX2 of width 768 too,
and in bfloat16, whose dense products are faster than those of float32, of width
512; from Zen 5 on of widths 256 and 512 at 50, 75 and 90 % zeros, where half of
them lose in bfloat16; with AMX of widths 64 to 1,024, blocks with 64 and 512
tokens.
"""

BLOCK = 32
"""Rows and columns of the blocks that kernels multiply as a whole."""

NEVER = 1.0
"""The crossover of kernels that are faster at no sparsity."""

_SPARSITIES = 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95
_TOLERANCE = 0.005
"""Of the sparsity of a mask, which is rounded to a count of weights."""
_LEAST_SPEEDUP = 1.1
"""Least speed-up of a layer; a step also scans masks and updates weights."""
_REPEATS = 5
_MOST_TOKENS = 1024
_TILES = 'amx'


def crossover(
    dtype: str, width: int, tokens: int, in_blocks: bool = False
) -> float:
  """Returns the sparsity above which native kernels are faster here.

  Args:
    dtype: Dtype of the products, for which there are kernels.
    width: Width of the model.
    tokens: Tokens of a batch.
    in_blocks: Whether masks consist of whole blocks, see `BLOCK`.

  Returns:
    The crossover from `MEASURED`. On a processor that is not listed there, it
    is measured, which takes seconds, and cached beside the kernels for
    processors of this kind.

  Raises:
    ValueError: the cached measurement is damaged.
  """
  known = known_crossover(dtype, in_blocks)
  if known is not None:
    return known
  tokens = min(tokens, _MOST_TOKENS)
  cache = library.build().with_name(
      f'crossover-{processor.identity()}-{_kernels(dtype, in_blocks)}-{width}-'
      f'{tokens}.json'
  )
  if cache.exists():
    fix = 'delete it, so that the kernels are measured again.'
    cached = files.read_object(cache, fix).get('crossover')
    if not isinstance(cached, float) or not 0 <= cached <= NEVER:
      raise ValueError(f'{cache} has the crossover {cached!r}; {fix}')
    return cached
  return _measure(cache, dtype, width, tokens, in_blocks)


def known_crossover(dtype: str, in_blocks: bool = False) -> float | None:
  """Returns the crossover of `MEASURED`; `None`: this processor has none."""
  vendor = processor.vendor()
  kernels = _kernels(dtype, in_blocks)
  known = MEASURED.get((vendor, kernels))
  if known is None and in_blocks and kernels != _TILES:
    # With vector kernels blocks are faster at least wherever zeros anywhere
    # are.
    return known_crossover(dtype)
  return known


def _kernels(dtype: str, in_blocks: bool) -> str:
  if in_blocks and dtype == 'bfloat16' and native.has_matrix_unit():
    return _TILES
  return native.kernels(dtype) + ('-blocks' if in_blocks else '')


@functools.cache  # A cache of kernels may be read-only.
def _measure(
    cache: pathlib.Path, dtype: str, width: int, tokens: int, in_blocks: bool
) -> float:
  # Products may be lowered while a function is traced.
  with jax.ensure_compile_time_eval():
    result = measure_crossover(dtype, width, tokens, in_blocks)
  logger.info(
      'Kernels %s on this processor (%s) are not known to be faster than '
      'dense products: measured at width %d, %s.',
      _kernels(dtype, in_blocks), processor.vendor(), width,
      'they never are' if result == NEVER else f'they are above {result:.1%}',
  )
  try:
    files.write_atomically(cache, json.dumps({'crossover': result}))
    logger.info('The crossover is kept in %s.', cache)
  except OSError as error:
    logger.warning('the next run measures again: %s', error)
  return result


def measure_crossover(
    dtype: Any, width: int, tokens: int, in_blocks: bool = False
) -> float:
  """Measures a layer and its gradients at several sparsities, interleaved.

  Args:
    dtype: Dtype of the products.
    width: Number of inputs; there are four times as many outputs.
    tokens: Number of tokens.
    in_blocks: Whether masks consist of blocks.

  Returns:
    The crossover, slightly below the least measured sparsity from which on the
    kernels are faster, or `NEVER`.
  """
  keys = jax.random.split(jax.random.key(0), 4)
  x = jax.random.normal(keys[0], (tokens, width), dtype)
  w = jax.random.normal(keys[1], (width, 4 * width), dtype)
  dy = jax.random.normal(keys[2], (tokens, 4 * width), dtype)

  def differentiated(multiply):
    def loss(x, w, mask):
      return jnp.vdot(multiply(x, w, mask).astype(dtype), dy)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))

  dense = differentiated(lambda x, w, mask: bf16_matmul.matmul(x, w))
  sparse = differentiated(
      lambda x, w, mask: primitives.sparse_matmul(
          x, w, mask, lowering=native.NATIVE
      )
  )
  side = BLOCK if in_blocks else 1
  blocks = w.shape[0] // side, w.shape[1] // side
  masks = [
      jax.random.bernoulli(keys[3], jnp.float32(1 - sparsity), blocks)
      .repeat(side, 0).repeat(side, 1)
      for sparsity in _SPARSITIES
  ]
  programs = [(dense, masks[0])] + [(sparse, mask) for mask in masks]
  seconds: list[list[float]] = [[] for _ in programs]
  for _ in range(_REPEATS + 1):
    for (program, mask), times in zip(programs, seconds):
      start = time.perf_counter()
      jax.block_until_ready(program(x, w, mask))
      times.append(time.perf_counter() - start)
  of_dense, *of_sparse = (statistics.median(times[1:]) for times in seconds)
  threshold = NEVER
  for sparsity, time_of in reversed([*zip(_SPARSITIES, of_sparse)]):
    if of_dense < _LEAST_SPEEDUP * time_of:
      break
    threshold = sparsity - _TOLERANCE
  return threshold
