"""Arms: the ways to train that an experiment compares."""

import dataclasses
from fractions import Fraction

PRETRAINED, TUNED = 'validation/loss', 'target/loss'
"""Metrics that arms are chosen and compared by, in nats."""

ROUNDS = ('pruned', 'longer')
"""Methods that continue the training of a dense model in rounds."""


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to train; its runs differ in their seed and learning rate only.

  Attributes:
    method: `'init'` (initial weights), `'dense'`, `'static'`, `'set'`,
      `'rigl'`, `'granet'`, `'rigl-balanced'` and `'granet-balanced'` (growth by
      `growth.balanced`), `'rigl-skipped'` (no gradient step at mask updates),
      `'gmp'` (gradual pruning), `'variable'` (sparse, then dense), `'pruned'`
      (rounds of iterative pruning of a dense model) or `'longer'` (the same
      rounds without pruning).
    sparsity: Fraction of zeros; for `'variable'`, before the dense stage; for
      `'gmp'`, at the end.
    size: Name of a size of the scale; `''` is the main one.
    task: Name of a task that the pre-trained arm is fine-tuned on; `''`: the
      arm is a pre-training.
    sparse_tuning: Whether fine-tuning keeps the mask of pre-training.
    rate_of: Arm whose chosen learning rate this one uses; `None`: its own rate
      is tuned.
    flops_of: Arm whose pre-training FLOPs this one trains on, in steps of its
      own; `None`: it reads as many tokens as its size demands.
    dense_share: Share of the steps of `'variable'` that its dense stage takes.

  Example:
    >>> tuned = Arm('static', 0.75, size='small', task='task')
    >>> tuned.name, tuned.parent.name, tuned.parent.parent.name
    ('static-75_small+task', 'static-75_small', 'init_small')
  """

  method: str
  sparsity: float = 0.0
  size: str = ''
  task: str = ''
  sparse_tuning: bool = False
  rate_of: 'Arm | None' = None
  flops_of: 'Arm | None' = None
  dense_share: Fraction = Fraction(1, 6)

  @property
  def folder(self) -> str:
    """Name of the folder of its runs; arms with identical runs share it."""
    return (
        self.method
        + (f'-{100 * self.sparsity:g}' if self.sparsity else '')
        + (f'-at-{self.flops_of.kind}' if self.flops_of else '')
        + (f'-dense-{float(self.dense_share):g}'
           if self.dense_share != Arm.dense_share else '')
        + (f'_{self.size}' if self.size else '')
        + (f'+{self.task}' if self.task else '')
        + ('-sparse' if self.sparse_tuning else '')
    )

  @property
  def name(self) -> str:
    """Name in tables and figures."""
    if self.rate_of is None:
      return self.folder
    return f'{self.folder} at the rate of {self.rate_of.folder}'

  @property
  def parent(self) -> 'Arm | None':
    """The arm whose run of the same seed this one starts from."""
    if self.task:
      return dataclasses.replace(
          self, task='', sparse_tuning=False, rate_of=None
      )
    if self.method == 'init':
      return None
    return Arm('dense' if self.method in ROUNDS else 'init', size=self.size)

  @property
  def metric(self) -> str:
    """The loss that the learning rate is chosen by."""
    return TUNED if self.task else PRETRAINED

  @property
  def kind(self) -> str:
    """Name of method and sparsity alone, the same at every size and task."""
    return Arm(self.method, self.sparsity).folder


def with_parents(arms: list[Arm]) -> list[Arm]:
  """Returns arms with all that they depend on, in order of dependency.

  An arm comes after its `parent` and its `rate_of`.

  Example:
    >>> [arm.name for arm in with_parents([Arm('static', 0.5, task='task')])]
    ['init', 'static-50', 'static-50+task']
  """
  ordered: dict[Arm, None] = {}

  def add(arm: Arm) -> None:
    for before in (arm.parent, arm.rate_of):
      if before is not None:
        add(before)
    ordered[arm] = None

  for arm in arms:
    add(arm)
  return list(ordered)
