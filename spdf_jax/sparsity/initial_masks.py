# SPDX-License-Identifier: Apache-2.0
"""Initial masks: by name, given, of non-zero weights, by scores or saliency.

All are functions `(key, params, sparsities) -> mask`, for `init=` of any
algorithm; what needs more, such as a loss and a batch, is bound to it first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import names
from spdf_jax.sparsity import counts
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.selection import Selector
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.topk import keys

PyTree = Any


def given(
    mask: PyTree, *, where: Where | None = None
) -> MaskMaker:
  """Uses a mask as the initial mask: `static(s, init=given(mask))`.

  The mask must have the initial sparsity of the algorithm;
  `sparsity=sparsities_of(mask)` sets that to the sparsity of the mask.

  Args:
    mask: bool arrays in the structure and the shapes of the parameters, `None`
      where they are not sparsified, e.g. from `get_mask`.
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
    >>> algorithm = spdf.static(0.5, init=spdf.init.given(mask))
    >>> tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
    >>> spdf.get_mask(tx.init(params))['w'].tolist()
    [[True, False], [False, True]]
  """
  where = selectors.hidden_matrices if where is None else where
  given = trees.by_name(mask)
  for name, leaf in given.items():
    dtype = str(getattr(leaf, 'dtype', type(leaf).__name__))
    if dtype != 'bool' or not hasattr(leaf, 'dtype'):
      raise ValueError(
          f'mask of {name!r} is of type {dtype}; give a bool array, True where '
          'a weight is kept, or None for a leaf that is not sparsified.'
      )

  def init(key, params, sparsities, structure=structures.UNSTRUCTURED):
    del key
    layers = trees.by_name(params)
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

    # `where` may depend on the dtype, so masks get that of the parameters.
    selector = selection.selector_of(where, [
        (name, jax.ShapeDtypeStruct(leaf.shape, layers[name].dtype))
        for name, leaf in given.items()
    ])

    def convert(path, p):
      name = trees.path_name(path)
      return _layers_of(name, given[name], p, selector)

    mask = jax.tree_util.tree_map_with_path(convert, params)
    counts.check_counts(mask, sparsities, structure, 'mask')
    return mask

  return init


def _layers_of(
    name: str, mask: jax.Array, params: jax.Array, selector: Selector
) -> jax.Array:
  """Reshapes one leaf of a mask to the layers of its parameters."""
  shape = jax.ShapeDtypeStruct(mask.shape, params.dtype)
  selected = selector(name, shape)
  if selected is None or selected is False:
    raise ValueError(
        f'mask of {name!r} has shape {list(mask.shape)}, and the `where` of '
        'init.given does not select it, but sparsify selects the parameter, as '
        f'layers of shape {list(params.shape)}; pass init.given the `where` of '
        'sparsify.'
    )
  axes = selection.select(lambda path, leaf: selected, {name: shape})
  # Evaluated eagerly, so that counts can be checked under jit; copied, so that
  # donating the state does not donate the caller's mask.
  with jax.ensure_compile_time_eval():
    layers = selection.to_layers({name: mask}, {name: shape}, axes)[name]
    layers = jnp.copy(layers)
  if layers.shape != params.shape:
    raise ValueError(
        f'mask of {name!r} has shape {list(mask.shape)}, layers of shape '
        f'{list(layers.shape)}, but the parameters have layers of shape '
        f'{list(params.shape)}; give the mask the shape of the parameters, '
        'and pass `init.given` the same `where` as sparsify.'
    )
  return layers


def nonzero(
    key: jax.Array | None,
    params: PyTree,
    sparsity: PyTree,
    *,
    structure: Structure = structures.UNSTRUCTURED,
) -> PyTree:
  """Keeps the weights that are not zero, as in the checkpoint of a sparse run.

  Kept weights that happen to be zero make the count differ from the sparsity.
  `init.magnitude` keeps the exact count for any checkpoint.

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
    >>> nonzero(None, params, 0.5)['w'].tolist()
    [[True, False], [False, True]]
  """
  del key
  # CPUs that flush denormals compare them as equal to zero; bits do not.
  bits = keys.sortable_bits
  mask = jax.tree.map(lambda p: bits(p) != bits(jnp.zeros_like(p)), params)
  counts.check_counts(mask, sparsity, structure, 'mask of non-zero parameters')
  return mask


def scored(
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
    >>> scored(diagonal)(jax.random.key(0), params, 0.5)['w'].tolist()
    [[[True, False], [False, True]]]
  """
  def init(key, params, sparsities, structure=structures.UNSTRUCTURED):
    def score(path, p, leaf_key):
      leaf_scores = scores(leaf_key, tuple(p.shape))
      if jnp.shape(leaf_scores) != p.shape:
        raise ValueError(
            f'scores of {trees.path_name(path)!r} have shape '
            f'{list(jnp.shape(leaf_scores))}; return them in the given shape, '
            f'{list(p.shape)}.'
        )
      return leaf_scores

    tree_scores = jax.tree_util.tree_map_with_path(
        score, params, masks.leaf_keys(key, params)
    )
    return masks.mask_from_scores(tree_scores, sparsities, structure=structure)

  return init


