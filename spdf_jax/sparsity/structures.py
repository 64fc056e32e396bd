# SPDX-License-Identifier: Apache-2.0
"""Structures of masks: units of weights, and the groups that rank them.

A structure partitions the weights of a leaf `[layers, inputs, outputs]` into
units, which are kept or pruned as a whole, such as blocks, and the units into
groups, which are ranked together and have one count.
"""

from collections.abc import Callable, Mapping
import math
import operator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax import names

Shape = tuple[int, ...]


class Structure(NamedTuple):
  """A structure: pure functions of shapes and arrays."""

  check: Callable[[float], None]
  """`(sparsity) -> None`: raises ValueError if the structure cannot have the
  sparsity."""

  unit_shape: Callable[[Shape], Shape]
  """`(layers, inputs, outputs) -> (groups, a, b)`, where `a * b` units form a
  group; raises ValueError if the structure does not divide a leaf."""

  sums: Callable[[jax.Array], jax.Array]
  """`(scores) -> sums`: sums of the scores in each unit, `[layers, rows,
  columns]`."""

  group: Callable[[jax.Array], jax.Array]
  """`(sums) -> unit_scores`: arranges sums in groups, `[..., a, b]`. The axes
  before the last two index groups; they are not merged, so that sharded axes
  need no resharding."""

  expand: Callable[[jax.Array, Shape], jax.Array]
  """`(mask of units, shape of the leaf) -> mask of weights`."""

  name: str = 'Structure'
  """How the structure is printed."""

  def reduce(self, scores: jax.Array) -> jax.Array:
    """Returns the sums of the scores in each unit, in groups `[..., a, b]`."""
    return self.group(self.sums(scores))

  def __repr__(self) -> str:
    return self.name


def unstructured() -> Structure:
  """Treats every weight as a unit; a layer is one group.

  Returns:
    The structure.

  Example:
    >>> unstructured().unit_shape((2, 4, 8))
    (2, 4, 8)
  """
  return UNSTRUCTURED


UNSTRUCTURED = Structure(
    check=lambda sparsity: None,
    unit_shape=lambda shape: tuple(shape),
    sums=lambda scores: scores,
    group=lambda sums: sums,
    expand=lambda mask, shape: mask.reshape(shape),
    name='unstructured()',
)
"""The result of `unstructured()`, as a default for arguments."""


@names.printed_as_call
def n_of_m(n: int, m: int, axis: str = 'inputs') -> Structure:
  """Keeps exactly n of every m consecutive weights, e.g. 2:4.

  The only possible sparsity is `1 - n / m`, besides 0 for a dense leaf.

  Args:
    n: Number of weights kept of every m.
    m: Number of consecutive weights in a group.
    axis: `'inputs'` or `'outputs'`: the axis along which weights are
      consecutive.

  Returns:
    The structure.

  Raises:
    ValueError: not 0 < n < m, or `axis` is unknown; later, if m does not
      divide the axis or the sparsity is another one.

  References:
    Mishra et al., `Accelerating Sparse Deep Neural Networks
    <https://arxiv.org/abs/2104.08378>`_, 2021

  Example:
    >>> n_of_m(2, 4).unit_shape((1, 8, 16))
    (32, 4, 1)
  """
  _check_axis(axis)
  n, m = _size('n', n), _size('m', m)
  if n >= m:
    raise ValueError(f'n is {n} and m is {m}; keep fewer than m of m weights.')
  fraction = 1 - n / m

  def check(sparsity):
    if sparsity and not math.isclose(sparsity, fraction, abs_tol=1e-6):
      raise ValueError(
          f'sparsity is {sparsity} under n_of_m({n}, {m}), which keeps exactly '
          f'{n} of {m}; give {fraction:.7g}.'
      )

  def groups_of(shape):
    return _divide(shape, axis, m, f'n_of_m({n}, {m})')

  order = {'inputs': (0, 1, 3, 2), 'outputs': (0, 1, 2, 3)}[axis]
  return _grouped(axis, check, groups_of, order, units=(1,))


