# SPDX-License-Identifier: Apache-2.0
"""Initial masks that are given, or made from a checkpoint's zeros or scores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.axes import to_layers
from spdf_jax.sparsity.combinators import MaskMaker
from spdf_jax.sparsity.mask_counts import check_counts
from spdf_jax.sparsity.paths import by_name
from spdf_jax.sparsity.paths import path_name
from spdf_jax.sparsity.selectors import hidden_matrices
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED

PyTree = Any


def given_mask(
    mask: PyTree, *, where: selection.Where = hidden_matrices
) -> Callable[..., PyTree]:
  """Uses a mask as the initial mask: `static(s, init=given_mask(mask))`.

  The mask must have the initial sparsity of the algorithm;
  `sparsity=sparsities_of(mask)` sets that to the sparsity of the mask.

  Args:
    mask: bool arrays in the structure and the shapes of the parameters, `None`
      where they are not sparsified, e.g. from `saliency_mask` or `get_mask`.
    where: The `where` given to `sparsify`.

  Returns:
    `(key, params, sparsities, structure=UNSTRUCTURED) -> mask`, for `init=` of
    any algorithm. It raises ValueError where the mask's leaves, shapes or
    counts do not match the parameters, the sparsities and the structure.

  Raises:
    ValueError: an entry is not a bool array.

  Example:
    >>> import optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> mask = {'w': jnp.eye(2, dtype=bool), 'b': None}
    >>> algorithm = spdf.static(0.5, init=given_mask(mask))
    >>> tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
    >>> spdf.get_mask(tx.init(params))['w'].tolist()
    [[True, False], [False, True]]
  """
  given = by_name(mask)
  for name, leaf in given.items():
    if not (hasattr(leaf, 'dtype') and leaf.dtype == bool):
      raise ValueError(
          f'mask of {name!r} is {leaf!r:.60}; give a bool array, True where a '
          'weight is kept, or None for a leaf that is not sparsified.'
      )

  def init(key, params, sparsities, structure=UNSTRUCTURED):
    del key
    layers = by_name(params)
    # `optax.tree.map_params` passes an empty tree as a placeholder.
    if not layers:
      return params
    if set(layers) - set(given):
      name = min(set(layers) - set(given))
      raise ValueError(
          f'mask has no leaf {name!r}, which is sparsified, with layers of '
          f'shape {list(layers[name].shape)}; it has '
          f'{", ".join(given) or "none"}. Give it the structure of the '
          'parameters.'
      )
    if set(given) - set(layers):
      name = min(set(given) - set(layers))
      raise ValueError(
          f'mask has a leaf {name!r} of shape {list(given[name].shape)} where '
          'the parameters are not sparsified; put None there, or have `where` '
          'select it.'
      )

    def convert(path, p):
      name = path_name(path)
      return _layers_of(name, given[name], p, where)

    found = jax.tree_util.tree_map_with_path(convert, params)
    check_counts(found, sparsities, structure, 'mask')
    return found

  return init


def _layers_of(
    name: str, mask: jax.Array, params: jax.Array, where: selection.Where
) -> jax.Array:
  """Reshapes one leaf of a mask to the layers of its parameters."""
  # `where` may depend on the dtype, so the mask's shape gets the parameters'.
  shape = jax.ShapeDtypeStruct(mask.shape, params.dtype)
  selected = selection.selector_of(where)(name, shape)
  if selected is None or selected is False:
    raise ValueError(
        f'mask of {name!r} has shape {list(mask.shape)}, which '
        f'`where` does not select, but the parameters have layers of shape '
        f'{list(params.shape)}; pass given_mask the `where` of sparsify.'
    )
  axes = selection.select(lambda path, leaf: selected, {name: shape})
  # Evaluated eagerly, so that counts can be checked under jit; copied, so that
  # donating the state does not donate the caller's mask.
  with jax.ensure_compile_time_eval():
    layers = to_layers({name: mask}, {name: shape}, axes)[name]
    layers = jnp.copy(layers)
  if layers.shape != params.shape:
    raise ValueError(
        f'mask of {name!r} has shape {list(mask.shape)}, layers of shape '
        f'{list(layers.shape)}, but the parameters have layers of shape '
        f'{list(params.shape)}; give the mask the shape of the parameters, '
        'and given_mask the `where` of sparsify.'
    )
  return layers


def nonzero_mask(
    key: jax.Array | None,
    params: PyTree,
    sparsity: PyTree,
    *,
    structure: Structure = UNSTRUCTURED,
) -> PyTree:
  """Keeps the weights that are not zero, as in the checkpoint of a sparse run.

  Kept weights that happen to be zero make the count differ from the sparsity.
  `magnitude_mask` keeps the exact count for any checkpoint.

  Args:
    key: Not used.
    params: Parameters; `None` leaves stay `None`.
    sparsity: The required fraction of zeros: a number, a tree of numbers, or a
      `ModelWide`; not checked under `jax.jit`, where values are unknown.
    structure: Required structure of the mask.

  Returns:
    The mask.

  Raises:
    ValueError: the number of zeros of a leaf differs from its sparsity, or they
      do not follow the structure.

  Example:
    >>> params = {'w': jnp.array([[3., 0.], [0., 2.]])}
    >>> nonzero_mask(None, params, 0.5)['w'].tolist()
    [[True, False], [False, True]]
  """
  del key
  mask = jax.tree.map(lambda p: p != 0, params)
  check_counts(mask, sparsity, structure, 'mask of non-zero parameters')
  return mask


def scored_mask(
    scores: Callable[[jax.Array, tuple[int, ...]], jax.Array]
) -> MaskMaker:
  """Keeps the weights with the highest scores of a function.

  Args:
    scores: `(key, shape) -> scores`, called for every sparsified leaf with a
      key of its own and the shape `[layers, inputs, outputs]`; ties prefer the
      lower index.

  Returns:
    `(key, params, sparsities) -> mask`, for `init=` of any algorithm. It raises
    ValueError where scores have a shape other than the given one.

  Example:
    >>> diagonal = lambda key, shape: jnp.eye(*shape[1:])[None]
    >>> params = {'w': jnp.ones((1, 2, 2))}
    >>> scored_mask(diagonal)(jax.random.key(0), params, 0.5)['w'].tolist()
    [[[True, False], [False, True]]]
  """
  def init(key, params, sparsities, structure=UNSTRUCTURED):
    def score(path, p, leaf_key):
      found = scores(leaf_key, tuple(p.shape))
      if jnp.shape(found) != p.shape:
        raise ValueError(
            f'scores of {path_name(path)!r} have shape '
            f'{list(jnp.shape(found))}; return them in the given shape, '
            f'{list(p.shape)}.'
        )
      return found

    found = jax.tree_util.tree_map_with_path(
        score, params, masks.leaf_keys(key, params)
    )
    return masks.mask_from_scores(found, sparsities, structure=structure)

  return init
