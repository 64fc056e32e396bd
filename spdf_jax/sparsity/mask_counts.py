"""How many weights masks keep, against how many they are asked to."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import selection
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED

PyTree = Any


def levels_of(mask: PyTree) -> PyTree:
  """Returns the sparsity of every leaf of a mask, to ask for exactly that.

  Args:
    mask: A mask, as `saliency_mask` or `get_mask` return it.

  Returns:
    A tree of floats, `None` kept: the `sparsity` of `static`.

  Example:
    >>> levels_of({'w': jnp.eye(4, dtype=bool), 'b': None})
    {'b': None, 'w': 0.75}
  """
  def level(mask):
    rows = np.asarray(jnp.sum(mask, axis=-1, dtype=jnp.int32))
    return 1 - int(rows.sum(dtype=np.int64)) / mask.size

  with jax.ensure_compile_time_eval():
    return jax.tree.map(level, mask)


def check_counts(
    mask: PyTree, levels: PyTree, structure: Structure, name: str = 'mask'
) -> None:
  """Refuses a mask that does not keep as many weights as levels ask for.

  In a leaf of several layers the layers may keep different numbers, if they add
  up to the level; under a structure every competition keeps its own.

  Args:
    mask: bool leaves, the last two axes a layer; traced ones are not checked.
    levels: What a distribution returned.
    structure: What must be kept together, or apart.
    name: What to call the mask in the message.

  Raises:
    ValueError: the mask has another count, or is not in the structure.

  Example:
    >>> mask = {'w': jnp.eye(2, dtype=bool)}
    >>> check_counts(mask, {'w': 0.5}, UNSTRUCTURED)
    >>> check_counts(mask, {'w': 0.25}, UNSTRUCTURED)
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: mask of 'w' keeps 2 weights, but sparsity=0.25 asks for 3; ...
  """
  try:
    with jax.ensure_compile_time_eval():
      mask = jax.tree.map(lambda m: m.reshape((-1, *m.shape[-2:])), mask)
      kept = jax.tree.map(lambda m: _units(m, structure), mask)
  except jax.errors.TracerArrayConversionError:
    return  # Under jit: only the counts of a constant are known.
  found = selection.by_name(kept)
  sizes = {
      path: structure.unit_shape(leaf.shape)
      for path, leaf in selection.by_name(mask).items()
  }
  for path, counts in found.items():
    if not counts.size:
      raise ValueError(
          f'{name} of {path!r} keeps some weights of a unit of the structure '
          'and prunes others; make it with the same structure.'
      )
  if isinstance(levels, ModelWide):
    asked = number_kept(sum(map(math.prod, sizes.values())), levels.level)
    total = sum(int(counts.sum()) for counts in found.values())
    if total != asked:
      raise ValueError(_differ(name, levels.level, total, asked))
    return
  levels = selection.by_name(uniform(mask, levels))
  for path, counts in found.items():
    here, level = f'{name} of {path!r}', levels[path]
    asked, number = number_kept(math.prod(sizes[path][1:]), level), len(counts)
    if structure is UNSTRUCTURED:
      # Layers of a stack may differ; their mean is the level up to rounding.
      total = int(counts.sum())
      if abs(total - number * asked) >= number:
        raise ValueError(_differ(here, level, total, number * asked))
    elif any(counts != asked):
      other = counts[counts != asked][0]
      where = ' units of a group of the structure'
      raise ValueError(_differ(here, level, other, asked, where))


def _units(mask: jax.Array, structure: Structure) -> np.ndarray:
  """Counts kept units per competition; empty if a unit is kept in part.

  Raises where the mask is traced.
  """
  units = structure.reduce(mask) > 0
  if not np.asarray(jnp.all(structure.expand(units, mask.shape) == mask)):
    return np.zeros(0, np.int64)
  counts = jnp.sum(units, axis=(-2, -1), dtype=jnp.int32)
  return np.asarray(counts).astype(np.int64).ravel()


def _differ(
    name: str, level: float, found: int, asked: int, what: str = ' weights'
) -> str:
  return (
      f'{name} keeps {found:,}{what}, but sparsity={level:g} asks for '
      f'{asked:,}; give sparsity=levels_of(mask), or the level it has.'
  )
