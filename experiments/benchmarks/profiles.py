"""Time of a training step by part, from JAX's profiler.

Steps of the suite `peers` with kept values only, at three widths, in float32
and bfloat16, dense and at 75 and 90 % sparsity, also in blocks of 32 if the
processor has a unit that multiplies them. Operations are assigned to a
part by the compiled program: sparse kernels; dense products, also those of
attention and the head; and all others. Operations that run at the same time
count each, so that the parts may add up to more than the step. `idle` is the
share of the cores' time that no thread of the process uses, without the
profiler.
"""

from collections.abc import Callable, Iterator
import pathlib
import re
import tempfile
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
from experiments.benchmarks import peers
from experiments.benchmarks import small_gpts
from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor
from spdf_jax.sparsity import structures

SPARSITIES = (0.0, 0.75, 0.9)
PARTS = ('sparse kernels', 'dense products', 'other operations')
CASES = (
    *peers.CASES,
    small_gpts.Case(
        'width 1024',
        dict(n_layers=4, n_heads=16, d_model=1024, d_ff=4096, max_length=256),
        4, 256, 1, 5,
    ),
)
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%(\S+) = (.*)$', re.MULTILINE)


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all widths; see `measure_case`."""
  for case in CASES:
    yield from measure_case(case, repeats, rng)


def measure_case(
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
      (dtype, sparsity, '') for dtype in peers.DTYPES for sparsity in SPARSITIES
  ]
  if native.has_matrix_unit():
    variants += [('bfloat16', s, ' in blocks') for s in SPARSITIES if s]
  for dtype, sparsity, where in variants:
    program = peers.compile_step(
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
