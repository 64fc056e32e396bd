"""Exact top-k masks against the argsort that other libraries use.

Target: `mask_from_scores` at least 20 times faster than a stable argsort on
4096 x 16384 float32, with at most 8 bytes of scratch per score.
"""

from collections.abc import Callable
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments import measuring
import spdf_jax as spdf

SHAPE = (4096, 16384)
SPARSITY = 0.75


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures normal scores, and scores with many ties.

  Args:
    repeats: Timed rounds; a round takes an argsort of half a minute each.
    rng: Of the scores and the bootstrap.

  Yields:
    Rows.
  """
  yield from measure_shape(SHAPE, repeats, rng)


def measure_shape(
    shape: tuple[int, int], repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures scores of a shape; see `measure`."""
  normal = jnp.asarray(rng.standard_normal(shape, np.float32))
  compiled = lambda f: jax.jit(f, static_argnums=1).lower(
      normal, SPARSITY
  ).compile()
  ours, argsort = compiled(spdf.mask_from_scores), compiled(argsort_mask)
  cases = {'normal': normal, 'many ties': jnp.round(8 * normal)}
  for case, scores in cases.items():
    yield from _rows(case, ours, argsort, scores, repeats, rng)
  for name, program in (('mask_from_scores', ours), ('argsort', argsort)):
    yield measuring.counted_row(
        'both',
        f'{name}: scratch bytes per score',
        program.memory_analysis().temp_size_in_bytes / normal.size,
        target=8 if program is ours else None,
    )


def argsort_mask(scores: jax.Array, sparsity: float) -> jax.Array:
  """Keeps the highest scores by a stable argsort, as jaxpruner does."""
  flat = scores.reshape(-1)
  kept = max(1, flat.size - round(sparsity * flat.size))
  order = jnp.argsort(-flat, stable=True)
  mask = jnp.zeros(flat.size, bool).at[order[:kept]].set(True)
  return mask.reshape(scores.shape)


def _rows(
    case: str,
    ours: Callable[[jax.Array], jax.Array],
    argsort: Callable[[jax.Array], jax.Array],
    scores: jax.Array,
    repeats: int,
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  jax.block_until_ready(ours(scores))
  # Programs are compiled: argsort needs no warm-up worth half a minute.
  timings = measuring.interleave(
      [lambda: ours(scores), lambda: argsort(scores)], repeats, warmups=0
  )
  mine, other = timings.results
  yield measuring.counted_row(
      case, 'entries that differ from argsort', int((mine != other).sum()),
      target=0,
  )
  for clock, seconds in (('wall', timings.wall), ('CPU', timings.cpu)):
    yield measuring.sampled_row(
        case, f'mask_from_scores, {clock} s', seconds[0], rng
    )
    yield measuring.sampled_row(case, f'argsort, {clock} s', seconds[1], rng)
    yield measuring.sampled_row(
        case,
        f'argsort / mask_from_scores, {clock}',
        seconds[1] / seconds[0],
        rng,
        target=20 if case == 'normal' else None,
        at_most=False,
    )
