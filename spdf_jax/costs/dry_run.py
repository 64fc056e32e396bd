"""What a recipe will do and cost, before it is run."""

import math
from typing import Any

import jax

from spdf_jax.accelerator import native
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.sparsity_spans import as_ranges
from spdf_jax.costs.sparsity_spans import find_segments
from spdf_jax.sparsity import get_mask
from spdf_jax.sparsity import selection
from spdf_jax.training.phases import Phase
from spdf_jax.training.plan import asked_levels
from spdf_jax.training.plan import Level
from spdf_jax.training.plan import mean_sparsity
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.stored_state import bytes_per_weight
from spdf_jax.training.stored_state import is_compact_at
from spdf_jax.training.stored_state import planned_state
from spdf_jax.training.workdir import checkpoint_bytes

_MULTIPLIES_ZEROS = (
    'XLA multiplies the zeros of masked matrices: FLOPs fall, seconds do not.'
)
_SKIPS_ZEROS = (
    'Native kernels ({kernels}) skip the zeros of masked matrices where more '
    'than {crossover:.0%} are zero; XLA runs all other steps.'
)


def describe_plan(recipe: Recipe, name: str) -> dict[str, Any]:
  """Describes a run for its `plan.json`: model, phases and their FLOPs.

  Args:
    recipe: What will be run.
    name: What to call it.

  Returns:
    JSON-able: name, model sizes, parameters, sparsified parameters and, per
    phase, steps, tokens, sparsity at its end, FLOPs per step (the mean, and
    also if it were dense), mask updates as ranges, and the segments of one
    level.
  """
  shape = shape_of(recipe.model.config)

  def cost(phase, sparsity, dense_grads):
    return phase.batch_size * training_flops(
        shape, phase.length, sparsity, dense_grads=dense_grads
    )

  found = find_segments(
      recipe.plan, lambda step: mean_sparsity(_levels_at(recipe, step)), cost
  )
  changes = recipe.plan.update_steps
  phases = []
  for phase, segments in zip(recipe.plan.phases, found):
    start = segments[0].start
    flops = sum(s.steps * s.flops_per_step for s in segments)
    phases.append({
        'name': phase.name,
        'start': start,
        'steps': phase.steps,
        'batch_size': phase.batch_size,
        'length': phase.length,
        'source': phase.data,
        'sparsity': segments[-1].sparsity,
        'tokens': phase.tokens,
        'flops_per_step': flops / phase.steps,
        'dense_flops_per_step': cost(phase, 0.0, False),
        'mask_updates': as_ranges(
            changes[(changes >= start) & (changes < start + phase.steps)]
        ),
        'segments': [segment._asdict() for segment in segments],
    })
  return {
      'name': name,
      'model': {'preset': recipe.config.model.preset, **shape._asdict()},
      'parameters': recipe.parameters,
      'sparsified_parameters': sum(
          level.size for level in _levels_at(recipe, 0).values()
      ),
      'phases': phases,
      'compute': _describe_compute(recipe),
  }


