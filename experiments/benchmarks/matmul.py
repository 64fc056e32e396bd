"""Native kernels against XLA's dense matmul in one linear layer.

Measures the speed-up of forward, dx and dW of one layer, including the
construction of index lists, over XLA's float32 products without a mask.
Operands are float32 and, if there are kernels for it, bfloat16; means of the
latter are also given over a model's dense products in bfloat16. Targets apply
to AVX-512, as means over layers and numbers of tokens. Masks of 32 x 32 blocks
have targets in bfloat16 on AMX, with 1,024 tokens.
`SPDF_NATIVE_KERNELS=avx2` or `portable` measures other kernels, `taskset -c 0`
one thread.
"""

from collections.abc import Callable, Iterator
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import measuring
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import native
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import structures

SPEEDUPS = {
    'float32': {0.5: 1.45, 0.75: 2.5, 0.9: 5.0, 0.95: 8.0},
    'bfloat16': {0.5: 2.0, 0.75: 3.6, 0.9: 6.5, 0.95: 9.5},
}
"""Smallest mean speed-up by dtype and sparsity."""
IN_BLOCKS = {0.5: 1.5, 0.75: 2.3, 0.9: 3.5}
"""Smallest speed-up of masks of blocks over dense products in bfloat16."""


class Layer(NamedTuple):
  """A linear layer to measure."""

  inputs: int
  """Rows of w."""

  outputs: int
  """Columns of w."""


