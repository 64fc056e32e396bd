"""Training and generation of GPT-2 Small and GPT-3 XL on one large GPU.

Steps in bfloat16 with a loss in chunks, with and without rematerialized layers:
dense, with a static mask of 75 % zeros, and with RigL. GPUs multiply zeros, so
the question is what masks cost. Target: a step with a static mask takes at most
1.02 of a dense one. The model's FLOPs, without those computed again in the
backward pass, are given as a share of the rate of matrix products measured in
the same run.

After that, exact top-k against the two sorts that JAX offers, and greedy
generation by GPT-2 Small with a cache, its layers in a loop and scanned. GPT-3
XL needs some 50 GiB of memory, for two states at a time.
"""

from collections.abc import Generator, Iterator
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import dense_training
from experiments.benchmarks import measuring
from experiments.benchmarks import model
from experiments.benchmarks import optimizer
from experiments.benchmarks import small_gpts
from experiments.benchmarks import topk
import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.costs.flops import training_flops
from spdf_jax.sparsity import masks

_LARGEST_STEP_RATIO = 1.02
_PRODUCTS = 10
"""Matrix products in one call, so that launches take no time."""
_RIGL = optimizer.ALGORITHMS['rigl']
_LOSS = training.Loss(chunk=128)
_WARMUPS = 2


def _case(
    preset: str, batch_size: int, length: int, attention: str, remat: str
) -> small_gpts.Case:
  sizes = dataclasses.asdict(models.PRESETS[preset]) | dict(
      dtype='bfloat16', scan_layers=True, attention=attention, remat=remat
  )
  return small_gpts.Case(
      f'{preset}, {attention} attention, remat {remat}, '
      f'{batch_size} x {length} tokens', sizes, batch_size, length, 1, 0,
  )


