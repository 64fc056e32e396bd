# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint of a phase, by the metric of its early stop."""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

import jax

from spdf_jax.sparsity.rewinding import RewindState
from spdf_jax.training.step import TrainState

PyTree = Any


class Best(NamedTuple):
  """The best evaluation of a phase so far."""

  metric: str
  """The metric of the phase's early stop."""

  value: float
  """The best value of the metric."""

  step: int
  """The step of the evaluation, the earliest of equal ones."""

  def __str__(self) -> str:
    return f'step {self.step}, {self.metric} {self.value:.4g}'

  @property
  def row(self) -> dict[str, float]:
    """The values to log.

    Example:
      >>> Best('target/loss', 2.5, 40).row
      {'best/step': 40, 'best/target/loss': 2.5}
    """
    return {'best/step': self.step, f'best/{self.metric}': self.value}


def read_bests(meta: Mapping[str, Any]) -> dict[str, Best]:
  """Returns the best of each phase from the metadata of a checkpoint.

  Args:
    meta: The metadata; an earlier version wrote it without any best.

  Returns:
    The best by name of the phase.

  Example:
    >>> read_bests({'best': {'tune': ['target/loss', 2.5, 40]}})['tune'].step
    40
  """
  stored = meta['best'] if 'best' in meta else {}
  return {name: Best(*fields) for name, fields in stored.items()}


def describe_best(meta: Mapping[str, Any], step: int) -> str:
  """Describes which best weights a checkpoint holds.

  Args:
    meta: The metadata of the checkpoint.
    step: The step of the checkpoint.

  Returns:
    A phrase; `''` if the checkpoint is neither a best one nor at the end of a
    phase that has one.

  Example:
    >>> meta = {'best': {'tune': ['target/loss', 2.5, 40]},
    ...         'phase_ends': {'tune': 60}}
    >>> describe_best(meta, 60)
    "the best of phase 'tune' (step 40, target/loss 2.5)"
    >>> describe_best(meta, 50)
    ''
  """
  for name, best in read_bests(meta).items():
    if step in (best.step, meta['phase_ends'][name]):
      return f'the best of phase {name!r} ({best})'
  return ''


def step_values(state: TrainState) -> TrainState:
  """Returns the values of a state that a best state does not replace.

  These are all scalars, such as counts, the loss scale, and the snapshot of
  `rewind_weights`; arrays of the parameters, the masks and the optimizer's
  moments are `None`.
  """
  return dataclasses.replace(
      state, params=_scalars(state.params), opt_state=_scalars(state.opt_state)
  )


def _scalars(tree: PyTree) -> PyTree:
  def keep(node):
    if isinstance(node, RewindState):
      return node._replace(inner_state=_scalars(node.inner_state))
    return node if node.ndim == 0 else None

  return jax.tree.map(
      keep, tree, is_leaf=lambda node: isinstance(node, RewindState)
  )


def at_step(best: TrainState, values: TrainState) -> TrainState:
  """Returns a best state with the `step_values` of a later one.

  Schedules and batches are functions of the step, so that a phase that follows
  with the best weights takes its own learning rates and its own batches.

  Args:
    best: The best state, from which parameters, masks and moments are taken.
    values: Result of `step_values` for the later state.

  Returns:
    The state.
  """
  return dataclasses.replace(
      values,
      params=best.params,
      opt_state=jax.tree.map(
          lambda later, x: x if later is None else later,
          values.opt_state, best.opt_state, is_leaf=lambda x: x is None,
      ),
  )
