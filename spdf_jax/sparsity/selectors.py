# SPDX-License-Identifier: Apache-2.0
"""Ready selectors of the weight matrices to sparsify, as `where`."""

import collections
from collections.abc import Mapping, Sequence
import re
from typing import Any

import jax

from spdf_jax.sparsity import selection
from spdf_jax.sparsity.selection import Axes
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.selection import Selector

_WORD = re.compile(r'[A-Z]?[a-z]+|[A-Z]+(?![a-z])')
_EXCLUDED = frozenset(
    'adapter adapters bias classifier ln logits lora router vocab wpe wte'
    .split()
)
_EXCLUDED_AT_THE_END = frozenset(
    'head pos position positional positions router scale unembed'.split()
)
_POSITIONS = frozenset('pos position positional positions'.split())
_TABLES = frozenset('encoding encodings table'.split())
_ATTENTION = frozenset('q k v o qkv wq wk wv query key value'.split())
_OUTPUTS = frozenset('o out output post wo'.split())
# Names of leaves in a layer's module.
_ARRAYS = frozenset('kernel w weight'.split())
_COLORS = 4
# Sizes of kernels of convolutions, whatever their names.
_KERNEL_SIZES = {1, 3, 5, 7, 9, 11}


def matrices(path: str, leaf: Any) -> bool | None:
  """Selects every leaf with two axes except biases of heads, whatever its name.

  Use it in a mapping whose first patterns exclude leaves: `where={'embed/*':
  False, 'head/*': False, '*': matrices}`.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    `True` for a leaf `[inputs, outputs]`, both longer than one, of a floating
    or complex dtype; `None` for other leaves.

  Example:
    >>> matrices('head/kernel', jax.ShapeDtypeStruct((4, 8), 'float32'))
    True
  """
  if path.split('/')[-1] == 'bias' or len(leaf.shape) != 2:
    return None
  return True if selection.is_matrix(leaf) else None


def hidden_matrices(path: str, leaf: Any) -> bool | None:
  """Selects the weight matrices of hidden layers: the default `where`.

  Of the leaves that `matrices` selects, those whose path names an embedding
  (also of patches), a position table, an output head, a classifier, a router,
  an adapter, a norm or a bias are excluded.

  Some layouts and names are ambiguous: stacked (scanned) layers, per-head
  kernels and convolutions have more than two axes; a `gate` is a matrix of a
  gated MLP or the router of a mixture of experts; `out` at the top level is a
  hidden layer or a head. They are not selected either, but `sparsify` logs a
  warning that names them. `stacked`, `per_head` and `convolutions` select them.

  A last layer that is not named as a head, such as that of `eqx.nn.MLP` or
  `Dense_0` after the convolutions of a Linen model, is a hidden matrix by its
  name. The log of the selection names one that looks so by its shape; `where=
  {'Dense_0/*': False, '*': hidden_matrices}` keeps it dense.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    `True`: the leaf is sparsified; `False`: it is excluded by its name; `None`:
    it is not sparsified, because its layout or name is not recognized.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((4, 8), 'float32')
    >>> hidden_matrices('h_0/mlp/wi/kernel', leaf)
    True
    >>> hidden_matrices('wte/embedding', leaf)
    False
  """
  parts = path.split('/')
  if any(map(_is_excluded, parts)):
    return False
  modules = [part for part in parts[:-1] if part != 'params']
  at_top = _words(modules[0]) if len(modules) == 1 else []
  if at_top[:1] in (['out'], ['output']):
    return None
  if any(_words(part)[-1:] in (['gate'], ['gating']) for part in parts):
    return None
  return matrices(path, leaf)


