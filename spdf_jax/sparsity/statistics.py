# SPDX-License-Identifier: Apache-2.0
"""Counts of the weights that masks keep, and of differences between masks."""

from collections.abc import Iterator
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import state
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.selection import Where

PyTree = Any


class UnitCounts(NamedTuple):
  """Counts of the units of a leaf, an entry for each layer.

  Units are the inputs and outputs of a layer, the rows and columns of its
  matrix.
  """

  without_inputs: Any
  """Number of outputs that keep no weight, int32."""

  without_outputs: Any
  """Number of inputs that keep no weight, int32."""

  row_variation: Any
  """Variance of the number of kept weights per input, divided by that of a
  uniformly random mask that keeps as many: 1 on average for random masks, and 1
  if all weights are kept or none, float32."""

  column_variation: Any
  """The same of the number of kept weights per output, float32."""


@functools.partial(jax.jit, static_argnames='axes')
def count_units(mask: jax.Array, axes: MatrixAxes) -> UnitCounts:
  """Counts the inputs and outputs that keep no weight, and the variation.

  Args:
    mask: Bool mask of a leaf.
    axes: Axes of the leaf, as `selection.select` returns them.

  Returns:
    The counts, in arrays of the shape of the mask, except that axes of the
    matrix have length 1. A vector, a matrix of one input, has no units.

  Example:
    >>> mask = jnp.array([[True, True, False], [False, False, False]])
    >>> counts = count_units(mask, MatrixAxes(0, 1))
    >>> int(counts.without_inputs.item()), int(counts.without_outputs.item())
    (1, 1)
  """
  inputs = selection.as_tuple(axes.reduction)
  outputs = selection.as_tuple(axes.output)
  per_input, per_output = (
      jnp.sum(mask, axis=axis, keepdims=True, dtype=jnp.int32)
      for axis in (outputs, inputs)
  )
  empty = lambda counts, axis: jnp.sum(
      counts == 0, axis=axis, keepdims=True, dtype=jnp.int32
  )
  if math.prod(mask.shape[axis] for axis in inputs) == 1:
    none = jnp.zeros_like(empty(per_output, outputs))
    ones = none + jnp.float32(1)
    return UnitCounts(none, none, ones, ones)
  return UnitCounts(
      empty(per_output, outputs),
      empty(per_input, inputs),
      _variation(per_input, inputs, mask, outputs),
      _variation(per_output, outputs, mask, inputs),
  )


def _variation(
    counts: jax.Array,
    units: tuple[int, ...],
    mask: jax.Array,
    weights: tuple[int, ...],
) -> jax.Array:
  """Returns the variance of counts along axes of units, over a random mask's.

  That of a random mask is the variance of the hypergeometric distribution.
  """
  number, each = (
      math.prod(mask.shape[axis] for axis in axes) for axes in (units, weights)
  )
  mean = lambda x: jnp.mean(x, axis=units, keepdims=True)
  of_unit = counts.astype(jnp.float32)
  share = mean(of_unit) / each
  variance = mean(jnp.square(of_unit - mean(of_unit)))
  # JAX takes an int of 2^31 or more for an overflow of int32, and no float.
  left = float(number * each - each), float(max(number * each - 1, 1))
  random = each * share * (1 - share) * left[0] / left[1]
  # Integers, because the share of a large dense layer is rounded.
  mixed = jnp.any(counts > 0, axis=units, keepdims=True) & jnp.any(
      counts < each, axis=units, keepdims=True
  ) & (random > 0)
  return jnp.where(mixed, variance / jnp.where(mixed, random, 1), 1)