_INITS = {
    'magnitude': masks.magnitude,
    'nonzero': nonzero,
    'random': masks.random,
}


def init_of(value: Any, name: str = 'init') -> Callable[..., Any]:
  """Returns the initializer of masks with a name, or a given function.

  Args:
    value: `(key, params, sparsities) -> mask`, or `'random'`, `'magnitude'` or
      `'nonzero'`.
    name: Name of the argument for error messages.

  Returns:
    The maker.

  Raises:
    ValueError: `value` is something else, or the name is unknown.

  Example:
    >>> init_of('magnitude').__name__
    'magnitude'
  """
  maker = names.by_entry(name, value, _INITS, missing=3)
  if not callable(maker):
    raise ValueError(
        f'{name} is {maker!r:.80}; give a function (key, params, sparsities) '
        "-> mask, e.g. spdf_jax.init.magnitude, or its name, 'magnitude'."
    )
  return maker


def initial_mask(
    init: Callable[..., PyTree],
    key: jax.Array,
    params: PyTree,
    sparsities: PyTree,
    structure: Structure,
) -> PyTree:
  """Makes the initial mask, with the structure if there is one.

  Args:
    init: `(key, params, sparsities) -> mask`; must also accept `structure=` if
      `structure` is not `UNSTRUCTURED`.
    key: A typed PRNG key.
    params: Leaves `[layers, inputs, outputs]`.
    sparsities: Sparsities, as the distribution returns them.
    structure: Structure of the mask.

  Returns:
    The mask.

  Raises:
    ValueError: the structure cannot have a sparsity.
  """
  if structure is structures.UNSTRUCTURED:
    return init(key, params, sparsities)
  for sparsity in jax.tree.leaves(sparsities):
    structure.check(sparsity)
  return init(key, params, sparsities, structure=structure)


Loss = Callable[[PyTree, Any], jax.Array]
Score = Callable[[PyTree, PyTree], PyTree]

_SYNFLOW_ROUNDS = 100

_is_none = lambda x: x is None


def saliency(
    score: str | Score,
    loss_fn: Loss,
    params: PyTree,
    batch: Any,
    *,
    where: Where | None = None,
) -> MaskMaker:
  r"""Keeps the weights with the highest saliency scores.

  With weights :math:`w`, the gradient :math:`g` and the Hessian :math:`H` of
  the loss over the sparsified leaves, the scores are

  * `'snip'`: :math:`|w \odot g|`, the sensitivity of the loss to the weight;
  * `'grasp'`: :math:`w \odot H g`. Removing a weight lowers the squared norm of
    the gradient by twice its score, to first order, so the weights whose
    removal would lower it most are kept. The paper's code divides logits by a
    temperature of 200 before the loss; to reproduce it, do so in `loss_fn`;
  * `'synflow'`: :math:`|w| \odot \partial R / \partial |w|` in 100 rounds, over
    which the fraction of kept weights falls exponentially to its final value.
    Here `loss_fn(params, batch)` is :math:`R`: the sum of the outputs of a
    linear network, without activation functions or normalization, on the batch,
    an input of ones. It receives the absolute values of all parameters. If R
    overflows float32, divide the outputs of layers by constants: in a chain of
    layers these do not change the ranking.

  In the papers all layers are one group: `distribution='model_wide'`. A layer
  may then keep a single weight; `'uniform'` prevents it. The mask is computed
  in each call of `init` of the optimizer, also under `jax.jit`, from the
  parameters given here, which the algorithm keeps in memory.

  Args:
    score: Name of a score, or `(weights, grads) -> scores` of trees with `None`
      for leaves that are not sparsified.
    loss_fn: `(params, batch) -> scalar`.
    params: The initial parameters, all of them.
    batch: Batch for `loss_fn`: several examples of every class, or some
      sequences.
    where: The `where` given to `sparsify`; in a group of a `partition`, one
      that selects the leaves of the group.

  Returns:
    `(key, params, sparsities) -> mask`, for `init=` of any algorithm. It raises
    ValueError where scores are not finite or have a wrong shape, or the leaves
    of the algorithm are others.

  Raises:
    ValueError: the score is unknown.

  References:
    Lee et al., `SNIP <https://arxiv.org/abs/1810.02340>`_, 2019;
    Wang et al., `GraSP <https://arxiv.org/abs/2002.07376>`_, 2020;
    Tanaka et al., `SynFlow <https://arxiv.org/abs/2006.05467>`_, 2020

  Example:
    >>> import optax, spdf_jax as spdf
    >>> params = {'w': jnp.array([[1., 2.], [3., 4.]]), 'b': jnp.zeros(2)}
    >>> loss_fn = lambda p, x: jnp.sum((x @ p['w'] + p['b']) ** 2)
    >>> batch = jnp.array([[1., 0.]])
    >>> snip = spdf.init.saliency('snip', loss_fn, params, batch)
    >>> algorithm = spdf.static(0.5, distribution='model_wide', init=snip)
    >>> tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
    >>> spdf.get_mask(tx.init(params))['w'].tolist()
    [[True, True], [False, False]]
  """
  scorer = _by_gradient(score) if callable(score) else names.lookup(
      'score', score, SCORES
  )
  rounds = _SYNFLOW_ROUNDS if score == 'synflow' else 1
  where = selectors.hidden_matrices if where is None else where
  axes = selection.select(where, params)
  as_layers = lambda tree: selection.to_layers(tree, params, axes)
  if score == 'synflow':
    params = jax.tree.map(jnp.abs, params)

  @jax.jit
  def scores_of(params, batch, weights, mask):
    loss = lambda weights: loss_fn(_merged(weights, params), batch)
    scores = scorer(loss, masks.apply_mask(weights, mask))
    _check_shapes(scores, weights)
    finite = jax.tree.map(lambda s: jnp.all(jnp.isfinite(s)), scores)
    ranked = lambda s, m: jnp.where(m, s.astype(jnp.float32), -jnp.inf)
    return as_layers(jax.tree.map(ranked, scores, mask)), finite

  def init(key, layers, sparsities, structure=structures.UNSTRUCTURED):
    del key
    # `optax.tree.map_params` passes an empty tree as a placeholder.
    if not jax.tree.leaves(layers):
      return layers
    _check_layers(layers, jax.eval_shape(as_layers, params))
    weights = selection.selected(params, params, axes)
    # Rounds before the last may have other sparsities than n of m.
    unchecked = structure._replace(check=lambda sparsity: None)
    # Evaluated eagerly, so that scores can be checked under jit.
    with jax.ensure_compile_time_eval():
      mask = jax.tree.map(lambda w: jnp.ones(w.shape, bool), weights)
      for done in range(1, rounds + 1):
        scores, finite = scores_of(params, batch, weights, mask)
        _check_finite(finite, score)
        layer_masks = masks.mask_from_scores(
            scores, _of_round(sparsities, done, rounds),
            structure=structure if done == rounds else unchecked,
        )
        mask = selection.from_layers(layer_masks, params, axes)
    return layer_masks

  return init


