"""Work: what an operation asks of a device, whatever the device."""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.masks import MaskProfile


class Product(NamedTuple):
  """A product of resident activations and streamed weights.

  Attributes:
    tokens: Rows of the activations.
    inputs: Features that are multiplied and summed over.
    outputs: Features of the result.
    density: Share of the weights that are not zero.
    sampled: Whether the weights are the result: xᵀ @ dy where they are kept.
    mask: The real mask where it is known; by default one at random.
  """

  tokens: float
  inputs: int
  outputs: int
  density: float = 1.0
  sampled: bool = False
  mask: MaskProfile | None = None

  @property
  def kept(self) -> float:
    """Weights that are not zero."""
    if self.mask is not None:
      return self.mask.nonzeros
    return self.inputs * self.outputs * self.density


class Scores(NamedTuple):
  """A dense product of activations, such as queries by keys.

  Attributes:
    multiply_adds: Their number.
  """

  multiply_adds: float


class Elementwise(NamedTuple):
  """Operations that take a number in and give a number.

  Attributes:
    operations: Their number.
  """

  operations: float


class Host(NamedTuple):
  """What happens to weights where they are stored, off the wafer.

  Attributes:
    operations: Numbers that are computed; not timed one by one.
    steps: Optimizer steps, each taking the device's `step_seconds`.
  """

  operations: float
  steps: float = 0.0


Work = Product | Scores | Elementwise | Host
"""What a rule makes of an operation."""


def split_tokens(work: Work, systems: float) -> Work:
  """Returns one system's share of work in data-parallel training.

  Args:
    work: Of the whole batch.
    systems: Among which the tokens are split; weights are not.

  Returns:
    The share; what hosts do is not shared.

  Example:
    >>> split_tokens(Product(1024, 64, 64), 4).tokens
    256.0
  """
  if isinstance(work, Product):
    return work._replace(tokens=work.tokens / systems)
  if isinstance(work, Host):
    return work
  return type(work)(work[0] / systems)
