"""Initial masks from elsewhere: given ones, a checkpoint's zeros, scores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.combinators import MaskMaker
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.distributions import uniform

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
    parameters and the levels ask for.

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
  given = _by_name(mask)
  for name, leaf in given.items():
    if not (hasattr(leaf, 'dtype') and leaf.dtype == bool):
      raise ValueError(
          f'mask of {name!r} is {leaf!r:.60}; give a bool array, True where a '
          'weight is kept, or None for a leaf that is not sparsified.'
      )

  def init(key, params, levels):
    del key
    layers = _by_name(params)
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
    _check_counts(found, levels, 'mask')
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
    key: jax.Array | None, params: PyTree, sparsity: PyTree
) -> PyTree:
  """Keeps the weights that are not zero, as in the checkpoint of a sparse run.

  A kept weight may be zero by chance. Where exactly the number asked for is to
  be kept whatever the checkpoint holds, use `magnitude_mask`.

  Args:
    key: Not used.
    params: Parameters; `None` leaves stay `None`.
    sparsity: The fraction of zeros that is asked for, one number or a tree of
      them; not checked under `jax.jit`, where values are not known.

  Returns:
    The mask.

  Raises:
    ValueError: a leaf has another number of zeros than is asked for.

  Example:
    >>> params = {'w': jnp.array([[3., 0.], [0., 2.]])}
    >>> nonzero_mask(None, params, 0.5)['w'].tolist()
    [[True, False], [False, True]]
  """
  del key
  mask = jax.tree.map(lambda p: p != 0, params)
  _check_counts(mask, sparsity, 'the mask of non-zero parameters')
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
  def init(key, params, levels):
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
    return masks.mask_from_scores(found, levels)

  return init


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
  return jax.tree.map(lambda m: 1 - _kept(m) / m.size, mask)


def _kept(mask: jax.Array) -> int:
  """Counts on the host; raises where a mask is traced."""
  with jax.ensure_compile_time_eval():
    rows = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    return int(np.sum(np.asarray(rows), dtype=np.int64))


def _check_counts(mask: PyTree, levels: PyTree, name: str) -> None:
  """Raises unless a mask keeps as many weights as the levels ask for."""
  try:
    kept = jax.tree.map(_kept, mask)
  except jax.errors.TracerArrayConversionError:
    return  # Under jit: only the counts of a constant are known.
  counts = _by_name(kept)
  sizes = {path: leaf.shape for path, leaf in _by_name(mask).items()}
  if isinstance(levels, ModelWide):
    asked = number_kept(sum(map(np.prod, sizes.values())), levels.level)
    found = sum(counts.values())
    if found != asked:
      raise ValueError(_differ(name, '', found, asked, levels.level))
    return
  levels = _by_name(uniform(mask, levels))
  for path, found in counts.items():
    layers, *layer = sizes[path]
    asked = layers * number_kept(int(np.prod(layer)), levels[path])
    # Layers of a stack may differ; their mean is the level up to rounding.
    if abs(found - asked) >= layers:
      raise ValueError(
          _differ(name, f' of {path!r}', found, asked, levels[path])
      )


def _differ(name: str, leaf: str, found: int, asked: int, level: float) -> str:
  return (
      f'{name}{leaf} keeps {found:,} weights, but sparsity={level:g} asks for '
      f'{asked:,}; give sparsity=levels_of(mask), or the level it has.'
  )


def _by_name(tree: PyTree) -> dict[str, Any]:
  return {
      selection.path_name(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
