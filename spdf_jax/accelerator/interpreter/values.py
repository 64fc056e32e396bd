# SPDX-License-Identifier: Apache-2.0
"""Values in a jaxpr, and the masks of those that are weights."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax

from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import primitives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
  """Masks of an array of weights; a pytree node.

  Attributes:
    product: `True` where a weight is kept; `None` for a `ListedMatrix`.
    gradient: `True` where its gradient is computed, or `None`.
    weights: Paths of the weights of which the array consists.
  """

  product: Any
  gradient: Any
  weights: frozenset[str] = dataclasses.field(metadata={'static': True})


class Value(NamedTuple):
  """A value in a jaxpr.

  Attributes:
    array: The array; with masks, its pruned entries are to be ignored. Or the
      `ListedMatrix` in its place, which has lists instead of masks.
    masks: Masks of weights that are followed; `None` for all other arrays.
  """

  array: Any
  masks: Masks | None = None

  @property
  def is_listed(self) -> bool:
    """Whether the array is a `ListedMatrix`."""
    return isinstance(self.array, listed_matrix.ListedMatrix)

  def masked(self) -> Any:
    """Returns the array, with zeros in place of pruned weights."""
    if self.masks is None:
      return self.array
    if self.is_listed:
      return listed_matrix.dense_parameter(self.array)
    return primitives.kept_weights(
        self.array, self.masks.product, self.masks.gradient
    )


def dense(var: Any, value: Value) -> Any:
  """Returns the array of a variable, with zeros in place of pruned weights.

  A `ListedMatrix` has the dtype of its parameter also where the program casts
  it, since products sum in float32.
  """
  x = value.masked()
  return x.astype(var.aval.dtype) if value.is_listed else x


def arrays_and_masks(
    values: Sequence[Value],
) -> tuple[list[Any], list[Masks | None]]:
  """Returns the arrays of values, and their masks."""
  return [v.array for v in values], [v.masks for v in values]
