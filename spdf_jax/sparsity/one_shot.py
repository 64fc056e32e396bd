# SPDX-License-Identifier: Apache-2.0
"""One-shot pruning of a trained matrix, from statistics of its inputs.

A `Pruner` computes statistics of the inputs of a layer, which are added over
the batches of a calibration text, and prunes the matrix of the layer by them.
`models.prune_blocks` applies one to all layers of a decoder.
"""

from collections.abc import Callable
import functools
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import topk
from spdf_jax.sparsity.structures import Structure

logger = logging.getLogger('spdf_jax')

Sparsity = float | str
"""The fraction of zeros of a matrix in [0, 1), or N:M as `'2:4'`: the number of
kept weights of every M consecutive inputs of an output."""

# Largest factor of the caller's damping; it is raised tenfold.
_MOST_DAMPING = 1e3
_ROWS = 512  # Rows of a Cholesky factor that are computed at a time.


class Pruner(NamedTuple):
  """A way to prune a matrix; pure functions of arrays."""

  statistics: Callable[..., jax.Array]
  """`(x [tokens, inputs], total=0) -> total`, with the statistics of a batch
  added; those of all batches are given to `prune`."""

  prune: Callable[[jax.Array, jax.Array, Sparsity], tuple[jax.Array, jax.Array]]
  """`(w [inputs, outputs], statistics, sparsity) -> (w, mask)`: the weights,
  zero off the mask, and the mask. Of n weights without N:M, round(sparsity * n)
  are pruned, so that `init.nonzero` accepts the result. It raises ValueError if
  the matrix does not have the sparsity, or the statistics are not finite."""


def magnitude() -> Pruner:
  """Prunes the weights of smallest magnitude of the matrix.

  Returns:
    The pruner, without statistics.

  Example:
    >>> w = jnp.array([[3., -4.], [1., 2.]])
    >>> magnitude().prune(w, jnp.zeros(()), 0.5)[1].tolist()
    [[True, True], [False, False]]
  """
  def prune(w, statistics, sparsity):
    del statistics
    structure, n, group = _groups(w, sparsity)
    kept = n if group < len(w) else w.size - _pruned(w.size, sparsity)
    mask = _keep(jnp.abs(w), structure, kept)
    return jnp.where(mask, w, 0), mask

  return Pruner(lambda x, total=0: jnp.zeros((), x.dtype), prune)


def wanda() -> Pruner:
  r"""Prunes by magnitude times the norm of the input, within each output.

  The score of a weight is :math:`|W_{ij}| \, \lVert X_i \rVert_2`, with the
  norm of input i over all tokens. Weights that are kept do not change. If a
  fraction of the inputs is not an integer, the counts of outputs differ by one.

  Returns:
    The pruner; its statistics are the squared norms, `[inputs]`.

  References:
    Sun et al., `A Simple and Effective Pruning Approach for Large Language
    Models <https://arxiv.org/abs/2306.11695>`_, 2023

  Example:
    >>> x = jnp.array([[1., 10.]])
    >>> w = jnp.array([[3., -4.], [1., 2.]])
    >>> wanda().prune(w, wanda().statistics(x), 0.5)[1].tolist()
    [[False, False], [True, True]]
  """
  def prune(w, statistics, sparsity):
    _check_finite(statistics)
    scores = jnp.abs(w).astype(_computed(w)) * jnp.sqrt(statistics)[:, None]
    structure, n, group = _groups(w, sparsity)
    if group < len(w):
      mask = _keep(scores, structure, n)
    else:
      ends = [_pruned(len(w) * j, sparsity) for j in range(w.shape[1] + 1)]
      kept = jnp.asarray(len(w) - np.diff(ends), jnp.int32)
      # Each output is a layer of its own, with its own count.
      mask = topk.keep_largest(scores.T[:, None], kept)[:, 0].T
    return jnp.where(mask, w, 0), mask

  return Pruner(
      lambda x, total=0: total + jnp.sum(x.astype(_computed(x))**2, axis=0),
      prune,
  )


