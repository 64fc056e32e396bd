# SPDX-License-Identifier: Apache-2.0
"""Distributions of one sparsity over layers, as trees of sparsities."""

from collections.abc import Callable, Mapping, Sequence
import fnmatch
import functools
import inspect
import math
from typing import Any, NamedTuple, TypeVar

import jax

from spdf_jax.names import by_entry
from spdf_jax.sparsity import trees

T = TypeVar('T')
PyTree = Any
Distribution = Callable[[PyTree, PyTree], PyTree]

_is_none = lambda x: x is None


def uniform(params: PyTree, sparsity: PyTree) -> PyTree:
  """Assigns the same sparsity to every sparsified layer.

  Args:
    params: A tree whose leaves are sparsified except where `None`.
    sparsity: The fraction of zeros in [0, 1): one number for all leaves, or a
      tree of numbers that is a prefix of `params`. A traced number, such as
      that of a schedule at a traced count, is not checked.

  Returns:
    A tree of the structure of `params` with a float per leaf; `None` unchanged.

  Raises:
    ValueError: a sparsity is not a number in [0, 1), or the tree does not fit
      `params`.

  Example:
    >>> import jax.numpy as jnp
    >>> uniform({'w': jnp.ones((2, 2)), 'b': None}, 0.75)
    {'b': None, 'w': 0.75}
  """
  if jax.tree_util.all_leaves([sparsity]) or sparsity is None:
    is_traced = isinstance(sparsity, jax.core.Tracer)
    value = sparsity if is_traced else check_sparsity(sparsity)
    return jax.tree.map(
        lambda p: None if p is None else value, params, is_leaf=_is_none
    )
  # `optax.tree.map_params` passes an empty tree as a placeholder.
  if not jax.tree.leaves(params):
    return params
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
  """Assigns leaves the sparsity of the first pattern that matches their path.

  Patterns are shell patterns over the whole path, e.g. `'*/attn/*'`; `*` also
  matches `/`, and matching is case-sensitive. Leaves that match no pattern stay
  dense.

  Args:
    params: A tree whose leaves are sparsified except where `None`.
    sparsity: Sparsities in [0, 1) by pattern: a mapping, tried in its order, or
      a list of `(pattern, sparsity)` pairs. Use pairs instead of an
      `ml_collections.ConfigDict`, which sorts its keys, if the order matters.

  Returns:
    A tree of the structure of `params` with a float per leaf; `None` unchanged.

  Raises:
    ValueError: a sparsity is not a number in [0, 1), or a pattern is given
      twice or is not the first match of any leaf.

  Example:
    >>> import jax.numpy as jnp
    >>> w = jnp.ones((1, 2, 2))
    >>> by_pattern({'attn': {'wq': w}, 'mlp': {'wi': w}}, {'attn/*': 0.5})
    {'attn': {'wq': 0.5}, 'mlp': {'wi': 0.0}}
  """
  try:
    by_path = dict(sparsity)
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'sparsity is {sparsity!r}; by_pattern needs patterns of paths with '
        "their sparsities, e.g. {'*/attn/*': 0.5, '*/mlp/*': 0.75}."
    ) from error
  if len(by_path) < len(sparsity):
    patterns = [pair[0] for pair in sparsity]
    repeated = next(p for p in patterns if patterns.count(p) > 1)
    raise ValueError(
        f'sparsity has the pattern {repeated!r} twice; give it once.'
    )
  by_path = {
      str(pattern): check_sparsity(value, f'sparsity of {pattern!r}')
      for pattern, value in by_path.items()
  }
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  names = [trees.path_name(path) for path in paths]
  matching = [
      [p for p in by_path if fnmatch.fnmatchcase(name, p)] for name in names
  ]
  # `optax.tree.map_params` passes an empty tree as a placeholder.
  if names:
    _check_all_used(list(by_path), matching, names)
  return jax.tree.unflatten(
      jax.tree.structure(params),
      [by_path[matches[0]] if matches else 0.0 for matches in matching],
  )


def _check_all_used(
    patterns: list[str], matching: list[list[str]], names: list[str]
) -> None:
  for pattern in patterns:
    if any(matches[:1] == [pattern] for matches in matching):
      continue
    if any(pattern in matches for matches in matching):
      raise ValueError(
          f'sparsity has the pattern {pattern!r}, but patterns before it match '
          'all of its leaves; put it before them, or remove it.'
      )
    raise ValueError(
        f'sparsity has the pattern {pattern!r}, which matches none of the '
        'sparsified leaves; remove it, or let it match some of: '
        f'{", ".join(names)}.'
    )


