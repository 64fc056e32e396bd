"""Readings: interpretations under which a printed number can be computed."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools
from typing import NamedTuple

import jax

from experiments.papers.published_flops import Row
from spdf_jax.interop import layouts
from spdf_jax.models import PRESETS

TUNED = 512
"""Sequence length in fine-tuning: Hu et al. 2021, "LoRA"."""


class Reading(NamedTuple):
  """An interpretation of a printed number, and its value.

  Attributes:
    value: Computed number, in the unit of its cell.
    how: Description of the interpretation; `''` for this project's own.
    slip: Whether the printed number would be an error, such as the value of
      another cell.
  """

  value: float
  how: str = ''
  slip: bool = False


Read = Callable[[Row, str], Iterator[Reading]]
"""Function of row and column of a cell that yields its readings. The first is
this project's own."""


@functools.cache
def parameters_of(preset: str) -> tuple[int, int]:
  """Returns the parameters of a preset, and those in its hidden matrices.

  Example:
    >>> parameters_of('gpt2-small')
    (125226240, 84934656)
  """
  config = dataclasses.replace(PRESETS[preset], scan_layers=True)
  leaves = jax.tree.leaves(layouts.abstract_params(config))
  return (
      sum(int(x.size) for x in leaves), config.n_layers * config.hidden_weights
  )