def sparsegpt(*, block_size: int = 128, damping: float = 0.01) -> Pruner:
  r"""Prunes by the optimal brain surgeon, and updates the kept weights.

  With the Hessian :math:`H = X^\top X` of the squared error of the outputs, to
  whose diagonal `damping` times its mean is added, and the upper Cholesky
  factor :math:`U` of :math:`H^{-1} = U^\top U`, inputs are pruned in order. The
  mask of each block of inputs keeps the highest scores
  :math:`w_{ij}^2 / U_{ii}^2` of the whole block, or of every M inputs of an
  output with N:M; the error of each pruned weight is compensated by the weights
  of the inputs after it. Weights of inputs that are always zero become zero.

  All is computed in float32, or float64 where weights or inputs are. If the
  damped Hessian has no Cholesky factor in that dtype, the damping is multiplied
  by ten until it has, with a warning.

  Args:
    block_size: Number of inputs whose mask is chosen at a time.
    damping: Fraction of the mean of the diagonal that is added to it.

  Returns:
    The pruner; its statistics are :math:`X^\top X`, `[inputs, inputs]`.

  Raises:
    ValueError: an argument is not positive.

  References:
    Frantar and Alistarh, `SparseGPT <https://arxiv.org/abs/2301.00774>`_, 2023,
    algorithm 1

  Example:
    The second weight takes over the work of the first, an equal input:

    >>> x = jnp.array([[1., 1.], [2., 2.]])
    >>> w = jnp.array([[1.], [2.]])
    >>> pruner = sparsegpt(damping=1e-4)
    >>> pruner.prune(w, pruner.statistics(x), 0.5)[0].round(2).tolist()
    [[0.0], [3.0]]
  """
  for name, value in (('block_size', block_size), ('damping', damping)):
    if not value > 0:
      raise ValueError(f'{name} is {value}; it must be positive.')

  def prune(w, statistics, sparsity):
    structure, n, group = _groups(w, sparsity)
    _check_finite(statistics)
    # A copy, since the factor takes its place.
    statistics = jnp.array(statistics, _computed(w))
    grouped = group < len(w)
    size = min(block_size, len(w))
    if grouped:
      size = max(size // group, 1) * group
    blocks = -(-len(w) // size)
    ends = [min(i * size, len(w)) * w.shape[1] for i in range(blocks + 1)]
    pruned = np.diff([0 if grouped else _pruned(end, sparsity) for end in ends])
    kept = np.where(grouped, n, np.diff(ends) - pruned).astype(np.int32)
    dead = jnp.diag(statistics) == 0
    lower = _damped_factor(statistics, damping)
    weights, mask = _surgeon(
        w.astype(lower.dtype), lower, dead, kept,
        structure=structure, size=size, group=group if grouped else size,
    )
    return weights.astype(w.dtype), mask

  def statistics(x, total=0):
    inputs, x = x.shape[1], x.astype(_computed(x))
    total = jnp.broadcast_to(jnp.asarray(total, x.dtype), (inputs, inputs))

    def add(start, size, total):
      part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
      rows = jnp.matmul(part.T, x, precision='highest')
      rows += jax.lax.dynamic_slice_in_dim(total, start, size)
      return jax.lax.dynamic_update_slice_in_dim(total, rows, start, axis=0)

    # A few rows at a time, since the whole product may be larger than the
    # weights.
    size = min(_ROWS, inputs)
    whole, rest = divmod(inputs, size)
    total = jax.lax.fori_loop(
        0, whole, lambda i, total: add(i * size, size, total), total
    )
    return add(inputs - rest, rest, total) if rest else total

  return Pruner(statistics, prune)


PRUNERS = {'magnitude': magnitude, 'sparsegpt': sparsegpt, 'wanda': wanda}
"""Functions that return a pruner, by name."""


def _computed(x: jax.Array) -> jax.typing.DTypeLike:
  """Returns the dtype of computations: that of an array, or float32."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _groups(w: jax.Array, sparsity: Sparsity) -> tuple[Structure, int, int]:
  """Returns the structure, and the n of m inputs of its groups, if any."""
  match = re.fullmatch(r'(\d+):(\d+)', sparsity) if isinstance(
      sparsity, str
  ) else None
  if match is None:
    distributions.check_sparsity(sparsity)
    return structures.UNSTRUCTURED, len(w), len(w)
  n, m = map(int, match.groups())
  structure = structures.n_of_m(n, m)
  structure.unit_shape((1, *w.shape))  # Checks that m divides the inputs.
  return structure, n, m


def _pruned(size: int, sparsity: Sparsity) -> int:
  return round(float(sparsity) * size)


def _keep(
    scores: jax.Array, structure: Structure, kept: int | jax.Array
) -> jax.Array:
  """Returns the mask of the highest scores of a matrix."""
  mask = topk.keep_largest(structure.reduce(scores[None]), kept)
  return structure.expand(mask, (1, *scores.shape))[0]


def _check_finite(statistics: jax.Array) -> None:
  if not bool(jnp.isfinite(statistics).all()):
    raise ValueError(
        'the statistics of the inputs are not finite; look for NaN in the '
        'weights, or prune by magnitude, which needs no inputs.'
    )


def _damped_factor(hessian: jax.Array, damping: float) -> jax.Array:
  """Replaces the lower half of H by L, `H = L.T @ L`, damped until it has one.

  The factor U of the inverse of H is then the inverse of L.T. The upper half
  stays as it is, for the next damping: only H and some rows are in memory.
  """
  inputs = len(hessian)
  diagonal = jnp.diag(hessian)
  diagonal = jnp.where(diagonal == 0, 1, diagonal)
  used = damping
  while True:
    damped = diagonal + used * diagonal.mean()
    for start in reversed(range(0, inputs, _ROWS)):
      rows = _rows_of_factor(hessian, damped, start)
      hessian = _set_rows(hessian, rows, start)
    if bool(jnp.isfinite(jnp.diag(hessian)).all()):
      break
    used *= 10
    if used > damping * _MOST_DAMPING:
      raise ValueError(
          f'the Hessian of the inputs has no Cholesky factor at a damping of '
          f'{used / 10:g}; calibrate with more tokens, or prune by wanda.'
      )
  if used > damping:
    logger.warning(
        'the Hessian of the inputs has no Cholesky factor at a damping of %g; '
        'that of %g is used', damping, used,
    )
  return hessian


@functools.partial(jax.jit, static_argnames='start')
def _rows_of_factor(
    hessian: jax.Array, diagonal: jax.Array, start: int
) -> jax.Array:
  """Returns rows of L, up to the diagonal, and of H above it.

  Args:
    hessian: H above the diagonal, and the rows of L after these.
    diagonal: Diagonal of H.
    start: First of `_ROWS` rows.
  """
  stop = min(start + _ROWS, len(hessian))
  later = hessian[stop:, :stop]
  product = jnp.matmul(later[:, start:].T, later, precision='highest')
  above = jnp.triu(hessian[start:stop, start:stop], 1)
  block = above + above.T + jnp.diag(diagonal[start:stop]) - product[:, start:]
  # Reversing both axes turns an upper triangular factor into a lower one.
  corner = jax.lax.linalg.cholesky(
      block[::-1, ::-1], symmetrize_input=False
  )[::-1, ::-1].T
  before = jax.lax.linalg.triangular_solve(
      corner, hessian[:start, start:stop].T - product[:, :start],
      left_side=True, lower=True, transpose_a=True,
  )
  return jnp.concatenate([before, corner + above], axis=1)


@functools.partial(jax.jit, donate_argnums=0)
def _set_rows(matrix: jax.Array, rows: jax.Array, start: int) -> jax.Array:
  return jax.lax.dynamic_update_slice(matrix, rows, (start, 0))


def _rows_of_inverse(
    lower: jax.Array, start: jax.Array, size: int
) -> jax.Array:
  """Returns rows of U, `[size, inputs]`, zero beyond the inputs."""
  unit = jnp.arange(len(lower))[:, None] == start + jnp.arange(size)
  columns = jax.lax.linalg.triangular_solve(
      lower.T, unit.astype(lower.dtype), left_side=True, transpose_a=True
  )
  return columns.T


@functools.partial(jax.jit, static_argnames=('structure', 'size', 'group'))
def _surgeon(
    w: jax.Array,
    lower: jax.Array,
    dead: jax.Array,
    kept: jax.Array,
    *,
    structure: Structure,
    size: int,
    group: int,
) -> tuple[jax.Array, jax.Array]:
  """Prunes the inputs in order, `group` at a time, in blocks of `size`.

  Args:
    w: Weights [inputs, outputs].
    lower: Result of `_damped_factor`.
    dead: Whether an input is always zero.
    kept: Number of kept weights in a group, for every block.
    structure: Structure of a group's mask.
    size: Number of inputs of a block, whose errors are propagated together.
    group: Number of inputs whose mask is chosen at a time.

  Returns:
    The weights and the mask.
  """
  inputs, outputs = w.shape
  missing = len(kept) * size - inputs
  w = jnp.pad(jnp.where(dead[:, None], 0, w), ((0, missing), (0, 0)))
  diagonal = jnp.pad(
      1 / jnp.diag(lower), (0, missing), constant_values=1
  )
  # Padded inputs get the lowest score.
  is_input = jnp.arange(len(w)) < inputs
  rows = jax.lax.dynamic_slice_in_dim

  def prune_block(block, carry):
    w, mask = carry
    start = block * size
    # Not the whole inverse, which would take as much memory as the Hessian.
    u_rows = jnp.pad(
        _rows_of_inverse(lower, start, size), ((0, 0), (0, missing))
    )
    u = rows(u_rows, start, size, axis=1)
    d = rows(diagonal, start, size)

    def prune_group(i, carry):
      part, mask, errors = carry
      at = i * group
      scores = (rows(part, at, group) / rows(d, at, group)[:, None]) ** 2
      real = rows(is_input, start + at, group)[:, None]
      keep = _keep(jnp.where(real, scores, -1), structure, kept[block])
      mask = jax.lax.dynamic_update_slice_in_dim(mask, keep, at, axis=0)

      def prune_input(j, carry):
        part, errors = carry
        error = jnp.where(mask[j], 0, part[j] / d[j])
        part = part - u[j][:, None] * error
        # Exactly zero, which the difference of two equal numbers may miss.
        part = part.at[j].set(jnp.where(mask[j], part[j], 0))
        return part, errors.at[j].set(error)

      part, errors = jax.lax.fori_loop(
          at, at + group, prune_input, (part, errors)
      )
      return part, mask, errors

    part = rows(w, start, size)
    part, kept_here, errors = jax.lax.fori_loop(
        0, size // group, prune_group,
        (part, jnp.zeros(part.shape, bool), jnp.zeros_like(part)),
    )
    later = jnp.arange(len(w)) >= start + size
    u_later = jnp.where(later, u_rows, 0)
    w = w - jnp.matmul(u_later.T, errors, precision='highest')
    return (
        jax.lax.dynamic_update_slice_in_dim(w, part, start, axis=0),
        jax.lax.dynamic_update_slice_in_dim(mask, kept_here, start, axis=0),
    )

  w, mask = jax.lax.fori_loop(
      0, len(kept), prune_block, (w, jnp.zeros(w.shape, bool))
  )
  return w[:inputs], mask[:inputs]
