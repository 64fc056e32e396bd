"""How one sparsity is distributed over layers: trees of levels."""

import math
from typing import Any
from typing import NamedTuple

import jax

PyTree = Any

_is_none = lambda x: x is None


class ModelWide(NamedTuple):
  """One competition over all leaves, instead of a level for each."""

  level: float
  """The fraction of zeros in the whole tree, in [0, 1)."""


def uniform(params: PyTree, sparsity: PyTree) -> PyTree:
  """Gives every sparsified layer the same sparsity.

  Args:
    params: A tree whose leaves are sparsified except where `None`.
    sparsity: The fraction of zeros in [0, 1): one number for all leaves, or a
      tree of numbers that is a prefix of `params`.

  Returns:
    A tree of the structure of `params` with a float per leaf, `None` kept.

  Raises:
    ValueError: a sparsity is no number in [0, 1), or the tree does not fit.

  Example:
    >>> import jax.numpy as jnp
    >>> uniform({'w': jnp.ones((2, 2)), 'b': None}, 0.75)
    {'b': None, 'w': 0.75}
  """
  if jax.tree_util.all_leaves([sparsity]) or sparsity is None:
    level = check_sparsity(sparsity)
    return jax.tree.map(
        lambda p: None if p is None else level, params, is_leaf=_is_none
    )
  try:
    return jax.tree.map(
        lambda s, sub: sub if sub is None else uniform(sub, s),
        sparsity, params, is_leaf=_is_none,
    )
  except (ValueError, TypeError) as error:
    if 'sparsity is' in str(error):
      raise
    raise ValueError(
        'sparsity is a tree that does not fit the parameters; give it the '
        f'structure {jax.tree.structure(params)} or a prefix of it.'
    ) from error


def check_levels(sparsity: PyTree) -> None:
  """Raises ValueError unless every sparsity in a tree is in [0, 1)."""
  leaves = jax.tree.leaves(sparsity)
  for level in leaves or [sparsity]:
    check_sparsity(level)


def _is_number(value: Any) -> bool:
  try:
    float(value)
  except (TypeError, ValueError):
    return False
  return not isinstance(value, str)


def check_sparsity(sparsity: Any, name: str = 'sparsity') -> float:
  """Returns a sparsity as a float in [0, 1), or raises.

  Args:
    sparsity: What the user gave.
    name: What to call it in the message.

  Returns:
    The sparsity.

  Raises:
    ValueError: it is no number, NaN, or outside [0, 1).

  Example:
    >>> check_sparsity(0.75)
    0.75
  """
  if isinstance(sparsity, bool) or not _is_number(sparsity):
    raise ValueError(
        f'{name} is {sparsity!r}; give the fraction of zeros as a number in '
        '[0, 1).'
    )
  level = float(sparsity)
  if math.isnan(level) or not 0 <= level < 1:
    raise ValueError(
        f'{name} is {level}; it is the fraction of zeros and must be in '
        '[0, 1).'
    )
  return level