def erk(
    params: PyTree,
    sparsity: float,
    *,
    power: float = 1.0,
    kernels: Mapping[str, Sequence[int]] | None = None,
) -> PyTree:
  r"""Assigns lower sparsities to small layers (Erdős–Rényi–kernel).

  A layer of :math:`i_l` inputs and :math:`o_l` outputs, which is a kernel of
  height :math:`h_l` and width :math:`w_l` in a convolution, keeps the fraction

  .. math::
    d_l = \min\left(1,\ \epsilon
      \left(\frac{i_l + o_l + h_l + w_l}{i_l o_l h_l w_l}\right)^p\right)

  of its weights, with the :math:`\epsilon` at which the whole tree has the
  given sparsity; a matrix has no :math:`h_l` and :math:`w_l`. Layers with
  :math:`d_l = 1` are dense.

  Args:
    params: A tree of leaves `[layers, inputs, outputs]` or `[inputs,
      outputs]`, or of their shapes; `None` leaves are not counted. The inputs
      of a kernel are those of all its positions, :math:`h_l w_l i_l`.
    sparsity: The fraction of zeros in [0, 1) over all leaves.
    power: The exponent :math:`p`; 0 makes all sparsities equal.
    kernels: The sizes `(height, width)` of kernels, one number or more, by the
      paths of their leaves. Within `sparsify`, those of the `kernel` axes that
      `where` returns are used.

  Returns:
    A tree of the structure of `params` with a float per leaf; `None` unchanged.

  Raises:
    ValueError: the sparsity is not a number in [0, 1), `power` is negative, a
      leaf has no weights, or fewer than one per layer would be kept.

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
    raise ValueError(
        f'power is {power}; give a finite number >= 0, usually 1.'
    )
  check_not_empty(params)
  leaves, treedef = jax.tree.flatten(params)
  fans = [((1, 1) + tuple(leaf.shape))[-2:] for leaf in leaves]
  sizes = [math.prod(leaf.shape) for leaf in leaves]
  budget = (1 - sparsity) * sum(sizes)
  layers = sum(size // (i * o) for size, (i, o) in zip(sizes, fans))
  if budget < layers:
    raise ValueError(
        f'sparsity is {sparsity}, which leaves {budget:g} weights for {layers} '
        'layers; erk needs one per layer, so lower the sparsity.'
    )
  sizes_of = (kernels or {}).get
  raw = [
      (i // math.prod(size) + o + sum(size)) / (i * o)
      for (i, o), size in zip(
          fans, (sizes_of(name, ()) for name in trees.by_name(params))
      )
  ]
  densities = _fill(raw, power, sizes, budget)
  return jax.tree.unflatten(
      treedef, [min(1 - density, math.nextafter(1, 0)) for density in densities]
  )


def _fill(
    raw: list[float], power: float, sizes: list[int], budget: float
) -> list[float]:
  """Returns min(1, eps * raw^power) per leaf such that a budget is kept."""
  densities = [1.0] * len(raw)
  free = list(range(len(raw)))
  while free:
    left = budget - (sum(sizes) - sum(sizes[i] for i in free))
    # Relative to the largest, so that a high power does not underflow in
    # every leaf.
    most = max(raw[i] for i in free)
    weights = {i: (raw[i] / most) ** power for i in free}
    scale = left / math.fsum(weights[i] * sizes[i] for i in free)
    if scale <= 1:
      for i in free:
        densities[i] = scale * weights[i]
      break
    free = [i for i in free if scale * weights[i] <= 1]
  return densities


def igq(params: PyTree, sparsity: float) -> PyTree:
  r"""Assigns lower sparsities to small layers (ideal gas quotas).

  A layer of :math:`n_l` weights keeps the fraction :math:`d_l = 1 / (F n_l +
  1)` of them, as cylinders of gas whose pistons share one force, with the
  :math:`F` at which the whole tree has the given sparsity.

  Args:
    params: A tree of leaves `[layers, inputs, outputs]` or `[inputs,
      outputs]`, or of their shapes; `None` leaves are not counted.
    sparsity: The fraction of zeros in [0, 1) over all leaves.

  Returns:
    A tree of the structure of `params` with a float per leaf; `None` unchanged.

  Raises:
    ValueError: the sparsity is not a number in [0, 1), or a leaf has no
      weights.

  References:
    Vysogorets and Kempe, `Connectivity Matters
    <https://arxiv.org/abs/2107.02306>`_, 2023

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'small': jnp.ones((2, 2)), 'large': jnp.ones((4, 4))}
    >>> {k: round(v, 2) for k, v in igq(params, 0.5).items()}
    {'large': 0.56, 'small': 0.24}
  """
  sparsity = check_sparsity(sparsity)
  check_not_empty(params)
  leaves = jax.tree.leaves(params)
  if not leaves or not sparsity:
    return jax.tree.map(lambda p: 0.0, params)
  sizes = [math.prod(leaf.shape) for leaf in leaves]
  weights = [math.prod(leaf.shape[-2:]) for leaf in leaves]
  density = lambda force, n: 1 / (force * n + 1)
  # The sparsity of every layer, and so of all, is between that of the smallest
  # and of the largest one.
  odds = sparsity / (1 - sparsity)
  low, high = odds / max(weights), odds / min(weights)
  for _ in range(100):
    force = (low + high) / 2
    kept = sum(size * density(force, n) for size, n in zip(sizes, weights))
    if kept > (1 - sparsity) * sum(sizes):
      low = force
    else:
      high = force
  return jax.tree.unflatten(
      jax.tree.structure(params),
      [1 - density(high, n) for n in weights],
  )


class ModelWide(NamedTuple):
  """One sparsity for all leaves as one group, in place of a tree."""

  sparsity: float
  """The fraction of zeros over all leaves."""


def model_wide(params: PyTree, sparsity: float) -> ModelWide:
  """Requests that the weights of all layers are ranked together, as one group.

  With it, algorithms refuse a schedule whose sparsity falls, because they
  choose the weights to revive within each layer.

  Args:
    params: The parameters, not used.
    sparsity: The fraction of zeros in [0, 1) over all leaves.

  Returns:
    A `ModelWide` tuple that holds the sparsity, in place of a tree.

  Raises:
    ValueError: the sparsity is not a number in [0, 1).

  Example:
    >>> model_wide({'w': None}, 0.75)
    ModelWide(sparsity=0.75)
  """
  del params
  return ModelWide(check_sparsity(sparsity))


def for_kernels(
    distribution: Distribution, make: Callable[[Distribution], T]
) -> Callable[[Mapping[str, Sequence[int]]], T] | None:
  """Returns a function from the sizes of kernels to `make` of a distribution.

  `None` if the distribution does not depend on the sizes.
  """
  takes_kernels: Any = distribution
  if 'kernels' not in inspect.signature(distribution).parameters:
    return None
  return lambda kernels: make(
      functools.partial(takes_kernels, kernels=kernels)
  )


def check_not_empty(params: PyTree) -> None:
  """Raises ValueError if a leaf has no weights."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not math.prod(leaf.shape):
      raise ValueError(
          f'{trees.path_name(path)!r} has the shape {tuple(leaf.shape)}, no '
          'weights; put None there, in place of the leaf.'
      )


