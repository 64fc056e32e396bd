# SPDX-License-Identifier: Apache-2.0
"""Mask pytrees: made from scores with exact counts, and applied to trees.

A mask has the structure of the parameters, `True` where a weight is kept,
`None` where a leaf is not sparsified. Functions that rank weights take the last
two axes of a leaf as one layer; all earlier axes index independent layers, so
stacked (scanned) layers are ranked separately.
"""

from collections.abc import Callable
import functools
import math
import operator
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import counts
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import topk
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.structures import Structure

PyTree = Any
MaskMaker = Callable[..., PyTree]
"""`(key, params, sparsities) -> mask`: makes an initial mask. With `structure=`
where the mask has a structure."""


def random(
    key: jax.Array,
    params: PyTree,
    sparsity: PyTree,
    *,
    structure: Structure = structures.UNSTRUCTURED,
) -> PyTree:
  """Draws masks uniformly at random from those with the exact sparsity.

  The key of a leaf is `key` with the crc32 of the leaf's path folded in, so
  adding a leaf to the tree changes no other mask.

  Args:
    key: A typed PRNG key.
    params: Parameters, or their shapes; `None` leaves stay `None`.
    sparsity: The fraction of zeros in [0, 1): a number, a tree of numbers, or
      a `ModelWide`.
    structure: Structure of the mask, e.g. `n_of_m(2, 4)`.

  Returns:
    The mask.

  Raises:
    ValueError: a sparsity is outside [0, 1), or the structure does not fit it
      or a leaf.

  Example:
    >>> params = {'w': jnp.ones((4, 8))}
    >>> int(random(jax.random.key(0), params, 0.75)['w'].sum())
    8
  """
  draw = functools.partial(
      _random, params=params, sparsity=sparsity, structure=structure
  )
  return trees.auto_axes(draw, params)(key)


def _random(
    key: jax.Array,
    params: PyTree,
    sparsity: PyTree,
    structure: Structure,
) -> PyTree:
  if isinstance(sparsity, ModelWide):
    bits = jax.tree.map(
        lambda p, leaf_key: jax.random.bits(
            leaf_key, _unit_scores_shape(structure, p.shape), jnp.uint32
        ),
        params, leaf_keys(key, params),
    )
    return _keep_of_all(bits, params, sparsity, None, structure)

  def draw(like, leaf_key, kept):
    shape = like.shape[1:]
    mask = topk.keep_random(
        leaf_key, _unit_scores_shape(structure, shape), kept
    )
    return structure.expand(mask, _as_layers(shape)).reshape(shape)

  # Empty arrays carry the shapes, because only shapes are needed.
  likes = jax.tree.map(lambda p: np.zeros((0, *p.shape), bool), params)
  return _map_pruned(draw, likes, params, sparsity, key, structure)


def magnitude(
    key: jax.Array | None,
    params: PyTree,
    sparsity: PyTree,
    *,
    structure: Structure = structures.UNSTRUCTURED,
) -> PyTree:
  """Keeps the weights of largest magnitude in every layer.

  Ties are broken at random by `key`, so pruned weights, all zero, are revived
  uniformly at random. `key=None` prefers the lower index.

  Args:
    key: A typed PRNG key, or `None`.
    params: Parameters; `None` leaves stay `None`.
    sparsity: The fraction of zeros in [0, 1): a number, a tree of numbers, or
      a `ModelWide`.
    structure: Structure of the mask; the score of a block is the sum of its
      magnitudes.

  Returns:
    The mask.

  Raises:
    ValueError: a sparsity is outside [0, 1), or the structure does not fit it
      or a leaf.

  Example:
    >>> params = {'w': jnp.array([[3., -4.], [1., 2.]])}
    >>> magnitude(None, params, 0.5)['w'].tolist()
    [[True, True], [False, False]]
  """
  return _mask_from(jnp.abs, params, sparsity, key, structure)


