# SPDX-License-Identifier: Apache-2.0
"""`hard_threshold`: a wrapper that keeps the largest weights of each step."""

import functools
from typing import Any

import jax
import optax

from spdf_jax.sparsity import age
from spdf_jax.sparsity import sparsify as sparsifying
from spdf_jax.sparsity.algorithms import largest
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.schedules import UpdateEvery
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.state import check_dense
from spdf_jax.sparsity.state import check_update
from spdf_jax.sparsity.state import SparsifyState
from spdf_jax.sparsity.structures import Structure

PyTree = Any


def hard_threshold(
    inner: optax.GradientTransformation,
    sparsity: PyTree,
    *,
    least: int = 0,
    update_every: UpdateEvery = 1,
    update_until: int | None = None,
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
    where: Where | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer to keep only the largest weights after every step.

  With the operator :math:`H_t` that keeps the largest magnitudes of each
  matrix, as many as the sparsity of step :math:`t` leaves, and sets all others
  to zero,

  .. math::
    u_t, s_{t+1} = \mathrm{inner}(g_t,\ s_t,\ p_t), \qquad
    p_{t+1} = H_t(p_t + u_t)

  with parameters :math:`p_t`, gradients :math:`g_t` and the state :math:`s_t`
  of `inner`. Unlike under `sparsify`, gradients and moments are those of all
  weights, so that a pruned weight returns once its update is among the largest.
  A step needs dense gradients: compute them without a mask, or with the
  `grad_mask` of `get_masks`, which is all `True`.

  The state is a `SparsifyState`, which `get_mask`, `summarize`, `check_zeros`
  and all that reads masks take. What `sparsify` says of transformations around
  it holds here too. The caller masks the initial parameters once, with
  `apply_mask(params, get_mask(opt_state))`.

  Args:
    inner: The optimizer.
    sparsity: The fraction of zeros in [0, 1): a number, a schedule, or a tree
      of those for the sparsified leaves. A kept fraction of 1/64 is the
      sparsity `1 - 1 / 64`.
    least: Number of the largest weights of each output that are kept in any
      case, in place of others of the matrix; leaves with one input, such as
      biases, have none.
    update_every: Number of steps between changes of the sparsity by a schedule,
      a list of these steps, or a function; masks are chosen at every step.
    update_until: Last step at which a schedule changes the sparsity; a constant
      sparsity and a list need none.
    distribution: Distribution of the sparsity over leaves, as for `gmp`:
      `uniform`, `erk`, `igq`, `model_wide`, or `by_pattern`, with which
      `sparsity` is a mapping of patterns; or its name.
    structure: Structure of the mask, e.g. `structures.balanced(None)`, which
      ranks the inputs of each output by themselves, or `'2:4'`.
    where: The leaves to sparsify, as `sparsify` takes it. To also sparsify
      biases, give them the axes `MatrixAxes((), 0)`.

  Returns:
    The sparse optimizer; its `update` needs `params`.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: an argument is invalid; on `init`, if a leaf keeps no weight, or
      fewer than `least` for each output, if a `model_wide` sparsity falls or
      comes with `least`, or if `inner` contains `sparsify`, `hard_threshold` or
      `with_age`; on `update`, if `params` is missing.

  References:
    Gao et al., `Weight-sparse transformers have interpretable circuits
    <https://arxiv.org/abs/2511.13653>`_, 2025
    Blumensath and Davies, `Iterative hard thresholding
    <https://arxiv.org/abs/0805.0510>`_, 2009

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> params = {'w': jnp.array([[3.0, 2.0], [1.0, 0.0]])}
    >>> tx = spdf.hard_threshold(optax.sgd(1.0), 0.5)
    >>> state = tx.init(params)
    >>> params = spdf.apply_mask(params, spdf.get_mask(state))
    >>> grads = {'w': jnp.array([[0.0, 1.5], [0.0, -2.5]])}
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates)['w'].tolist()
    [[3.0, 0.0], [0.0, 2.5]]
  """
  rule = largest.largest(
      sparsity, least=least, update_every=update_every,
      update_until=update_until, distribution=distribution,
      structure=structure,
  )
  return threshold_by(inner, rule, where=where)


def threshold_by(
    inner: optax.GradientTransformation,
    rule: Algorithm,
    *,
    where: Where | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Returns `hard_threshold` with any rule that makes masks of weights alone.

  Args:
    inner: The optimizer.
    rule: The result of `largest`, or a `join` or `partition` of those and
      `dense()`.
    where: The leaves to sparsify, as `sparsify` takes it.

  Returns:
    The sparse optimizer.
  """
  # A threshold has no randomness; the key fills its place in the state.
  arguments = sparsifying.Arguments.create(inner, rule, where, key=0)
  return optax.GradientTransformationExtraArgs(
      functools.partial(_init, arguments), functools.partial(_update, arguments)
  )


def _init(
    arguments: sparsifying.Arguments, params: PyTree
) -> SparsifyState:
  state = sparsifying.init(arguments, params)
  is_age = lambda x: isinstance(x, age.AgeState)
  if any(map(is_age, jax.tree.leaves(state.inner_state, is_leaf=is_age))):
    raise ValueError(
        'with_age is inside hard_threshold, under which the moments of pruned '
        'weights never restart; leave it out.'
    )
  return state


def _update(
    arguments: sparsifying.Arguments,
    updates: PyTree,
    state: SparsifyState,
    params: PyTree | None = None,
    **extra_args: Any,
) -> tuple[PyTree, SparsifyState]:
  """Updates all weights, then removes all but the largest."""
  check_update('hard_threshold', state, params)
  check_dense(state)
  updates, inner_state = arguments.inner.update(
      updates, state.inner_state, params, **extra_args,
      **age.mask_argument(state.inner_state, state.mask),
  )
  # Ranked as they are applied, rounded to the dtype of the parameters. The rule
  # reads no gradients; the weights fill their place.
  weights = optax.apply_updates(params, updates)
  mask = sparsifying.next_mask(arguments, True, weights, state, weights)
  return sparsifying.remove_pruned(updates, params, mask), state._replace(
      count=optax.safe_increment(state.count), mask=mask,
      inner_state=inner_state,
  )
