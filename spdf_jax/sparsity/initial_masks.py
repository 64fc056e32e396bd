"""Initial masks from elsewhere: given ones, a checkpoint's zeros, scores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.combinators import MaskMaker
from spdf_jax.sparsity.mask_counts import check_counts
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED

PyTree = Any


def given_mask(
    mask: PyTree, *, where: selection.Where = selection.hidden_matrices
) -> MaskMaker:
  """Makes an algorithm start with this mask: `static(s, init=given_mask(m))`.

  The mask must have the sparsity that the algorithm asks for at first; where
  it has its own, `sparsity=levels_of(mask)` asks for just that.

  Args:
    mask: bool arrays in the structure and the shapes of the parameters, `None`
      where they are not sparsified, e.g. from `saliency_mask` or `get_mask`.
    where: The selection given to `sparsify`.

  Returns:
    `(key, params, levels) -> mask`, for `init=` of any algorithm. It raises
    ValueError where the mask's leaves, shapes or counts are not what the
    parameters, the levels and the structure ask for.

  Raises:
    ValueError: an entry is no bool array.

  Example:
    >>> import optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> mask = {'w': jnp.eye(2, dtype=bool), 'b': None}
    >>> algorithm = spdf.static(0.5, init=given_mask(mask))
    >>> tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
    >>> spdf.get_mask(tx.init(params))['w'].tolist()
    [[True, False], [False, True]]
  """
  given = selection.by_name(mask)
  for name, leaf in given.items():
    if not (hasattr(leaf, 'dtype') and leaf.dtype == bool):
      raise ValueError(
          f'mask of {name!r} is {leaf!r:.60}; give a bool array, True where a '
          'weight is kept, or None for a leaf that is not sparsified.'
      )

  def init(key, params, levels, structure=UNSTRUCTURED):
    del key
    layers = selection.by_name(params)
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
      name = selection.path_name(path)
      return _layers_of(name, given[name], p, where)

    found = jax.tree_util.tree_map_with_path(convert, params)
    check_counts(found, levels, structure, 'mask')
    return found

  return init


def _layers_of(
    name: str, mask: jax.Array, params: jax.Array, where: selection.Where
) -> jax.Array:
  """Brings one leaf of a mask to the layers of its parameters."""
  # The shape of the parameters is the mask's; their dtype `where` may ask for.
  shape = jax.ShapeDtypeStruct(mask.shape, params.dtype)
  answer = where(name, shape)
  if answer is False:
    raise ValueError(
        f'mask of {name!r} has shape {list(mask.shape)}, which '
        f'`where` does not select, but the parameters have layers of shape '
        f'{list(params.shape)}; pass given_mask the `where` of sparsify.'
    )
  axes = selection.select(lambda path, leaf: answer, {name: shape})
  # Evaluated under jit too, where its counts are to be checked; copied, as the
  # state may be donated and the caller's mask must not be.
  with jax.ensure_compile_time_eval():
    layers = selection.to_layers({name: mask}, {name: shape}, axes)[name]
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

  A kept weight may be zero by chance. Where exactly the number asked for is to
  be kept whatever the checkpoint holds, use `magnitude_mask`.

  Args:
    key: Not used.
    params: Parameters; `None` leaves stay `None`.
    sparsity: The fraction of zeros that is asked for, one number or a tree of
      them; not checked under `jax.jit`, where values are not known.
    structure: What must be kept together, or apart.

  Returns:
    The mask.

  Raises:
    ValueError: a leaf has another number of zeros than is asked for, or not in
      the structure.

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
  """Keeps the weights to which a function gives the highest scores.

  Args:
    scores: `(key, shape) -> scores`, called for every sparsified leaf with a
      key of its own and the shape `[layers, inputs, outputs]`; the lower index
      wins among equal scores.

  Returns:
    `(key, params, levels) -> mask`, for `init=` of any algorithm. It raises
    ValueError where scores have another shape than was asked for.

  Example:
    >>> diagonal = lambda key, shape: jnp.eye(*shape[1:])[None]
    >>> params = {'w': jnp.ones((1, 2, 2))}
    >>> scored_mask(diagonal)(jax.random.key(0), params, 0.5)['w'].tolist()
    [[[True, False], [False, True]]]
  """
  def init(key, params, levels, structure=UNSTRUCTURED):
    def score(path, p, leaf_key):
      found = scores(leaf_key, tuple(p.shape))
      if jnp.shape(found) != p.shape:
        raise ValueError(
            f'scores of {selection.path_name(path)!r} have shape '
            f'{list(jnp.shape(found))}; return them in the shape asked for, '
            f'{list(p.shape)}.'
        )
      return found

    found = jax.tree_util.tree_map_with_path(
        score, params, masks.leaf_keys(key, params)
    )
    return masks.mask_from_scores(found, levels, structure=structure)

  return init