STEPS = (
    _case('gpt2-small', 16, 1024, 'xla', 'full'),
    _case('gpt2-small', 16, 1024, 'cudnn', 'full'),
    _case('gpt2-small', 16, 1024, 'cudnn', 'none'),
    _case('gpt3-xl', 8, 2048, 'cudnn', 'full'),
)
GENERATION = tuple(
    small_gpts.Case(
        name, dict(dtype='bfloat16', scan_layers=scanned), batch_size, 256, 1, 0
    )
    for name, scanned in (('gpt2-small', False), ('scanned gpt2-small', True))
    for batch_size in (1, 16)
)
PRODUCT = 8192
"""Rows and columns of the matrices whose products are the peak."""


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures the peak, steps, top-k and generation.

  Args:
    repeats: Rounds of timing.
    rng: Random generator of tokens, scores and the bootstrap.

  Yields:
    Rows.

  Raises:
    OSError: jax does not use a GPU.
  """
  if jax.default_backend() != 'gpu':
    raise OSError(
        f'--suite=gpu needs a GPU, and jax uses a {jax.default_backend()}: '
        'install jax[cuda12], or measure --suite=train_step.'
    )
  peak = yield from measure_peak(PRODUCT, repeats, rng)
  for case in STEPS:
    yield from measure_steps(case, peak, repeats, rng)
  yield from measure_topk(topk.SHAPE, repeats, rng)
  for case in GENERATION:
    yield from measure_generation(case, repeats, rng)


def measure_peak(
    size: int, repeats: int, rng: np.random.Generator
) -> Generator[measuring.Row, None, float]:
  """Yields the rate of bfloat16 products of squares; returns it in FLOP/s."""
  a, b = (
      jnp.asarray(rng.standard_normal((size, size), np.float32), jnp.bfloat16)
      for _ in range(2)
  )
  scale = size**-0.5  # Keeps the values finite.

  @jax.jit
  def multiply(a, b):
    return jax.lax.fori_loop(
        0, _PRODUCTS, lambda _, x: (scale * (x @ b)).astype(x.dtype), a
    )

  seconds = measuring.interleave(
      [lambda: multiply(a, b)], repeats, warmups=_WARMUPS
  ).wall[0]
  rates = _PRODUCTS * 2 * size**3 / seconds
  yield measuring.sampled_row(
      f'bfloat16 products of {size} x {size}', 'TFLOP/s', 1e-12 * rates, rng
  )
  return float(np.median(rates))


def measure_steps(
    case: small_gpts.Case, peak: float, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures training steps of one model.

  Args:
    case: The model.
    peak: FLOP/s of matrix products.
    repeats: Rounds of timing.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  subject = small_gpts.create_subject(case, rng)
  chain = small_gpts.chain_of(subject)
  tokens = case.batch_size * case.length
  flops = case.batch_size * training_flops(
      subject.model.config, case.length
  )

  compile_step = functools.partial(
      small_gpts.compile_step, subject, loss=_LOSS
  )
  programs = {
      'dense': compile_step(chain, dense_training.train_step),
      'static': compile_step(
          small_gpts.sparsified(chain, spdf.static(small_gpts.SPARSITY))
      ),
  }
  for name, program in programs.items():
    size = compiled.tree_bytes(program.state) + compiled.scratch_bytes(program)
    yield measuring.counted_row(case.name, f'{name}: GiB', size / 2**30)
    yield measuring.counted_row(
        case.name, f'{name}: seconds to compile', program.seconds
    )
  # Each state is as large as the model with Adam's moments, so those of the
  # first two programs go before RigL's is made.
  calls = [compiled.repeated(program) for program in programs.values()]
  del programs, program
  wall = measuring.interleave(calls, repeats, warmups=_WARMUPS).wall
  del calls
  for name, seconds in zip(('dense', 'static'), wall):
    for metric, samples in (
        ('ms', 1e3 * seconds), ('tokens/s', tokens / seconds),
        ('share of the peak, %', 100 * flops / seconds / peak),
    ):
      yield measuring.sampled_row(case.name, f'{name}: {metric}', samples, rng)
  yield measuring.sampled_row(
      case.name, 'static / dense', wall[1] / wall[0], rng,
      target=_LARGEST_STEP_RATIO,
  )
  program = compile_step(small_gpts.sparsified(chain, _RIGL))
  calls = optimizer.repeated_at(
      program, _RIGL, (optimizer.UPDATE, optimizer.BETWEEN),
      repeats + _WARMUPS,
  )
  update, between = measuring.interleave(calls, repeats, warmups=_WARMUPS).wall
  yield measuring.sampled_row(
      case.name, 'RigL, an update / a step between', update / between, rng
  )


def measure_topk(
    shape: tuple[int, int], repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures masks of the highest scores against two sorts."""
  scores = jnp.asarray(rng.standard_normal(shape, np.float32))
  functions = [
      jax.jit(f, static_argnums=1)
      for f in (masks.mask_from_scores, topk.argsort_mask, _lax_mask)
  ]
  calls = [lambda f=f: f(scores, topk.SPARSITY) for f in functions]
  timings = measuring.interleave(calls, repeats, warmups=_WARMUPS)
  case = f'masks of {shape[0]} x {shape[1]} scores'
  yield measuring.sampled_row(
      case, 'mask_from_scores, ms', 1e3 * timings.wall[0], rng
  )
  first, *others = timings.results
  for name, seconds, mask in zip(
      ('argsort', 'lax.top_k'), timings.wall[1:], others
  ):
    yield measuring.sampled_row(
        case, f'{name} / mask_from_scores', seconds / timings.wall[0], rng
    )
    yield measuring.counted_row(
        case, f'entries that differ from {name}', int((first != mask).sum())
    )


def _lax_mask(scores: jax.Array, sparsity: float) -> jax.Array:
  flat = scores.reshape(-1)
  kept = flat.size - round(sparsity * flat.size)
  _, at = jax.lax.top_k(flat, kept)
  return jnp.zeros(flat.size, bool).at[at].set(True).reshape(scores.shape)


def measure_generation(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures greedy generation after half of the cache."""
  program = model.generation_program(case, case.length // 2, rng)
  seconds = measuring.interleave(
      [compiled.repeated(program)], repeats, warmups=_WARMUPS
  ).wall[0]
  name = f'{case.name}, generation, {case.batch_size} sequences'
  yield measuring.counted_row(name, 'seconds to compile', program.seconds)
  yield measuring.sampled_row(
      name, 'tokens/s', case.batch_size * model.TOKENS / seconds, rng
  )
