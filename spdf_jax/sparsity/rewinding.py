# SPDX-License-Identifier: Apache-2.0
"""Rewinding of the learning rate, or of weights, at the start of rounds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.algorithms import iterative
from spdf_jax.sparsity.algorithms.iterative import Round
from spdf_jax.sparsity.state import get_mask

PyTree = Any


def rewind_schedule(
    base: optax.Schedule, rounds: Sequence[Round]
) -> optax.Schedule:
  r"""Rewinds a schedule to an earlier step at the start of every round.

  In round :math:`r`, which starts at step :math:`t_r`, the step :math:`t` has
  the value :math:`\mathrm{base}(\mathrm{rewind\_to}_r + t - t_r)`. The last
  round has no end.

  Args:
    base: The schedule to rewind, e.g. of the learning rate.
    rounds: The rounds, as for `iterative`.

  Returns:
    A schedule of the step, counted over all rounds.

  Raises:
    ValueError: there is no round, or a round is invalid.

  References:
    Renda et al., `Comparing Rewinding and Fine-tuning in Neural Network
    Pruning <https://arxiv.org/abs/2003.02389>`_, 2020

  Example:
    >>> rounds = [Round(4), Round(3, 0.2, 2), Round(3, 0.2, 2)]
    >>> sawtooth = rewind_schedule(lambda step: step, rounds)
    >>> [sawtooth(step) for step in range(11)]
    [0, 1, 2, 3, 2, 3, 4, 2, 3, 4, 5]
  """
  rounds = iterative.check_rounds(rounds)
  starts = np.asarray(iterative.round_starts(rounds), np.int32)
  shifts = np.asarray([r.rewind_to for r in rounds], np.int32) - starts

  def schedule(count):
    if schedules.is_host_int(count):
      return base(count + int(shifts[np.sum(count >= starts[1:])]))
    current = jnp.sum(jnp.asarray(count)[..., None] >= starts[1:], axis=-1)
    return base(count + jnp.asarray(shifts)[current])

  return schedule


class RewindState(NamedTuple):
  """State of `rewind_weights`."""

  count: jax.Array  # type: ignore[assignment]  # hides tuple.count
  """Number of steps taken, int32."""

  snapshot: PyTree
  """The parameters to which the kept weights are rewound."""

  inner_state: PyTree
  """State of the wrapped transformation."""


def rewind_weights(
    tx: optax.GradientTransformation,
    boundaries: Sequence[int],
    *,
    snapshot_at: int,
) -> optax.GradientTransformationExtraArgs:
  """Rewinds the kept weights to an early snapshot, e.g. at starts of rounds.

  The step at a boundary rewinds: the algorithm inside `tx` computes the new
  mask from the trained weights, and the step sets the parameters to `mask *
  snapshot`. At this step `tx` receives zeros in place of the gradients, which
  were computed at the weights before rewinding. All parameters are rewound,
  sparsified or not. Moments are not, unless `reset_state` clears them:

  .. code-block:: python

    from spdf_jax.sparsity.algorithms.iterative import round_starts

    starts = round_starts(rounds)  # The first step of every round.
    inner = optax.chain(
        reset_state(optax.scale_by_adam(), starts),
        optax.scale_by_learning_rate(rewind_schedule(base, rounds)),
    )
    tx = sparsify(inner, iterative(rounds), key=0)
    tx = rewind_weights(tx, starts[1:], snapshot_at=1_000)

  Updates are added to parameters, so `p + (s - p)` is exactly 0 for pruned
  weights, but for kept weights it equals `s` only up to rounding: the error is
  at most one unit in the last place of the larger of `|p|` and `|s|`.

  Args:
    tx: The optimizer, `sparsify(…)`; transformations that accumulate or skip
      whole steps, such as `optax.MultiSteps`, wrap the result.
    boundaries: Increasing steps, each of which rewinds, such as the first steps
      of the rounds of `iterative` after the first round.
    snapshot_at: The step before which the parameters are copied: 0 for the
      initial parameters, or a later step before the first boundary.

  Returns:
    The rewinding optimizer; its `update` needs `params`.

  Raises:
    TypeError: `tx` is not an optimizer.
    ValueError: there is no boundary, the boundaries are not increasing, or
      `snapshot_at` is not before the first; on `update`, if `params` is
      missing or `tx` does not contain `sparsify`.

  References:
    Frankle et al., `Stabilizing the Lottery Ticket Hypothesis
    <https://arxiv.org/abs/1903.01611>`_, 2019;
    Renda et al., `Comparing Rewinding and Fine-tuning in Neural Network
    Pruning <https://arxiv.org/abs/2003.02389>`_, 2020

  Example:
    The step at boundary 2 rewinds to the initial parameters:

    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> largest = spdf.static(0.5, init='magnitude')
    >>> tx = spdf.sparsify(optax.sgd(0.5), largest, key=0)
    >>> tx = rewind_weights(tx, [2], snapshot_at=0)
    >>> params = {'w': jnp.array([[8., 0.], [0., 9.]])}
    >>> state = tx.init(params)
    >>> for step in range(3):
    ...   updates, state = tx.update({'w': jnp.ones((2, 2))}, state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   print(step, params['w'].tolist())
    0 [[7.5, 0.0], [0.0, 8.5]]
    1 [[7.0, 0.0], [0.0, 8.0]]
    2 [[8.0, 0.0], [0.0, 9.0]]
  """
  like_params.check_optimizer('tx', tx)
  tx = optax.with_extra_args_support(tx)
  boundaries = schedules.check_boundaries(boundaries)
  schedules.check_steps('snapshot_at', snapshot_at, 0)
  rewinds = np.asarray(boundaries, np.int32)
  if not rewinds.size or snapshot_at >= rewinds[0]:
    raise ValueError(
        f'snapshot_at is {snapshot_at} and boundaries {list(boundaries)}; give '
        'at least one boundary, and a snapshot_at below the first.'
    )

  def init_fn(params):
    # Copies, because state and parameters may be donated together.
    snapshot = jax.tree.map(jnp.copy, params)
    return RewindState(jnp.zeros([], jnp.int32), snapshot, tx.init(params))

  def update_fn(updates, state, params=None, **extra_args):
    if params is None:
      raise ValueError(
          'rewind_weights needs params: call tx.update(grads, opt_state, '
          'params).'
      )
    # With a donated state, this cond does not copy the snapshot.
    snapshot = jax.lax.cond(
        state.count == snapshot_at, lambda: params, lambda: state.snapshot
    )
    again = jnp.any(state.count == rewinds)
    updates = jax.tree.map(
        lambda g: jnp.where(again, jnp.zeros_like(g), g), updates
    )
    updates, inner_state = tx.update(
        updates, state.inner_state, params, **extra_args
    )
    # A select fuses with the update; a cond would materialize the update.
    target = masks.apply_mask(snapshot, get_mask(inner_state))
    updates = jax.tree.map(
        lambda u, s, p: jnp.where(again, s - p, u),
        updates, target, params,
    )
    count = optax.safe_increment(state.count)
    return updates, RewindState(count, snapshot, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
