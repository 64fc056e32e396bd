"""Seconds of a training step by its sparsity: modeled, at best, or measured."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import WaferDevice
from spdf_jax.accelerator.wafer.comparisons import GPUS
from spdf_jax.accelerator.wafer.comparisons import roofline_seconds
from spdf_jax.costs.simulation import step_reports
from spdf_jax.costs.simulation import trace_step
from spdf_jax.data import Batch
from spdf_jax.names import lookup
from spdf_jax.training.recipe import Recipe

WAFERS = ('cs2', 'cs3')
MACHINES = ('cpu', *GPUS, *WAFERS)
"""What steps are timed on: here, GPUs at their best, the modeled wafer."""

_REPEATS = 3
_MOMENTS_AND_GRADIENTS = 4  # Copies of the parameters in a step, at least.

Seconds = Callable[[float], float]


def step_seconds(
    recipe_at: Callable[[float], Recipe],
    machine: str,
    count: int,
    levels: Sequence[float],
) -> Seconds:
  """Returns how long a step takes at a level of sparsity.

  On a wafer it is modeled. On a GPU it is the least that data sheets allow, and
  the same at every level: unstructured zeros gain nothing there. On `'cpu'`
  steps are taken here and now, at 0 and at `levels`; between these the seconds
  are interpolated, and where more zeros took longer that is left out.

  Args:
    recipe_at: Builds the recipe of a level; its first phase is timed.
    machine: One of `MACHINES`.
    count: Systems or GPUs; 1 for the CPU.
    levels: Rising levels to measure at.

  Returns:
    `level -> seconds`, which does not rise with the level.

  Raises:
    ValueError: the machine or the count is unknown, or the model does not fit
      this machine's memory.

  Example:
    >>> step_seconds(None, 'cpu', 2, [0.5])
    Traceback (most recent call last):
    ...
    ValueError: count is 2; give 1 for the CPU, and at least 1 of others.
  """
  lookup('machine', machine, dict.fromkeys(MACHINES))
  if count < 1 or (machine == 'cpu' and count != 1):
    raise ValueError(
        f'count is {count}; give 1 for the CPU, and at least 1 of others.'
    )
  if machine == 'cpu':
    found = {s: measure_step(recipe_at(s)) for s in (0.0, *levels)}
    return interpolated(found)
  recipe = recipe_at(levels[-1])
  if machine in WAFERS:
    return _on_wafer(recipe, create_device(machine), count)
  phase = recipe.plan.phases[0]
  program = trace_step(recipe, phase.batch_size, phase.length)
  seconds = roofline_seconds(program, machine, count=count)
  return lambda level: seconds


def interpolated(measured: Mapping[float, float]) -> Seconds:
  """Joins measured seconds by lines that do not rise with the level.

  Args:
    measured: Seconds by level, from 0 on, rising.

  Returns:
    `level -> seconds`; beyond the last level those of the last.

  Example:
    >>> seconds = interpolated({0.0: 2.0, 0.5: 3.0, 0.9: 1.0})
    >>> seconds(0.25), round(seconds(0.7), 3), seconds(0.95)
    (2.0, 1.5, 1.0)
  """
  levels = list(measured)
  falling = np.minimum.accumulate([measured[level] for level in levels])
  return lambda level: float(np.interp(level, levels, falling))


def measure_step(recipe: Recipe) -> float:
  """Takes steps of a recipe's first phase here, on random tokens.

  Args:
    recipe: Its state is made; its corpus is not read.

  Returns:
    Seconds of a step, the median of three after the first.

  Raises:
    ValueError: the state does not fit the free memory.
  """
  needed = recipe.parameters * 4 * _MOMENTS_AND_GRADIENTS
  free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  if needed > free:
    raise ValueError(
        f'{recipe.parameters:,} parameters take at least '
        f'{needed / 2**30:,.1f} GiB to train, and {free / 2**30:,.1f} GiB are '
        'free here; plan for another machine.'
    )
  phase = recipe.plan.phases[0]
  shape = phase.batch_size, phase.length
  tokens = jax.random.randint(
      jax.random.key(0), shape, 0, recipe.model.config.vocab_size
  )
  batch = Batch(tokens, tokens, jnp.ones(shape, jnp.float32))
  state, _ = recipe.step(recipe.create_state(), batch)  # Compiles.
  jax.block_until_ready(state)
  found = []
  for _ in range(_REPEATS):
    start = time.perf_counter()
    state, _ = recipe.step(state, batch)
    jax.block_until_ready(state)
    found.append(time.perf_counter() - start)
  return float(np.median(found))


def _on_wafer(recipe: Recipe, device: WaferDevice, systems: int) -> Seconds:
  phase = recipe.plan.phases[0]
  report = step_reports(recipe, device, systems)

  @functools.cache
  def seconds(level: float) -> float:
    shape = phase.batch_size, phase.length
    found = report(shape, lambda layer: level, False)
    return float(found.seconds)

  return seconds
