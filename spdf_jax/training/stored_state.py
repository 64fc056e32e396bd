"""How a run stores its state: dense arrays, or the values of kept weights."""

import functools
import math
from typing import Any

import jax

from spdf_jax import sparsity
from spdf_jax.packing import PackedMask
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.selection import by_name
from spdf_jax.sparsity.selection import path_name
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.storage import is_packed
from spdf_jax.sparsity.storage import kept_sizes
from spdf_jax.training.plan import asked_levels
from spdf_jax.training.plan import Plan
from spdf_jax.training.step import TrainState


def check_storage(storage: str, plan: Plan, mesh: jax.sharding.Mesh) -> None:
  """Refuses compact storage where it cannot be.

  Args:
    storage: `'dense'` or `'compact'`.
    plan: The phases.
    mesh: The devices that train.

  Raises:
    ValueError: the storage is compact and masks move within a phase, or there
      are several devices.
  """
  if storage == 'dense':
    return
  if mesh.size > 1:
    raise ValueError(
        f"storage is 'compact' and the mesh has {mesh.size} devices; it is for "
        "one: use storage 'dense', or a mesh of one device."
    )
  for span in plan.spans:
    inside = (plan.update_steps > span.start) & (
        plan.update_steps < span.start + span.steps
    )
    skips = create_algorithm(span.sparsity).skip_step_at(0)
    if inside.any() or skips is not False:
      raise ValueError(
          f"storage is 'compact' and {span}, in which masks move "
          f"({span.sparsity}); use storage 'dense', or a static sparsity."
      )


def is_compact_at(storage: str, plan: Plan, step: int) -> bool:
  """Returns whether a step is taken on kept values alone.

  Dense are steps of phases that keep every weight, those that change the mask,
  and those that need the gradients of pruned weights.

  Args:
    storage: `'dense'` or `'compact'`.
    plan: The phases.
    step: The step, from 0.
  """
  if storage == 'dense' or plan.phase_at(step).sparsity == 0:
    return False
  return step not in plan.update_steps and step not in plan.dense_grads_steps


def is_compact(state: TrainState) -> bool:
  """Returns whether a state holds kept values alone."""
  return is_packed(sparsity.stored_mask(state.opt_state))


def planned_state(
    state: TrainState, plan: Plan, where: Where, step: int
) -> TrainState:
  """Returns the shapes of a compact state, by the levels of a plan.

  Args:
    state: Shapes of the dense state.
    plan: The phases.
    where: The selection of sparsified leaves.
    step: A step that is compact. Where the whole model competes, its layers are
      taken to keep equal shares.

  Returns:
    The shapes.
  """
  levels = asked_levels(plan, step, state.params, where)

  def size(path, mask):
    name = path_name(path)
    level = levels.get(name) or levels[f'{name}[0]']
    return round(level.size * (1 - level.sparsity))

  sizes = jax.tree_util.tree_map_with_path(
      size, sparsity.get_mask(state.opt_state)
  )
  pack = functools.partial(sparsity.pack_state, sizes=sizes)
  params, opt_state = jax.eval_shape(pack, state.params, state.opt_state)
  return state.replace(params=params, opt_state=opt_state)


def bytes_per_weight(state: TrainState) -> float:
  """Returns what a weight of a sparsified matrix takes, kept or not.

  Args:
    state: The state, or its shapes, stored either way.

  Returns:
    Bytes of parameters, mask and moments, over the weights of the matrices.
  """
  masks = by_name(jax.tree.map(
      lambda m: math.prod(m.shape), sparsity.stored_mask(state.opt_state),
      is_leaf=lambda x: isinstance(x, PackedMask),
  ))
  arrays = by_name({'params': state.params, 'opt_state': state.opt_state})
  taken = sum(
      math.prod(x.shape) * x.dtype.itemsize for name, x in arrays.items()
      if any(f'/{mask}/' in f'/{name}/' for mask in masks)
  )
  return taken / sum(masks.values())


def to_compact(
    state: TrainState, sharding: jax.sharding.Sharding | None = None
) -> TrainState:
  """Packs a dense state; its masks are read by the host.

  Args:
    state: The state.
    sharding: Where all of the new one lies; by default as jit has it.

  Returns:
    The state, of kept values.
  """
  sizes = kept_sizes(sparsity.get_mask(state.opt_state))
  pack = functools.partial(sparsity.pack_state, sizes=sizes)
  return _convert(pack, state, sharding)


def to_dense(state: TrainState, shardings: Any) -> TrainState:
  """Unpacks a state, bit for bit.

  Args:
    state: Of kept values.
    shardings: Of the dense state.

  Returns:
    The state, of dense arrays.
  """
  return _convert(sparsity.unpack_state, state, shardings)


def _convert(function: Any, state: TrainState, shardings: Any) -> TrainState:
  def convert(state):
    params, opt_state = function(state.params, state.opt_state)
    return state.replace(params=params, opt_state=opt_state)

  return jax.jit(convert, out_shardings=shardings)(state)
