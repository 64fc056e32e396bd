"""Cost of every algorithm, on steps with a mask update and between them.

Each algorithm wraps the chain that a user of optax would write, and is compared
with that chain in one interleaved run. Each comparison has a process of its
own, because earlier compilations fragment the heap and slow down later
measurements. Both kinds of steps use one compiled program and differ in the
counters in its state.

Targets: between updates the optimizer alone takes at most 1.25 of the time of
the dense one and the train step at most 1.02; on an update the train step takes
at most 1.25. Rates by density and ages, which take a power per weight, have no
such target. The optimizer's program has scratch of at most 0.65 of its state
beyond the dense one's, and no copy of the state. A run compiles once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import functools
import multiprocessing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import compiled
from experiments.benchmarks import measuring
from experiments.benchmarks import small_gpts
from experiments.launch import console
import spdf_jax as spdf
from spdf_jax import models

UPDATE, BETWEEN = 50, 51
"""Steps that are timed: with a mask update, and between two of them."""
_STEPS = 105
"""Steps of a whole run, which includes the last mask update."""
_TIMES = dict(update_every=10, update_until=100)
_RISING = spdf.cubic(0.5, small_gpts.SPARSITY, 90)
ALGORITHMS = {
    'static': spdf.static(small_gpts.SPARSITY),
    'gmp': spdf.gmp(_RISING, **_TIMES),
    'gmp, model wide': spdf.gmp(
        _RISING, distribution=spdf.model_wide, **_TIMES
    ),
    'sparse_evolution': spdf.sparse_evolution(
        small_gpts.SPARSITY, update_every=10
    ),
    'rigl': spdf.rigl(small_gpts.SPARSITY, **_TIMES),
    'rigl, balanced': spdf.rigl(
        small_gpts.SPARSITY, grow='balanced', **_TIMES
    ),
    'granet': spdf.granet(_RISING, **_TIMES),
    'iterative': spdf.iterative([spdf.Round(50), spdf.Round(50, 0.25)]),
    'static, by density': spdf.static(small_gpts.SPARSITY),
    'static, with age': spdf.static(small_gpts.SPARSITY),
}
_WRAPS = {
    'static, by density': lambda adam: optax.chain(
        adam, spdf.scale_by_density(1.0, where=models.sparsifiable)
    ),
    'static, with age': functools.partial(
        spdf.with_age, where=models.sparsifiable
    ),
}
"""Changes of Adam in these rows, which have no targets of time."""
_WARMUPS = 2
_LARGEST_OPTIMIZER_RATIO = 1.25
_LARGEST_STEP_RATIO = 1.02
_LARGEST_UPDATE_RATIO = 1.25
_LARGEST_SCRATCH = 0.65


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures the quickstart's model and one of some 3.5M parameters.

  Args:
    repeats: Rounds of timing; faster cases take several steps in each.
    rng: Random generator of tokens and the bootstrap.

  Yields:
    Rows.
  """
  context = multiprocessing.get_context('spawn')
  for case in small_gpts.CASES[:2]:
    for name in ALGORITHMS:
      with concurrent.futures.ProcessPoolExecutor(
          1, mp_context=context, initializer=console.prepare
      ) as child:
        seed = int(rng.integers(2**32))
        rows = child.submit(_measure_one, case, name, repeats, seed)
        yield from rows.result()


def _measure_one(
    case: small_gpts.Case, name: str, repeats: int, seed: int
) -> list[measuring.Row]:
  return list(measure_case(
      case._replace(name=f'{case.name}, {name}'), repeats,
      np.random.default_rng(seed), {name: ALGORITHMS[name]},
  ))


