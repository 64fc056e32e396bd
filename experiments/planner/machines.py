"""Time of a training step by sparsity: modeled, lower bound, or measured."""

from collections.abc import Callable, Mapping, Sequence
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.wafer import gpus
from experiments.wafer import run_costs
from spdf_jax import names
from spdf_jax.accelerator import wafer
from spdf_jax.data import Batch
from spdf_jax.training import initial_state
from spdf_jax.training.run import Run

WAFERS = ('cs2', 'cs3')
MACHINES = ('cpu', *gpus.GPUS, *WAFERS)
"""Machines: this CPU (measured), GPUs (rooflines) and wafers (modeled)."""

_REPEATS = 3
# Minimum number of arrays of the parameters' size in a step: the parameters,
# their gradients and two moments.
_MOMENTS_AND_GRADIENTS = 4

Seconds = Callable[[float], float]


def step_seconds(
    run_at: Callable[[float], Run],
    machine: str,
    count: int,
    sparsities: Sequence[float],
) -> Seconds:
  """Returns a function from a sparsity to the time of a step.

  Times on wafers are modeled. Times on GPUs are rooflines of data sheets, equal
  at every sparsity, since unstructured sparsity gives GPUs no speedup. For
  `'cpu'` steps are measured on this machine at 0 and at `sparsities`, and
  interpolated; a time above that of a lower sparsity is replaced by the latter.

  Args:
    run_at: Function from a sparsity to a run, whose first phase is timed.
    machine: One of `MACHINES`.
    count: Number of systems or GPUs; 1 for the CPU.
    sparsities: Sparsities to measure, increasing.

  Returns:
    A non-increasing function from a sparsity to seconds.

  Raises:
    ValueError: the machine is unknown, the count is out of range, or the model
      does not fit this machine's memory.

  Example:
    >>> step_seconds(None, 'cpu', 2, [0.5])
    Traceback (most recent call last):
    ...
    ValueError: count is 2; give 1 for the CPU, and at least 1 of others.
  """
  names.lookup('machine', machine, dict.fromkeys(MACHINES))
  if count < 1 or (machine == 'cpu' and count != 1):
    raise ValueError(
        f'count is {count}; give 1 for the CPU, and at least 1 of others.'
    )
  if machine == 'cpu':
    measured = {s: measure_step(run_at(s)) for s in (0.0, *sparsities)}
    return interpolated(measured)
  run = run_at(sparsities[-1])
  if machine in WAFERS:
    return _on_wafer(run, wafer.create_device(machine), count)
  phase = run.plan.phases[0]
  program = run_costs.trace_step(run, phase.batch_size, phase.length)
  seconds = gpus.roofline_seconds(program, machine, count=count)
  return lambda sparsity: seconds


def interpolated(measured: Mapping[float, float]) -> Seconds:
  """Returns a non-increasing linear interpolation of measured seconds.

  Args:
    measured: Seconds by sparsity; the sparsities increase from 0.

  Returns:
    A function from a sparsity to seconds, constant beyond the last sparsity.

  Example:
    >>> seconds = interpolated({0.0: 2.0, 0.5: 3.0, 0.9: 1.0})
    >>> seconds(0.25), round(seconds(0.7), 3), seconds(0.95)
    (2.0, 1.5, 1.0)
  """
  sparsities = list(measured)
  falling = np.minimum.accumulate([measured[s] for s in sparsities])
  return lambda sparsity: float(np.interp(sparsity, sparsities, falling))


def measure_step(run: Run) -> float:
  """Measures the time of a step of a run's first phase, on random tokens.

  Args:
    run: The run; the state is allocated, the corpus is not read.

  Returns:
    Seconds of a step, the median of three after a first one that compiles.

  Raises:
    ValueError: the state does not fit the free memory.
  """
  needed = run.parameters * 4 * _MOMENTS_AND_GRADIENTS
  free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  if needed > free:
    raise ValueError(
        f'{run.parameters:,} parameters take at least '
        f'{needed / 2**30:,.1f} GiB to train, and {free / 2**30:,.1f} GiB are '
        'free here; plan for another machine.'
    )
  phase = run.plan.phases[0]
  shape = phase.batch_size, phase.length
  tokens = jax.random.randint(
      jax.random.key(0), shape, 0, run.model.config.vocab_size, jnp.int32
  )
  batch = Batch(tokens, tokens, jnp.ones(shape, jnp.float32))
  state = initial_state.create(run.programs)
  state, _ = run.programs.step(state, batch)  # Compiles the step.
  jax.block_until_ready(state)
  seconds = []
  for _ in range(_REPEATS):
    start = time.perf_counter()
    state, _ = run.programs.step(state, batch)
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - start)
  return float(np.median(seconds))


def _on_wafer(
    run: Run, device: wafer.WaferDevice, systems: int
) -> Seconds:
  phase = run.plan.phases[0]
  report = run_costs.step_reports(run, device, systems)

  @functools.cache
  def seconds(sparsity: float) -> float:
    shape = phase.batch_size, phase.length
    step_report = report(shape, lambda layer: sparsity, False)
    return float(step_report.seconds)

  return seconds
