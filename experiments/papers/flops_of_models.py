"""FLOPs of models and recipes: inference, phases, shares of fine-tuning."""

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from experiments.papers import published_flops as published
from experiments.papers.readings import parameters_of
from experiments.papers.spdf_readings import pretraining_flops
from experiments.papers.spdf_readings import tuning_flops
from spdf_jax.costs.dry_run import describe_plan
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import ModelShape
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.traced_flops import trace_flops
from spdf_jax.evaluation.markdown import align
from spdf_jax.evaluation.markdown import percent
from spdf_jax.models import PRESETS
from spdf_jax.training.recipe import Recipe


class Inference(NamedTuple):
  """A model that is asked for a forward pass.

  Attributes:
    name: What it is called.
    shape: Its sizes.
    length: Tokens of a sequence.
    sparsity: Fraction of zeros in its hidden matrices.
    parameters: All of them, zeros included.
    sparsified: Parameters of its hidden matrices.
  """

  name: str
  shape: ModelShape
  length: int
  sparsity: float
  parameters: int
  sparsified: int

  @property
  def flops(self) -> float:
    """Of a sequence."""
    return forward_flops(self.shape, self.length, self.sparsity)

  @property
  def kept(self) -> float:
    """Parameters that are not zero."""
    return self.parameters - self.sparsity * self.sparsified


def published_models(table: str) -> list[Inference]:
  """Returns the models of a paper at its sparsities, on 2,048 tokens.

  Args:
    table: A key of `published_flops.TABLES`.

  Returns:
    The models, dense ones first.

  Example:
    >>> [round(model.sparsity, 3) for model in published_models('iterative')]
    [0.0, 0.838]
  """
  levels = {
      'spdf': list(published.PRETRAINING.rows),
      'variable': [
          (name, level) for name in (published.V_SMALL, published.V_LARGE)
          for level in (0.0, 0.75, 0.9)
      ],
      'iterative': [(published.PRUNED, 0.0), *published.ITERATIVE.rows],
  }
  return [
      Inference(
          f'{name} {percent(level)}', shape_of(PRESETS[name]), 2048, level,
          *parameters_of(name),
      )
      for name, level in levels[table]
  ]


def models_of(recipe: Recipe) -> list[Inference]:
  """Returns a recipe's model, dense and as each of its phases leaves it."""
  plan = describe_plan(recipe, 'plan')
  shape = shape_of(recipe.model.config)
  levels = {'dense': 0.0} | {p['name']: p['sparsity'] for p in plan['phases']}
  return [
      Inference(
          name, shape, recipe.model.config.max_length, level,
          plan['parameters'], plan['sparsified_parameters'],
      )
      for name, level in levels.items()
  ]


def format_inference(models: Iterable[Inference]) -> str:
  """Writes what forward passes take, sparse against the same model dense.

  Example:
    >>> print(format_inference(published_models('iterative')[1:]))
    model            tokens  FLOPs/seq  FLOPs/token  fewer   non-zero  fewer
    gpt3-1.3b 83.8%   2,048  2.053e+12    1.002e+09  3.02x  3.035e+08  4.34x
  """
  rows = [(
      'model', 'tokens', 'FLOPs/seq', 'FLOPs/token', 'fewer', 'non-zero',
      'fewer',
  )]
  for model in models:
    dense = model._replace(sparsity=0.0)
    rows.append((
        model.name, f'{model.length:,}', f'{model.flops:.3e}',
        f'{model.flops / model.length:.3e}',
        f'{dense.flops / model.flops:.2f}x', f'{model.kept:.3e}',
        f'{dense.kept / model.kept:.2f}x',
    ))
  return align(rows, '<>>>>>>')


def format_tuning_shares() -> str:
  """Writes SPDF's fine-tuning as a share of its pre-training."""
  rows = [('fine-tuning of pre-training', *published.TASKS)]
  for name, level in published.PRETRAINING.rows:
    flops = pretraining_flops(name, level)
    rows.append((
        f'{name} {percent(level)}',
        *(f'{tuning_flops(name, task) / flops:.2%}' for task in published.TASKS)
    ))
  return align(rows, '<>>>>')


def format_recipe(recipe: Recipe, name: str) -> str:
  """Writes the FLOPs of a recipe's phases, and fine-tuning's share of them.

  Args:
    recipe: What would be run.
    name: What to call it.

  Returns:
    Text.
  """
  phases = describe_plan(recipe, name)['phases']
  rows = [(
      'phase', 'steps', 'tokens', 'sparsity', 'FLOPs/seq', 'FLOPs', 'of dense',
  )]
  for phase in phases:
    rows.append((
        phase['name'], f'{phase["steps"]:,}', f'{phase["tokens"]:,}',
        percent(phase['sparsity']),
        f'{phase["flops_per_step"] / phase["batch_size"]:.3e}',
        f'{_flops(phase):.3e}', f'{_flops(phase) / _dense(phase):.3f}',
    ))
  total, dense = (sum(map(f, phases)) for f in (_flops, _dense))
  rows.append((
      'total', f'{sum(p["steps"] for p in phases):,}',
      f'{sum(p["tokens"] for p in phases):,}', '', '', f'{total:.3e}',
      f'{total / dense:.3f}',
  ))
  lines = [f'{name}: {recipe.parameters:,} parameters', '',
           align(rows, '<>>>>>>')]
  tuning = sum(_flops(p) for p in phases if p['source'] == 'task')
  if 0 < tuning < total:
    lines.append(f'fine-tuning is {tuning / (total - tuning):.2%} of '
                 'pre-training')
  return '\n'.join(lines)


def format_traced(recipe: Recipe) -> str:
  """Writes the formula beside a count over each phase's traced train step.

  The step is traced at the sparsity that its phase ends with.
  """
  rows = [(
      'phase', 'traced/step', 'formula', 'softmax in it', 'difference',
      'recomputed',
  )]
  for phase in describe_plan(recipe, '')['phases']:
    found = trace_flops(
        recipe, phase['batch_size'], phase['length'], phase['sparsity']
    )
    rows.append((
        phase['name'], f'{found.products:.4e}', f'{found.formula:.4e}',
        f'{found.softmax / found.formula:.2%}', f'{found.difference:.2%}',
        f'{found.recomputed:.3e}',
    ))
  return align(rows, '<>>>>>') + (
      '\nTraced are products; the difference is without softmax, which has '
      'none. What\nremat and chunks of the loss compute anew is in neither.'
  )


def _flops(phase: Mapping[str, Any]) -> float:
  return phase['steps'] * phase['flops_per_step']


def _dense(phase: Mapping[str, Any]) -> float:
  return phase['steps'] * phase['dense_flops_per_step']
