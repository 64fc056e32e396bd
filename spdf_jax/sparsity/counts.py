# SPDX-License-Identifier: Apache-2.0
"""Exact numbers of weights that masks keep, and checks of masks."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.schedules import UpdateTimes
from spdf_jax.sparsity.structures import Structure

PyTree = Any

# A fixed-point number of 30 bits splits into two limbs of 15 bits, whose
# products with those of an int32 fit into 32 bits.
_LIMB = 15


def number_kept(size: int, sparsity: float) -> int:
  """Returns the number of weights kept at a sparsity, at least one.

  Args:
    size: The number of weights in the group.
    sparsity: The fraction of zeros in [0, 1).

  Returns:
    `max(1, size - round(sparsity * size))`, halves rounded to even.

  Example:
    >>> number_kept(604_000_000, 0.9)
    60400000
  """
  return max(1, size - round(float(sparsity) * size))


def traced_number_kept(size: int, sparsity: jax.Array) -> jax.Array:
  """Returns the number of weights kept at a traced sparsity, at least one.

  Args:
    size: The number of weights in the group, below 2^31.
    sparsity: The fraction of zeros in [0, 1), rounded to float32, so that in
      groups of millions the number may differ by one from `number_kept`.

  Returns:
    int32, `max(1, size - sparsity * size)` rounded to the nearest integer.

  Example:
    >>> int(jax.jit(lambda s: traced_number_kept(1000, s))(0.8))
    200
  """
  one = 2 ** (2 * _LIMB)  # Scaling by a power of two is exact.
  fraction = (jnp.float32(sparsity) * one).astype(jnp.uint32)
  return jnp.maximum(1, size - fraction_of(size, fraction, carry=one // 2))


def model_kept(
    params: PyTree, sparsity: ModelWide, structure: Structure
) -> int:
  """Returns the number of weights that a model-wide sparsity keeps.

  Args:
    params: Leaves `[layers, inputs, outputs]`, or their shapes.
    sparsity: The sparsity of all layers together.
    structure: Structure of the mask.

  Returns:
    The number of weights.

  Raises:
    ValueError: the structure has groups with counts of their own, a leaf has no
      weights, or fewer would be kept than one unit of every layer.
  """
  fraction = distributions.check_sparsity(sparsity.sparsity)
  structure.check(fraction)
  distributions.check_not_empty(params)
  total = least = 0
  for leaf in jax.tree.leaves(params):
    unit_shape = structure.unit_shape(leaf.shape)
    if unit_shape[0] != leaf.shape[0]:
      raise ValueError(
          "distribution 'model_wide' ranks the weights of all layers together, "
          'but the structure requires a number of kept weights in every group '
          "of a layer; give another distribution, e.g. 'uniform', or "
          "structure='unstructured'."
      )
    total += math.prod(leaf.shape)
    least += math.prod(leaf.shape) // math.prod(unit_shape[1:])
  kept = number_kept(total, fraction)
  if kept < least:
    raise ValueError(
        f'sparsity is {fraction}, which keeps {kept:,} of {total:,} weights, '
        f'fewer than the {least:,} of one weight (block, channel) in every '
        'layer; lower the sparsity.'
    )
  return kept


def fixed(fraction: Any, name: str = 'fraction') -> np.ndarray:
  """Converts fractions to the fixed-point numbers that `fraction_of` takes.

  Rounds up, because the float 0.3 is below three tenths and 30 % of 10 must
  still be 3.

  Args:
    fraction: Numbers in [0, 1], of any shape, on the host.
    name: Name of the fractions for error messages.

  Returns:
    `ceil(fraction * 2^30)` as uint32, of the shape of `fraction`.

  Raises:
    ValueError: a fraction is outside [0, 1].

  Example:
    >>> int(fixed(0.25)) == 2**28
    True
  """
  values = np.asarray(fraction, np.float64)
  outside = values[~((values >= 0) & (values <= 1))]
  if outside.size:
    raise ValueError(
        f'{name} is {float(outside.flat[0])}; give a number in [0, 1].'
    )
  # Scaling by a power of two is exact, so only the ceiling rounds.
  return np.ceil(values * 2 ** (2 * _LIMB)).astype(np.uint32)


def fraction_of(n: Any, fraction: Any, carry: Any = 0) -> jax.Array:
  """Multiplies counts by a fraction in exact integer arithmetic; traceable.

  Args:
    n: Counts from 0 to 2^31 - 1, of any shape.
    fraction: Fixed-point numbers of `fixed`; broadcast with `n`.
    carry: Numbers below 2^30 to add to the product; uniformly random ones round
      up with the probability of the remainder. Broadcast with `n`.

  Returns:
    `floor((n * fraction + carry) / 2^30)`, exactly, as int32.

  Example:
    >>> fraction_of(jnp.array([10, 604_000_000]), fixed(0.3)).tolist()
    [3, 181200000]
  """
  low = jnp.uint32(2**_LIMB - 1)
  n, fraction = jnp.asarray(n), jnp.asarray(fraction)
  n, fraction = n.astype(jnp.uint32), fraction.astype(jnp.uint32)
  n_high, n_low = n >> _LIMB, n & low
  f_high, f_low = fraction >> _LIMB, fraction & low
  lowest = n_low * f_low
  middle = n_high * f_low + n_low * f_high + (lowest >> _LIMB)
  remainder = (middle & low) << _LIMB | lowest & low
  up = (remainder + jnp.asarray(carry).astype(jnp.uint32)) >> 2 * _LIMB
  return (n_high * f_high + (middle >> _LIMB) + up).astype(jnp.int32)


class ModelTable(NamedTuple):
  """Number of weights that a whole model keeps, in place of a tree."""

  rows: np.ndarray
  """uint32 `[updates, 2]`: high and low 32 bits."""


def kept_table(
    params: PyTree,
    sparsity: PyTree,
    distribution: Callable[[PyTree, PyTree], PyTree],
    times: UpdateTimes | None = None,
    structure: Structure = structures.UNSTRUCTURED,
) -> PyTree:
  """Tabulates the kept counts of every leaf at every update, on the host.

  The compiled step would have to count in float32, which is off by dozens of
  weights in the largest layers; it looks up row `times.index(count)` of this
  table instead, or the only row.

  Args:
    params: Leaves `[layers, inputs, outputs]`, or their shapes; `None` leaves
      stay `None`.
    sparsity: A number, a schedule, or a tree of those.
    distribution: `(params, sparsity) -> sparsities`, e.g. `uniform`.
    times: The steps of mask updates; not needed for a constant sparsity.
    structure: Structure of the masks.

  Returns:
    Per leaf, int32 `[updates]`: the number of kept units of each group, where
    `updates` is 1 for a constant sparsity. A `ModelTable` for
    `model_wide` sparsities.

  Raises:
    ValueError: a sparsity is outside [0, 1), a schedule is given without a last
      update, a model-wide sparsity falls, or a count exceeds int32.

  Example:
    >>> from spdf_jax.sparsity.distributions import uniform
    >>> from spdf_jax.sparsity.schedules import update_times
    >>> sparsity = schedules.periodic([0.0, 0.75], 10)
    >>> params = {'w': jnp.ones((3, 4, 8)), 'b': None}
    >>> table = kept_table(params, sparsity, uniform, update_times(10, stop=20))
    >>> table['w'].tolist()
    [8, 32]
  """
  steps = [0]
  if not schedules.is_constant(sparsity):
    if times is None or times.endless:
      raise ValueError(
          'sparsity is a schedule and update_until is None; give update_until, '
          'the last step that may be a mask update.'
      )
    steps = times.steps.tolist()
  names, shapes = [], []
  for path, p in jax.tree_util.tree_leaves_with_path(params):
    names.append(trees.path_name(path))
    shape = tuple(p.shape)
    shapes.append(structure.unit_shape(shape))
  treedef: Any = jax.tree.structure(params)
  known: dict[Any, Any] = {}
  rows = []
  for step in [0, *steps]:  # The initial mask has the sparsity of step 0.
    current = schedules.sparsity_at(sparsity, step)
    key = tuple(jax.tree.leaves(current))
    if key not in known:
      sparsities = distribution(params, current)
      if isinstance(sparsities, ModelWide):
        kept = model_kept(params, sparsities, structure)
        known[key] = divmod(kept, 2**32)
      else:
        known[key] = _kept_by_leaf(names, shapes, _leaves(sparsities, treedef))
    rows.append(known[key])
  if isinstance(rows[0], tuple):
    if rows != sorted(rows, reverse=True):
      raise ValueError(
          "sparsity falls, but distribution 'model_wide' never revives pruned "
          'weights; give a schedule that does not fall, or distribution '
          "'uniform' or 'erk'."
      )
    return ModelTable(np.array(rows[1:], np.uint32))
  return treedef.unflatten(
      np.array(column[1:], np.int32) for column in zip(*rows)
  )


def _leaves(sparsities: PyTree, treedef: Any) -> list[Any]:
  try:
    return treedef.flatten_up_to(sparsities)
  except ValueError as error:
    raise ValueError(
        f'distribution returns a tree {jax.tree.structure(sparsities)}; return '
        f'one sparsity for each sparsified leaf: {treedef}.'
    ) from error


def _kept_by_leaf(
    names: list[str], shapes: list[tuple[int, ...]], sparsities: list[Any]
) -> list[int]:
  counts = []
  for name, shape, sparsity in zip(names, shapes, sparsities):
    sparsity = distributions.check_sparsity(sparsity, f'sparsity of {name!r}')
    counts.append(number_kept(math.prod(shape[-2:]), sparsity))
    if counts[-1] >= 2**31:
      raise ValueError(
          f'{name!r} keeps {counts[-1]:,} weights of shape {shape[-2:]}, more '
          'than 2**31 - 1; split the leaf along an axis.'
      )
  return counts


def sparsities_of(mask: PyTree) -> PyTree:
  """Returns the exact sparsity of every leaf of a mask.

  Args:
    mask: A mask, as `get_mask` returns it.

  Returns:
    A tree of floats, `None` unchanged, which `static` takes as `sparsity`.

  Example:
    >>> import jax.numpy as jnp
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
    >>> check_counts(mask, {'w': 0.5}, structures.UNSTRUCTURED)
    >>> check_counts(mask, {'w': 0.25}, structures.UNSTRUCTURED)
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: mask of 'w' keeps 2 of 4 weights, but sparsity=0.25 requires \
3; ...
  """
  try:
    with jax.ensure_compile_time_eval():
      mask = jax.tree.map(lambda m: m.reshape((-1, *m.shape[-2:])), mask)
      kept = jax.tree.map(lambda m: _units(m, structure), mask)
  except jax.errors.TracerArrayConversionError:
    return  # Under jit, the counts of a traced mask are unknown.
  kept = trees.by_name(kept)
  # `optax.tree.map_params` passes an empty tree as a placeholder.
  if not kept:
    return
  sizes = {
      path: structure.unit_shape(leaf.shape)
      for path, leaf in trees.by_name(mask).items()
  }
  for path, counts in kept.items():
    if not counts.size:
      raise ValueError(
          f'{name} of {path!r} keeps some weights of a block or channel and '
          f'prunes others; make it with the structure of the algorithm, '
          f'{structure}.'
      )
  if isinstance(sparsities, ModelWide):
    required = model_kept(mask, sparsities, structure)
    weights = {
        path: math.prod(leaf.shape) // math.prod(sizes[path])
        for path, leaf in trees.by_name(mask).items()
    }
    total = sum(
        int(counts.sum()) * weights[path] for path, counts in kept.items()
    )
    # One more unit may be too large.
    if not required - max(weights.values()) < total <= required:
      size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(mask))
      raise ValueError(
          _differ(name, sparsities.sparsity, total, size, required)
      )
    return
  sparsities = trees.by_name(distributions.uniform(mask, sparsities))
  for path, counts in kept.items():
    here, sparsity = f'{name} of {path!r}', sparsities[path]
    required = number_kept(math.prod(sizes[path][1:]), sparsity)
    number = len(counts)
    if structure is structures.UNSTRUCTURED:
      # Layers of a stack may differ; their mean is rounded to a count.
      total = int(counts.sum())
      if abs(total - number * required) >= number:
        size = number * math.prod(sizes[path][1:])
        raise ValueError(
            _differ(here, sparsity, total, size, number * required)
        )
    elif any(counts != required):
      other = counts[counts != required][0]
      raise ValueError(
          f'{here} keeps {other:,} units (weights, blocks or channels) of a '
          f'group of {structure}, but sparsity={sparsity:g} requires '
          f'{required:,}; make the mask with the structure and the sparsity of '
          'the algorithm.'
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


def _differ(
    name: str, sparsity: float, kept: int, size: int, required: int
) -> str:
  return (
      f'{name} keeps {kept:,} of {size:,} weights, but sparsity={sparsity:g} '
      f'requires {required:,}; set the sparsity to that of the mask, '
      f'{1 - kept / size:.10g} here (sparsities_of(mask) returns it for every '
      "leaf), or use another mask, e.g. that of init='magnitude'."
  )
