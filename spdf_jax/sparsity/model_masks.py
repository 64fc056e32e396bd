"""Masks of a whole model, whose layers are ranked as one group."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.topk import keep_largest_of_all

PyTree = Any


def keep_of_model(
    scores: PyTree,
    params: PyTree,
    kept: int | jax.Array,
    structure: Structure,
    *,
    among: PyTree | None = None,
    tie_break: PyTree | None = None,
) -> PyTree:
  """Keeps units of a whole model, and at least one in every layer.

  Units that differ in size, such as the channels of different layers, are
  ranked by their scores per weight.

  Args:
    scores: Scores of units, as `structure.reduce` returns them.
    params: Leaves `[layers, inputs, outputs]`, or their shapes.
    kept: Number of weights to keep, see `model_kept`: an int, or uint32 `[2]`,
      the high word first.
    structure: Structure of the mask.
    among: Masks of the units that may be kept; `None`: all.
    tie_break: A tree of typed keys; `None` prefers the earlier of equal scores.

  Returns:
    Masks of weights, of the shapes of `params`; they keep fewer than `kept`
    weights where the next unit is too large.
  """
  sizes = jax.tree.map(
      lambda p: math.prod(p.shape) // math.prod(structure.unit_shape(p.shape)),
      params,
  )
  if len(set(jax.tree.leaves(sizes))) > 1:
    scores = jax.tree.map(
        lambda s, n: s / n if jnp.issubdtype(s.dtype, jnp.floating) else s,
        scores, sizes,
    )
  candidates = among
  if among is None:
    candidates = jax.tree.map(lambda _: None, scores)
  scores = jax.tree.map(_with_best_first, scores, candidates)
  units = keep_largest_of_all(
      scores, kept, among=among, tie_break=tie_break, sizes=sizes
  )
  return jax.tree.map(lambda p, m: structure.expand(m, p.shape), params, units)


def _with_best_first(scores: jax.Array, among: jax.Array | None) -> jax.Array:
  """Raises the best score of every layer to the largest number."""
  if jnp.issubdtype(scores.dtype, jnp.floating):
    least, most = -jnp.inf, jnp.inf
    ranked = jnp.where(jnp.isnan(scores), least, scores)
  else:
    least, most = 0, jnp.iinfo(scores.dtype).max
    ranked = scores
  if among is not None:
    ranked = jnp.where(among, ranked, jnp.asarray(least, scores.dtype))
  flat = ranked.reshape(*scores.shape[:-2], -1)
  best = jnp.argmax(flat, axis=-1, keepdims=True)
  index = jax.lax.broadcasted_iota(best.dtype, flat.shape, flat.ndim - 1)
  return jnp.where(
      (index == best).reshape(scores.shape),
      jnp.asarray(most, scores.dtype), scores,
  )
