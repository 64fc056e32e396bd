# SPDX-License-Identifier: Apache-2.0
"""Dry runs: phases, memory and FLOPs of a recipe before it is run."""

from typing import Any

from spdf_jax.accelerator import native
from spdf_jax.costs.flops import embedding_flops
from spdf_jax.costs.flops import ModelShape
from spdf_jax.costs.flops import OwnShape
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.sparsity_spans import as_ranges
from spdf_jax.costs.sparsity_spans import find_spans
from spdf_jax.costs.totals import totals_of
from spdf_jax.training.own_models import OwnModel
from spdf_jax.training.planned_sparsity import mean_sparsity
from spdf_jax.training.planned_sparsity import planned_sparsities
from spdf_jax.training.planned_sparsity import PlannedSparsity
from spdf_jax.training.recipe import Recipe

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
    recipe: Recipe of the run.
    name: Name of the run.

  Returns:
    JSON-serializable data: name, model sizes and a dropout rate above 0,
    parameters, sparsified parameters, totals against dense training (see
    `totals_of`) and, per phase, steps, tokens, final sparsity of the sparsified
    parameters and of all, FLOPs per step (the mean, that of a dense step, and
    that of the input embedding, which both leave out), mask updates as ranges,
    the spans of constant sparsity, and notes.
  """
  shape = _shape_of(recipe)

  def cost(phase, sparsity, dense_grads):
    return phase.batch_size * training_flops(
        shape, phase.length, sparsity, dense_grads=dense_grads
    )

  found = find_spans(
      recipe.plan,
      lambda step: mean_sparsity(layer_sparsities(recipe, step)),
      cost,
  )
  changes = recipe.plan.update_steps
  hidden = sum(layer.size for layer in layer_sparsities(recipe, 0).values())
  dropout = recipe.model.config.dropout
  phases = []
  for phase, spans in zip(recipe.plan.phases, found):
    start = spans[0].start
    flops = sum(s.steps * s.flops_per_step for s in spans)
    phases.append({
        'name': phase.name,
        'start': start,
        'steps': phase.steps,
        'batch_size': phase.batch_size,
        'length': phase.length,
        'source': phase.data,
        'sparsity': spans[-1].sparsity,
        'overall_sparsity': spans[-1].sparsity * hidden / recipe.parameters,
        'tokens': phase.tokens,
        'flops_per_step': flops / phase.steps,
        'dense_flops_per_step': cost(phase, 0.0, False),
        'embedding_flops_per_step': (
            3 * phase.batch_size * embedding_flops(shape, phase.length)
        ),
        'mask_updates': as_ranges(
            changes[(changes >= start) & (changes < start + phase.steps)]
        ),
        'spans': [span._asdict() for span in spans],
        'notes': phase.notes,
    })
  return {
      'name': name,
      'model': {
          'preset': recipe.config.model.preset, **shape._asdict(),
          **({'dropout': dropout} if dropout else {}),
      },
      'parameters': recipe.parameters,
      'sparsified_parameters': hidden,
      'phases': phases,
      'totals': totals_of(phases),
      'compute': _describe_compute(recipe),
  }


def _shape_of(recipe: Recipe) -> ModelShape | OwnShape:
  model = recipe.model
  if not isinstance(model, OwnModel):
    return shape_of(model.config)
  hidden = sum(layer.size for layer in layer_sparsities(recipe, 0).values())
  return OwnShape(hidden, model.config.d_model, model.config.vocab_size)


def _describe_compute(recipe: Recipe) -> str:
  if recipe.sparse_steps is None:
    return _MULTIPLIES_ZEROS
  return _SKIPS_ZEROS.format(
      kernels=native.kernels(), crossover=recipe.sparse_steps.crossover
  )


def layer_sparsities(recipe: Recipe, step: int) -> dict[str, PlannedSparsity]:
  """Returns the planned sparsity of each layer at a step."""
  return planned_sparsities(
      recipe.plan, step, recipe.abstract_state.params, recipe.where
  )
