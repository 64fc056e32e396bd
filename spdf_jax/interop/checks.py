# SPDX-License-Identifier: Apache-2.0
"""Checks of arrays: their names, shapes and masks."""

from collections.abc import Mapping
from collections.abc import Set

import numpy as np

Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


def refuse_other_names(
    what: str, found: Set[str], expected: Set[str]
) -> None:
  """Raises ValueError unless arrays have the names of a model.

  Args:
    what: Source of the arrays, for the error message.
    found: Names of the arrays.
    expected: Expected names.

  Raises:
    ValueError: an array is missing or unexpected; the message names the first
      one.
  """
  _refuse(what, 'lacks {}', expected - found)
  _refuse(what, 'has {} too many', found - expected)


def refuse_other_shapes(what: str, found: Shapes, expected: Shapes) -> None:
  """Raises ValueError unless arrays have the names and shapes of a model.

  Args:
    what: Source of the arrays, for the error message.
    found: Shapes of the arrays, by name.
    expected: Expected shapes, by name.

  Raises:
    ValueError: an array is missing, unexpected or of another shape; the message
      names the first one.
  """
  refuse_other_names(what, found.keys(), expected.keys())
  wrong = {name for name in found if found[name] != expected[name]}
  for name in sorted(wrong)[:1]:
    shapes = f', {found[name]} and not {expected[name]}'
    _refuse(what, 'has {} in another shape' + shapes, wrong)


def check_masks(what: str, masks: Arrays, shapes: Shapes) -> None:
  """Raises ValueError unless masks are boolean and have shapes of weights.

  Args:
    what: Source of the masks, for the error message.
    masks: Masks by name.
    shapes: Shapes of the weights, by name.

  Raises:
    ValueError: a mask has another dtype or shape, or no weight.
  """
  for name, x in masks.items():
    if x.dtype != bool or x.shape != shapes.get(name):
      raise ValueError(
          f'{what} has for {name!r} a mask {x.dtype}{list(x.shape)}; it must '
          f'be boolean and have the shape of a weight, {shapes.get(name)}.'
      )


def refuse_pruned_weights(
    what: str, weights: Arrays, masks: Arrays
) -> None:
  """Raises ValueError if a mask prunes weights that are not zero.

  Args:
    what: Source of the masks, for the error message.
    weights: Weights by name.
    masks: Masks of some of them, by name.

  Raises:
    ValueError: a pruned weight is not zero.
  """
  for name, mask in masks.items():
    if np.any(weights[name][~mask]):
      raise ValueError(
          f'{what} prunes weights in {name!r} that are not zero; delete it if '
          'the weights were trained after their export, or export them again.'
      )


def _refuse(what: str, problem: str, names: Set[str]) -> None:
  if names:
    first, more = min(names), len(names) - 1
    raise ValueError(
        f'{what} {problem.format(repr(first))}'
        f'{f" (and {more} more)" if more else ""}; it must hold all arrays of '
        'the model that its config describes, and no others.'
    )
