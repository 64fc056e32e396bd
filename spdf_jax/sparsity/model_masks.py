# SPDX-License-Identifier: Apache-2.0
"""Masks of a whole model, whose layers are ranked as one group."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.keys import sortable_bits
from spdf_jax.sparsity.leaves import map_leaves
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
        lambda s, n: s / n if jnp.issubdtype(s.dtype, jnp.inexact) else s,
        scores, sizes,
    )
  candidates = among
  if among is None:
    candidates = jax.tree.map(lambda _: None, scores)
  units = keep_largest_of_all(
      scores, kept, among=among, tie_break=tie_break, sizes=sizes,
      first=map_leaves(_best_units, scores, candidates),
  )
  return jax.tree.map(lambda p, m: structure.expand(m, p.shape), params, units)


def _best_units(
    scores: jax.Array, among: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns row and column of the best unit of every layer, int32 [layers]."""
  bits = sortable_bits(scores)
  if among is not None:
    bits = jnp.where(among, bits, jnp.zeros_like(bits))
  # Reductions instead of an argmax, for which sharded scores would be gathered.
  best = bits == jnp.max(bits, axis=(-2, -1), keepdims=True)
  found = []
  for axis in (-2, -1):
    index = jax.lax.broadcasted_iota(
        jnp.int32, scores.shape, scores.ndim + axis
    )
    last = jnp.int32(scores.shape[axis] - 1)
    first = jnp.min(
        jnp.where(best, index, last), axis=(-2, -1), keepdims=True
    )
    best &= index == first
    found.append(first.reshape(-1))
  return found[0], found[1]