class LayerSparsity(NamedTuple):
  """Numbers of kept weights and of all weights of one layer."""

  kept: int
  total: int

  inputs: int
  """Number of inputs: rows of the matrix."""

  outputs: int
  """Number of outputs: columns of the matrix."""

  without_inputs: int
  """Number of outputs that keep no weight."""

  without_outputs: int
  """Number of inputs that keep no weight."""

  row_variation: float
  """See `UnitCounts`, like the next."""

  column_variation: float

  @property
  def sparsity(self) -> float:
    """Fraction of zeros in the layer."""
    return 1 - self.kept / self.total

  @property
  def cut_off(self) -> float:
    """Fraction of the inputs and outputs that keep no weight."""
    cut = self.without_inputs + self.without_outputs
    return cut / (self.inputs + self.outputs)

  @property
  def cut_off_at_random(self) -> float:
    """Fraction that keeps no weight in a random mask, on average."""
    empty = sum(
        number * _no_weight(self.total // number, self.kept, self.total)
        for number in (self.inputs, self.outputs)
    )
    return empty / (self.inputs + self.outputs)

  @property
  def cuts_off_units(self) -> bool:
    """Whether many more inputs and outputs are cut off than at random.

    That is more than a hundredth, and more than the mean of random masks by six
    standard deviations and two. A mask that prunes whole inputs and outputs and
    nothing else cuts off none.
    """
    units = self.inputs + self.outputs
    whole = (self.outputs - self.without_inputs) * (
        self.inputs - self.without_outputs
    )
    random = units * self.cut_off_at_random
    return self.cut_off > 0.01 and self.kept < whole and (
        units * self.cut_off > random + 6 * math.sqrt(random) + 2
    )


def _no_weight(each: int, kept: int, total: int) -> float:
  """Returns the probability that a unit of `each` weights keeps none."""
  if kept > total - each:
    return 0.0
  log = lambda x: math.lgamma(x + 1)
  return math.exp(
      log(total - each) - log(total - each - kept) - log(total)
      + log(total - kept)
  )


class Summary(NamedTuple):
  """Exact counts of a mask, as `summarize` returns them."""

  layers: dict[str, LayerSparsity]
  """Counts by sparsified leaf, or by layer: `path[0]`, `path[1]`, …"""

  parameters: int
  """Number of parameters of the model, sparsified or not."""

  @property
  def kept(self) -> int:
    """Number of kept weights of sparsified layers."""
    return sum(layer.kept for layer in self.layers.values())

  @property
  def sparsified(self) -> int:
    """Number of weights of sparsified layers, kept or pruned."""
    return sum(layer.total for layer in self.layers.values())

  @property
  def sparsity(self) -> float:
    """Fraction of zeros among the weights of sparsified layers."""
    return (self.sparsified - self.kept) / max(self.sparsified, 1)

  @property
  def overall_sparsity(self) -> float:
    """Fraction of zeros S among all parameters (SPDF, section 2)."""
    return (self.sparsified - self.kept) / self.parameters

  def __str__(self) -> str:
    width = max(map(len, self.layers), default=0)
    rows = [
        f'{name:<{width}}  {layer.sparsity:6.2%}  '
        f'{layer.kept:,} of {layer.total:,} kept'
        + (f', {layer.cut_off:.1%} of units cut off' if layer.cut_off else '')
        for name, layer in self.layers.items()
    ]
    return '\n'.join(
        rows + [
            f'sparsified layers: {self.sparsity:.2%} zeros of '
            f'{self.sparsified:,}; all parameters: '
            f'{self.overall_sparsity:.2%} zeros of {self.parameters:,}'
        ]
    )


def summarize(
    opt_state: PyTree, params: PyTree, *, where: Where | None = None
) -> Summary:
  """Counts the kept weights of every sparsified leaf, and of its units.

  Units are inputs and outputs; those that keep no weight are cut off, and do
  not learn. Growth by the largest gradients may cut off many, see `rigl`.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`, or a mask.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`, to count each layer of a leaf of
      stacked layers. `None`: one count per leaf, of which the last axis indexes
      the outputs and all others the inputs.

  Returns:
    A `Summary` of exact integer counts; `str` formats it as a table.

  Raises:
    TypeError: `opt_state` is neither such a state nor a mask.
    ValueError: the mask has a leaf that `where` does not select, or that
      `params` does not have.

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4)), 'b': jnp.ones(4)}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> print(spdf.summarize(tx.init(params), params))
    w  75.00%  4 of 16 kept, 37.5% of units cut off
    sparsified layers: 75.00% zeros of 16; all parameters: 60.00% zeros of 20
  """
  is_state = lambda x: isinstance(x, state.SparsifyState)
  has_state = any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))
  mask = state.get_mask(opt_state) if has_state else opt_state
  stacks = _stacks(mask, params, where)
  layers = {
      name: layer
      for path, stack in stacks
      for name, layer in _numbered(path, _layers_of(stack))
  }
  sizes = [int(np.prod(p.shape)) for p in jax.tree.leaves(params)]
  return Summary(layers, sum(sizes))


