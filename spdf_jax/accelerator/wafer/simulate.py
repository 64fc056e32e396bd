# SPDX-License-Identifier: Apache-2.0
"""Simulation: the cost of a JAX program on a wafer, operation by operation."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.cost import cost_on
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import add_counts
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import Work
from spdf_jax.accelerator.wafer.trace import Sparsity
from spdf_jax.accelerator.wafer.trace import trace_program

BOUNDS = ('core', 'fabric', 'io', 'latency', 'host')
"""Resources that can limit the speed of an operation."""


def simulate(
    fn: Callable[..., Any],
    device: WaferDevice,
    *,
    systems: int = 1,
    sparsity: Sparsity | None = None,
    trips: int | None = None,
) -> Callable[..., 'Report']:
  """Returns a function that estimates the cost of `fn` on wafers.

  `fn` is traced but not executed, and the cost of each operation is estimated.
  Weights of products are streamed from hosts; products of activations, and
  elementwise operations on them, run on the cores. Operations on weights and
  gradients only, such as those of an optimizer, run on the hosts and take the
  device's `step_seconds` for each optimizer step.

  Args:
    fn: A JAX function, such as a forward pass or a whole training step.
    device: Device, one system (a wafer).
    systems: Number of systems over which the tokens are split.
    sparsity: Fraction of zeros in masks whose values are not given, or a
      function from the layer's name to it. Products of
      `accelerator.sparse_matmul` have masks, and so have those of any model in
      a loss that `skip_zeros` transforms; a warning says if there are none.
    trips: Number of iterations of each `while_loop` whose condition depends on
      unknown values.

  Returns:
    A function `(*args) -> Report`, called with the arguments of `fn`: arrays or
    `jax.ShapeDtypeStruct`. It counts the zeros of masks given as arrays. Signed
    integers are tokens, and so are arrays of the same shape; other arrays are
    weights, unless a product with weights shows that they are activations. Of
    a `cond` whose predicate is unknown, the costliest branch counts.

  Raises:
    ValueError: `sparsity` or `trips` is out of its range; or, when the returned
      function is called, another number is, `fn` cannot be traced, `sparsity`
      or `trips` is missing, or the activations of a product do not fit the
      device.

  Example:
    >>> from spdf_jax.accelerator import sparse_matmul
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((65 * 2048, 12288), jnp.float16)
    >>> w = jax.ShapeDtypeStruct((12288, 12288), jnp.float16)
    >>> mask = jax.ShapeDtypeStruct((12288, 12288), bool)
    >>> seconds = lambda s: simulate(
    ...     sparse_matmul, create_device('cs2'), sparsity=s)(x, w, mask).seconds
    >>> f'{seconds(0.0) / seconds(0.9):.1f} times faster'
    '8.7 times faster'
  """
  trace = trace_program(fn, sparsity=sparsity, trips=trips)

  def simulated(*args: Any) -> Report:
    report = report_on(trace(*args), device, systems)
    _check_fits(report)
    return report

  return simulated


class Row(NamedTuple):
  """An operation and its cost.

  Attributes:
    operation: Operation of the program.
    cost: Cost of all executions of the operation.
  """

  operation: Operation
  cost: Cost


@dataclasses.dataclass(frozen=True)
class BranchReport:
  """A `cond` whose predicate was unknown; its costliest branch counts.

  Attributes:
    name: Name of the cond.
    reports: Report of each branch, for all executions of the cond.
  """

  name: str
  reports: tuple['Report', ...]


@dataclasses.dataclass(frozen=True)
class Report:
  """The cost of a program; supports `+`, and `*` by a number of runs.

  Attributes:
    device: The device.
    systems: Number of systems over which the tokens are split.
    rows: Operations in program order; FLOPs are summed over all systems,
      cycles are not, since systems run in parallel.
    branches: Conds with unknown predicates; `rows` contains the operations of
      their costliest branches.
    unknown: Number of executions of primitives without a cost rule, by name;
      they cost no time.
  """

  device: WaferDevice
  systems: int
  rows: tuple[Row, ...]
  branches: tuple[BranchReport, ...] = ()
  unknown: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __add__(self, other: 'Report') -> 'Report':
    if (self.device, self.systems) != (other.device, other.systems):
      raise ValueError(
          f'reports are of {self.systems} x {self.device.name} and '
          f'{other.systems} x {other.device.name}; add only reports of the '
          'same device, with all its numbers, and of as many systems.'
      )
    return dataclasses.replace(
        self,
        rows=self.rows + other.rows,
        branches=self.branches + other.branches,
        unknown=add_counts((self.unknown, other.unknown)),
    )

  def __mul__(self, runs: float) -> 'Report':
    scale = lambda row: Row(
        row.operation._replace(count=row.operation.count * runs),
        row.cost * runs,
    )
    return dataclasses.replace(
        self,
        rows=tuple(map(scale, self.rows)),
        branches=tuple(
            dataclasses.replace(b, reports=tuple(r * runs for r in b.reports))
            for b in self.branches
        ),
        unknown={name: n * runs for name, n in self.unknown.items()},
    )

  @functools.cached_property
  def total(self) -> Cost:
    """Sum of all costs."""
    return sum((row.cost for row in self.rows), Cost())

  @property
  def program(self) -> Program:
    """The reported program, with conds resolved."""
    return Program(tuple(row.operation for row in self.rows))

  @property
  def cycles(self) -> Any:
    """Cycles from start to end."""
    return self.total.cycles

  @property
  def seconds(self) -> Any:
    """Seconds from start to end."""
    return self.total.cycles / self.device.clock

  @property
  def flops(self) -> Any:
    """FLOPs of all systems."""
    return self.total.flops

  @property
  def skipped_flops(self) -> Any:
    """FLOPs that sparsity saves."""
    return self.total.skipped_flops

  @property
  def utilisation(self) -> Any:
    """Fraction of the peak FLOP/s; 0 for a program that takes no time."""
    peak = self.device.peak_flops * self.systems
    return self.flops / (peak * self.seconds + 1e-300)

  @property
  def energy(self) -> tuple[Any, Any]:
    """Lower and upper bound, J: energy per FLOP at peak, and peak power."""
    return self.device.energy(self.flops, self.seconds * self.systems)

  @property
  def bound(self) -> str:
    """The resource of `BOUNDS` that limits the program for most of its time."""
    cycles = dict.fromkeys(BOUNDS, 0.0)
    for row in self.rows:
      cycles[bound_of(row.cost)] += row.cost.cycles
    return max(cycles, key=lambda name: cycles[name])

  def by_layer(self) -> dict[str, Cost]:
    """Returns the cost of each layer, in program order."""
    return self._grouped(lambda operation: operation.layer)

  def by_operation(self) -> dict[str, Cost]:
    """Returns the cost of each primitive, in program order."""
    return self._grouped(lambda operation: operation.name)

  def _grouped(self, key: Callable[[Operation], str]) -> dict[str, Cost]:
    groups: dict[str, Cost] = {}
    for row in self.rows:
      name = key(row.operation)
      groups[name] = groups[name] + row.cost if name in groups else row.cost
    return groups


def bound_of(cost: Cost) -> str:
  """Returns the element of `BOUNDS` with the most cycles.

  Example:
    >>> bound_of(Cost(core=1.0, io=2.0))
    'io'
  """
  return max(BOUNDS, key=lambda name: getattr(cost, name))


def report_on(
    program: Program, device: WaferDevice, systems: int = 1
) -> Report:
  """Returns the estimated cost of a traced program on a device.

  Args:
    program: Program that a function of `trace_program` returned.
    device: Device, one system (a wafer); its numbers may be tracers.
    systems: Number of systems over which the tokens are split.

  Returns:
    The report.

  Raises:
    ValueError: `systems` is not an integer from 1 to the `largest_cluster` of
      the device; or fields of the device are tracers, and the program has a
      `cond` whose predicate is unknown.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> product = Product(tokens=131072, inputs=4096, outputs=4096)
    >>> layer = Operation('h', 'dot', 'forward', product)
    >>> report = report_on(Program((layer,)) * 3, create_device('cs2'))
    >>> report.bound, f'{report.seconds * 1e3:.1f} ms'
    ('core', '7.1 ms')
  """
  costs: dict[Any, Cost] = {}  # Programs repeat the same work many times.

  def cost(work: Work) -> Cost:
    # The key contains the type, as named tuples of different types with equal
    # numbers compare equal, and the ids of tracers, which are not hashable.
    traced = (id(x) if isinstance(x, jax.core.Tracer) else x for x in work)
    key = type(work), *traced
    if key not in costs:
      costs[key] = cost_on(work, device, systems)
    return costs[key]

  return _report_on(program, device, systems, cost)


def _report_on(
    program: Program, device: WaferDevice, systems: int,
    cost: Callable[[Work], Cost],
) -> Report:
  rows = [Row(o, cost(o.work) * o.count) for o in program.operations]
  report = Report(device, systems, tuple(rows), (), program.unknown)
  for branch in program.branches:
    reports = tuple(
        _report_on(p, device, systems, cost) * branch.count
        for p in branch.programs
    )
    if any(isinstance(r.cycles, jax.core.Tracer) for r in reports):
      raise ValueError(
          f'{branch.name} chooses a branch by unknown values, and numbers of '
          'the device are tracers, so that the slowest branch is not known; '
          'give fn the values, or the device numbers.'
      )
    report += max(reports, key=lambda report: report.cycles)
    entry = BranchReport(branch.name, reports)
    report = dataclasses.replace(report, branches=(*report.branches, entry))
  return report


def _check_fits(report: Report) -> None:
  """Raises ValueError if the activations of a product do not fit."""
  sram = report.device.sram
  if not isinstance(sram, (int, float)):
    return  # A tracer cannot be compared.
  for operation, cost in report.rows:
    if isinstance(operation.work, Product) and cost.sram_bytes > sram:
      work = operation.work
      raise ValueError(
          f'{operation.name} of {operation.layer or "the program"} keeps '
          f'{cost.sram_bytes / 1e9:,.1f} GB of activations ({work.tokens:,.0f} '
          f'tokens over {report.systems} systems, {work.inputs:,} inputs, '
          f'{work.outputs:,} outputs) and {report.device.name} has '
          f'{sram / 1e9:,.1f} GB of memory; use a smaller batch, micro-batches '
          'or more systems.'
      )
