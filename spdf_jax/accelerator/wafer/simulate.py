"""Simulation: a JAX program in, what it would take on a wafer out."""

from collections.abc import Callable
from typing import Any

import jax

from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.equations import TOKEN
from spdf_jax.accelerator.wafer.inputs import operands_of
from spdf_jax.accelerator.wafer.interpret import Density
from spdf_jax.accelerator.wafer.interpret import Frequencies
from spdf_jax.accelerator.wafer.interpret import Interpreter
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.report import Report
from spdf_jax.accelerator.wafer.report import report_on
from spdf_jax.accelerator.wafer.work import Host
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.names import lookup


def simulate(
    fn: Callable[..., Any],
    device: WaferDevice,
    *,
    systems: int = 1,
    density: Density | None = None,
    frequencies: Frequencies | None = None,
    trips: int | None = None,
) -> Callable[..., Report]:
  """Turns a function into one that tells what it would take on a wafer.

  Nothing is computed: the function is traced and its equations are costed.
  Products of weights are streamed, products of activations and elementwise
  operations run on the cores; what is done to weights and gradients alone
  happens where they are stored, in the device's `step_seconds`.

  Args:
    fn: A JAX function: a forward pass, or a whole training step.
    device: The device.
    systems: Over which the tokens are split.
    density: Share of kept weights in masks whose values are not given, or a
      function of the layer's name.
    frequencies: By cond (`'cond_0'`, … as reports name them) the share of its
      executions in which it is true, or a share for each branch. Conds that
      follow from the inputs need none; for others the costliest branch counts.
    trips: Iterations of loops that end when their data says so.

  Returns:
    `(*args) -> Report`; arguments are arrays or `jax.ShapeDtypeStruct`s. Masks
    given as arrays are counted. Signed integers, and what has their shape, are
    taken for tokens; other arrays for weights, unless they meet weights in a
    product.

  Raises:
    ValueError: when called: a number is out of its range, `fn` cannot be
      traced, something needs `density` or `trips`, or the activations of a
      product do not fit the device.

  Example:
    >>> from spdf_jax.accelerator import sparse_matmul
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((65 * 2048, 12288), jnp.float16)
    >>> w = jax.ShapeDtypeStruct((12288, 12288), jnp.float16)
    >>> mask = jax.ShapeDtypeStruct((12288, 12288), bool)
    >>> seconds = lambda d: simulate(
    ...     sparse_matmul, create_device('cs2'), density=d)(x, w, mask).seconds
    >>> f'{seconds(1.0) / seconds(0.1):.1f} times faster'
    '8.7 times faster'
  """
  trace = trace_program(
      fn, density=density, frequencies=frequencies, trips=trips
  )

  def simulated(*args: Any) -> Report:
    report = report_on(trace(*args), device, systems)
    check_fits(report)
    return report

  return simulated


def trace_program(
    fn: Callable[..., Any],
    *,
    density: Density | None = None,
    frequencies: Frequencies | None = None,
    trips: int | None = None,
) -> Callable[..., Program]:
  """Turns a function into one that tells what it asks of any device.

  Args:
    fn: As for `simulate`.
    density: As for `simulate`.
    frequencies: As for `simulate`.
    trips: As for `simulate`.

  Returns:
    `(*args) -> Program`, for `report_on` with many devices.

  Raises:
    ValueError: as `simulate`, but for what depends on the device.

  Example:
    >>> import jax.numpy as jnp
    >>> program = trace_program(jnp.dot)(jnp.ones((8, 4)), jnp.ones((4, 2)))
    >>> program.operations[0].work.tokens
    8
  """
  if isinstance(density, (int, float)) and not 0 < density <= 1:
    raise ValueError(
        f'density is {density}; it is the share of kept weights, above 0 and '
        'at most 1.'
    )
  if trips is not None and trips < 0:
    raise ValueError(f'trips is {trips}; it must not be negative.')

  def traced(*args: Any) -> Program:
    try:
      closed = jax.make_jaxpr(fn)(*args)
    except (TypeError, jax.errors.JAXIndexError) as error:
      raise ValueError(
          f'fn {getattr(fn, "__name__", fn)!r} cannot be traced: {error}'
      ) from error
    inputs = operands_of(args)
    while True:
      interpreter = Interpreter(density, frequencies or {}, trips, inputs)
      program, _ = interpreter.walk(closed.jaxpr, closed.consts, inputs)
      found = interpreter.activations
      if not interpreter.products:
        found = set(range(len(inputs)))
      resolved = [
          o._replace(space=TOKEN) if i in found and o.space else o
          for i, o in enumerate(inputs)
      ]
      if [o.space for o in resolved] == [o.space for o in inputs]:
        break
      inputs = resolved
    for name in frequencies or {}:
      lookup('cond', name, dict.fromkeys(interpreter.conds.values()))
    if interpreter.updates:
      step = Operation('', 'optimizer_step', 'backward', Host(0, 1))
      program += Program((step,))
    return program

  return traced


def check_fits(report: Report) -> None:
  """Raises ValueError where the activations of a product do not fit."""
  sram = report.device.sram
  if not isinstance(sram, (int, float)):
    return  # Swept over: `cost.fits` is the flag.
  for operation, cost in report.rows:
    if isinstance(operation.work, Product) and cost.sram_bytes > sram:
      work = operation.work
      raise ValueError(
          f'{operation.name} of {operation.layer or "the program"} keeps '
          f'{cost.sram_bytes / 1e9:,.1f} GB of activations ({work.tokens:,.0f} '
          f'tokens over {report.systems} systems, {work.inputs:,} inputs, '
          f'{work.outputs:,} outputs) and {report.device.name} has '
          f'{sram / 1e9:,.1f} GB; use a smaller batch, micro-batches or more '
          'systems.'
      )
