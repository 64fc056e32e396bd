"""FLOPs of models and recipes: inference, phases, shares of fine-tuning."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from experiments.papers import computed_flops
from experiments.wafer import run_costs
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import ScoreProduct
from spdf_jax.accelerator.wafer.program import with_sparsity
from spdf_jax.costs import flops
from spdf_jax.costs import plan_costs
from spdf_jax.models import PRESETS
from spdf_jax.models import Sizes
from spdf_jax.runs import markdown
from spdf_jax.training.run import Run


class Inference(NamedTuple):
  """Model and sequence length of a forward pass.

  Attributes:
    name: Name in the table.
    shape: Sizes of the model.
    length: Tokens of a sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    parameters: Number of all parameters, zeros included.
    sparsified: Number of parameters in the hidden matrices.
  """

  name: str
  shape: Sizes
  length: int
  sparsity: float
  parameters: int
  sparsified: int

  @property
  def flops(self) -> float:
    """FLOPs of a sequence."""
    return flops.forward_flops(self.shape, self.length, self.sparsity)

  @property
  def kept(self) -> float:
    """Number of parameters that are not zero."""
    return self.parameters - self.sparsity * self.sparsified


def published_models(table: str) -> list[Inference]:
  """Returns the models of a paper at its sparsities, on 2,048 tokens.

  Args:
    table: One of `flops_tables.TABLES`.

  Returns:
    The models, dense ones first.

  Example:
    >>> [round(model.sparsity, 3) for model in published_models('iterative')]
    [0.0, 0.838]
  """
  sparsities = {
      'spdf': list(computed_flops.PRETRAINED),
      'variable': [
          (name, sparsity)
          for name in (computed_flops.V_SMALL, computed_flops.V_LARGE)
          for sparsity in (0.0, 0.75, 0.9)
      ],
      'iterative': [
          (computed_flops.PRUNED, sparsity)
          for sparsity in (0.0, computed_flops.PRUNED_SPARSITY)
      ],
  }
  return [
      Inference(
          f'{name} {markdown.percent(sparsity)}', PRESETS[name], 2048,
          sparsity, *computed_flops.parameters_of(name),
      )
      for name, sparsity in sparsities[table]
  ]


def models_of(run: Run) -> list[Inference]:
  """Returns a run's model, dense and at the sparsity of each phase."""
  plan = plan_costs.describe_plan(run, 'plan')
  shape = run.model.config
  planned = {p['name']: p['sparsity'] for p in plan['phases']}
  sparsities = {'dense': 0.0} | planned
  return [
      Inference(
          name, shape, run.model.config.max_length, sparsity,
          plan['parameters'], plan['sparsified_parameters'],
      )
      for name, sparsity in sparsities.items()
  ]


def format_inference(models: Iterable[Inference]) -> str:
  """Formats the FLOPs of forward passes, against the same model dense.

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
  return markdown.align(rows, '<>>>>>>')


def format_tuning_shares() -> str:
  """Formats the FLOPs of SPDF's fine-tuning as a share of pre-training."""
  rows = [('fine-tuning of pre-training', *computed_flops.SEQUENCES)]
  for name, sparsity in computed_flops.PRETRAINED:
    flops = computed_flops.pretraining_flops(name, sparsity)
    rows.append((
        f'{name} {markdown.percent(sparsity)}',
        *(f'{computed_flops.tuning_flops(name, task) / flops:.2%}'
          for task in computed_flops.SEQUENCES)
    ))
  return markdown.align(rows, '<>>>>')


def format_run(run: Run, name: str) -> str:
  """Formats the FLOPs of a run's phases, and the share of fine-tuning.

  Args:
    run: The run.
    name: Name of the run in the text.

  Returns:
    Text.
  """
  plan = plan_costs.describe_plan(run, name)
  phases, whole = plan['phases'], plan['totals'][0]
  rows = [(
      'phase', 'steps', 'tokens', 'sparsity', 'FLOPs/seq', 'FLOPs', 'of dense',
  )]
  for phase in phases:
    rows.append((
        phase['name'], f'{phase["steps"]:,}', f'{phase["tokens"]:,}',
        markdown.percent(phase['sparsity']),
        f'{phase["flops_per_step"] / phase["batch_size"]:.3e}',
        f'{_flops(phase):.3e}', f'{_flops(phase) / _dense(phase):.3f}',
    ))
  rows.append((
      'total', f'{sum(p["steps"] for p in phases):,}',
      f'{sum(p["tokens"] for p in phases):,}', '', '',
      f'{whole["flops"]:.3e}', f'{whole["of_dense"]:.3f}',
  ))
  lines = [
      f'{name}: {run.parameters:,} parameters', '',
      markdown.align(rows, '<>>>>>>')
  ]
  tuning = sum(_flops(p) for p in phases if p['source'] == 'task')
  if 0 < tuning < whole['flops']:
    lines.append(f'fine-tuning is {tuning / (whole["flops"] - tuning):.2%} of '
                 'pre-training')
  return '\n'.join(lines)


