"""How one sparsity is distributed over layers: trees of levels."""

from collections.abc import Mapping
from collections.abc import Sequence
import fnmatch
import math
from typing import Any
from typing import NamedTuple

import jax

from spdf_jax.sparsity.selection import path_name

PyTree = Any

_is_none = lambda x: x is None


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
        f'structure {jax.tree.structure(params)} or a prefix of it, or pass '
        'patterns of paths with distribution=by_pattern.'
    ) from error


def by_pattern(
    params: PyTree, sparsity: Mapping[str, float] | Sequence[tuple[str, float]]
) -> PyTree:
  """Gives leaves the level of the first pattern that matches their path.

  Patterns are those of the shell over the whole path, e.g. `'*/attn/*'`; `*`
  goes across `/`, and case counts. What no pattern matches stays dense.

  Args:
    params: A tree whose leaves are sparsified except where `None`.
    sparsity: Levels in [0, 1) by pattern: a mapping, tried in its order, or
      pairs. A ConfigDict sorts its keys: where the order matters, use pairs.

  Returns:
    A tree of the structure of `params` with a float per leaf, `None` kept.

  Raises:
    ValueError: a level is no number in [0, 1), or a pattern gives no leaf its
      level.

  Example:
    >>> import jax.numpy as jnp
    >>> w = jnp.ones((1, 2, 2))
    >>> by_pattern({'attn': {'wq': w}, 'mlp': {'wi': w}}, {'attn/*': 0.5})
    {'attn': {'wq': 0.5}, 'mlp': {'wi': 0.0}}
  """
  try:
    levels = dict(sparsity)
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'sparsity is {sparsity!r}; by_pattern needs patterns of paths with '
        "their levels, e.g. {'*/attn/*': 0.5, '*/mlp/*': 0.75}."
    ) from error
  levels = {
      str(pattern): check_sparsity(level, f'sparsity of {pattern!r}')
      for pattern, level in levels.items()
  }
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  names = [path_name(path) for path in paths]
  matching = [
      [p for p in levels if fnmatch.fnmatchcase(name, p)] for name in names
  ]
  # An empty tree is a placeholder (`optax.tree.map_params`), not a mistake.
  if names:
    _check_all_used(list(levels), matching, names)
  return jax.tree.unflatten(
      jax.tree.structure(params),
      [levels[found[0]] if found else 0.0 for found in matching],
  )


def _check_all_used(
    patterns: list[str], matching: list[list[str]], names: list[str]
) -> None:
  for pattern in patterns:
    if any(found[:1] == [pattern] for found in matching):
      continue
    if any(pattern in found for found in matching):
      raise ValueError(
          f'sparsity has the pattern {pattern!r}, but patterns before it match '
          'all of its leaves; put it before them.'
      )
    raise ValueError(
        f'sparsity has the pattern {pattern!r}, which matches none of the '
        f'sparsified leaves; they are {", ".join(names)}.'
    )


def erk(params: PyTree, sparsity: float, *, power: float = 1.0) -> PyTree:
  r"""Keeps small layers denser: Erdős–Rényi–kernel levels.

  A layer of :math:`i_l` inputs and :math:`o_l` outputs has the density

  .. math::
    d_l = \min\left(1,\ \epsilon
      \left(\frac{i_l + o_l}{i_l o_l}\right)^p\right)

  with the :math:`\epsilon` at which the whole tree has the sparsity asked for:
  layers that come out dense leave the budget of the others.

  Args:
    params: A tree of leaves `[layers, inputs, outputs]` or `[inputs,
      outputs]`, or their shapes; `None` leaves are not counted.
    sparsity: The fraction of zeros in [0, 1) over all leaves.
    power: :math:`p`; at 0 all levels are equal.

  Returns:
    A tree of the structure of `params` with a float per leaf, `None` kept.

  Raises:
    ValueError: the sparsity is no number in [0, 1), `power` is negative, or
      the budget is below one weight per layer.

  References:
    Mocanu et al., `SET <https://arxiv.org/abs/1707.04780>`_, 2018;
    Evci et al., `RigL <https://arxiv.org/abs/1911.11134>`_, 2020

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'small': jnp.ones((2, 2)), 'large': jnp.ones((6, 6))}
    >>> erk(params, 0.5)
    {'large': 0.5555555555555556, 'small': 0.0}
  """
  sparsity = check_sparsity(sparsity)
  if not 0 <= power < math.inf:
    raise ValueError(f'power is {power}; give a number from 0 on, usually 1.')
  leaves, treedef = jax.tree.flatten(params)
  fans = [((1, 1) + tuple(leaf.shape))[-2:] for leaf in leaves]
  sizes = [math.prod(leaf.shape) for leaf in leaves]
  budget = (1 - sparsity) * sum(sizes)
  layers = sum(size // (i * o) for size, (i, o) in zip(sizes, fans))
  if budget < layers:
    raise ValueError(
        f'sparsity is {sparsity}, which leaves {budget:g} weights for {layers} '
        'layers; erk needs one per layer, so lower it.'
    )
  raw = [(i + o) / (i * o) for i, o in fans]
  densities = _fill(raw, power, sizes, budget)
  return treedef.unflatten(
      min(1 - density, math.nextafter(1, 0)) for density in densities
  )


def _fill(
    raw: list[float], power: float, sizes: list[int], budget: float
) -> list[float]:
  """Returns min(1, eps * raw^power) per leaf such that they fill a budget."""
  densities = [1.0] * len(raw)
  free = list(range(len(raw)))
  while free:
    left = budget - (sum(sizes) - sum(sizes[i] for i in free))
    # Relative to the largest: a high power must not underflow everywhere.
    most = max(raw[i] for i in free)
    weights = {i: (raw[i] / most) ** power for i in free}
    scale = left / math.fsum(weights[i] * sizes[i] for i in free)
    if scale <= 1:
      for i in free:
        densities[i] = scale * weights[i]
      break
    free = [i for i in free if scale * weights[i] <= 1]
  return densities


class ModelWide(NamedTuple):
  """One level for all leaves together, in place of a tree of levels."""

  level: float
  """The fraction of zeros over all leaves."""


def model_wide(params: PyTree, sparsity: float) -> ModelWide:
  """Lets all layers compete for the weights that are kept.

  Args:
    params: A tree whose leaves are sparsified except where `None`.
    sparsity: The fraction of zeros in [0, 1) over all leaves.

  Returns:
    The level, marked as one for the whole tree.

  Raises:
    ValueError: the sparsity is no number in [0, 1).

  Example:
    >>> model_wide({'w': None}, 0.75)
    ModelWide(level=0.75)
  """
  del params
  return ModelWide(check_sparsity(sparsity))


def check_levels(sparsity: PyTree) -> None:
  """Raises ValueError unless every sparsity in a tree is in [0, 1)."""
  leaves = jax.tree.leaves(sparsity)
  for level in leaves or [sparsity]:
    # The patterns of `by_pattern` are text.
    if not isinstance(level, str) or level is sparsity:
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
