# SPDX-License-Identifier: Apache-2.0
"""Fields of JaxPruner's configurations, as arguments of algorithms."""

from collections.abc import Callable
from collections.abc import Mapping
import re
from typing import Any

import jax

import spdf_jax as spdf
from spdf_jax.names import lookup

Fields = Mapping[str, Any]


def times(fields: Fields) -> dict[str, Any]:
  """Returns the steps of mask updates.

  Args:
    fields: The configuration. Updates are the multiples of `update_freq` from
      `update_start_step` to `update_end_step`, or that step if they are equal.

  Returns:
    The arguments `update_every`, `update_from` and `update_until`.

  Raises:
    ValueError: a field is missing.

  Example:
    >>> times(dict(update_start_step=15, update_end_step=40, update_freq=10))
    {'update_every': 10, 'update_from': 20, 'update_until': 40}
  """
  start, end = _required(fields, 'update_start_step', 'update_end_step')
  if start == end:
    return dict(update_every=[end], update_from=end, update_until=end)
  [every] = _required(fields, 'update_freq')
  return dict(
      update_every=every, update_from=-(-start // every) * every,
      update_until=end,
  )


def final_sparsity(fields: Fields) -> float:
  """Returns the sparsity at the end, which N:M determines.

  Args:
    fields: The configuration.

  Returns:
    The fraction of zeros.

  Raises:
    ValueError: the sparsity is missing, or N:M is invalid.

  Example:
    >>> final_sparsity(dict(sparsity=0.8, sparsity_type='nm_2,4'))
    0.5
  """
  [sparsity] = _required(fields, 'sparsity')
  pattern = _n_of_m(fields)
  if pattern is not None:
    structure(fields)  # Checks n and m.
    n, m = pattern
    return 1 - n / m
  return sparsity


def ramp(fields: Fields) -> Callable[[Any], Any]:
  """Returns the cubic ramp, which JaxPruner evaluates one step ahead.

  N:M does not rise: the first update prunes to it.

  Args:
    fields: The configuration.

  Returns:
    The sparsity as a schedule.

  Raises:
    ValueError: a field is missing or invalid.

  Example:
    >>> schedule = ramp(dict(
    ...     sparsity=0.8, update_start_step=0, update_end_step=100))
    >>> schedule(49), schedule(100)
    (0.7000000000000001, 0.8)
  """
  start, end = _required(fields, 'update_start_step', 'update_end_step')
  if _n_of_m(fields):
    start = end = times(fields)['update_from']
  cubic = spdf.cubic(0.0, final_sparsity(fields), max(end - start, 1), start)
  return lambda count: cubic(count + 1)


def shape(fields: Fields, gradual: bool = False) -> dict[str, Any]:
  """Returns the distribution over leaves and the structure of masks.

  Args:
    fields: The configuration.
    gradual: Whether the sparsity is a ramp; all leaves then rise to their own
      sparsities in proportion.

  Returns:
    The arguments `distribution` and `structure`.

  Raises:
    ValueError: a field is missing or invalid.

  Example:
    >>> shape(dict(sparsity=0.8, dist_type='uniform'))['distribution']({}, 0.8)
    {}
  """
  name, asked = _required(fields, 'dist_type', 'sparsity')
  distribution = lookup(
      'dist_type', name, {'uniform': spdf.uniform, 'erk': spdf.erk}
  )
  if _n_of_m(fields):
    # N:M replaces every sparsity but 0.
    by_leaf = lambda params, sparsity: jax.tree.map(
        lambda s: sparsity if s else 0.0, distribution(params, asked)
    )
  elif gradual:
    by_leaf = lambda params, sparsity: jax.tree.map(
        lambda s: s * sparsity / asked if asked else 0.0,
        distribution(params, asked),
    )
  else:
    by_leaf = distribution
  return dict(distribution=by_leaf, structure=structure(fields))


def structure(fields: Fields) -> spdf.structures.Structure:
  """Returns the structure of masks.

  Args:
    fields: The configuration; JaxPruner groups weights along the last axis.

  Returns:
    The structure; unstructured without `sparsity_type`.

  Raises:
    ValueError: the type is unknown or has no counterpart.

  Example:
    >>> structure(dict(sparsity_type='block_4,4')).unit_shape((1, 8, 16))
    (1, 2, 4)
  """
  given = str(fields.get('sparsity_type', ''))
  if not given:
    return spdf.structures.UNSTRUCTURED
  pattern = _n_of_m(fields)
  if pattern is not None:
    return spdf.structures.n_of_m(*pattern, axis='outputs')
  if re.fullmatch(r'block_\d+,\d+', given):
    return spdf.structures.block(*map(int, re.findall(r'\d+', given)))
  if given == 'channel_-1':
    return spdf.structures.channel('outputs')
  raise ValueError(
      f'sparsity_type is {given!r}; give nm_2,4, block_4,4 or channel_-1, or '
      'wrap the optimizer with spdf_jax.sparsify and its structures.'
  )


def _n_of_m(fields: Fields) -> tuple[int, int] | None:
  found = re.fullmatch(
      r'nm_(\d+),(\d+)', str(fields.get('sparsity_type', ''))
  )
  return (int(found[1]), int(found[2])) if found else None


def _required(fields: Fields, *names: str) -> list[Any]:
  missing = [name for name in names if name not in fields]
  if missing:
    raise ValueError(
        f'config has no {missing[0]!r}; give it, as the algorithm '
        f'{fields.get("algorithm")!r} needs {" and ".join(names)}.'
    )
  return [fields[name] for name in names]
