# SPDX-License-Identifier: Apache-2.0
"""Storage of the state: dense arrays, or the values of kept weights only."""

import dataclasses
import functools
import math
from typing import Any

import jax

from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax.accelerator.pallas.lowering import BLOCKS
from spdf_jax.accelerator.wafer.execute import WAFER
from spdf_jax.packing import is_packed
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.state import stored_mask
from spdf_jax.sparsity.storage import kept_sizes
from spdf_jax.sparsity.storage import pack_state
from spdf_jax.sparsity.storage import unpack_state
from spdf_jax.sparsity.trees import by_name
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.plan import mean_sparsity
from spdf_jax.training.plan import Plan
from spdf_jax.training.plan import planned_sparsities
from spdf_jax.training.step.matmul import ApplyFn
from spdf_jax.training.step.matmul import SparseSteps
from spdf_jax.training.step.optimizers import NamedOptimizer
from spdf_jax.training.step.state import TrainState


def check_storage(
    config: RunConfig, plan: Plan, mesh: jax.sharding.Mesh
) -> None:
  """Raises ValueError if the storage is compact and a run does not support it.

  Args:
    config: The config of the run.
    plan: The phases.
    mesh: Mesh of the run.

  Raises:
    ValueError: the storage is compact, and the optimizer, the model, the matrix
      products, the mesh or a phase needs dense arrays.
  """
  if config.storage != 'compact':
    return
  obstacle = _obstacle(config, plan, mesh)
  if obstacle:
    raise ValueError(f"storage is 'compact' and {obstacle}.")


def choose_storage(
    config: RunConfig,
    plan: Plan,
    mesh: jax.sharding.Mesh,
    sparse_steps: SparseSteps | None,
    params: Any,
    where: Where,
) -> str:
  """Returns the storage of a run, `'dense'` or `'compact'`.

  Args:
    config: The config of the run; with storage `'auto'`, the state is compact
      where the run supports it and the kernels skip zeros.
    plan: The phases.
    mesh: Mesh of the run.
    sparse_steps: Model and threshold of sparse steps; `None`: always dense.
    params: Shapes of the parameters.
    where: The selection of sparsified leaves.
  """
  if config.storage != 'auto':
    return config.storage
  if sparse_steps is None or _obstacle(config, plan, mesh):
    return 'dense'
  least = min(
      mean_sparsity(planned_sparsities(plan, start, params, where))
      for phase, start in zip(plan.phases, plan.starts) if not phase.is_dense
  )
  return 'compact' if least > sparse_steps.crossover else 'dense'


def _obstacle(
    config: RunConfig, plan: Plan, mesh: jax.sharding.Mesh
) -> str | None:
  """Returns what needs dense arrays and the fix, or `None`."""
  if isinstance(config.optimizer, NamedOptimizer):
    return (
        f'the optimizer is {config.optimizer.name!r}, but compact storage '
        "needs AdamW: use storage 'dense', or AdamW"
    )
  if config.adapter is not None:
    return (
        f'adapter.rank is {config.adapter.rank}, and adapters change dense '
        "arrays: use storage 'dense', or no adapter"
    )
  if models.PACKED not in config.model.sizes.features:
    return (
        f'the model {config.model.preset!r} is your own, which does not '
        "support it: use storage 'dense'"
    )
  if config.matmul in (WAFER, *BLOCKS):
    return (
        f'matmul is {config.matmul!r}, which has no products with packed '
        "weights: use storage 'dense'"
    )
  if mesh.size > 1:
    return (
        f'the mesh has {mesh.size} devices; compact storage needs one: use '
        "storage 'dense', or a mesh of one device"
    )
  for phase in plan.phases:
    if phase.thresholds:
      return (
          f'phase {phase.name!r} has hard_threshold, which needs the moments '
          "of all weights: use storage 'dense'"
      )
    if phase.rewind_weights_to is not None:
      return (
          f'phase {phase.name!r} rewinds weights, of which a dense copy is '
          "kept: use storage 'dense'"
      )
  if plan.algorithm.init_state is not None:
    return (
        'an algorithm of the phases has a state, which is stored densely: use '
        "storage 'dense'"
    )
  for span in plan.spans:
    inside = (plan.update_steps > span.start) & (
        plan.update_steps < span.start + span.steps
    )
    skips = create_algorithm(span.algorithm).skip_step_at(0)
    if inside.any() or skips is not False:
      return (
          f'{span} with mask updates ({span.algorithm}): use storage '
          "'dense', or a static sparsity"
      )
  return None


