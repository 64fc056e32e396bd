# SPDX-License-Identifier: Apache-2.0
"""Learning rates and initial weights that follow the density of each layer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax import packing
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import Where

PyTree = Any


class DensityState(NamedTuple):
  """State of `scale_by_density`: it is empty."""


def scale_by_density(
    base_density: float | None,
    *,
    width_multiplier: float = 1.0,
    where: Where | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Divides the updates of sparsified layers by their number of kept inputs.

  An output of a layer is a sum over its kept inputs, so that one update of
  Adam changes it in proportion to their number. With the density :math:`\rho`,
  the share of weights that a layer keeps at the step, updates are multiplied by

  .. math:: \frac{1}{m_d m_\rho}, \qquad m_\rho = \rho / \rho_\mathrm{base}

  with the width multiplier :math:`m_d`: a learning rate that is tuned at the
  base density and width then suits all others. Where a mask update changes the
  density, as at the dense boundary of `join`, the next updates follow it.

  Put it inside `sparsify`, after the preconditioner and before weight decay, of
  which the strength then does not change:

  .. code-block:: python

    inner = optax.chain(
        optax.scale_by_adam(), spdf.scale_by_density(1.0),
        optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(3e-3),
    )

  Args:
    base_density: Density at which the learning rate was tuned, in (0, 1];
      `None`: updates follow the width only (muP).
    width_multiplier: Width of the model over the width at which the learning
      rate was tuned, at least 1.
    where: The `where` given to `sparsify`.

  Returns:
    The transformation, which has no state; leaves that are not sparsified pass
    unchanged.

  Raises:
    ValueError: a number is out of its range; on `update`, if it is not inside
      `sparsify`, or `where` is not that of `sparsify`.

  References:
    Dey et al., `Sparse maximal update parameterization
    <https://arxiv.org/abs/2405.15743>`_, 2024, table 1

  Example:
    >>> import spdf_jax as spdf
    >>> tx = spdf.sparsify(
    ...     spdf.scale_by_density(1.0), spdf.static(0.75), key=0)
    >>> params = {'w': jnp.ones((4, 4))}
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> float(updates['w'].max())
    4.0
  """
  _check(base_density, width_multiplier)

  def update_fn(
      updates, state, params=None, *, sparsity_mask=None, **extra_args
  ):
    del extra_args
    mask = mask_inside(sparsity_mask, params, 'scale_by_density')
    factors = _factors(mask, params, base_density, width_multiplier, where)
    treedef: Any
    leaves, treedef = jax.tree.flatten(updates)
    return treedef.unflatten(
        u if f is None else u * f.astype(u.dtype)
        for u, f in zip(leaves, factors)
    ), state

  return optax.GradientTransformationExtraArgs(
      lambda params: DensityState(), update_fn
  )


def scale_init(
    params: PyTree,
    mask: PyTree,
    base_density: float | None,
    *,
    width_multiplier: float = 1.0,
    where: Where | None = None,
) -> PyTree:
  r"""Scales initial weights of sparsified layers by their kept inputs.

  Their variance is divided by :math:`m_d m_\rho`, see `scale_by_density`, so
  that the outputs of a layer are as large as at the base width and density.

  Args:
    params: The initial parameters.
    mask: The mask of the first step, `get_mask(opt_state)`.
    base_density: Density for which the weights were initialized, in (0, 1];
      `None`: they follow the width only (muP).
    width_multiplier: Width of the model over the width for which the weights
      were initialized, at least 1. Initializers that divide by the number of
      inputs, such as `lecun_normal`, count the width themselves.
    where: The `where` given to `sparsify`.

  Returns:
    The parameters.

  Raises:
    ValueError: a number is out of its range, a layer keeps no weight, or
      `where` is not that of `sparsify`.

  References:
    Dey et al., `Sparse maximal update parameterization
    <https://arxiv.org/abs/2405.15743>`_, 2024, table 1

  Example:
    >>> mask = {'w': jnp.arange(16).reshape(4, 4) < 4}
    >>> params = scale_init({'w': jnp.ones((4, 4))}, mask, 1.0)
    >>> float(params['w'].max())
    2.0
  """
  _check(base_density, width_multiplier)
  masks.check_bool(mask)
  matching = trees.matching_leaves(mask, params)
  factors = _factors(matching, params, base_density, width_multiplier, where)
  for name, m in zip(trees.by_name(params), matching):
    if not (m is None or isinstance(m, jax.core.Tracer) or m.any()):
      raise ValueError(
          f'the mask keeps no weight of {name!r}, so its outputs have no '
          'scale; lower its sparsity.'
      )
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  return treedef.unflatten(
      p if f is None else p * jnp.sqrt(f).astype(p.dtype)
      for p, f in zip(leaves, factors)
  )


def mask_inside(sparsity_mask: PyTree, params: PyTree, name: str) -> list[Any]:
  """Returns the mask of each parameter of a transformation inside `sparsify`.

  Args:
    sparsity_mask: The mask that `sparsify` passes.
    params: The parameters that the transformation got. Within `optax.masked` or
      `optax.partition` these are not all.
    name: Name of the transformation for the error message.

  Returns:
    One entry per leaf of `params`, `None` for dense leaves.

  Raises:
    ValueError: there is no mask, because the transformation is not inside.
  """
  if sparsity_mask is None:
    raise ValueError(
        f'{name} got no mask; put it inside sparsify, e.g. sparsify('
        f'optax.chain(optax.scale_by_adam(), {name}(…), …), …).'
    )
  return trees.matching_leaves(sparsity_mask, params, allow_others=True)


def _check(base_density: float | None, width_multiplier: float) -> None:
  if base_density is not None and not 0 < base_density <= 1:
    raise ValueError(
        f'base_density is {base_density}; give the density at which the '
        'learning rate was tuned, above 0 and at most 1.'
    )
  if not 1 <= width_multiplier < float('inf'):
    raise ValueError(
        f'width_multiplier is {width_multiplier}, so that the base width is '
        'above the width; give the width over a base width that is at most '
        'the width.'
    )


def _factors(
    mask: list[Any],
    params: PyTree,
    base_density: float | None,
    width_multiplier: float,
    where: Where | None,
) -> list[jax.Array | None]:
  """Returns 1 / (m_d m_rho) of each layer, `None` for dense leaves."""
  treedef: Any
  weights, treedef = jax.tree.flatten(params)
  # Packed parameters are vectors, and `where` selects matrices.
  matrices = treedef.unflatten(
      p if m is None else jax.ShapeDtypeStruct(m.shape, p.dtype)
      for m, p in zip(mask, weights)
  )
  axes = selection.select(where or selectors.hidden_matrices, matrices)

  def factor(name, m, a):
    if m is None:
      return None
    if a is None:
      raise ValueError(
          f'where selects no matrix in {name!r}, which sparsify prunes; give '
          'both the same where.'
      )
    if base_density is None:
      return jnp.float32(1 / width_multiplier)
    kept = packing.count_kept(m, (*a.reduction, *a.output))
    size = math.prod(m.shape) // kept.size
    # The updates of a layer without kept weights are zero.
    base_kept = base_density * size / width_multiplier
    return base_kept / jnp.maximum(kept, 1).astype(jnp.float32)

  return list(map(factor, trees.by_name(params), mask, axes))