def mask_from_scores(
    scores: PyTree,
    sparsity: PyTree,
    *,
    tie_break: jax.Array | None = None,
    structure: Structure = structures.UNSTRUCTURED,
) -> PyTree:
  """Keeps the highest scores of every layer, by an exact integer count.

  Of a layer's n scores, `max(1, n - round(sparsity * n))` are kept, for any
  number of ties; with a structure, n is the number of units in a group. NaN
  ranks below every number. The algorithm is that of `topk.keep_largest`.

  Args:
    scores: A tree of scores, complex ones ranked by magnitude; the last two
      axes of a leaf are a layer.
    sparsity: The fraction of zeros in [0, 1): a number, a tree of numbers, or
      a `ModelWide`, which makes all layers one group.
    tie_break: `None` prefers the lower index among equal scores; a typed PRNG
      key breaks ties at random (a function of the key and the leaf's path).
    structure: Structure of the mask; the score of a block is the sum of its
      scores.

  Returns:
    The mask, of the scores' shapes.

  Raises:
    ValueError: a sparsity is outside [0, 1), or the structure does not fit it
      or a leaf.

  Example:
    >>> mask_from_scores(jnp.array([[1., 5., 5., 5.]]), 0.5).tolist()
    [[False, True, True, False]]
  """
  return _mask_from(lambda x: x, scores, sparsity, tie_break, structure)


def _mask_from(
    score: Callable[[jax.Array], jax.Array],
    tree: PyTree,
    sparsity: PyTree,
    key: jax.Array | None,
    structure: Structure,
) -> PyTree:
  ranked = functools.partial(
      _ranked, score, sparsity=sparsity, structure=structure
  )
  return trees.auto_axes(ranked, tree)(tree, key)


def _ranked(
    score: Callable[[jax.Array], jax.Array],
    tree: PyTree,
    key: jax.Array | None,
    sparsity: PyTree,
    structure: Structure,
) -> PyTree:
  def unit_scores(x):
    return structure.reduce(score(x).reshape(_as_layers(x.shape)))

  if isinstance(sparsity, ModelWide):
    scores = trees.map_leaves(unit_scores, tree)
    return _keep_of_all(scores, tree, sparsity, key, structure)

  def cut(x, leaf_key, kept):
    mask = topk.keep_largest(unit_scores(x), kept, tie_break=leaf_key)
    return structure.expand(mask, _as_layers(x.shape)).reshape(x.shape)

  return _map_pruned(cut, tree, tree, sparsity, key, structure)


def _map_pruned(
    cut: Callable[..., jax.Array],
    operands: PyTree,
    params: PyTree,
    sparsity: PyTree,
    key: jax.Array | None,
    structure: Structure,
) -> PyTree:
  """Maps `cut(operand, key, kept)` over leaves with pruned weights."""

  def kept_of(p, fraction):
    is_traced = isinstance(fraction, jax.core.Tracer)
    if not is_traced:
      structure.check(fraction)
    size = math.prod(structure.unit_shape(_as_layers(p.shape))[1:])
    if is_traced:
      return counts.traced_number_kept(size, fraction)
    kept = counts.number_kept(size, fraction)
    return None if kept == size else np.int32(kept)

  kept = jax.tree.map(
      kept_of, params, distributions.uniform(params, sparsity)
  )
  pruned = jax.tree.map(
      lambda p, k, x: None if k is None else x, params, kept, operands
  )
  masks = trees.map_leaves(cut, pruned, leaf_keys(key, params), kept)
  return jax.tree.map(
      lambda p, m: jnp.ones(p.shape, bool) if m is None else m, params, masks
  )


def _keep_of_all(
    scores: PyTree,
    params: PyTree,
    sparsity: ModelWide,
    key: jax.Array | None,
    structure: Structure,
) -> PyTree:
  """Ranks the units of all leaves as one group."""
  layers = jax.tree.map(
      lambda p: jax.ShapeDtypeStruct(_as_layers(p.shape), p.dtype), params
  )
  masks = topk.keep_of_model(
      scores,
      layers,
      counts.model_kept(layers, sparsity, structure),
      structure,
      tie_break=None if key is None else leaf_keys(key, params),
  )
  return jax.tree.map(lambda p, m: m.reshape(p.shape), params, masks)


def _unit_scores_shape(
    structure: Structure, shape: tuple[int, ...]
) -> tuple[int, ...]:
  layers = jax.ShapeDtypeStruct(_as_layers(shape), jnp.float32)
  return jax.eval_shape(structure.reduce, layers).shape


def _as_layers(shape: tuple[int, ...]) -> tuple[int, int, int]:
  """Returns `(layers, inputs, outputs)` of a leaf of any rank."""
  shape = (1,) * (2 - len(shape)) + tuple(shape)
  inputs, outputs = shape[-2:]
  return math.prod(shape[:-2]), inputs, outputs


