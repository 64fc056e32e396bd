# SPDX-License-Identifier: Apache-2.0
"""Masks before training, by the saliency of weights for the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.names import lookup
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.axes import from_layers
from spdf_jax.sparsity.axes import MatrixAxes
from spdf_jax.sparsity.axes import to_layers
from spdf_jax.sparsity.masking import apply_mask
from spdf_jax.sparsity.paths import path_name
from spdf_jax.sparsity.selectors import hidden_matrices
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED

PyTree = Any
Loss = Callable[[PyTree, Any], jax.Array]
Score = Callable[[PyTree, PyTree], PyTree]

_SYNFLOW_ROUNDS = 100

_is_none = lambda x: x is None


def saliency_mask(
    score: str | Score,
    loss_fn: Loss,
    params: PyTree,
    batch: Any,
    sparsity: PyTree,
    *,
    where: selection.Where = hidden_matrices,
    distribution: Callable[
        [PyTree, PyTree], PyTree
    ] = distributions.model_wide,
    structure: Structure = UNSTRUCTURED,
) -> PyTree:
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

  Run it once before training, not under `jax.jit`:

  .. code-block:: python

    mask = saliency_mask('snip', loss_fn, params, batch, 0.9)
    algorithm = static(0.9, distribution=model_wide, init=given_mask(mask))

  Args:
    score: Name of a score, or `(weights, grads) -> scores` of trees with `None`
      for leaves that are not sparsified.
    loss_fn: `(params, batch) -> scalar`.
    params: The initial parameters.
    batch: Batch for `loss_fn`: several examples of every class, or some
      sequences.
    sparsity: The fraction of zeros in [0, 1), or another argument of
      `distribution`.
    where: The `where` given to `sparsify`.
    distribution: `(params, sparsity) -> sparsities`; by default all layers are
      one group, as in the papers. `uniform` prevents empty layers.
    structure: Structure of the mask, e.g. `block(4, 4)`.

  Returns:
    The mask, in the structure of `params`: bool where they are sparsified,
    `None` elsewhere.

  Raises:
    ValueError: the score is unknown, scores are not finite or have a wrong
      shape, or the sparsity is outside [0, 1).

  References:
    Lee et al., `SNIP <https://arxiv.org/abs/1810.02340>`_, 2019;
    Wang et al., `GraSP <https://arxiv.org/abs/2002.07376>`_, 2020;
    Tanaka et al., `SynFlow <https://arxiv.org/abs/2006.05467>`_, 2020

  Example:
    >>> params = {'w': jnp.array([[1., 2.], [3., 4.]]), 'b': jnp.zeros(2)}
    >>> loss_fn = lambda p, x: jnp.sum((x @ p['w'] + p['b']) ** 2)
    >>> batch = jnp.array([[1., 0.]])
    >>> saliency_mask('snip', loss_fn, params, batch, 0.5)['w'].tolist()
    [[True, True], [False, False]]
  """
  scorer = _by_gradient(score) if callable(score) else lookup(
      'score', score, SCORES
  )
  rounds = _SYNFLOW_ROUNDS if score == 'synflow' else 1
  axes = selection.select(where, params)
  as_layers = lambda tree: to_layers(tree, params, axes)
  sparsities = distribution(as_layers(params), sparsity)
  if score == 'synflow':
    params = jax.tree.map(jnp.abs, params)
  weights = _selected(params, axes)
  mask = jax.tree.map(lambda w: jnp.ones(w.shape, bool), weights)

  @jax.jit
  def scores_of(params, batch, weights, mask):
    loss = lambda weights: loss_fn(_merged(weights, params), batch)
    scores = scorer(loss, apply_mask(weights, mask))
    _check_shapes(scores, weights)
    finite = jax.tree.map(lambda s: jnp.all(jnp.isfinite(s)), scores)
    ranked = lambda s, m: jnp.where(m, s.astype(jnp.float32), -jnp.inf)
    return as_layers(jax.tree.map(ranked, scores, mask)), finite

  # The sparsities of rounds before the last may be others than n of m has.
  unchecked = structure._replace(check=lambda sparsity: None)
  for done in range(1, rounds + 1):
    scores, finite = scores_of(params, batch, weights, mask)
    _check_finite(finite, score)
    layers = masks.mask_from_scores(
        scores, _of_round(sparsities, done, rounds),
        structure=structure if done == rounds else unchecked,
    )
    mask = from_layers(layers, params, axes)
  return mask


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


def _selected(params: PyTree, axes: list[MatrixAxes | None]) -> PyTree:
  """Returns the sparsified leaves, `None` elsewhere."""
  leaves, treedef = jax.tree.flatten(params)
  return jax.tree.unflatten(
      treedef, [None if a is None else leaf for leaf, a in zip(leaves, axes)]
  )


def _merged(weights: PyTree, params: PyTree) -> PyTree:
  return jax.tree.map(
      lambda w, p: p if w is None else w, weights, params, is_leaf=_is_none
  )


def _check_shapes(scores: PyTree, weights: PyTree) -> None:
  wanted: Any = jax.tree.structure(weights)
  found: Any = jax.tree.structure(scores)
  if wanted != found:
    raise ValueError(
        f'score returns a tree of structure {found}; return that of the '
        f'weights, {wanted}.'
    )
  pairs = zip(
      jax.tree_util.tree_leaves_with_path(weights), jax.tree.leaves(scores)
  )
  for (path, w), s in pairs:
    if jnp.shape(s) != w.shape:
      raise ValueError(
          f'score returns shape {list(jnp.shape(s))} for '
          f'{path_name(path)!r} of shape {list(w.shape)}; return a '
          'score for every weight.'
      )


def _check_finite(finite: PyTree, score: str | Score) -> None:
  for path, ok in jax.tree_util.tree_leaves_with_path(finite):
    if not ok:
      raise ValueError(
          f'score {score!r} of {path_name(path)!r} is not finite; '
          'lower the scale of the loss, or look for NaN in parameters and '
          'batch.'
      )
