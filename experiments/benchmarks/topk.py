"""Exact top-k and random masks against the argsort that other libraries use.

Targets on 4096 x 16384 float32: `mask_from_scores` is at least 40 times faster
than a stable argsort, 15 times if many scores are tied, gives the same masks,
and takes at most 8 bytes of scratch per score; a random mask is at least 6
times faster than the argsort of uniform random numbers.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import measuring
import spdf_jax as spdf
from spdf_jax.sparsity import masks

SHAPE = (4096, 16384)
SPARSITY = 0.75
_SMALLEST_SPEEDUPS = {'normal': 40, 'many ties': 15, 'random mask': 6}


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures normal scores, scores with many ties, and random masks.

  Args:
    repeats: Rounds of timing; an argsort takes half a minute in each.
    rng: Random generator of scores and the bootstrap.

  Yields:
    Rows.
  """
  yield from measure_shape(SHAPE, repeats, rng)


def measure_shape(
    shape: tuple[int, int], repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures masks of a shape; see `measure`."""
  normal = jnp.asarray(rng.standard_normal(shape, np.float32))
  ours, argsort = (
      jax.jit(f, static_argnums=1).lower(normal, SPARSITY).compile()
      for f in (masks.mask_from_scores, argsort_mask)
  )
  cases = {'normal': normal, 'many ties': jnp.round(8 * normal)}
  for case, scores in cases.items():
    timings = _time(ours, argsort, scores, repeats)
    mine, other = timings.results
    yield measuring.counted_row(
        case, 'entries that differ from argsort', int((mine != other).sum()),
        target=0,
    )
    yield from _time_rows(case, 'mask_from_scores', 'argsort', timings, rng)
  for name, program in (('mask_from_scores', ours), ('argsort', argsort)):
    yield measuring.counted_row(
        'both',
        f'{name}: scratch bytes per score',
        program.memory_analysis().temp_size_in_bytes / normal.size,
        target=8 if program is ours else None,
    )
  yield from _random_rows(shape, repeats, rng)


def argsort_mask(scores: jax.Array, sparsity: float) -> jax.Array:
  """Returns a mask of the highest scores by a stable argsort, as in jaxpruner.
  """
  flat = scores.reshape(-1)
  kept = max(1, flat.size - round(sparsity * flat.size))
  order = jnp.argsort(-flat, stable=True)
  mask = jnp.zeros(flat.size, bool).at[order[:kept]].set(True)
  return mask.reshape(scores.shape)


def _random_rows(
    shape: tuple[int, int], repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  like = jax.ShapeDtypeStruct(shape, jnp.float32)
  key = jax.random.key(0)
  ours, argsort = (
      jax.jit(f).lower(key).compile()
      for f in (
          lambda key: spdf.init.random(key, like, SPARSITY),
          lambda key: argsort_mask(
              jax.random.uniform(key, shape, jnp.float32), SPARSITY
          ),
      )
  )
  timings = _time(ours, argsort, key, repeats)
  case = 'random mask'
  # The two masks are different samples with the same number of kept weights.
  mine, other = (int(mask.sum()) for mask in timings.results)
  yield measuring.counted_row(
      case, 'kept beyond those of argsort', mine - other, target=0
  )
  yield from _time_rows(
      case, 'random_mask', 'argsort of uniforms', timings, rng
  )


def _time(
    ours: Callable[[jax.Array], jax.Array],
    argsort: Callable[[jax.Array], jax.Array],
    argument: jax.Array,
    repeats: int,
) -> measuring.Timings:
  jax.block_until_ready(ours(argument))
  # Both are compiled already; a warm-up of argsort would take half a minute.
  return measuring.interleave(
      [lambda: ours(argument), lambda: argsort(argument)], repeats, warmups=0
  )


def _time_rows(
    case: str,
    ours: str,
    argsort: str,
    timings: measuring.Timings,
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  for clock, seconds in (('wall', timings.wall), ('CPU', timings.cpu)):
    yield measuring.sampled_row(case, f'{ours}, {clock} s', seconds[0], rng)
    yield measuring.sampled_row(case, f'{argsort}, {clock} s', seconds[1], rng)
    yield measuring.sampled_row(
        case,
        f'{argsort} / {ours}, {clock}',
        seconds[1] / seconds[0],
        rng,
        target=_SMALLEST_SPEEDUPS[case],
        at_most=False,
    )
