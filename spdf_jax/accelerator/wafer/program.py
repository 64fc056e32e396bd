"""Programs: the operations of a program as work, before any device."""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
from typing import NamedTuple

from spdf_jax.accelerator.wafer.work import Work


class Operation(NamedTuple):
  """Work that a program asks for.

  Attributes:
    layer: Name of the module it comes from, `''` outside of all.
    name: Name of the primitive.
    phase: `'forward'`, `'backward'` or `'recompute'`.
    work: The work of one execution.
    count: Executions.
  """

  layer: str
  name: str
  phase: str
  work: Work
  count: float = 1.0


class Branches(NamedTuple):
  """A `cond` whose predicate is not known.

  Attributes:
    name: To name it by in `frequencies`: `'cond_0'` and so on, in the order of
      the program.
    programs: What each branch does.
    frequencies: How often each is taken; `None`: nobody said, and the costliest
      counts.
    count: Executions of the `cond`.
  """

  name: str
  programs: tuple['Program', ...]
  frequencies: tuple[float, ...] | None
  count: float = 1.0


@dataclasses.dataclass(frozen=True)
class Program:
  """What a program asks of any device.

  Attributes:
    operations: In order, one for each equation.
    branches: Its open conds; their operations are not among `operations`.
    unknown: Executions of primitives without a rule, by name.
    free: Executions of primitives that only name or lay out data, by name.
  """

  operations: tuple[Operation, ...] = ()
  branches: tuple[Branches, ...] = ()
  unknown: Mapping[str, float] = dataclasses.field(default_factory=dict)
  free: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __add__(self, other: 'Program') -> 'Program':
    return Program(
        self.operations + other.operations,
        self.branches + other.branches,
        add_counts(self.unknown, other.unknown),
        add_counts(self.free, other.free),
    )

  def __mul__(self, count: float) -> 'Program':
    return Program(
        tuple(o._replace(count=o.count * count) for o in self.operations),
        tuple(b._replace(count=b.count * count) for b in self.branches),
        {name: n * count for name, n in self.unknown.items()},
        {name: n * count for name, n in self.free.items()},
    )

  __rmul__ = __mul__


def add_counts(*counts: Mapping[str, float]) -> dict[str, float]:
  """Adds up counts by name.

  Example:
    >>> add_counts({'sort': 1}, {'sort': 2, 'fft': 1})
    {'sort': 3, 'fft': 1}
  """
  total: dict[str, float] = {}
  for count in counts:
    for name, n in count.items():
      total[name] = total.get(name, 0) + n
  return total


def join(programs: Iterable[Program]) -> Program:
  """Runs programs one after another."""
  programs = tuple(programs)
  return Program(
      tuple(o for p in programs for o in p.operations),
      tuple(b for p in programs for b in p.branches),
      add_counts(*(p.unknown for p in programs)),
      add_counts(*(p.free for p in programs)),
  )