@names.printed_as_call
def balanced(groups: int | None, axis: str = 'outputs') -> Structure:
  """Keeps equally many weights in every group of outputs or inputs.

  Args:
    groups: Number of groups of consecutive outputs (inputs), such as heads;
      `None`: every single output (input) is a group.
    axis: `'inputs'` or `'outputs'`: the axis that is grouped.

  Returns:
    The structure.

  Raises:
    ValueError: `groups` is not a positive int or `axis` is unknown; later, if
      `groups` does not divide the axis.

  Example:
    >>> balanced(12).unit_shape((1, 768, 768))
    (12, 768, 64)
  """
  _check_axis(axis)
  if groups is not None:
    groups = _size('groups', groups)

  def groups_of(shape):
    number = shape[_AXES[axis]] if groups is None else groups
    _divide(shape, axis, number, f'balanced({groups})')
    return number

  order = {'inputs': (0, 1, 2, 3), 'outputs': (0, 2, 1, 3)}[axis]
  return _grouped(axis, lambda sparsity: None, groups_of, order)


@names.printed_as_call
def block(inputs: int, outputs: int, balanced: bool = False) -> Structure:
  """Keeps or prunes whole blocks of weights; a layer is one group of blocks.

  Args:
    inputs: Number of rows of a block.
    outputs: Number of columns of a block.
    balanced: Whether each column of blocks is a group of its own, so that all
      keep equally many: a random mask leaves no output without inputs.

  Returns:
    The structure.

  Raises:
    ValueError: a size is not a positive int; later, if blocks do not divide a
      leaf.

  Example:
    >>> block(4, 4).unit_shape((2, 8, 16))
    (2, 2, 4)
    >>> block(4, 4, balanced=True).unit_shape((2, 8, 16))
    (8, 2, 1)
  """
  inputs, outputs = _size('inputs', inputs), _size('outputs', outputs)
  blocks = _blocks(
      lambda shape: (inputs, outputs), f'block({inputs}, {outputs})'
  )
  return _by_column(blocks) if balanced else blocks


@names.printed_as_call
def channel(axis: str) -> Structure:
  """Keeps or prunes all weights of an input or of an output together.

  Args:
    axis: `'inputs'` or `'outputs'`: the axis whose entries are pruned.

  Returns:
    The structure.

  Raises:
    ValueError: `axis` is unknown.

  Example:
    >>> channel('outputs').unit_shape((2, 4, 8))
    (2, 1, 8)
  """
  _check_axis(axis)
  if axis == 'inputs':
    return _blocks(lambda shape: (1, shape[2]), 'channel')
  return _blocks(lambda shape: (shape[1], 1), 'channel')


_AXES = {'inputs': 1, 'outputs': 2}


