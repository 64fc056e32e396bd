# SPDX-License-Identifier: Apache-2.0
"""Comparison of the weights that masks keep with the required sparsities."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.counts import model_kept
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.paths import by_name
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED

PyTree = Any


def sparsities_of(mask: PyTree) -> PyTree:
  """Returns the exact sparsity of every leaf of a mask.

  Args:
    mask: A mask, as `saliency_mask` or `get_mask` return it.

  Returns:
    A tree of floats, `None` unchanged, which `static` takes as `sparsity`.

  Example:
    >>> sparsities_of({'w': jnp.eye(4, dtype=bool), 'b': None})
    {'b': None, 'w': 0.75}
  """
  def sparsity(mask):
    rows = np.asarray(jnp.sum(mask, axis=-1, dtype=jnp.int32))
    return 1 - int(rows.sum(dtype=np.int64)) / mask.size

  with jax.ensure_compile_time_eval():
    return jax.tree.map(sparsity, mask)


def check_counts(
    mask: PyTree, sparsities: PyTree, structure: Structure, name: str = 'mask'
) -> None:
  """Raises ValueError unless a mask has the given sparsities.

  The layers of one leaf may keep different numbers of weights if their total
  matches; with a structure, every group must match.

  Args:
    mask: bool leaves; the last two axes are a layer. Traced masks are not
      checked.
    sparsities: Required sparsities, as a distribution returns them.
    structure: Required structure of the mask.
    name: Name of the mask for error messages.

  Raises:
    ValueError: a count differs, or the mask does not follow the structure.

  Example:
    >>> mask = {'w': jnp.eye(2, dtype=bool)}
    >>> check_counts(mask, {'w': 0.5}, UNSTRUCTURED)
    >>> check_counts(mask, {'w': 0.25}, UNSTRUCTURED)
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: mask of 'w' keeps 2 weights, but sparsity=0.25 requires 3; ...
  """
  try:
    with jax.ensure_compile_time_eval():
      mask = jax.tree.map(lambda m: m.reshape((-1, *m.shape[-2:])), mask)
      kept = jax.tree.map(lambda m: _units(m, structure), mask)
  except jax.errors.TracerArrayConversionError:
    return  # Under jit, the counts of a traced mask are unknown.
  found = by_name(kept)
  # `optax.tree.map_params` passes an empty tree as a placeholder.
  if not found:
    return
  sizes = {
      path: structure.unit_shape(leaf.shape)
      for path, leaf in by_name(mask).items()
  }
  for path, counts in found.items():
    if not counts.size:
      raise ValueError(
          f'{name} of {path!r} keeps some weights of a unit of the structure '
          'and prunes others; make it with the same structure.'
      )
  if isinstance(sparsities, ModelWide):
    asked = model_kept(mask, sparsities, structure)
    weights = {
        path: math.prod(leaf.shape) // math.prod(sizes[path])
        for path, leaf in by_name(mask).items()
    }
    total = sum(
        int(counts.sum()) * weights[path] for path, counts in found.items()
    )
    # One more unit may be too large.
    if not asked - max(weights.values()) < total <= asked:
      raise ValueError(_differ(name, sparsities.sparsity, total, asked))
    return
  sparsities = by_name(uniform(mask, sparsities))
  for path, counts in found.items():
    here, sparsity = f'{name} of {path!r}', sparsities[path]
    asked = number_kept(math.prod(sizes[path][1:]), sparsity)
    number = len(counts)
    if structure is UNSTRUCTURED:
      # Layers of a stack may differ; their mean is rounded to a count.
      total = int(counts.sum())
      if abs(total - number * asked) >= number:
        raise ValueError(_differ(here, sparsity, total, number * asked))
    elif any(counts != asked):
      other = counts[counts != asked][0]
      raise ValueError(
          f'{here} keeps {other:,} units of a group of the structure, but '
          f'sparsity={sparsity:g} requires {asked:,}; make it with the same '
          'structure and sparsity.'
      )


def _units(mask: jax.Array, structure: Structure) -> np.ndarray:
  """Counts kept units per group; returns no counts if a unit is partly kept.

  Raises TracerArrayConversionError where the mask is traced.
  """
  units = structure.reduce(mask).astype(bool)
  if not np.asarray(jnp.all(structure.expand(units, mask.shape) == mask)):
    return np.zeros(0, np.int64)
  counts = jnp.sum(units, axis=(-2, -1), dtype=jnp.int32)
  return np.asarray(counts).astype(np.int64).ravel()


def _differ(name: str, sparsity: float, found: int, asked: int) -> str:
  return (
      f'{name} keeps {found:,} weights, but sparsity={sparsity:g} requires '
      f'{asked:,}; give sparsity=sparsities_of(mask), the one that it has.'
  )
