# SPDX-License-Identifier: Apache-2.0
"""Ready selectors of the weight matrices to sparsify, as `where`."""

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
_COLORS = 4


def matrices(path: str, leaf: Any) -> bool | None:
  """Selects every leaf with two axes, whatever its name.

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
  del path
  return True if len(leaf.shape) == 2 and selection.is_matrix(leaf) else None


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
  output axes, if they are fused), and those of output projections, which are
  named `out`, `o`, `wo`, `output` or `post`, `[heads, size, outputs]`, as in
  `flax.linen.MultiHeadDotProductAttention`. All heads are one matrix.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    The axes of an attention kernel; for other leaves as `hidden_matrices`.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((8, 2, 4), 'float32')
    >>> per_head('attention/query/kernel', leaf)
    MatrixAxes(reduction=(0,), output=(1, 2))
  """
  parts = path.split('/')
  if any(map(_is_excluded, parts)):
    return False
  axes = tuple(range(len(leaf.shape)))
  modules = parts[:-1] or parts
  attends = any(map(_attends, modules))
  if len(axes) < 3 or not selection.is_matrix(leaf) or not attends:
    return hidden_matrices(path, leaf)
  if any(_OUTPUTS & set(_words(part)) for part in modules[-2:]):
    return MatrixAxes(axes[:-1], axes[-1:])
  return MatrixAxes(axes[:1], axes[1:])


def convolutions(path: str, leaf: Any) -> Axes:
  """Selects hidden matrices, and kernels of convolutions.

  Kernels are `[..., inputs, outputs]` after one to three spatial axes, as in
  `flax.linen.Conv`. Those of the stem, named `stem` or `init` or with at most
  four inputs (colors), are excluded.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    The axes of a kernel; for other leaves as `hidden_matrices`.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((3, 3, 16, 32), 'float32')
    >>> convolutions('Block_0/Conv_0/kernel', leaf)
    MatrixAxes(reduction=(0, 1, 2), output=(3,))
  """
  parts = path.split('/')
  if any(map(_is_excluded, parts)):
    return False
  rank = len(leaf.shape)
  words = {word for part in parts for word in _words(part)}
  if rank < 3 or not any(word.startswith('conv') for word in words):
    return hidden_matrices(path, leaf)
  if leaf.shape[-2] <= _COLORS or words & {'stem', 'init'}:
    return False
  if rank > 5:
    return None
  return MatrixAxes(tuple(range(rank - 1)), (rank - 1,))


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
    MatrixAxes(reduction=(1,), output=(2,))
  """
  if not callable(where):
    raise TypeError(
        f'stacked got {where!r:.80}; give it a selector, or none: '
        'where=stacked().'
    )

  def selector(path, leaf):
    rank = len(leaf.shape)
    if rank < 2 or not -rank <= axis < rank:
      return None
    shape = list(leaf.shape)
    del shape[axis]
    inside = where(path, jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
    if inside is None or inside is False:
      return inside
    outer = [i for i in range(rank) if i != axis % rank]
    if inside is True:
      return MatrixAxes(tuple(outer[-2:-1]), tuple(outer[-1:]))
    return MatrixAxes(*(
        tuple(outer[i] for i in ((at,) if isinstance(at, int) else at))
        for at in inside
    ))

  selector.__name__ = f'stacked({where.__name__}, axis={axis})'
  return selector


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
