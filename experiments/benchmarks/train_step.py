"""Overhead of sparsity in a training step, and the speed of native kernels.

Three optimizers of one model are compared: `dense`, the chain that a user of
optax would write; `static`, the same chain in `sparsify` at 75 %; `phases`, the
optimizer of configs/quickstart.py with its three phases and restart.

Targets: the sparse step takes at most 1.03 of the time of the dense one, the
optimizer alone at most 1.25, and there is no copy of the optimizer's state.
That is counted in three ways: bytes of the donated state that are not updated
in place; bytes that XLA copies to arrays shaped like the dense optimizer's
state; and scratch beyond that of the dense program. In the optimizer alone the
latter is one masked gradient, up to half of Adam's state, because clipping
reads it twice; a copy of the state would be twice that.

The native kernels, which skip zeros, are measured last. Targets of the speed-up
over the dense step, in a model of width 768: 1.2 times at a sparsity of 50 %,
1.6 at 75 %, 2.1 at 90 % and 2.4 at 95 %; with compact storage 1.35, 1.9, 2.5
and 3.0 times. With the latter, parameters, masks and moments of a sparse layer
take at most 6.5 bytes per weight at 75 %, and 2.7 at 90 %; dense arrays take
13.
"""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
from experiments.benchmarks import small_gpts
import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.training.step import optimizers
from spdf_jax.training.step import storage

_LARGEST_SCRATCH = 0.5
"""Largest scratch as a share of Adam's state: that of the masked gradient."""
_LARGEST_STEP_RATIO = 1.03
_LARGEST_OPTIMIZER_RATIO = 1.25
NATIVE_SPEEDUPS = {0.5: 1.2, 0.75: 1.6, 0.9: 2.1, 0.95: 2.4}
"""Smallest speed-up of a wide model's step by native kernels, by sparsity."""
COMPACT_SPEEDUPS = {0.5: 1.35, 0.75: 1.9, 0.9: 2.5, 0.95: 3.0}
"""The same with compact storage: only kept values in parameters and moments."""
_LARGEST_BYTES = {0.75: 6.5, 0.9: 2.7}
"""Largest number of bytes per weight in compact storage, by sparsity."""
WIDE = small_gpts.Case(
    'd_model 768',
    dict(n_layers=4, n_heads=12, d_model=768, d_ff=3072, max_length=256),
    4, 256, 1, 5,
)


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all cases.

  Args:
    repeats: Rounds of timing; faster cases take several steps in each.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  for case in small_gpts.CASES:
    yield from measure_case(case, repeats, rng)
  for case in (small_gpts.CASES[0], WIDE):
    yield from measure_native(case, repeats, rng)


def measure_native(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures the step with native kernels, at several sparsities."""
  subject = small_gpts.create_subject(case, rng)
  chain = small_gpts.chain_of(subject)
  sparse = training.sparse_steps(
      'native', subject.model, case.batch_size * case.length
  )
  if sparse is None:
    return
  programs = [
      small_gpts.compile_step(subject, chain, small_gpts.dense_train_step)
  ]
  for sparsity in NATIVE_SPEEDUPS:
    optimizer = small_gpts.sparsified(chain, spdf.static(sparsity))
    programs += [
        small_gpts.compile_step(
            subject, optimizer, is_compact=is_compact, sparse_steps=sparse
        )
        for is_compact in (True, False)
    ]
  sizes = [
      storage.bytes_per_weight(program.state)
      for program in programs[1::2]
  ]
  timings = measuring.interleave(
      [compiled.repeated(program) for program in programs],
      repeats * case.steps, warmups=2,
  )
  name = f'{case.name}, native'
  yield measuring.sampled_row(
      name, 'dense step, wall ms', 1e3 * timings.wall[0], rng
  )
  for i, (sparsity, size) in enumerate(zip(NATIVE_SPEEDUPS, sizes)):
    for rival, at, targets in (
        ('native', 2 * i + 2, NATIVE_SPEEDUPS),
        ('compact', 2 * i + 1, COMPACT_SPEEDUPS),
    ):
      yield from measuring.ratio_rows(
          name, f'{sparsity:.0%} zeros: dense step / {rival}', timings, (0, at),
          rng, target=targets[sparsity] if case is WIDE else None,
          at_most=False,
      )
    yield measuring.counted_row(
        name, f'{sparsity:.0%} zeros: compact bytes per weight', size,
        target=_LARGEST_BYTES.get(sparsity),
    )


def measure_case(
    case: small_gpts.Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures one case; see `measure`."""
  subject = small_gpts.create_subject(case, rng)
  chain = small_gpts.chain_of(subject)
  all_optimizers = {
      'dense': chain,
      'static': small_gpts.sparsified(
          chain, spdf.static(small_gpts.SPARSITY)
      ),
      'phases': optimizers.adamw(
          subject.plan, where=models.sparsifiable, key=jax.random.key(0),
          **subject.settings,
      ),
  }
  programs = small_gpts.compile_steps(subject, all_optimizers)
  yield from _time_rows(
      case.name, 'step', _LARGEST_STEP_RATIO, programs,
      repeats * case.steps, rng,
  )
  yield from small_gpts.memory_rows(case.name, 'step', None, programs)

  grads = small_gpts.random_grads(subject.params, rng)
  programs = {
      name: small_gpts.compile_update(subject, optimizer, grads)
      for name, optimizer in all_optimizers.items()
  }
  yield from _time_rows(
      case.name, 'optimizer', _LARGEST_OPTIMIZER_RATIO, programs,
      repeats * case.updates, rng,
  )
  yield from small_gpts.memory_rows(
      case.name, 'optimizer', _LARGEST_SCRATCH, programs
  )


def _time_rows(
    case: str,
    kind: str,
    target: float,
    programs: Mapping[str, compiled.Program],
    repeats: int,
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  calls = [compiled.repeated(program) for program in programs.values()]
  timings = measuring.interleave(calls, repeats, warmups=2)
  yield measuring.sampled_row(
      case, f'dense {kind}, wall ms', 1e3 * timings.wall[0], rng
  )
  for i, name in enumerate(programs):
    if name == 'dense':
      continue
    yield from measuring.ratio_rows(
        case, f'{name} {kind} / dense', timings, (i, 0), rng, target=target
    )