def _blocks(
    size_of: Callable[[Shape], tuple[int, int]], name: str
) -> Structure:
  """Builds a structure whose units are blocks of weights."""

  def unit_shape(shape):
    rows, columns = size_of(shape)
    return (
        shape[0],
        _divide(shape, 'inputs', rows, name),
        _divide(shape, 'outputs', columns, name),
    )

  def sums(scores):
    layers, a, b = unit_shape(scores.shape)
    rows, columns = size_of(scores.shape)
    blocks = scores.reshape(layers, a, rows, b, columns)
    return jnp.sum(blocks, axis=(2, 4), dtype=_sum_dtype(scores.dtype))

  def expand(mask, shape):
    layers, a, b = unit_shape(shape)
    blocks = (layers, a, shape[1] // a, b, shape[2] // b)
    mask = jnp.broadcast_to(mask.reshape(layers, a, 1, b, 1), blocks)
    return mask.reshape(shape)

  return Structure(
      lambda sparsity: None, unit_shape, sums, lambda sums: sums, expand
  )


def _by_column(structure: Structure) -> Structure:
  """Returns a structure that ranks the units of each column separately."""

  def unit_shape(shape):
    layers, a, b = structure.unit_shape(shape)
    return layers * b, a, 1

  def group(sums):
    return sums.swapaxes(1, 2)[..., None]

  def expand(mask, shape):
    layers, a, b = structure.unit_shape(shape)
    return structure.expand(mask.reshape(layers, b, a).swapaxes(1, 2), shape)

  return structure._replace(
      unit_shape=unit_shape, group=group, expand=expand
  )


def _sum_dtype(dtype: Any) -> Any:
  """Returns the dtype of sums: float32, or the scores' own if it is wider."""
  dtype = jnp.dtype(dtype)
  inexact = jnp.issubdtype(dtype, jnp.inexact)
  return dtype if inexact and dtype.itemsize > 4 else jnp.float32


def _grouped(
    axis: str,
    check: Callable[[float], None],
    groups_of: Callable[[Shape], int],
    order: tuple[int, ...],
    units: tuple[int, ...] = (),
) -> Structure:
  """Builds a structure of single weights, with groups along an axis.

  `order` transposes the axes of the leaf, after the split into groups, so that
  group axes precede unit axes; `units` are further unit axes of length one.
  """
  back = tuple(order.index(i) for i in range(4))

  def split(shape):
    at = _AXES[axis]
    groups = groups_of(shape)
    return *shape[:at], groups, shape[at] // groups, *shape[at + 1:]

  def ordered(shape):
    parts = split(shape)
    return tuple(parts[i] for i in order)

  def unit_shape(shape):
    *groups, a, b = ordered(shape) + units
    return math.prod(groups), a, b

  def group(sums):
    apart = sums.reshape(split(sums.shape)).transpose(order)
    return apart.reshape(*apart.shape, *units)

  def expand(mask, shape):
    return mask.reshape(ordered(shape)).transpose(back).reshape(shape)

  return Structure(check, unit_shape, lambda scores: scores, group, expand)


def _check_axis(axis: str) -> None:
  if axis not in _AXES:
    raise ValueError(f"axis is {axis!r}; give 'inputs' or 'outputs'.")


def _size(name: str, size: int) -> int:
  """Returns a size as an int, or raises."""
  try:
    number = operator.index(size)
  except TypeError:
    number = 0
  if isinstance(size, bool) or number < 1:
    raise ValueError(f'{name} is {size!r}; give an int, 1 or more.')
  return number


def _divide(shape: Shape, axis: str, by: int, name: str) -> int:
  size = shape[_AXES[axis]]
  if size % by:
    raise ValueError(
        f'{name} needs a multiple of {by} {axis}, but a leaf has {size} '
        f'{axis}; use a divisor of {size}, or leave the leaf out by the '
        '`where` of sparsify.'
    )
  return size // by
_STRUCTURES = {
    'balanced': balanced,
    'block': block,
    'channel': channel,
    'n_of_m': n_of_m,
    'unstructured': unstructured,
}


def structure_of(value: Any) -> Structure:
  """Returns the structure with a name, or a given structure.

  Args:
    value: A structure; `'unstructured'`; N:M as `'2:4'`; or a mapping with the
      name under `'structure'` and its arguments.

  Returns:
    The structure.

  Raises:
    ValueError: `value` is something else, or the name or an argument is
      unknown.

  Example:
    >>> structure_of('2:4').unit_shape((1, 8, 16))
    (32, 4, 1)
  """
  if isinstance(value, str) and re.fullmatch(r'\d+:\d+', value):
    n, m = map(int, value.split(':'))
    return n_of_m(n, m)
  structure = names.by_entry('structure', value, _STRUCTURES)
  if isinstance(value, (str, Mapping)):
    structure = structure()
  if not isinstance(structure, Structure):
    raise ValueError(
        f'structure is {structure!r:.80}; give e.g. '
        "spdf_jax.structures.block(4, 4), or a name such as '2:4'."
    )
  return structure