def is_compact_at(storage: str, plan: Plan, step: int) -> bool:
  """Returns whether a step runs on a compact state.

  Steps of dense phases, steps with a mask update, and steps that need the
  gradients of pruned weights run on dense states.

  Args:
    storage: `'dense'` or `'compact'`.
    plan: The phases.
    step: The step, from 0.
  """
  if storage == 'dense' or plan.phase_at(step).is_dense:
    return False
  return step not in plan.update_steps and step not in plan.dense_grads_steps


def is_compact(state: TrainState) -> bool:
  """Returns whether a state holds kept values only."""
  return is_packed(stored_mask(state.opt_state))


def planned_state(
    state: TrainState, plan: Plan, where: Where, step: int
) -> TrainState:
  """Returns the shapes of a compact state, by the sparsities of a plan.

  If the whole model is one group, all its layers are assumed to have the same
  sparsity.

  Args:
    state: Shapes of the dense state.
    plan: The phases.
    where: The selection of sparsified leaves.
    step: A step that runs on a compact state.

  Returns:
    The shapes.
  """
  layers = planned_sparsities(plan, step, state.params, where)

  def size(path, mask):
    name = path_name(path)
    layer = layers.get(name) or layers[f'{name}[0]']
    return round(layer.size * (1 - layer.sparsity))

  sizes = jax.tree_util.tree_map_with_path(
      size, sparsity.get_mask(state.opt_state)
  )
  pack = functools.partial(pack_state, sizes=sizes)
  params, opt_state = jax.eval_shape(pack, state.params, state.opt_state)
  return dataclasses.replace(state, params=params, opt_state=opt_state)


def bytes_per_weight(state: TrainState) -> float:
  """Returns the bytes of state per weight of the sparsified matrices.

  Args:
    state: The state, or its shapes, dense or compact.

  Returns:
    Bytes of parameters, mask and moments, divided by the number of kept and
    pruned weights of the matrices.
  """
  masks = by_name(jax.tree.map(
      lambda m: m.size, jax.eval_shape(sparsity.get_mask, state.opt_state)
  ))
  arrays = by_name({'params': state.params, 'opt_state': state.opt_state})
  taken = sum(
      math.prod(x.shape) * x.dtype.itemsize for name, x in arrays.items()
      if any(f'/{mask}/' in f'/{name}/' for mask in masks)
  )
  return taken / sum(masks.values())


def compact_apply(
    model: models.Model, sparse_steps: SparseSteps | None
) -> ApplyFn:
  """Returns the model of steps on compact states.

  Args:
    model: The model, with the reference lowering.
    sparse_steps: The model with kernels; `None`: there are none.
  """
  # Kernels at any sparsity: other products would first unpack all weights.
  return sparse_steps.apply_fn if sparse_steps else model.apply


def convert(
    state: TrainState, storage: str, shardings: Any = None
) -> TrainState:
  """Converts a state to a storage, bit for bit.

  Args:
    state: The state, dense or compact. Of a dense state that is packed, the
      masks are copied to the host.
    storage: `'dense'` or `'compact'`.
    shardings: Shardings of the converted state; `None`: chosen by jit.

  Returns:
    The state, unchanged if it is stored so already.
  """
  if is_compact(state) == (storage == 'compact'):
    return state
  function: Any = unpack_state
  if storage == 'compact':
    sizes = kept_sizes(sparsity.get_mask(state.opt_state))
    function = functools.partial(pack_state, sizes=sizes)

  def converted(state):
    params, opt_state = function(state.params, state.opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)

  return jax.jit(converted, out_shardings=shardings)(state)
