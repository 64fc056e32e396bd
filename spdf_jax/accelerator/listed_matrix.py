# SPDX-License-Identifier: Apache-2.0
"""Matrices as lists of their kept weights, and the product with them.

A kept weight takes 16 bits of index and a value in float32 or bfloat16; pruned
weights take nothing, and the product reads nothing of them. Unlike the lists of
masks and packed matrices, which every call makes anew, these are built once:
they are for the few tokens of generation, and the product has no gradients.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.interpreters import batching
import jax.numpy as jnp
import numpy as np

from spdf_jax import lowerings
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import trees

PyTree = Any

DTYPES = ('float32', 'bfloat16')
"""Dtypes of the values, and of the inputs, of the product."""

# The kernels read eight entries at a time, also past the last one.
_PADDING = 8
_MOST_INPUTS = 2**16
_MOST_KEPT = 2**31 - 1


class Layout(NamedTuple):
  """The axes of a parameter that is a matrix, after those of a stack."""

  inputs: tuple[int, ...]
  """Sizes of the axes of the inputs."""

  outputs: tuple[int, ...]
  """Sizes of the axes of the outputs, such as heads and their size."""

  outputs_first: bool
  """Whether the axes of the outputs precede those of the inputs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListedMatrix:
  """The kept weights of a matrix in lists, one per output; a pytree node.

  Attributes:
    values: Kept weights in the order (output, input), [size], padded with at
      least 8 zeros, which kernels may read.
    indices: Input of every value, uint16 [size].
    starts: First value of every output, and the number of kept weights, int32
      [outputs + 1].
    inputs: Number of inputs.
    layout: Layout of the parameter; `None`: [..., inputs, outputs].

  Example:
    >>> w = np.array([[3., 0., 4.], [0., 0., 5.]], np.float32)
    >>> listed = list_matrix(w, w != 0)
    >>> listed.values[:3].tolist(), listed.indices[:3].tolist()
    ([3.0, 4.0, 5.0], [0, 0, 1])
    >>> listed.starts.tolist(), listed.shape
    ([0, 1, 1, 3], (2, 3))
  """

  values: jax.Array | np.ndarray
  indices: jax.Array | np.ndarray
  starts: jax.Array | np.ndarray
  inputs: int = dataclasses.field(metadata={'static': True})
  layout: Layout | None = dataclasses.field(
      default=None, metadata={'static': True}
  )

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the matrix, after the axes of a stack."""
    return (*self.starts.shape[:-1], self.inputs, self.outputs)

  @property
  def outputs(self) -> int:
    """Number of outputs."""
    return self.starts.shape[-1] - 1

  @property
  def axes(self) -> Layout:
    """Layout of the parameter, also where it is [..., inputs, outputs]."""
    return self.layout or Layout((self.inputs,), (self.outputs,), False)

  @property
  def parameter_shape(self) -> tuple[int, ...]:
    """Shape of the parameter, after the axes of a stack."""
    inputs, outputs, outputs_first = self.axes
    sizes = outputs + inputs if outputs_first else inputs + outputs
    return (*self.starts.shape[:-1], *sizes)


def list_matrix(
    w: np.ndarray, mask: np.ndarray, *, dtype: Any = None
) -> ListedMatrix:
  """Converts a masked matrix, or a stack of them, to a `ListedMatrix`.

  Args:
    w: Weights [..., inputs, outputs].
    mask: `True` where a weight is kept, bool of the shape of `w`.
    dtype: Dtype of the values, float32 or bfloat16; `None`: that of `w`.

  Returns:
    The `ListedMatrix`, of NumPy arrays. Those of a stack have its leading axes,
    and are padded to the size of the matrix that keeps most weights.

  Raises:
    ValueError: the shapes differ, `w` has fewer than two axes or an empty one,
      or a matrix has more than 65,536 inputs or 2^31 - 1 kept weights.
    TypeError: the mask is not boolean, or the dtype is not supported.

  Example:
    >>> w = np.array([[3., 0.], [4., 5.]], np.float32)
    >>> listed = list_matrix(w, w != 0)
    >>> listed.values[:3].tolist(), listed.indices[:3].tolist()
    ([3.0, 4.0, 5.0], [0, 1, 1])
  """
  w, mask = np.asarray(w), np.asarray(mask)
  if w.ndim < 2 or w.shape != mask.shape or 0 in w.shape:
    raise ValueError(
        f'list_matrix got w {list(w.shape)} and mask {list(mask.shape)}; give '
        'both the same shape [..., inputs, outputs], without empty axes.'
    )
  if mask.dtype != bool:
    raise TypeError(
        f'list_matrix got a mask of dtype {mask.dtype}; give booleans, e.g. '
        'w != 0.'
    )
  name = 'dtype of w' if dtype is None else 'dtype'
  dtype = jnp.dtype(w.dtype if dtype is None else dtype)
  _check_dtype(name, dtype)
  if w.ndim > 2:
    return _stack([list_matrix(*each, dtype=dtype) for each in zip(w, mask)])
  # The transpose is read in the order (output, input).
  _, indices = np.nonzero(mask.T)
  counts = mask.sum(0, dtype=np.int64)
  return list_values(w.T[mask.T].astype(dtype), indices, counts, w.shape[0])


def list_values(
    values: np.ndarray, indices: np.ndarray, counts: np.ndarray, inputs: int
) -> ListedMatrix:
  """Builds a listed matrix from kept weights in the order (output, input).

  Args:
    values: Kept weights, [kept].
    indices: Input of every kept weight, [kept].
    counts: Number of kept weights of every output, [outputs].
    inputs: Number of inputs.

  Returns:
    The listed matrix.

  Raises:
    ValueError: the numbers do not fit, or the matrix is too large for the
      16-bit indices of lists.

  Example:
    >>> list_values(np.ones(1, np.float32), np.array([1]),
    ...             np.array([0, 1]), 2).starts.tolist()
    [0, 0, 1]
  """
  kept = int(counts.sum())
  if not kept == len(values) == len(indices):
    raise ValueError(
        f'list_values got {len(values)} values, {len(indices)} indices and '
        f'counts with the sum {kept}; give one value and one index for every '
        'kept weight, and the number of them for every output.'
    )
  if inputs > _MOST_INPUTS or kept > _MOST_KEPT:
    raise ValueError(
        f'the matrix has {inputs} inputs and keeps {kept} weights; a listed '
        f'matrix has at most {_MOST_INPUTS} inputs and {_MOST_KEPT} weights: '
        'give list_params the mask None for this one, or read the model with '
        'load_hf instead of load_listed.'
    )
  if kept and not 0 <= indices.min() <= indices.max() < inputs:
    raise ValueError(
        f'indices are from {indices.min()} to {indices.max()}, but the matrix '
        f'has {inputs} inputs; give indices from 0 to {inputs - 1}.'
    )
  _check_dtype('dtype of values', values.dtype)
  return ListedMatrix(
      np.pad(values, (0, _PADDING)),
      np.pad(indices.astype(np.uint16), (0, _PADDING)),
      np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
      inputs,
  )


def split_outputs(
    matrix: ListedMatrix, sizes: Sequence[int]
) -> list[ListedMatrix]:
  """Splits a matrix into matrices with the given numbers of outputs.

  Example:
    >>> w = np.array([[3., 0., 4.], [0., 0., 5.]], np.float32)
    >>> split_outputs(list_matrix(w, w != 0), [2, 1])[1].values[:2].tolist()
    [4.0, 5.0]
  """
  counts = np.diff(matrix.starts)
  parts, end = [], 0
  for size in sizes:
    begin, end = end, end + size
    first, last = matrix.starts[begin], matrix.starts[end]
    parts.append(list_values(
        np.asarray(matrix.values[first:last]),
        np.asarray(matrix.indices[first:last]),
        counts[begin:end], matrix.inputs,
    ))
  return parts


def _stack(matrices: list[ListedMatrix]) -> ListedMatrix:
  size = max(matrix.values.shape[-1] for matrix in matrices)

  def join(name):
    arrays = [np.asarray(getattr(matrix, name)) for matrix in matrices]
    if name != 'starts':
      ends = [[(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
              for x in arrays]
      arrays = [np.pad(x, end) for x, end in zip(arrays, ends)]
    return np.stack(arrays)

  return ListedMatrix(
      join('values'), join('indices'), join('starts'), matrices[0].inputs
  )


def list_params(
    params: PyTree,
    mask: PyTree,
    *,
    where: Any = None,
    dtype: Any = None,
) -> PyTree:
  """Converts sparsified matrices to lists of their kept weights.

  For inference: a `GPT` or `Llama` with the result as its parameters multiplies
  by these matrices with `listed_matmul`; set `lowering='native'` in the model's
  config to use native kernels. Gradients, optimizers and masks need the
  original parameters.

  Args:
    params: Tree of parameters.
    mask: Mask of the structure of `params`, with `None` for dense leaves, as
      `get_mask` returns it.
    where: Selection of the sparsified leaves and their axes, as `sparsify`
      takes it, for parameters of other layouts than [..., inputs, outputs],
      such as attention kernels with an axis of heads; `None`: there are none.
    dtype: Dtype of the values of kept weights, float32 or bfloat16; `None`:
      that of the parameters.

  Returns:
    The parameters, with a `ListedMatrix` in place of every leaf with a mask.

  Raises:
    ValueError: parameters and mask differ in structure or shapes, axes of
      inputs and outputs alternate, or `list_matrix` does not support a matrix.
    TypeError: a mask is not boolean, or the dtype is not supported.

  Example:
    >>> params = {'w': np.eye(3, dtype=np.float32), 'b': np.zeros(3)}
    >>> listed = list_params(params, {'w': params['w'] != 0, 'b': None})
    >>> type(listed['w']).__name__, type(listed['b']).__name__
    ('ListedMatrix', 'ndarray')
  """
  axes: dict[str, Any] = {}
  if where is not None:
    axes = dict(zip(trees.by_name(params), selection.select(where, params)))

  def convert(path, m, w):
    if m is None:
      return w
    name = trees.path_name(path)
    if axes.get(name) is None or m.shape != w.shape:
      return list_matrix(w, m, dtype=dtype)  # It refuses unequal shapes.
    return _list_parameter(name, w, m, axes[name], dtype)

  return jax.tree_util.tree_map_with_path(
      convert, mask, params, is_leaf=lambda m: m is None
  )


def _list_parameter(name, w, mask, axes, dtype):
  """Converts a parameter whose inputs and outputs are those of `axes`."""
  inputs, outputs = axes.reduction, axes.output
  stack = tuple(i for i in range(w.ndim) if i not in inputs + outputs)
  outputs_first = outputs < inputs
  ordered = outputs + inputs if outputs_first else inputs + outputs
  if stack + ordered != tuple(range(w.ndim)):
    raise ValueError(
        f'where gives {name!r} of shape {list(w.shape)} the axes '
        f'{list(inputs)} of inputs and {list(outputs)} of outputs, which lists '
        'cannot represent; give it the mask None, or an order of axes in which '
        'those of a stack are first and the inputs are adjacent.'
    )
  sizes_of = lambda part: tuple(w.shape[i] for i in part)
  layout = Layout(sizes_of(inputs), sizes_of(outputs), outputs_first)
  sizes = [math.prod(layout.inputs), math.prod(layout.outputs)]

  def matrix(a):
    rows, columns = sizes[::-1] if outputs_first else sizes
    a = np.asarray(a).reshape(*a.shape[:len(stack)], rows, columns)
    return a.swapaxes(-1, -2) if outputs_first else a

  listed = list_matrix(matrix(w), matrix(mask), dtype=dtype)
  return dataclasses.replace(listed, layout=layout)


def listed_matmul(
    x: jax.Array, w: ListedMatrix, *, lowering: str = lowerings.REFERENCE
) -> jax.Array:
  """Multiplies by a `ListedMatrix`, for inference: y = x @ w.

  The product has no gradients; use `sparse_matmul` in training. Inputs must be
  finite for all lowerings to agree, as for `sparse_matmul`. In the native
  lowering, a row of the result does not depend on the number of rows, nor on
  that of threads.

  Args:
    x: Inputs [..., inputs], float32 or bfloat16.
    w: Matrix [inputs, outputs], no stack, with values in float32 or bfloat16,
      independent of the dtype of `x`.
    lowering: `'native'`, for the native CPU kernels; or `'reference'`, which
      builds the dense matrix at every call.

  Returns:
    Product [..., outputs], of the dtype of `x`, with sums in float32.

  Raises:
    ValueError: the last axis of `x` does not have the size `inputs`, an axis is
      empty, `w` is a stack, or the lowering is unknown.
    TypeError: a dtype is not supported.

  Example:
    >>> w = np.array([[3., 0.], [4., 5.]], np.float32)
    >>> listed_matmul(jnp.array([[1., 2.]]), list_matrix(w, w != 0)).tolist()
    [[11.0, 10.0]]
  """
  x = jnp.asarray(x)
  lowerings.check_lowering(lowering)
  if x.ndim < 1 or len(w.shape) != 2 or x.shape[-1] != w.inputs or 0 in x.shape:
    raise ValueError(
        f'listed_matmul got x {list(x.shape)} and w {list(w.shape)}; give x '
        '[..., inputs], without empty axes, and one matrix w [inputs, outputs].'
    )
  _check_dtype('dtype of x', x.dtype)
  _check_dtype('dtype of w.values', w.values.dtype)
  return listed_matmul_p.bind(
      x, *map(jnp.asarray, (w.values, w.indices, w.starts)), lowering=lowering
  )


def dense_matrix(matrix: ListedMatrix) -> jax.Array:
  """Returns the matrix, or a stack of them, with zeros for pruned weights.

  Example:
    >>> w = np.array([[3., 0., 4.], [0., 0., 5.]], np.float32)
    >>> dense_matrix(list_matrix(w, w != 0)).tolist()
    [[3.0, 0.0, 4.0], [0.0, 0.0, 5.0]]
  """
  if len(matrix.shape) > 2:
    return jax.vmap(dense_matrix)(matrix)
  values, starts = map(jnp.asarray, (matrix.values, matrix.starts))
  columns = jnp.searchsorted(
      starts, jnp.arange(values.shape[0]), side='right'
  ) - 1
  # Padding has the index `outputs`, which the scatter drops.
  return jnp.zeros(matrix.shape, values.dtype).at[
      jnp.asarray(matrix.indices), columns
  ].set(values, mode='drop')


def dense_parameter(matrix: ListedMatrix) -> jax.Array:
  """Returns the dense matrix, or a stack of them, in the parameter's shape.

  Example:
    >>> w = np.eye(2, 6, dtype=np.float32).reshape(2, 3, 2)
    >>> listed = list_params({'query': w}, {'query': w != 0},
    ...                      where={'query': selection.MatrixAxes(0, (1, 2))})
    >>> bool((dense_parameter(listed['query']) == w).all())
    True
  """
  w = dense_matrix(matrix)
  if matrix.axes.outputs_first:
    w = w.swapaxes(-1, -2)
  return w.reshape(matrix.parameter_shape)


def _reference(x, values, indices, starts):
  """Multiplies by the dense matrix."""
  w = dense_matrix(ListedMatrix(
      values.astype(jnp.float32), indices, starts, x.shape[-1]
  ))
  y = jnp.matmul(x.astype(jnp.float32), w, precision='highest')
  return y.astype(x.dtype)


listed_matmul_p = lowerings.define_primitive('listed_matmul', _reference)
"""Primitive of y = x @ W; operands x, values, indices, starts."""


def _batch(args, axes, **params):
  if all(axis is None for axis in axes[1:]):
    x = jnp.moveaxis(args[0], axes[0], 0)
    return listed_matmul_p.bind(x, *args[1:], **params), 0
  f = functools.partial(listed_matmul_p.bind, **params)
  stacked = [
      None if axis is None else jnp.moveaxis(arg, axis, 0)
      for arg, axis in zip(args, axes)
  ]
  one = lambda mapped: f(*(
      arg if axis is None else each
      for arg, axis, each in zip(args, axes, mapped)
  ))
  return jax.lax.map(one, stacked), 0


batching.primitive_batchers[listed_matmul_p] = _batch


def _check_dtype(name: str, dtype: Any) -> None:
  """Raises TypeError unless there are products with lists in a dtype."""
  if dtype.name not in DTYPES:
    raise TypeError(
        f'{name} is {dtype}; use {" or ".join(DTYPES)}, the dtypes of listed '
        'matrices and their products.'
    )
