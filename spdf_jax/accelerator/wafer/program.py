# SPDX-License-Identifier: Apache-2.0
"""Programs: sequences of operations, independent of any device."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np


class MaskProfile:
  """The number and the distribution of a mask's non-zeros.

  Attributes:
    nonzeros: Number of kept weights.
    sparsity: Fraction of zeros.

  Example:
    >>> profile = MaskProfile(np.array([[True, True], [False, False]]))
    >>> profile.nonzeros, profile.sparsity
    (2, 0.5)
  """

  def __init__(self, mask: Any):
    """Initializes the profile of a mask, bool [inputs, outputs]."""
    self._mask = np.asarray(mask, bool)
    self.nonzeros = int(self._mask.sum())
    self.sparsity = 1 - self.nonzeros / self._mask.size
    self._per_window: dict[float, np.ndarray] = {}

  def transposed(self) -> 'MaskProfile':
    """Returns the profile of the transposed mask."""
    return MaskProfile(self._mask.T)

  def imbalance(self, columns: Any, window: float) -> np.ndarray:
    """Returns the ratio of the largest to the mean load of columns of cores.

    Args:
      columns: Numbers of columns of cores over which the inputs are split.
      window: Number of outputs after which columns synchronize.

    Returns:
      The sum over windows of the busiest column's non-zeros, divided by the sum
      of the means, for each number of columns.

    Example:
      >>> profile = MaskProfile(np.array([[True, True], [False, False]]))
      >>> profile.imbalance(np.array([1, 2]), 2).tolist()
      [1.0, 2.0]
    """
    inputs, outputs = self._mask.shape
    if not self.nonzeros:
      return np.ones(np.shape(columns))
    starts = np.arange(0, outputs, max(int(window), 1))
    if window not in self._per_window:
      self._per_window[window] = np.add.reduceat(
          self._mask, starts, axis=1, dtype=np.int64
      )
    per_window = self._per_window[window]

    def count(number):
      number = int(np.clip(round(float(number)), 1, inputs))
      firsts = np.arange(number) * inputs // number
      loads = np.add.reduceat(per_window, firsts, axis=0)
      return loads.max(axis=0).sum() * number / self.nonzeros

    return np.vectorize(count, otypes=[float])(columns)


def check_sparsity(sparsity: float, label: str = 'sparsity') -> None:
  """Raises ValueError unless a sparsity is in [0, 1)."""
  if not 0 <= sparsity < 1:
    raise ValueError(
        f'{label} is {sparsity}; give the fraction of zeros, at least 0 and '
        'below 1.'
    )


class Product(NamedTuple):
  """A product of resident activations and streamed weights.

  Attributes:
    tokens: Number of rows of the activations.
    inputs: Number of contracted features.
    outputs: Number of features of the result.
    sparsity: Fraction of zeros among the weights.
    sampled: Whether the product is the gradient of weights: xᵀ @ dy at kept
      weights.
    mask: Profile of the mask; `None` assumes a random one of this sparsity.
  """

  tokens: float
  inputs: int
  outputs: int
  sparsity: float = 0.0
  sampled: bool = False
  mask: MaskProfile | None = None

  @property
  def kept(self) -> float:
    """Number of kept weights."""
    if self.mask is not None:
      return self.mask.nonzeros
    return self.inputs * self.outputs * (1 - self.sparsity)


class ScoreProduct(NamedTuple):
  """A dense product of activations, such as queries by keys.

  Attributes:
    multiply_adds: Number of multiply-adds.
  """

  multiply_adds: float


class Elementwise(NamedTuple):
  """Scalar operations on the cores.

  Attributes:
    operations: Number of operations.
  """

  operations: float


class Host(NamedTuple):
  """Work on weights and gradients, executed on the hosts that store them.

  Attributes:
    operations: Number of operations, which take no time in the model.
    steps: Number of optimizer steps; each takes the device's `step_seconds`.
  """

  operations: float
  steps: float = 0.0


Work = Product | ScoreProduct | Elementwise | Host
"""The kinds of work that a cost rule returns."""


def split_tokens(work: Work, parts: float) -> Work:
  """Returns the work of one of several equal parts of the tokens.

  Args:
    work: Work on the whole batch.
    parts: Number of parts of the tokens; weights are not split.

  Returns:
    The work of one part; `Host` work is not split.

  Example:
    >>> split_tokens(Product(1024, 64, 64), 4).tokens
    256.0
  """
  if isinstance(work, Product):
    return work._replace(tokens=work.tokens / parts)
  if isinstance(work, Host):
    return work
  return type(work)(work[0] / parts)


class Operation(NamedTuple):
  """An operation of a program.

  Attributes:
    layer: Name of the module, `''` outside all modules.
    name: Name of the primitive.
    phase: `'forward'`, `'backward'` or `'recompute'`.
    work: The work of one execution.
    count: Number of executions.
  """

  layer: str
  name: str
  phase: str
  work: Work
  count: float = 1.0  # type: ignore[assignment]  # hides tuple.count


class Branches(NamedTuple):
  """A `cond` whose predicate is unknown.

  Attributes:
    name: Name, `'cond_0'` and so on, in program order.
    programs: Program of each branch, of which the costliest counts.
    count: Number of executions of the `cond`.
  """

  name: str
  programs: tuple['Program', ...]
  count: float = 1.0  # type: ignore[assignment]  # hides tuple.count


@dataclasses.dataclass(frozen=True)
class Program:
  """The work of a program, independent of the device.

  Attributes:
    operations: Operations in program order, one for each unit of work.
    branches: Conds with unknown predicates; `operations` does not contain
      their operations.
    unknown: Number of executions of primitives without a cost rule, by name.
  """

  operations: tuple[Operation, ...] = ()
  branches: tuple[Branches, ...] = ()
  unknown: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __add__(self, other: 'Program') -> 'Program':
    return join((self, other))

  def __mul__(self, count: float) -> 'Program':
    return Program(
        tuple(o._replace(count=o.count * count) for o in self.operations),
        tuple(b._replace(count=b.count * count) for b in self.branches),
        {name: n * count for name, n in self.unknown.items()},
    )


def add_counts(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Adds counts by name.

  Example:
    >>> add_counts([{'sort': 1}, {'sort': 2, 'fft': 1}])
    {'sort': 3, 'fft': 1}
  """
  total: dict[str, float] = {}
  for count in counts:
    for name, n in count.items():
      total[name] = total.get(name, 0) + n
  return total