def check_sparsities(sparsity: PyTree) -> None:
  """Raises ValueError unless every sparsity in a tree is in [0, 1)."""
  leaves = jax.tree.leaves(sparsity)
  for leaf in leaves or [sparsity]:
    # Patterns of `by_pattern` in a list of pairs are leaves too.
    if not isinstance(leaf, str) or leaf is sparsity:
      check_sparsity(leaf)


def _is_number(value: Any) -> bool:
  try:
    float(value)
  except (TypeError, ValueError):
    return False
  return not isinstance(value, str)


def check_sparsity(sparsity: Any, name: str = 'sparsity') -> float:
  """Returns a sparsity as a float in [0, 1), or raises.

  Args:
    sparsity: The value to check.
    name: Name of the value for error messages.

  Returns:
    The sparsity.

  Raises:
    ValueError: the value is not a number, is NaN, or is outside [0, 1).

  Example:
    >>> check_sparsity(0.75)
    0.75
  """
  if isinstance(sparsity, bool) or not _is_number(sparsity):
    raise ValueError(
        f'{name} is {sparsity!r}; give the fraction of zeros as a number in '
        '[0, 1).'
    )
  value = float(sparsity)
  if math.isnan(value) or not 0 <= value < 1:
    raise ValueError(
        f'{name} is {value}; it is the fraction of zeros and must be in '
        '[0, 1).'
    )
  return value

_DISTRIBUTIONS = {
    'by_pattern': by_pattern,
    'erk': erk,
    'igq': igq,
    'model_wide': model_wide,
    'uniform': uniform,
}


def distribution_of(value: Any) -> Callable[..., Any]:
  """Returns the distribution with a name, or a given distribution.

  Args:
    value: `(params, sparsity) -> sparsities`, or `'uniform'`, `'erk'`, `'igq'`,
      `'by_pattern'` or `'model_wide'`, or a mapping with the name under
      `'distribution'` and further arguments.

  Returns:
    The distribution.

  Raises:
    ValueError: `value` is something else, or the name or an argument is
      unknown.

  Example:
    >>> distribution_of('erk').__name__
    'erk'
  """
  # A distribution takes two positional arguments; initializers take three.
  distribution = by_entry('distribution', value, _DISTRIBUTIONS, missing=2)
  if not callable(distribution):
    raise ValueError(
        f'distribution is {distribution!r:.80}; give a function (params, '
        "sparsity) -> sparsities, e.g. spdf_jax.erk, or its name, 'erk'."
    )
  return distribution
