# SPDX-License-Identifier: Apache-2.0
"""`sparsify` behind the three methods that JaxPruner's users call."""

import dataclasses
from typing import Any

import jax

import spdf_jax as spdf

PyTree = Any
Transformation = Any


@dataclasses.dataclass(frozen=True)
class Updater:
  """Sparse training in loops written for JaxPruner, e.g. that of EasyDeL.

  The loop wraps its optimizer once and calls a method before the forward pass
  and one after the gradient step. The mask is stored in the optimizer state and
  the wrapped optimizer keeps pruned weights at zero, so these two methods only
  apply the mask again: they change parameters that the optimizer has not
  updated yet, and nothing later.

  Pass the updater where the loop takes one, e.g.
  `easydel.TrainingArguments(pruning_module=Updater(…))`. `wrap_optax` must be
  the outermost transformation that changes updates, as `sparsify` must.

  References:
    Lee et al., `JaxPruner <https://arxiv.org/abs/2304.14082>`_, 2023

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> updater = Updater(spdf.static(0.75), key=0)
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = updater.wrap_optax(optax.sgd(0.1))
    >>> params = updater.pre_forward_update(params, tx.init(params))
    >>> int((params['w'] == 0).sum())
    12
  """

  algorithm: spdf.Algorithm | None
  """The algorithm, e.g. `rigl(…)`; `None` keeps every weight."""

  where: Any = spdf.where.hidden_matrices
  """Selection of the leaves to sparsify, as for `sparsify`."""

  key: int | jax.Array = 0
  """Seed or typed PRNG key, as for `sparsify`."""

  def wrap_optax(self, inner: Transformation) -> Transformation:
    """Returns the sparse optimizer.

    Args:
      inner: The optimizer.

    Returns:
      `sparsify` around `inner`, or `inner` itself if there is no algorithm.
    """
    if self.algorithm is None:
      return inner
    return spdf.sparsify(inner, self.algorithm, where=self.where, key=self.key)

  def pre_forward_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Applies the mask to the parameters of a forward pass.

    Args:
      params: The parameters.
      opt_state: The state of an optimizer that contains `wrap_optax`.

    Returns:
      The parameters, zero where they are pruned.

    Raises:
      ValueError: `opt_state` holds no mask.
    """
    if self.algorithm is None:
      return params
    return _masked(params, spdf.get_mask(opt_state))

  def post_gradient_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Applies the mask to updated parameters, as `pre_forward_update` does."""
    return self.pre_forward_update(params, opt_state)


# One compiled call instead of one for every leaf, in loops that are not jitted.
_masked = jax.jit(spdf.apply_mask)