def join(programs: Iterable[Program]) -> Program:
  """Concatenates programs."""
  programs = tuple(programs)
  return Program(
      tuple(o for p in programs for o in p.operations),
      tuple(b for p in programs for b in p.branches),
      add_counts(p.unknown for p in programs),
  )


def with_sparsity(
    program: Program,
    sparsity: Callable[[str], float],
    *,
    dense_grads: bool = False,
) -> Program:
  """Returns a program with another sparsity of the masked products.

  Args:
    program: A program traced with a sparsity above 0, which marks the masked
      products.
    sparsity: Function from the layer's name to the fraction of zeros.
    dense_grads: Whether gradients of pruned weights are computed too.

  Returns:
    The program, without the profiles of known masks.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4, 0.5))
    >>> sparser = with_sparsity(Program((operation,)), lambda layer: 0.9)
    >>> sparser.operations[0].work.sparsity
    0.9
  """

  def change(operation: Operation) -> Operation:
    work = operation.work
    if not (isinstance(work, Product) and work.sparsity > 0):
      return operation
    zeros = sparsity(operation.layer)
    if dense_grads and work.sampled:
      zeros = 0.0
    return operation._replace(work=work._replace(sparsity=zeros, mask=None))

  return map_operations(program, change)


def in_micro_batches(program: Program, number: int) -> Program:
  """Returns a program that computes its batch in sequential parts.

  The weights are streamed again for each part; the optimizer steps once.

  Args:
    program: Program on the whole batch.
    number: Number of micro-batches.

  Returns:
    A program with the work of all micro-batches.

  Raises:
    ValueError: `number` is below 1.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4))
    >>> parts = in_micro_batches(Program((operation,)), 4)
    >>> parts.operations[0].work.tokens, parts.operations[0].count
    (2.0, 4.0)
  """

  if number < 1:
    raise ValueError(f'number is {number}; give 1 micro-batch or more.')

  def change(operation: Operation) -> Operation:
    if isinstance(operation.work, Host):
      return operation
    return operation._replace(
        work=split_tokens(operation.work, number),
        count=operation.count * number,
    )

  return map_operations(program, change)


def map_operations(
    program: Program, change: Callable[[Operation], Operation]
) -> Program:
  """Applies a function to every operation, also of branches."""
  return dataclasses.replace(
      program,
      operations=tuple(map(change, program.operations)),
      branches=tuple(
          b._replace(
              programs=tuple(map_operations(p, change) for p in b.programs)
          )
          for b in program.branches
      ),
  )
