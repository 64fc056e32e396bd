"""Overhead of the sparse primitive in its reference lowering, a dense product.

`sparse_matmul` with its reference lowering is compared with a masked einsum:
forward, and forward with both gradients. Target: at most 1.02 of the einsum's
time, and no more memory.
"""

from collections.abc import Callable, Iterator
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import measuring
from spdf_jax.accelerator import sparse_matmul

SPARSITY = 0.75
_LARGEST_RATIO = 1.02


class Case(NamedTuple):
  """A linear layer to measure."""

  tokens: int
  """Rows of x."""

  inputs: int
  """Columns of x, rows of w."""

  outputs: int
  """Columns of w."""

  dtype: str
  """Dtype of x and w."""

  calls: int
  """Calls per timed sample."""


CASES = (
    Case(1024, 256, 1024, 'float32', 8),
    Case(1024, 768, 768, 'float32', 4),
    Case(1024, 768, 3072, 'float32', 1),
    Case(256, 2048, 8192, 'float32', 1),
    Case(1024, 256, 1024, 'bfloat16', 2),
)


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all cases.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of operands and the bootstrap.

  Yields:
    Rows.
  """
  for case in CASES:
    yield from measure_case(case, repeats, rng)


def measure_case(
    case: Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures one layer; see `measure`."""
  draw = lambda *shape: jnp.asarray(
      rng.standard_normal(shape, np.float32), case.dtype
  )
  x = draw(case.tokens, case.inputs)
  w = draw(case.inputs, case.outputs)
  dy = draw(case.tokens, case.outputs)
  mask = jnp.asarray(rng.random(w.shape) >= SPARSITY)
  name = f'{case.tokens} x {case.inputs} x {case.outputs} {case.dtype}'
  for kind, pass_of in (('forward', _forward), ('gradient', _gradient)):
    programs = [
        jax.jit(functools.partial(pass_of, multiply))
        .lower(x, w, mask, dy).compile()
        for multiply in (sparse_matmul, masked_einsum)
    ]
    calls = [
        functools.partial(_repeat, program, case.calls, x, w, mask, dy)
        for program in programs
    ]
    timings = measuring.interleave(calls, repeats, warmups=2)
    yield measuring.sampled_row(
        name,
        f'einsum {kind}, wall ms',
        1e3 * timings.wall[1] / case.calls,
        rng,
    )
    yield from measuring.ratio_rows(
        name, f'primitive {kind} / einsum', timings, (0, 1), rng,
        target=_LARGEST_RATIO,
    )
    ours, plain = (p.memory_analysis().temp_size_in_bytes for p in programs)
    yield measuring.counted_row(
        name,
        f'primitive {kind}: scratch bytes beyond einsum',
        ours - plain,
        target=0,
    )


def masked_einsum(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
  """Multiplies by the masked weights in plain JAX."""
  return jnp.einsum('tk,kn->tn', x, jnp.where(mask, w, 0))


def _forward(multiply: Callable[..., jax.Array], x, w, mask, dy) -> jax.Array:
  del dy
  return multiply(x, w, mask)


def _gradient(multiply: Callable[..., jax.Array], x, w, mask, dy) -> jax.Array:
  y, pullback = jax.vjp(lambda x, w: multiply(x, w, mask), x, w)
  return y, pullback(dy)


def _repeat(program: Callable[..., jax.Array], calls: int, *args) -> jax.Array:
  for _ in range(calls):
    result = jax.block_until_ready(program(*args))
  return result
