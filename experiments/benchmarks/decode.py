"""Generation by sparse models: time per token, and memory.

Steps of decoding, with 128 tokens in the cache, of dense models in float32 and
bfloat16 and of models with listed matrices, whose kept weights are float32 or
bfloat16. All variants of a width are timed alternately. Weights and masks are
random, and equal in all layers, in memory of their own. Memory is that of
parameters, cache and temporary buffers. Targets apply to the products with
hidden matrices alone, with bfloat16 values, over XLA's float32 products, by
AVX-512 on two cores. PyTorch decodes the dense model beside them, if it is
installed. The larger width needs some 16 GiB of memory, 22 with PyTorch.
"""

from collections.abc import Iterator
import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
from experiments.benchmarks import pytorch
from spdf_jax import evaluation
from spdf_jax import models
from spdf_jax.accelerator import list_matrix
from spdf_jax.accelerator import listed_matmul
from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import ListedMatrix
from spdf_jax.accelerator import native
from spdf_jax.sparsity import trees

PyTree = Any

SPARSITIES = (0.5, 0.75, 0.838, 0.9)
SPEEDUPS = {
    1: {0.75: 3.0, 0.838: 4.5, 0.9: 7.0}, 16: {0.75: 1.6, 0.838: 2.2, 0.9: 3.0},
}
"""Smallest speed-ups of hidden products, by number of tokens and sparsity."""
BATCH_SIZES = (1, 4, 16)
CONTEXT = 128
_LENGTH = 144  # Tokens in the cache.


class Case(NamedTuple):
  """A model to measure."""

  d_model: int
  """Width of the model; that of the feed-forward layer is four times this."""

  n_heads: int
  """Number of attention heads."""

  n_layers: int = 12
  """Number of layers."""

  vocab_size: int = 50257
  """Number of tokens."""

  @property
  def name(self) -> str:
    """Name of the model in the rows of the benchmark."""
    return f'width {self.d_model}'


CASES = (Case(768, 12), Case(2048, 16))


class _Variant(NamedTuple):
  sparsity: float
  dtype: str
  config: models.GPTConfig
  params: PyTree

  @property
  def name(self) -> str:
    kind = f'{self.sparsity:.3g} zeros' if self.sparsity else 'dense'
    return f'{kind}, {self.dtype}'


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all models.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of weights, masks and the bootstrap.

  Yields:
    Rows.
  """
  yield measuring.counted_row(
      native.kernels(), 'CPU devices', jax.device_count()
  )
  if not pytorch.is_installed():
    logging.warning(pytorch.MISSING)
  for case in CASES:
    yield from measure_case(case, repeats, rng)


def measure_case(
    case: Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures hidden products, then decoding, of one model.

  Args:
    case: The model.
    repeats: Rounds of timing.
    rng: Random generator of weights, masks and the bootstrap.

  Yields:
    Rows.
  """
  variants = _make_variants(case, rng)
  peers = {
      dtype: pytorch.convert(variants[0].params, dtype)
      for dtype in listed_matrix.DTYPES if pytorch.is_installed()
  }
  for tokens, targets in SPEEDUPS.items():
    yield from _measure_products(case, tokens, targets, variants, repeats, rng)
  for batch_size in BATCH_SIZES:
    programs = [_decoding(variant, batch_size) for variant in variants]
    calls = [compiled.repeated(program) for program in programs] + [
        pytorch.decoding(
            variants[0].config, tensors, batch_size, CONTEXT, _LENGTH
        ) for tensors in peers.values()
    ]
    wall = measuring.interleave(calls, repeats).wall
    name = f'{case.name}, {batch_size} sequences'
    yield measuring.sampled_row(
        name, 'dense, float32: wall ms per step', 1e3 * wall[0], rng
    )
    names = [v.name for v in variants] + [f'PyTorch, {x}' for x in peers]
    for other, seconds in list(zip(names, wall, strict=True))[1:]:
      yield measuring.sampled_row(
          name, f'{other}: speed-up', wall[0] / seconds, rng
      )
    for variant, program in zip(variants, programs):
      size = compiled.tree_bytes((variant.params, program.state))
      size += compiled.scratch_bytes(program)
      yield measuring.counted_row(
          name, f'{variant.name}: memory, MiB', size / 2**20
      )


