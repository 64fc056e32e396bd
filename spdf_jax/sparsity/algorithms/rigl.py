# SPDX-License-Identifier: Apache-2.0
"""RigL: drop by magnitude and growth by gradient."""

import math
from typing import Any

from spdf_jax import names
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.algorithms import growth
from spdf_jax.sparsity.algorithms import leafwise
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.schedules import Schedule
from spdf_jax.sparsity.schedules import UpdateEvery
from spdf_jax.sparsity.structures import Structure

PyTree = Any


@names.printed_as_call
def rigl(
    sparsity: PyTree,
    *,
    update_every: UpdateEvery,
    update_until: int,
    update_from: int | None = None,
    drop_fraction: float | Schedule = 0.3,
    regrow_dropped: bool = True,
    skip_gradient_step: bool = False,
    grow: growth.Growth | str = 'gradient',
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
    init: MaskMaker | str = 'random',
) -> Algorithm:
  r"""Drops small magnitudes and grows large gradients: RigL.

  At a mask update in step t, a layer with n kept weights drops the
  :math:`\lfloor f_t n \rfloor` of smallest magnitude, with the drop fraction
  :math:`f_t`, and grows as many of largest :math:`|dL/dw|` among all others,
  including the dropped ones (see `regrow_dropped`), or of largest other scores
  (see `grow`). Grown weights start at zero with zero moments. Only mask updates
  need the gradients of pruned weights: `get_dense_grads` returns whether the
  next step does, and `spdf_jax.accelerator.sparse_matmul` computes them where
  its `grad_mask` is `True`.

  With a schedule of the sparsity, every mask update keeps the exact scheduled
  count :math:`n_t`: :math:`\max(\lfloor f_t n \rfloor, n - n_t)` weights are
  dropped, and then weights grow until :math:`n_t` are kept.

  Args:
    sparsity: The fraction of zeros: a number, a schedule such as `cubic(0.5,
      0.8, 700)`, or a tree of those for the sparsified leaves.
    update_every: Number of steps between mask updates, a list of their steps,
      or a function of the step that is true at mask updates.
    update_until: Last step that may be a mask update; in the paper at three
      quarters of training. See `gmp` for schedules of the sparsity.
    update_from: First step that may be a mask update; by default
      `update_every`, if that is a number, and otherwise 0.
    drop_fraction: The drop fraction :math:`f_t`: a number in (0, 1), which
      decays to zero at `update_until` by a cosine as in the paper, or a
      schedule of the step.
    regrow_dropped: Whether a weight just dropped may grow again, as in the
      paper; it then keeps its value.
    skip_gradient_step: Whether a mask update replaces the gradient step, as in
      the paper; by default the step does both.
    grow: Scores of growth: `'gradient'`; `'balanced'`, the gradient in
      relation to those of its row and column, so that growth does not gather in
      few inputs and outputs (see `growth.balanced`); `'random'`; or a function
      `(units) -> scores` of `growth.Units`, with the gradients of all weights,
      or its name, `'package.module:function'`.
    distribution: Distribution of the sparsity over leaves: `uniform`, `erk`,
      `igq`, `model_wide`, or `by_pattern`, with which `sparsity` is a mapping
      of patterns; or its name.
    structure: Structure of the mask, e.g. `structures.block(4, 4)` or `'2:4'`.
    init: Function that makes the initial mask: `(key, params, sparsities) ->
      mask`, such as those of `spdf_jax.init`, or its name: `'random'`,
      `'magnitude'` or `'nonzero'`.

  Returns:
    The algorithm.

  Raises:
    ValueError: an argument is invalid, or no step is a mask update.

  References:
    Evci et al., `RigL <https://arxiv.org/abs/1911.11134>`_, 2020;
    Liu et al., `ITOP <https://arxiv.org/abs/2102.02887>`_, 2021

  Example:
    >>> algorithm = rigl(0.8, update_every=100, update_until=75_000)
    >>> algorithm.dense_grads_at(99), algorithm.dense_grads_at(100)
    (False, True)
  """
  scores = growth.growth_of(grow)
  return leafwise.leafwise(
      sparsity,
      leafwise.update_times_of(
          sparsity, update_every, update_from, update_until
      ),
      lambda units: leafwise.drop_and_grow(
          units,
          leafwise.surviving(units),
          grow_by=scores(units),
          regrow_dropped=regrow_dropped,
      ),
      distribution=distribution,
      structure=structure,
      init=init,
      drop_fraction=decayed(drop_fraction, update_until),
      dense_grads=grow != 'random',
      skip_step=skip_gradient_step,
  )


def decayed(
    drop_fraction: float | Schedule, update_until: int
) -> Schedule:
  """Returns the schedule of a drop fraction; numbers decay by a cosine to 0.

  Args:
    drop_fraction: A number in (0, 1), or a schedule of the step.
    update_until: The step from which the fraction is 0.

  Returns:
    The schedule.

  Raises:
    ValueError: the fraction is out of its range.
  """
  if callable(drop_fraction):
    return drop_fraction
  try:
    fraction = float(drop_fraction)
  except (TypeError, ValueError):
    fraction = math.nan
  if not 0 < fraction < 1:
    raise ValueError(
        f'drop_fraction is {drop_fraction!r}; give a number in (0, 1), or a '
        'schedule of the step.'
    )
  schedules.check_steps('update_until', update_until, 1)
  return schedules.cosine(fraction, update_until)
