"""Reports: what a program takes on a device, operation by operation."""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
import operator
from typing import Any
from typing import NamedTuple

import jax

from spdf_jax.accelerator.wafer.cluster import cost_on
from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import add_counts
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Program

BOUNDS = ('core', 'fabric', 'io', 'latency', 'host')
"""What can hold a program up."""


class Row(NamedTuple):
  """An operation and its cost.

  Attributes:
    operation: What is done.
    cost: Of all its executions.
  """

  operation: Operation
  cost: Cost

  @property
  def bound(self) -> str:
    """What holds it up: one of `BOUNDS`."""
    return bound_of(self.cost)


class BranchReport(NamedTuple):
  """A `cond` whose predicate was not known.

  Attributes:
    name: What `frequencies` calls it.
    reports: One for each branch, for all executions of the cond.
    frequencies: With which they count.
    given: Whether the caller gave them; if not, the costliest counts.
  """

  name: str
  reports: tuple['Report', ...]
  frequencies: tuple[float, ...]
  given: bool


@dataclasses.dataclass(frozen=True)
class Report:
  """What a program takes; reports add up, and multiply by a number of runs.

  Attributes:
    device: The device, one system of it.
    systems: Over which the tokens are split.
    rows: Operations in order, of all systems together where they are counts,
      and of each at the same time where they are cycles.
    branches: Conds that stayed open; `rows` hold their operations, weighted.
    unknown: Executions of primitives without a rule: not in the time.
    free: Executions of primitives that take no time, by name.
  """

  device: WaferDevice
  systems: int
  rows: tuple[Row, ...]
  branches: tuple[BranchReport, ...] = ()
  unknown: Mapping[str, float] = dataclasses.field(default_factory=dict)
  free: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __add__(self, other: 'Report') -> 'Report':
    if (self.device, self.systems) != (other.device, other.systems):
      raise ValueError(
          f'reports are of {self.systems} x {self.device.name} and '
          f'{other.systems} x {other.device.name}; add reports of one device.'
      )
    return dataclasses.replace(
        self,
        rows=self.rows + other.rows,
        branches=self.branches + other.branches,
        unknown=add_counts(self.unknown, other.unknown),
        free=add_counts(self.free, other.free),
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
            b._replace(reports=tuple(r * runs for r in b.reports))
            for b in self.branches
        ),
        unknown={name: n * runs for name, n in self.unknown.items()},
        free={name: n * runs for name, n in self.free.items()},
    )

  __rmul__ = __mul__

  @functools.cached_property
  def total(self) -> Cost:
    """The cost of everything."""
    return total(row.cost for row in self.rows)

  @property
  def program(self) -> Program:
    """What it is a report on, conds resolved."""
    return Program(tuple(row.operation for row in self.rows))

  @property
  def cycles(self) -> Any:
    """Cycles until it is done."""
    return self.total.cycles

  @property
  def seconds(self) -> Any:
    """Seconds until it is done."""
    return self.total.cycles / self.device.clock

  @property
  def flops(self) -> Any:
    """FLOPs done by all systems."""
    return self.total.flops

  @property
  def skipped_flops(self) -> Any:
    """FLOPs that zeros save."""
    return self.total.skipped_flops

  @property
  def utilisation(self) -> Any:
    """FLOPs done over those of the peak in the same time."""
    peak = self.device.peak_flops * self.systems
    return self.flops / (peak * self.seconds)

  @property
  def energy(self) -> tuple[Any, Any]:
    """J, at least and at most: FLOPs at the peak's energy; power all along."""
    return (
        self.flops * self.device.energy_per_flop,
        self.seconds * self.systems * self.device.power,
    )

  @property
  def bound(self) -> str:
    """What holds most of it up: one of `BOUNDS`."""
    cycles = dict.fromkeys(BOUNDS, 0.0)
    for row in self.rows:
      cycles[row.bound] += row.cost.cycles
    return max(cycles, key=cycles.get)

  def by_layer(self) -> dict[str, Cost]:
    """Adds costs up by layer, in order of appearance."""
    return self._grouped(lambda operation: operation.layer)

  def by_operation(self) -> dict[str, Cost]:
    """Adds costs up by primitive, in order of appearance."""
    return self._grouped(lambda operation: operation.name)

  def _grouped(self, key) -> dict[str, Cost]:
    groups: dict[str, Cost] = {}
    for row in self.rows:
      name = key(row.operation)
      groups[name] = groups[name] + row.cost if name in groups else row.cost
    return groups


def total(costs: Iterable[Cost]) -> Cost:
  """Adds costs up."""
  return functools.reduce(operator.add, costs, Cost())


def bound_of(cost: Cost) -> str:
  """Returns what holds work up: one of `BOUNDS`.

  Example:
    >>> bound_of(Cost(core=1.0, io=2.0))
    'io'
  """
  return max(BOUNDS, key=lambda name: getattr(cost, name))


def report_on(
    program: Program, device: WaferDevice, systems: int = 1
) -> Report:
  """Costs a program on a device.

  Args:
    program: What is to be done.
    device: The device; its numbers may be traced.
    systems: Over which the tokens are split.

  Returns:
    The report.

  Raises:
    ValueError: there is less than one system, or more than a cluster holds.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> from spdf_jax.accelerator.wafer.work import Product
    >>> layer = Operation('h', 'dot', 'forward', Product(131072, 4096, 4096))
    >>> report = report_on(Program((layer,)) * 3, create_device('cs2'))
    >>> report.bound, f'{report.seconds * 1e3:.1f} ms'
    ('core', '7.1 ms')
  """
  found: dict[Any, Cost] = {}  # A program repeats itself.

  def cost(work):
    # Kinds of work are tuples, equal if their numbers are; tracers have no
    # hash.
    traced = (id(x) if isinstance(x, jax.core.Tracer) else x for x in work)
    key = type(work), *traced
    if key not in found:
      found[key] = cost_on(work, device, systems)
    return found[key]

  return _report_on(program, device, systems, cost)


def _report_on(program, device, systems, cost) -> Report:
  rows = [Row(o, cost(o.work) * o.count) for o in program.operations]
  report = Report(
      device, systems, tuple(rows), (), program.unknown, program.free
  )
  for branch in program.branches:
    reports = tuple(
        _report_on(p, device, systems, cost) * branch.count
        for p in branch.programs
    )
    given = branch.frequencies is not None
    if given:
      shares = branch.frequencies
    else:
      worst = max(range(len(reports)), key=lambda i: reports[i].cycles)
      shares = tuple(float(i == worst) for i in range(len(reports)))
    for part, share in zip(reports, shares):
      if share:
        report += part * share
    entry = BranchReport(branch.name, reports, shares, given)
    report = dataclasses.replace(report, branches=(*report.branches, entry))
  return report
