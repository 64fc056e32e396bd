"""Where the time of training goes: parts of a step on a CPU, and GPUs.

The suite `profiles` takes steps of the suite `peers` with kept values only, at
three widths, in float32 and bfloat16, dense and at 75 and 90 % sparsity, also
in blocks of 32 if the processor has a unit that multiplies them. JAX's profiler
measures their operations, which are assigned to a part by the compiled program:
sparse kernels; dense products, also those of attention and the head; and all
others. Operations that run at the same time count each, so that the parts may
add up to more than the step. `idle` is the share of the cores' time that no
thread of the process uses, without the profiler.

The suite `gpu` trains GPT-2 Small and GPT-3 XL on one large GPU: steps in
bfloat16 with a loss in chunks, with and without rematerialized layers: dense,
with a static mask of 75 % zeros, and with RigL. GPUs multiply zeros, so
the question is what masks cost. Target: a step with a static mask takes at most
1.02 of a dense one. The model's FLOPs, without those computed again in the
backward pass, are given as a share of the rate of matrix products measured in
the same run.

After that, exact top-k against the two sorts that JAX offers, and greedy
generation by GPT-2 Small with a cache, its layers in a loop and scanned. GPT-3
XL needs some 50 GiB of memory, for two states at a time.
"""

from collections.abc import Callable, Generator, Iterator
import dataclasses
import functools
import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import machine
from experiments.benchmarks import measuring
from experiments.benchmarks import model
from experiments.benchmarks import optimizer
from experiments.benchmarks import pytorch
from experiments.benchmarks import small_gpts
from experiments.benchmarks import topk
import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor
from spdf_jax.costs.flops import training_flops
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import structures

SPARSITIES = (0.0, 0.75, 0.9)
PARTS = ('sparse kernels', 'dense products', 'other operations')
CASES = (
    *pytorch.CASES,
    small_gpts.Case(
        'width 1024',
        dict(n_layers=4, n_heads=16, d_model=1024, d_ff=4096, max_length=256),
        4, 256, 1, 5,
    ),
)
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%(\S+) = (.*)$', re.MULTILINE)
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


def measure_parts(
    repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures the parts of steps of all widths; see `measure_parts_of`."""
  for case in CASES:
    yield from measure_parts_of(case, repeats, rng)


def measure_parts_of(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures the steps of one model.

  Args:
    case: The model and its batch.
    repeats: Number of timed steps, and of traced ones.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  subject = small_gpts.create_subject(case, rng)
  variants = [
      (dtype, sparsity, '')
      for dtype in machine.dtypes() for sparsity in SPARSITIES
  ]
  if native.has_matrix_unit():
    variants += [('bfloat16', s, ' in blocks') for s in SPARSITIES if s]
  for dtype, sparsity, where in variants:
    program = small_gpts.compile_native_step(
        subject, case, dtype, sparsity,
        structures.block(32, 32) if where else 'unstructured',
    )
    call = compiled.repeated(program)
    timings = measuring.interleave([call], repeats, warmups=2)
    name = f'{case.name}, {dtype}, {sparsity:.0%} zeros{where}'
    wall, cpu = timings.wall[0], timings.cpu[0]
    yield measuring.sampled_row(name, 'step, wall ms', 1e3 * wall, rng)
    yield measuring.sampled_row(
        name, 'idle, % of the cores',
        100 * (1 - cpu / wall / processor.cores()), rng
    )
    part_of = parts_of(program.executable.as_text())
    samples = [_trace(call, part_of) for _ in range(repeats)]
    for part in PARTS:
      milliseconds = np.array([sample[part] for sample in samples])
      yield measuring.sampled_row(name, f'{part}, ms', milliseconds, rng)


def parts_of(text: str) -> dict[str, str]:
  """Returns the part of every instruction of a compiled program.

  Args:
    text: The program, as `jax.stages.Compiled.as_text` prints it.

  Returns:
    A member of `PARTS` by the name of the instruction.

  Example:
    >>> parts_of('''
    ...   %fusion.1 = f32[4] fusion(%x), metadata={op_name="f/dot_general"}
    ...   ROOT %add.2 = f32[] add(%y, %z)''')
    {'fusion.1': 'dense products', 'add.2': 'other operations'}
  """
  def part(definition: str) -> str:
    if 'custom_call_target="spdf_' in definition:
      return 'sparse kernels'
    is_product = re.search(r'\bdot\(|op_name="[^"]*dot_general', definition)
    return 'dense products' if is_product else 'other operations'

  return {name: part(rest) for name, rest in _INSTRUCTION.findall(text)}


def _trace(
    call: Callable[[], Any], part_of: dict[str, str]
) -> dict[str, float]:
  """Returns the milliseconds of every part in one call."""
  totals = dict.fromkeys(PARTS, 0.0)
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(call())
    file = next(pathlib.Path(folder).rglob('*.xplane.pb'))
    trace = jax.profiler.ProfileData.from_file(str(file))
  for plane in trace.planes:
    for line in plane.lines:
      for event in line.events:
        name = dict(event.stats).get('hlo_op')
        if name in part_of:
          totals[part_of[name]] += event.duration_ns / 1e6
  return totals


def measure_gpu(
    repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures the peak, steps, top-k and generation on a GPU.

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
  """Measures the rate of products of square bfloat16 matrices.

  Args:
    size: Rows and columns of the matrices.
    repeats: Number of measurements.
    rng: Source of random numbers.

  Yields:
    A row with the rate.

  Returns:
    The median rate, in FLOP/s.
  """
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
      'dense': compile_step(chain, small_gpts.dense_train_step),
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