def measure_case(
    case: small_gpts.Case,
    repeats: int,
    rng: np.random.Generator,
    algorithms: Mapping[str, spdf.Algorithm],
) -> Iterator[measuring.Row]:
  """Measures algorithms against the dense chain, all in this process."""
  subject = small_gpts.create_subject(case, rng)
  chain = small_gpts.chain_of(subject)
  optimizers = {'dense': chain} | {
      name: small_gpts.sparsified(
          small_gpts.chain_of(subject, wrap=_WRAPS[name])
          if name in _WRAPS else chain, algorithm,
      )
      for name, algorithm in algorithms.items()
  }

  grads = small_gpts.random_grads(subject.params, rng)
  programs = {
      name: small_gpts.compile_update(subject, optimizer, grads)
      for name, optimizer in optimizers.items()
  }
  for name, program in programs.items():
    yield measuring.counted_row(
        case.name,
        f'{name} optimizer: compilations of a run',
        compiled.count_compilations(program, _STEPS),
        target=1,
    )
    yield measuring.counted_row(
        case.name, f'{name} optimizer: state / dense',
        compiled.tree_bytes(program.state.opt_state)
        / compiled.tree_bytes(programs['dense'].state.opt_state),
    )
  targets = {BETWEEN: _LARGEST_OPTIMIZER_RATIO, UPDATE: None}
  yield from _time_rows(
      case.name, 'optimizer', programs, algorithms, targets,
      repeats * case.updates, rng,
  )
  yield from small_gpts.memory_rows(
      case.name, 'optimizer', _LARGEST_SCRATCH, programs
  )

  programs = small_gpts.compile_steps(subject, optimizers)
  for name, program in programs.items():
    yield measuring.counted_row(
        case.name, f'{name} step: seconds to compile', program.seconds
    )
  targets = {BETWEEN: _LARGEST_STEP_RATIO, UPDATE: _LARGEST_UPDATE_RATIO}
  yield from _time_rows(
      case.name, 'step', programs, algorithms, targets,
      repeats * case.steps, rng,
  )
  yield from small_gpts.memory_rows(case.name, 'step', None, programs)


def _time_rows(
    case: str,
    kind: str,
    programs: Mapping[str, compiled.Program],
    algorithms: Mapping[str, spdf.Algorithm],
    targets: Mapping[int, float | None],
    repeats: int,
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  timed = {('dense', BETWEEN): compiled.repeated(programs['dense'])}
  for name, algorithm in algorithms.items():
    counts = [
        count for count in targets
        if count == BETWEEN or algorithm.update_at(count)
    ]
    calls = repeated_at(programs[name], algorithm, counts, repeats + _WARMUPS)
    timed |= {(name, count): call for count, call in zip(counts, calls)}
  timings = measuring.interleave(
      list(timed.values()), repeats, warmups=_WARMUPS
  )
  yield measuring.sampled_row(
      case, f'dense {kind}, wall ms', 1e3 * timings.wall[0], rng
  )
  for i, (name, count) in enumerate(timed):
    if name == 'dense':
      continue
    when = 'update' if count == UPDATE else 'between'
    yield from measuring.ratio_rows(
        case, f'{name} {kind}, {when} / dense', timings, (i, 0), rng,
        target=None if name in _WRAPS else targets[count],
    )


def repeated_at(
    program: compiled.Program,
    algorithm: spdf.Algorithm,
    counts: Sequence[int],
    calls: int,
) -> list[Callable[[], Any]]:
  """Returns calls that take a step, each of them as step `count`.

  The calls share one state, and each has a batch or gradients of its own, so
  that between two mask updates the weights are trained, as in a run. With equal
  gradients in all steps, Adam would give all newly grown weights the same
  magnitude, and top-k would search its threshold among ties.

  Args:
    program: A compiled step of a `TrainState` whose optimizer is `sparsify`.
    algorithm: Algorithm of the optimizer.
    counts: Steps to simulate.
    calls: Largest number of times that each will be called.

  Returns:
    A call for every count.
  """
  # A copy, since the program's state is used by other calls too.
  state = jax.tree.map(jnp.copy, program.state)

  def at(i, count):
    argument = jax.tree.map(lambda x: jnp.roll(x, i, -1), program.argument)
    # Each call donates its counters, so there is a copy for each, created here
    # to exclude that from the timing. The counters of the learning rate and of
    # Adam are not replaced.
    clocks = iter([
        dict(
            count=jnp.int32(count),
            dense_grads=jnp.asarray(algorithm.dense_grads_at(count), bool),
        )
        for _ in range(calls)
    ])

    def call():
      nonlocal state
      opt_state = state.opt_state._replace(**next(clocks))
      state, rest = program.executable(
          state.replace(opt_state=opt_state), argument
      )
      return state, rest

    return call

  return [at(i, count) for i, count in enumerate(counts)]