def per_head(path: str, leaf: Any) -> Axes:
  """Selects hidden matrices, and attention kernels with axes for heads.

  The kernels of queries, keys and values are `[inputs, heads, size]` (with more
  output axes, if they are fused), and those of output projections `[heads,
  size, outputs]`, as in `flax.linen.MultiHeadDotProductAttention`. All heads
  are one matrix. Among the parameters of a model, an output projection is the
  kernel of a module whose input axes are the output axes of its siblings. Where
  the shapes do not tell, and for a leaf alone, names do: `attn`, `attention`,
  `mha`, or `query` and its like are attention, and `out`, `o`, `wo`, `output`
  and `post` in it output projections.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    The axes of an attention kernel; for other leaves as `hidden_matrices`.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((8, 2, 4), 'float32')
    >>> per_head('attention/query/kernel', leaf)
    MatrixAxes(reduction=(0,), output=(1, 2), kernel=())
  """
  parts = path.split('/')
  modules = parts[:-1] or parts
  if not _may_have_heads(path, leaf) or not any(map(_attends, modules)):
    return hidden_matrices(path, leaf)
  is_output = any(_OUTPUTS & set(_words(part)) for part in modules[-2:])
  return _axes_of_heads(leaf, is_output)


def _among_siblings(named: Sequence[tuple[str, Any]]) -> Selector:
  """Returns `per_head` for leaves whose siblings are known."""
  modules: dict[tuple[str, ...], dict[str, Any]] = (
      collections.defaultdict(dict)
  )
  for path, leaf in named:
    if _may_have_heads(path, leaf):
      parts = path.split('/')
      depth = 2 if parts[-1] in _ARRAYS and len(parts) > 1 else 1
      modules[tuple(parts[:-depth])][path] = leaf
  is_output: dict[str, bool] = {}
  for kernels in modules.values():
    is_output |= _projections(kernels)

  def selector(path, leaf):
    if path in is_output:
      return _axes_of_heads(leaf, is_output[path])
    return per_head(path, leaf)

  selector.__name__ = per_head.__name__
  return selector


per_head.among = _among_siblings  # type: ignore[attr-defined]


def _projections(kernels: Mapping[str, Any]) -> dict[str, bool]:
  """Returns which kernels of a module project heads, where shapes tell.

  Args:
    kernels: Kernels of at least three axes, by path.

  Returns:
    `True` for the output projection of an attention, `False` for the
    projections to its heads; empty if there is not exactly one of the former.
  """
  follows = lambda last, first: last.shape[-1] == first.shape[0] and (
      last.shape[:-1] == first.shape[1 - len(last.shape):]
  )
  pairs = [
      (path, other) for path, leaf in kernels.items()
      for other, first in kernels.items() if path != other
      and follows(leaf, first) and not follows(first, leaf)
  ]
  outputs = {path for path, _ in pairs}
  if len(outputs) != 1:
    return {}
  (output,) = outputs
  heads = kernels[output].shape[:-1]
  return {output: True} | {
      path: False for path, leaf in kernels.items() if path != output and (
          leaf.shape[0] == kernels[output].shape[-1]
          or leaf.shape[-len(heads):] == heads
      )
  }


def _may_have_heads(path: str, leaf: Any) -> bool:
  return len(leaf.shape) > 2 and selection.is_matrix(leaf) and not any(
      map(_is_excluded, path.split('/'))
  )


def _axes_of_heads(leaf: Any, is_output: bool) -> MatrixAxes:
  axes = tuple(range(len(leaf.shape)))
  if is_output:
    return MatrixAxes(axes[:-1], axes[-1:])
  return MatrixAxes(axes[:1], axes[1:])


def convolutions(path: str, leaf: Any) -> Axes:
  """Selects hidden matrices, and kernels of convolutions.

  Kernels are `[..., inputs, outputs]` after one to three spatial axes, as in
  `flax.linen.Conv`, and in modules whose names have a word that begins with
  `conv`; under other names, such as `down`, those with two or three equal
  spatial axes of 1, 3, 5, 7, 9 or 11. Kernels of the stem, named `stem` or
  `init` or with at most four inputs (colors), are excluded.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    The axes of a kernel; for other leaves as `hidden_matrices`.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((3, 3, 16, 32), 'float32')
    >>> convolutions('Block_0/Conv_0/kernel', leaf)
    MatrixAxes(reduction=(0, 1, 2), output=(3,), kernel=(0, 1))
  """
  parts = path.split('/')
  if any(map(_is_excluded, parts)):
    return False
  rank = len(leaf.shape)
  words = {word for part in parts for word in _words(part)}
  named = rank > 2 and any(word.startswith('conv') for word in words)
  spatial = set(leaf.shape[:-2])
  square = rank in (4, 5) and len(spatial) == 1 and spatial <= _KERNEL_SIZES
  if not named and not square:
    return hidden_matrices(path, leaf)
  if leaf.shape[-2] <= _COLORS or words & {'stem', 'init'}:
    return False
  if rank > 5:
    return None
  spatial_axes = tuple(range(rank - 2))
  return MatrixAxes((*spatial_axes, rank - 2), (rank - 1,), spatial_axes)