def format_traced(run: Run) -> str:
  """Formats FLOPs of traced train steps beside those of the formula.

  The step of each phase is traced at the sparsity at the end of the phase.
  """
  rows = [(
      'phase', 'traced/step', 'formula', 'softmax in it', 'difference',
      'recomputed',
  )]
  for phase in plan_costs.describe_plan(run, '')['phases']:
    traced = trace_flops(
        run, phase['batch_size'], phase['length'], phase['sparsity']
    )
    rows.append((
        phase['name'], f'{traced.products:.4e}', f'{traced.formula:.4e}',
        f'{traced.softmax / traced.formula:.2%}', f'{traced.difference:.2%}',
        f'{traced.recomputed:.3e}',
    ))
  return markdown.align(rows, '<>>>>>') + (
      '\nThe trace counts matrix products, so the difference excludes the '
      'softmax. Neither\nincludes what remat and the chunked loss recompute.'
  )


def _flops(phase: Mapping[str, Any]) -> float:
  return phase['steps'] * phase['flops_per_step']


def _dense(phase: Mapping[str, Any]) -> float:
  return phase['steps'] * phase['dense_flops_per_step']


class TracedFlops(NamedTuple):
  """FLOPs of one train step on a batch, counted in two ways.

  Attributes:
    products: FLOPs of all products in the program, except recomputed ones.
    recomputed: FLOPs of products that the backward pass recomputes to save
      memory (`remat`, or a loss in chunks); not part of the formula.
    formula: Result of `training_flops` for the batch.
    softmax: Part of `formula` for the softmax of attention, which has no
      products.
  """

  products: float
  recomputed: float
  formula: float
  softmax: float

  @property
  def difference(self) -> float:
    """Excess of the formula over the program, relative to the formula."""
    return (self.formula - self.softmax - self.products) / self.formula


def trace_flops(
    run: Run,
    batch_size: int,
    length: int,
    sparsity: float = 0.0,
    *,
    dense_grads: bool = False,
) -> TracedFlops:
  """Counts the FLOPs of a run's train step, by the program and the formula.

  Args:
    run: The run; the step is traced from shapes.
    batch_size: Number of sequences.
    length: Number of tokens of each sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether gradients of pruned weights are computed.

  Returns:
    Both counts.

  Raises:
    ValueError: `sparsity` is outside [0, 1].
  """
  shape = run.model.config
  formula = batch_size * flops.training_flops(
      shape, length, sparsity, dense_grads=dense_grads
  )
  program = with_sparsity(
      run_costs.trace_step(run, batch_size, length),
      lambda layer: sparsity,
      dense_grads=dense_grads,
  )
  return TracedFlops(
      products=product_flops(program, ('forward', 'backward')),
      recomputed=product_flops(program, ('recompute',)),
      formula=formula,
      softmax=3 * batch_size * flops.softmax_flops(shape, length),
  )


def product_flops(
    program: Program,
    phases: tuple[str, ...] = ('forward', 'backward', 'recompute'),
) -> float:
  """Returns the FLOPs of a program's products; only kept weights count.

  Args:
    program: A traced program; the costliest branch of each cond with an unknown
      predicate counts.
    phases: Passes whose operations are counted.

  Returns:
    FLOPs; a multiply-add counts as two.

  Example:
    >>> from spdf_jax.accelerator.wafer.program import Operation
    >>> product = Product(8, 4, 4, sparsity=0.75)
    >>> product_flops(Program((Operation('h', 'p', 'forward', product),)))
    64.0
  """
  total = 0.0
  for operation in program.operations:
    if operation.phase not in phases:
      continue
    work = operation.work
    if isinstance(work, Product):
      total += 2 * operation.count * work.tokens * work.kept
    elif isinstance(work, ScoreProduct):
      total += 2 * operation.count * work.multiply_adds
  for branches in program.branches:
    total += branches.count * max(
        product_flops(branch, phases) for branch in branches.programs
    )
  return total