def typed_key(key: int | jax.Array) -> jax.Array:
  """Returns the typed key of a seed; a typed key is returned as it is.

  Raises:
    TypeError: `key` is something else, such as a bool or a float.

  Example:
    >>> typed_key(0).dtype == typed_key(jax.random.key(0)).dtype
    True
  """
  if isinstance(key, jax.Array) and jnp.issubdtype(
      key.dtype, jax.dtypes.prng_key
  ):
    return key
  try:
    if isinstance(key, bool):
      raise TypeError
    return jax.random.key(operator.index(key))
  except TypeError:
    raise TypeError(
        f'key is {key!r:.80}; give an int or a typed key, jax.random.key(0).'
    ) from None


def leaf_keys(key: jax.Array | None, tree: PyTree) -> PyTree:
  """Folds the crc32 of every leaf's path into a key."""
  if key is None:
    return jax.tree.map(lambda _: None, tree)

  def fold(path, _):
    name = trees.path_name(path)
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))

  return jax.tree_util.tree_map_with_path(fold, tree)


def apply_mask(tree: PyTree, mask: PyTree) -> PyTree:
  """Zeroes the pruned entries of a tree.

  Selects entries instead of multiplying by the mask, so a NaN at a pruned
  weight becomes zero.

  Args:
    tree: Parameters, gradients, or another tree with the paths of the
      parameters.
    mask: The mask, as `get_mask` returns it. Leaves whose mask is `None` are
      returned unchanged.

  Returns:
    The masked tree, dtypes unchanged.

  Raises:
    TypeError: a leaf of the mask is not bool.
    ValueError: the mask has a leaf that the tree does not have.

  Example:
    >>> import jax.numpy as jnp
    >>> w = {'w': jnp.array([[1., 2.]])}
    >>> apply_mask(w, {'w': jnp.array([[True, False]])})['w'].tolist()
    [[1.0, 0.0]]
  """
  check_bool(mask)
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(
      x if m is None else jnp.where(m, x, jnp.zeros_like(x))
      for m, x in zip(trees.matching_leaves(mask, tree), leaves)
  )


def map_masked(f: Callable[..., Any], mask: PyTree, *rest: PyTree) -> PyTree:
  """Maps a function over the sparsified leaves of parameters.

  A mask holds `None` for leaves that stay dense, so `jax.tree.map(f, mask,
  params)` fails. Leaves are matched by their paths, so the mask may come from
  an `nnx.Optimizer`.

  Args:
    f: `(mask, *leaves) -> result`, called for every sparsified leaf.
    mask: The mask, as `get_mask` returns it.
    *rest: One or more trees of the structure of the parameters, such as the
      parameters or gradients, whose leaves `f` receives after the mask.

  Returns:
    The results in the structure of the first of these trees; `None` where
    leaves stay dense.

  Raises:
    TypeError: a leaf of the mask is not bool.
    ValueError: the mask has a leaf that a tree does not have, or there is no
      tree beside the mask.

  Example:
    Counts the kept weights that are below a threshold:

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.array([[1., 3.], [2., 4.]]), 'b': jnp.ones(2)}
    >>> mask = {'w': jnp.array([[True, True], [False, False]]), 'b': None}
    >>> small = lambda m, w: int((m & (w < 2)).sum())
    >>> map_masked(small, mask, params)
    {'b': None, 'w': 1}
  """
  check_bool(mask)
  if not rest:
    raise ValueError(
        'map_masked got a mask and no other tree; give the parameters, '
        'map_masked(f, mask, params).'
    )
  columns = [trees.matching_leaves(tree, rest[0]) for tree in rest]
  treedef: Any = jax.tree.structure(rest[0])
  return treedef.unflatten(
      None if m is None else f(m, *leaves)
      for m, *leaves in zip(trees.matching_leaves(mask, rest[0]), *columns)
  )


def check_bool(mask: PyTree) -> None:
  """Raises TypeError unless all leaves of a mask are bool."""
  for name, leaf in trees.by_name(mask).items():
    kind = getattr(leaf, 'dtype', type(leaf).__name__)
    if str(kind) != 'bool':
      at = f'leaf {name!r}' if name else 'array'
      raise TypeError(
          f'the mask has the {at} of {kind}, not bool; give a mask as '
          'get_mask(opt_state) returns it; apply_mask takes the parameters '
          'first, apply_mask(params, mask).'
      )