def stacked(where: Selector = hidden_matrices, axis: int = 0) -> Selector:
  """Applies a selector to leaves that stack layers, as under `nn.scan`.

  Args:
    where: Selector for the leaves of one layer, e.g. `per_head`.
    axis: The axis of layers in a leaf.

  Returns:
    A selector, which calls `where` with leaves without that axis. Every layer
    is sparsified independently.

  Raises:
    TypeError: `where` is not a function.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((12, 4, 8), 'float32')
    >>> stacked()('h/mlp/wi/kernel', leaf)
    MatrixAxes(reduction=(1,), output=(2,), kernel=())
  """
  if not callable(where):
    raise TypeError(
        f'stacked got {where!r:.80}; give it a selector, e.g. '
        'where.stacked(where.per_head), or no argument, where.stacked().'
    )

  def selector(path, leaf):
    rank = len(leaf.shape)
    if rank < 2 or not -rank <= axis < rank:
      return None
    shape = _without(leaf.shape, axis)
    inside = where(path, jax.ShapeDtypeStruct(shape, leaf.dtype))
    if inside is None or inside is False:
      return inside
    outer = [i for i in range(rank) if i != axis % rank]
    if inside is True:
      return MatrixAxes(tuple(outer[-2:-1]), tuple(outer[-1:]))
    return MatrixAxes(*(
        tuple(outer[i] for i in (at if isinstance(at, tuple) else (at,)))
        for at in inside
    ))

  selector.__name__ = f'stacked({where.__name__}, axis={axis})'
  if hasattr(where, 'among'):
    unstacked = lambda leaf: jax.ShapeDtypeStruct(
        _without(leaf.shape, axis), leaf.dtype
    )
    selector.among = lambda named: stacked(  # type: ignore[attr-defined]
        where.among([
            (path, unstacked(leaf)) for path, leaf in named
            if -len(leaf.shape) <= axis < len(leaf.shape)
        ]),
        axis,
    )
  return selector


def any_of(*selectors: Selector) -> Selector:
  """Applies the first of several selectors that recognizes a leaf.

  Args:
    *selectors: Selectors, e.g. `per_head, convolutions`.

  Returns:
    A selector, which returns the first result that is not `None`.

  Raises:
    ValueError: there is no selector.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((3, 3, 16, 32), 'float32')
    >>> any_of(per_head, convolutions)('Block_0/Conv_0/kernel', leaf)
    MatrixAxes(reduction=(0, 1, 2), output=(3,), kernel=(0, 1))
  """
  if not selectors:
    raise ValueError('any_of has no selectors; give some, e.g. per_head.')

  def selector(path, leaf):
    selected = (select(path, leaf) for select in selectors)
    return next((axes for axes in selected if axes is not None), None)

  selector.__name__ = f'any_of({", ".join(s.__name__ for s in selectors)})'
  if any(hasattr(select, 'among') for select in selectors):
    selector.among = lambda named: any_of(*(  # type: ignore[attr-defined]
        select.among(named) if hasattr(select, 'among') else select
        for select in selectors
    ))
  return selector


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
  """Returns a shape without an axis."""
  axis %= len(shape)
  return shape[:axis] + shape[axis + 1:]


def _words(part: str) -> list[str]:
  return [word.lower() for word in _WORD.findall(part)]


def _is_excluded(part: str) -> bool:
  words = _words(part)
  return bool(words) and (
      words[-1] in _EXCLUDED_AT_THE_END
      or bool(_POSITIONS & set(words)) and words[-1] in _TABLES
      or any(
          word in _EXCLUDED
          or word.startswith(('emb', 'unemb'))
          or 'norm' in word
          for word in words
      )
  )


def _attends(module: str) -> bool:
  words = _words(module)
  return any(word in ('attn', 'attention', 'mha') for word in words) or bool(
      words and words[0] in _ATTENTION
  )