LAYERS = (
    Layer(256, 1024),
    Layer(768, 768),
    Layer(768, 3072),
    Layer(3072, 768),
    Layer(2048, 8192),
)
TOKENS = (256, 1024, 4096)


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all layers, their means, and cases without a target.

  The latter are 32 tokens, and masks that are not uniform; masks of blocks come
  last.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of operands and the bootstrap.

  Yields:
    Rows.
  """
  yield measuring.counted_row(
      native.kernels(), 'CPU devices', jax.device_count()
  )
  for dtype in SPEEDUPS:
    if native.is_available(dtype):
      yield from measure_layers(LAYERS, TOKENS, repeats, rng, dtype)
  for layer in LAYERS[:3]:
    timings = _time(layer, 32, repeats, rng)
    yield from _rows(f'{_name(layer)} T 32', timings, rng)
  for kind, make in (('skewed', _skewed_mask), ('magnitude', _magnitude_mask)):
    timings = _time(LAYERS[2], 1024, repeats, rng, make)
    yield from _rows(f'{_name(LAYERS[2])} T 1024, {kind} mask', timings, rng)
  for dtype in SPEEDUPS:
    if native.is_available(dtype):
      for tokens in (64, 1024):
        yield from measure_blocks(LAYERS[2:4], tokens, repeats, rng, dtype)


def measure_blocks(
    layers: tuple[Layer, ...],
    tokens: int,
    repeats: int,
    rng: np.random.Generator,
    dtype: str,
) -> Iterator[measuring.Row]:
  """Measures masks of 32 x 32 blocks in all layers together."""
  make_mask = functools.partial(
      masks.random, structure=structures.block(32, 32)
  )
  timings = [
      _time(layer, tokens, repeats, rng, make_mask, dtype) for layer in layers
  ]
  has_target = (
      tokens == 1024 and dtype == 'bfloat16' and native.has_matrix_unit()
  )
  case = f'{" and ".join(map(_name, layers))} T {tokens}, blocks of 32'
  for sparsity, target in IN_BLOCKS.items():
    in_float32, sparse, *in_dtype = sum(t[sparsity].wall for t in timings)
    dense = in_dtype[0] if in_dtype else in_float32
    yield measuring.sampled_row(
        case, f'{sparsity:.0%} zeros: dense {dtype} / native, wall',
        dense / sparse, rng, at_most=False,
        target=target if has_target else None,
    )


def measure_layers(
    layers: tuple[Layer, ...],
    tokens: tuple[int, ...],
    repeats: int,
    rng: np.random.Generator,
    dtype: str = 'float32',
) -> Iterator[measuring.Row]:
  """Measures layers at several numbers of tokens, and the means.

  Args:
    layers: The layers.
    tokens: Numbers of tokens.
    repeats: Rounds of timing.
    rng: Random generator of operands and the bootstrap.
    dtype: Dtype of the operands of the native kernels.

  Yields:
    Rows.
  """
  all_timings = []
  kind = '' if dtype == 'float32' else f', {dtype}'
  for layer in layers:
    for number in tokens:
      timings = _time(layer, number, repeats, rng, dtype=dtype)
      all_timings.append(timings)
      yield from _rows(f'{_name(layer)} T {number}{kind}', timings, rng)
  has_target = native.kernels() == 'avx512'
  for sparsity, target in SPEEDUPS[dtype].items():
    keep_to = dict(target=target if has_target else None, at_most=False)
    of_sparsity = [timings[sparsity] for timings in all_timings]
    yield measuring.sampled_row(
        f'mean{kind}',
        f'{sparsity:.0%} zeros: dense / native, wall',
        np.array([t.wall[0] / t.wall[1] for t in of_sparsity]),
        rng,
        **keep_to,
    )
    yield measuring.counted_row(
        f'mean{kind}',
        f'{sparsity:.0%} zeros: dense / native, least CPU',
        float(np.mean([t.cpu[0].min() / t.cpu[1].min() for t in of_sparsity])),
        **keep_to,
    )
    if dtype != 'float32':
      yield measuring.sampled_row(
          f'mean{kind}',
          f'{sparsity:.0%} zeros: dense {dtype} / native, wall',
          np.array([t.wall[2] / t.wall[1] for t in of_sparsity]),
          rng,
      )


def _skewed_mask(key: jax.Array, w: jax.Array, sparsity: float) -> jax.Array:
  """Keeps a share of each row that falls from the first row to the last."""
  rows = jnp.linspace(2, 0, w.shape[0])[:, None]
  return jax.random.uniform(key, w.shape, jnp.float32) < rows * (1 - sparsity)


def _magnitude_mask(key: jax.Array, w: jax.Array, sparsity: float) -> jax.Array:
  """Keeps the largest weights after scaling the columns by random factors."""
  scores = abs(w) * jnp.exp(jax.random.normal(key, w.shape[1:], jnp.float32))
  return scores >= jnp.quantile(scores, sparsity)


def _name(layer: Layer) -> str:
  return f'{layer.inputs} x {layer.outputs}'


def _time(
    layer: Layer,
    tokens: int,
    repeats: int,
    rng: np.random.Generator,
    make_mask: Callable[..., jax.Array] = masks.random,
    dtype: str = 'float32',
) -> dict[float, measuring.Timings]:
  """Times dense and native layers, interleaved, by sparsity.

  The calls are dense products in float32, native ones and, for another dtype,
  dense products of that dtype.
  """
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
  x, w = draw(tokens, layer.inputs), draw(*layer)
  dy = draw(tokens, layer.outputs)
  native_layer = functools.partial(sparse_matmul, lowering=native.NATIVE)
  dense = jax.jit(functools.partial(_forward_and_gradients, jnp.dot))
  sparse = jax.jit(functools.partial(_forward_and_gradients, native_layer))
  operands = [a.astype(dtype) for a in (dy, x, w)]
  halved = jax.jit(functools.partial(
      _forward_and_gradients,
      lambda x, w: bf16_matmul.matmul(x, w).astype(dtype),
  ))
  # Models multiply [B, L, inputs], whose gradients XLA:CPU computes faster.
  in_batch = [a.reshape(4, -1, a.shape[-1]) for a in operands[:2]]
  timings = {}
  for sparsity in SPEEDUPS[dtype]:
    mask = make_mask(jax.random.key(0), w, sparsity)
    calls = [lambda: dense(dy, x, w), lambda mask=mask: sparse(*operands, mask)]
    if dtype != 'float32':
      calls.append(lambda: halved(*in_batch, operands[2]))
    timings[sparsity] = measuring.interleave(calls, repeats)
  return timings


def _forward_and_gradients(multiply, dy, x, w, *mask):
  y, pullback = jax.vjp(lambda x, w: multiply(x, w, *mask), x, w)
  return y, pullback(dy)


def _rows(
    case: str,
    timings: dict[float, measuring.Timings],
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  for sparsity, (wall, cpu, _) in timings.items():
    yield measuring.sampled_row(
        case, f'{sparsity:.0%} zeros: dense / native, wall', wall[0] / wall[1],
        rng,
    )
    yield measuring.counted_row(
        case,
        f'{sparsity:.0%} zeros: dense / native, least CPU',
        float(cpu[0].min() / cpu[1].min()),
    )