def _snip(loss: Callable[[PyTree], jax.Array], weights: PyTree) -> PyTree:
  return jax.tree.map(
      lambda w, g: jnp.abs(_product(w, g)), weights, jax.grad(loss)(weights)
  )


def _grasp(loss: Callable[[PyTree], jax.Array], weights: PyTree) -> PyTree:
  gradient = jax.grad(loss)
  _, curved = jax.jvp(gradient, (weights,), (gradient(weights),))
  return jax.tree.map(_product, weights, curved)


# SynFlow's weights are not negative, so its score equals that of SNIP.
_synflow = _snip

SCORES = {'snip': _snip, 'grasp': _grasp, 'synflow': _synflow}
"""Score functions by name: `(loss, weights) -> scores`."""


def _by_gradient(
    score: Score,
) -> Callable[[Callable[[PyTree], jax.Array], PyTree], PyTree]:
  return lambda loss, weights: score(weights, jax.grad(loss)(weights))


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
  return one.astype(jnp.float32) * other.astype(jnp.float32)


def _of_round(sparsities: PyTree, done: int, rounds: int) -> PyTree:
  """Returns the sparsities of a round; kept fractions decay exponentially."""
  if done == rounds:
    return sparsities
  return jax.tree.map(lambda s: 1 - (1 - s) ** (done / rounds), sparsities)


def _merged(weights: PyTree, params: PyTree) -> PyTree:
  return jax.tree.map(
      lambda w, p: p if w is None else w, weights, params, is_leaf=_is_none
  )


def _check_layers(layers: PyTree, scored: PyTree) -> None:
  given, ours = (
      {name: tuple(x.shape) for name, x in trees.by_name(tree).items()}
      for tree in (layers, scored)
  )
  for name in given.keys() | ours.keys():
    if given.get(name) != ours.get(name):
      raise ValueError(
          f'where of saliency selects {ours.get(name, "nothing")} in {name!r}, '
          f'and the algorithm prunes {given.get(name, "nothing")} there; give '
          'saliency the where of sparsify, and in a group of a partition one '
          'that selects the leaves of the group.'
      )


def _check_shapes(scores: PyTree, weights: PyTree) -> None:
  expected: Any = jax.tree.structure(weights)
  treedef: Any = jax.tree.structure(scores)
  if expected != treedef:
    raise ValueError(
        f'score returns a tree of structure {treedef}; return that of the '
        f'weights, {expected}.'
    )
  pairs = zip(
      jax.tree_util.tree_leaves_with_path(weights), jax.tree.leaves(scores)
  )
  for (path, w), s in pairs:
    if jnp.shape(s) != w.shape:
      raise ValueError(
          f'score returns shape {list(jnp.shape(s))} for '
          f'{trees.path_name(path)!r} of shape {list(w.shape)}; return a '
          'score for every weight.'
      )


def _check_finite(finite: PyTree, score: str | Score) -> None:
  for path, ok in jax.tree_util.tree_leaves_with_path(finite):
    if not ok:
      raise ValueError(
          f'score {score!r} of {trees.path_name(path)!r} is not finite '
          'everywhere; scale the loss down, or look for NaN in the parameters '
          'and the batch.'
      )
