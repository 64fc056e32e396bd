"""What a recipe will do and cost, before it is run."""

from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from spdf_jax.analysis.flops import ModelShape
from spdf_jax.analysis.flops import training_flops
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.masks import number_kept
from spdf_jax.training.checkpoints import checkpoint_bytes
from spdf_jax.training.recipe import Recipe

MULTIPLIES_ZEROS = (
    'XLA multiplies the zeros of masked matrices: FLOPs fall, seconds do not.'
)


def describe_plan(recipe: Recipe, name: str) -> dict[str, Any]:
  """Describes a run for its `plan.json`: model, phases and their FLOPs.

  Args:
    recipe: What will be run.
    name: What to call it.

  Returns:
    JSON-able: name, model sizes, parameters, sparsified parameters and, per
    phase, steps, tokens, sparsity, and FLOPs per step, also if it were dense.
  """
  config = recipe.model.config
  shape = ModelShape(
      n_layers=config.n_layers,
      d_model=config.d_model,
      n_heads=config.n_heads,
      d_ff=config.d_ff,
      vocab_size=config.vocab_size,
  )
  layers = sparsified_layers(recipe)
  sparsified = sum(layer.size for layer in layers.values())
  phases = []
  for i, (phase, start) in enumerate(
      zip(recipe.plan.phases, recipe.plan.starts)
  ):
    found = sum(x.size * x.levels[i] for x in layers.values()) / sparsified
    flops = lambda s, phase=phase: phase.batch_size * training_flops(
        shape, phase.length, s
    )
    phases.append({
        'name': phase.name,
        'start': start,
        'steps': phase.steps,
        'batch_size': phase.batch_size,
        'length': phase.length,
        'source': phase.data,
        'sparsity': found,
        'tokens': phase.tokens,
        'flops_per_step': flops(found),
        'dense_flops_per_step': flops(0.0),
    })
  return {
      'name': name,
      'model': {'preset': recipe.config['model']['preset'], **shape._asdict()},
      'parameters': recipe.parameters,
      'sparsified_parameters': sparsified,
      'phases': phases,
      'compute': MULTIPLIES_ZEROS,
  }


class Layer(NamedTuple):
  """A sparsified layer."""

  size: int
  """Weights, kept or not."""

  levels: tuple[float, ...]
  """Fraction of zeros at the start of each phase, by exact counts."""


def sparsified_layers(recipe: Recipe) -> dict[str, Layer]:
  """Returns the sparsified layers by path; stacked layers apart.

  Args:
    recipe: What will be run.

  Returns:
    Sizes, and the sparsity that the plan asks for in each phase.
  """
  params = recipe.abstract_state.params
  axes = selection.select(recipe.where, params)
  stacks = selection.to_layers(params, params, axes)
  asked = [
      jax.tree.leaves(recipe.plan.algorithm.sparsity_at(start, stacks))
      for start in recipe.plan.starts
  ]
  layers = {}
  for (path, stack), *levels in zip(
      jax.tree_util.tree_leaves_with_path(stacks), *asked
  ):
    size = int(np.prod(stack.shape[1:]))
    exact = tuple(1 - number_kept(size, level) / size for level in levels)
    for i in range(stack.shape[0]):
      name = selection.path_name(path) + (
          f'[{i}]' if stack.shape[0] > 1 else ''
      )
      layers[name] = Layer(size, exact)
  return layers


def format_plan(recipe: Recipe, plan: dict[str, Any]) -> str:
  """Writes what `--dry_run` prints.

  Args:
    recipe: What would be run.
    plan: `describe_plan` of it.

  Returns:
    Selection, parameters, sparsity per layer, memory and FLOPs, as text.
  """
  state = recipe.abstract_state
  layers = sparsified_layers(recipe)
  phases = recipe.plan.phases
  width = max(map(len, layers))
  lines = [
      f'{plan["name"]}: {plan["model"]}',
      f'parameters: {plan["parameters"]:,}, of which '
      f'{plan["sparsified_parameters"]:,} in {len(layers)} sparsified layers',
      '',
      f'{"sparsity":<{width}}  {"weights":>10}'
      + ''.join(f'  {phase.name:>12}' for phase in phases),
  ]
  for name, layer in layers.items():
    lines.append(
        f'{name:<{width}}  {layer.size:>10,}'
        + ''.join(f'  {level:>12.4%}' for level in layer.levels)
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
  mib = lambda tree: f'{checkpoint_bytes(tree) / 2**20:,.1f} MiB'
  return '\n'.join(lines + [
      '',
      f'memory: parameters {mib(state.params)}, gradients '
      f'{mib(state.params)}, optimizer with masks {mib(state.opt_state)}; '
      + '; '.join(_step_memory(recipe)),
      f'disk: {mib(state)} per checkpoint at most',
      plan['compute'],
  ])


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