def _measure_products(case, tokens, targets, variants, repeats, rng):
  """Yields the speed-ups of all products with hidden matrices."""
  variants = [v for v in variants if v.sparsity or v.dtype == 'float32']
  narrow = jnp.ones((tokens, case.d_model))
  wide = jnp.ones((tokens, 4 * case.d_model))

  @jax.jit
  def products(kernels, narrow, wide):
    def multiply(kernel):
      x = narrow if kernel.shape[0] == case.d_model else wide
      if isinstance(kernel, ListedMatrix):
        return listed_matmul(x, kernel, lowering=native.NATIVE)
      return x @ kernel
    return [multiply(kernel) for kernel in kernels]

  calls = []
  for variant in variants:
    flat = jax.tree_util.tree_leaves_with_path(
        variant.params, is_leaf=lambda x: isinstance(x, ListedMatrix)
    )
    kernels = [x for path, x in flat if _is_hidden(path, x)]
    calls.append(lambda kernels=kernels: products(kernels, narrow, wide))
  wall = measuring.interleave(calls, repeats).wall
  has_target = native.kernels() == 'avx512'
  for variant, seconds in zip(variants[1:], wall[1:]):
    keep_to = has_target and variant.dtype == 'bfloat16'
    yield measuring.sampled_row(
        f'{case.name}, hidden products, {tokens} tokens',
        f'{variant.name}: speed-up', wall[0] / seconds, rng,
        target=targets.get(variant.sparsity) if keep_to else None,
        at_most=False,
    )


def _is_hidden(path: Any, leaf: Any) -> bool:
  return models.sparsifiable(trees.path_name(path), leaf) is not False


def _make_variants(case: Case, rng: np.random.Generator) -> list[_Variant]:
  """Returns the dense model first."""
  config = models.GPTConfig(
      d_ff=4 * case.d_model, max_length=_LENGTH, **case._asdict()
  )
  tokens = jnp.zeros((1, 2), jnp.int32)
  model = models.model_of(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  dense = jax.tree.map(
      lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype), shapes
  )
  halved = dataclasses.replace(config, dtype='bfloat16')
  variants = [
      _Variant(0, 'float32', config, dense),
      _Variant(0, 'bfloat16', halved, jax.tree.map(
          lambda x: x.astype(jnp.bfloat16), dense
      )),
  ]
  skipping = dataclasses.replace(config, lowering=native.NATIVE)
  for sparsity in SPARSITIES:
    listed: dict[tuple[int, ...], ListedMatrix] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(dense):
      if _is_hidden(path, x) and x.shape not in listed:
        mask = rng.random(x.shape, np.float32) >= sparsity
        listed[x.shape] = list_matrix(x, mask)
    for dtype in listed_matrix.DTYPES:
      convert = lambda path, x, like=listed, dtype=dtype: (
          _copied(like[x.shape], dtype) if _is_hidden(path, x) else x
      )
      params = jax.tree_util.tree_map_with_path(convert, dense)
      variants.append(_Variant(sparsity, dtype, skipping, params))
  return variants


def _copied(matrix: ListedMatrix, dtype: str) -> ListedMatrix:
  return ListedMatrix(
      jnp.array(matrix.values, dtype), jnp.array(matrix.indices),
      jnp.array(matrix.starts), matrix.inputs,
  )


def _decoding(variant: _Variant, batch_size: int) -> compiled.Program:
  """Compiles a greedy step after `CONTEXT` tokens."""
  decoder = evaluation.CachedModel(models.model_of(variant.config))

  def step(state: Any, params: Any) -> tuple[Any, tuple[()]]:
    cache, last_B = state
    logits_Bx1xV, cache = decoder(
        params, cache, last_B[:, None], jnp.full((batch_size, 1), CONTEXT)
    )
    return (cache, jnp.argmax(logits_Bx1xV[:, 0], axis=-1)), ()

  cache = decoder.create_cache(batch_size, _LENGTH)
  state = cache, jnp.zeros(batch_size, jnp.int32)
  return compiled.compile_program(step, state, variant.params)