def format_plan(recipe: Recipe, plan: dict[str, Any]) -> str:
  """Writes what `--dry_run` prints.

  Args:
    recipe: What would be run.
    plan: `describe_plan` of it.

  Returns:
    Selection, parameters, sparsity per layer, memory and FLOPs, as text.
  """
  state = recipe.abstract_state
  phases = recipe.plan.phases
  columns = [_phase_levels(recipe, phase) for phase in phases]
  layers = columns[0]
  width = max(map(len, layers))
  cell = max(12, *(len(x) for column in columns for x in column.values()))
  lines = [
      f'{plan["name"]}: {plan["model"]}',
      f'parameters: {plan["parameters"]:,}, of which '
      f'{plan["sparsified_parameters"]:,} in {len(layers)} sparsified layers',
      '',
      f'{"sparsity":<{width}}  {"weights":>10}'
      + ''.join(f'  {phase.name:>{cell}}' for phase in phases),
  ]
  for name, level in _levels_at(recipe, 0).items():
    lines.append(
        f'{name:<{width}}  {level.size:>10,}'
        + ''.join(f'  {column[name]:>{cell}}' for column in columns)
    )
  names = [
      selection.path_name(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
  ]
  chosen = {name.split('[')[0] for name in layers}
  lines += [
      '',
      'never sparsified: ' + ', '.join(n for n in names if n not in chosen),
      '',
      f'{"phase":<14}{"steps":>8}{"batch":>12}{"tokens":>14}'
      f'{"learning rate":>22}{"FLOPs":>12}{"of dense":>10}',
  ]
  for phase, record in zip(phases, plan['phases']):
    rates = [float(phase.learning_rate(s)) for s in (0, phase.steps - 1)]
    lines.append(
        f'{phase.name:<14}{phase.steps:>8,}'
        f'{f"{phase.batch_size} x {phase.length}":>12}{phase.tokens:>14,}'
        f'{f"{rates[0]:.2e} to {rates[1]:.2e}":>22}'
        f'{phase.steps * record["flops_per_step"]:>12.3e}'
        f'{record["flops_per_step"] / record["dense_flops_per_step"]:>10.1%}'
    )
  mib = lambda size: f'{size / 2**20:,.1f} MiB'
  here = lambda tree: mib(_device_bytes(tree))
  masks = _device_bytes(get_mask(state.opt_state))
  sizes = ', '.join(f'{k} {v}' for k, v in recipe.mesh.shape.items())
  where = f' on each of {recipe.mesh.size} devices ({sizes})' if (
      recipe.mesh.size > 1
  ) else ''
  return '\n'.join(lines + [
      '',
      f'memory{where}: parameters {here(state.params)}, gradients '
      f'{here(state.params)}, optimizer '
      f'{mib(_device_bytes(state.opt_state) - masks)}, masks {mib(masks)}; '
      + '; '.join(_step_memory(recipe)),
      *_compact_memory(recipe),
      f'disk: {mib(checkpoint_bytes(state))} per checkpoint at most',
      plan['compute'],
  ])


def _compact_memory(recipe: Recipe) -> list[str]:
  """Says what the state takes where it is stored compactly."""
  storage, lines = recipe.config.storage, []
  for phase in recipe.plan.phases:
    last = recipe.plan.ends[phase.name] - 1
    if not is_compact_at(storage, recipe.plan, last):
      continue
    state = planned_state(
        recipe.abstract_state, recipe.plan, recipe.where, last
    )
    lines.append(
        f'stored compactly in phase {phase.name!r}: '
        f'{checkpoint_bytes(state) / 2**20:,.1f} MiB of parameters, optimizer '
        f'and masks, {bytes_per_weight(state):.2f} bytes per weight of a '
        f'sparsified layer in place of '
        f'{bytes_per_weight(recipe.abstract_state):.0f}'
    )
  return lines


def _device_bytes(tree: Any) -> int:
  """Returns the bytes of a tree that lie on one device."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(tree)
  )


def _describe_compute(recipe: Recipe) -> str:
  if recipe.sparse_steps is None:
    return _MULTIPLIES_ZEROS
  return _SKIPS_ZEROS.format(
      kernels=native.kernels(), crossover=recipe.sparse_steps.crossover
  )


def _levels_at(recipe: Recipe, step: int) -> dict[str, Level]:
  return asked_levels(
      recipe.plan, step, recipe.abstract_state.params, recipe.where
  )


def _phase_levels(recipe: Recipe, phase: Phase) -> dict[str, str]:
  """Writes each layer's level in a phase, from first to last if it changes."""
  end = recipe.plan.ends[phase.name]
  first, last = (
      _levels_at(recipe, step) for step in (end - phase.steps, end - 1)
  )
  return {
      name: f'{level.sparsity:.4%}'
      if level == last[name]
      else f'{level.sparsity:.2%} to {last[name].sparsity:.2%}'
      for name, level in first.items()
  }


def _step_memory(recipe: Recipe) -> list[str]:
  """Compiles the step for every batch shape; nothing is allocated."""
  described = []
  for shape in dict.fromkeys(
      (p.batch_size, p.length) for p in recipe.plan.phases
  ):
    compiled = recipe.compile_step(*shape)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    described.append(
        f'a step of {shape[0]} x {shape[1]} works in another '
        f'{temporary / 2**20:,.1f} MiB'
    )
  return described