class MaskChange(NamedTuple):
  """Counts of the differences between two masks of one layer."""

  grown: int
  """Number of weights kept after, not before."""

  dropped: int
  """Number of weights kept before, not after."""

  surviving: int
  """Number of weights kept before and after."""

  @property
  def overlap(self) -> float:
    """Jaccard index: the share of weights kept in both of those in either."""
    return self.surviving / sum(self) if any(self) else 1.0


def mask_changes(
    before: PyTree,
    after: PyTree,
    params: PyTree,
    *,
    where: Where | None = None,
) -> dict[str, MaskChange]:
  """Counts the differences between two masks, leaf by leaf, on the host.

  Args:
    before: A mask, as `get_mask` returns it.
    after: Another mask of the same parameters.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`, to count the stacked layers of a
      leaf one by one.

  Returns:
    Exact integer counts by leaf, or by layer, named as in `summarize`.

  Raises:
    ValueError: the masks have different leaves or shapes, or a leaf that
      `where` does not select.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> one = {'w': jnp.array([[True, True], [False, False]]), 'b': None}
    >>> other = {'w': jnp.array([[True, False], [True, True]]), 'b': None}
    >>> mask_changes(one, other, params)
    {'w': MaskChange(grown=2, dropped=1, surviving=1)}
  """
  changes = {}
  missing: Any = (None, np.zeros(0))
  pairs = itertools.zip_longest(
      _layers(before, params, where), _layers(after, params, where),
      fillvalue=missing,
  )
  for (name, old), (other_name, new) in pairs:
    if name != other_name or old.shape != new.shape:
      raise ValueError(
          f'one mask has the layer {name!r} {old.shape} where the other has '
          f'{other_name!r} {new.shape}; compare masks of the same parameters.'
      )
    parts = new & ~old, old & ~new, old & new
    changes[name] = MaskChange(*(int(m.sum(dtype=np.int64)) for m in parts))
  return changes


def _layers(
    mask: PyTree, params: PyTree, where: Where | None
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the name and the mask `[inputs, outputs]` of every layer."""
  for path, stack in _stacks(mask, params, where):
    yield from _numbered(path, np.asarray(stack))


def _stacks(
    mask: PyTree, params: PyTree, where: Where | None
) -> list[tuple[str, jax.Array]]:
  """Returns the path and masks `[layers, inputs, outputs]` of every leaf."""
  masks.check_bool(mask)
  leaves = list(zip(
      trees.by_name(params), trees.matching_leaves(mask, params)
  ))
  if where is None:
    return [
        (name, m.reshape(1, -1, m.shape[-1])) for name, m in leaves
        if m is not None
    ]
  axes = selection.select(where, params)
  for (name, m), a in zip(leaves, axes):
    if m is not None and a is None:
      raise ValueError(
          f'the mask has a leaf {name!r}, which where does not select; pass '
          'the `where` that sparsify was given.'
      )
  stacks = selection.to_layers(mask, params, axes)
  return [
      (trees.path_name(path), stack)
      for path, stack in jax.tree_util.tree_leaves_with_path(stacks)
  ]


def _layers_of(stack: jax.Array) -> list[LayerSparsity]:
  """Counts the kept weights and the units of a stack's layers."""
  _, inputs, outputs = stack.shape
  units = [np.ravel(x).tolist() for x in count_units(stack, MatrixAxes(1, 2))]
  return [
      LayerSparsity(kept, inputs * outputs, inputs, outputs, *of_layer)
      for kept, *of_layer in zip(_count(stack), *units)
  ]


def _count(stack: jax.Array) -> list[int]:
  """Counts the kept weights of every layer, of which there may be over 2^32."""
  # Summed on the devices, so that only counts are copied to the host.
  columns = jnp.sum(stack, axis=1, dtype=jnp.uint32)
  high, low = (
      np.asarray(jnp.sum(x, axis=1, dtype=jnp.uint32))
      for x in (columns >> 16, columns & 0xFFFF)
  )
  return [(int(h) << 16) + int(n) for h, n in zip(high, low)]


def _numbered(path: str, stack: Any) -> Iterator[tuple[str, Any]]:
  """Yields the name and the entry of each layer of a stack."""
  for i, layer in enumerate(stack):
    yield path + (f'[{i}]' if len(stack) > 1 else ''), layer
