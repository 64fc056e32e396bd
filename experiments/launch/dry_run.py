"""Text of a plan, as `--dry_run` prints it."""

import collections
from collections.abc import Iterable, Sequence
import itertools
import math
import operator
import re
from typing import Any

import jax
import numpy as np

from spdf_jax import sparsity
from spdf_jax.costs import plan_costs
from spdf_jax.runs import markdown
from spdf_jax.sparsity import trees
from spdf_jax.training.checkpoints import workdir
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.run import Run
from spdf_jax.training.step import storage

_FLOPS_NOTE = """\
Of dense: against the same steps without sparsity. With embedding: the lookup of
inputs is counted as a product. Overall sparsity: zeros over all parameters at
the end of the phase. The sparsity of totals is the mean over tokens."""
_SHOWN_AS_WHOLE = 0.9995  # Rounded to 100.0% in the table.
_FIRST_STEP = """\
A dense phase after a sparse one is below 100% of dense, because its first step
still computes with the mask."""


def format_plan(run: Run, name: str) -> str:
  """Formats the plan of a run: sparsity per layer, phases, memory, FLOPs.

  Args:
    run: The run.
    name: Name of the run.

  Returns:
    Several lines of text. Numbered layers of equal sparsity share a line.
  """
  plan = plan_costs.describe_plan(run, name)
  sizes = ', '.join(f'{k} {v}' for k, v in plan['model'].items())
  layers = plan_costs.layer_sparsities(run, 0)
  return '\n'.join([
      f'{name}: {sizes}',
      f'parameters: {plan["parameters"]:,}, of which '
      f'{plan["sparsified_parameters"]:,} in {len(layers)} sparsified layers',
      '',
      _table(_layer_rows(run)),
      '',
      'never sparsified: ' + ', '.join(_dense_leaves(run, layers)),
      '',
      _table(_phase_rows(run)),
      *(f'{phase["name"]}: {note}' for phase in plan['phases']
        for note in phase['notes']),
      '',
      _table(_flops_rows(plan)),
      _FLOPS_NOTE,
      *([_FIRST_STEP] if _grows_dense(plan) else []),
      *_budgets(plan),
      '',
      _memory(run),
      *_compact_memory(run),
      _disk(run),
      plan['compute'],
      'seconds: experiments.plan models GPUs, and experiments.simulate a wafer',
  ])


def _table(rows: Sequence[Sequence[str]]) -> str:
  return markdown.align(rows, '<' + '>' * (len(rows[0]) - 1))


def _size(number: float) -> str:
  """Formats bytes in the unit that keeps the number below 1024."""
  units = ('KiB', 'MiB', 'GiB', 'TiB')
  power = min(max(int(math.log2(max(number, 1)) // 10), 1), len(units))
  return f'{number / 2**(10 * power):.1f} {units[power - 1]}'


def _numbered_together(name: str) -> str:
  """Replaces numbers in a path by `*`, so that repeated layers are equal."""
  return re.sub(r'\d+', '*', name)


def _layer_rows(run: Run) -> list[list[str]]:
  phases = run.plan.phases
  columns = [_phase_sparsities(run, phase) for phase in phases]
  rows = collections.Counter(
      (_numbered_together(name), f'{layer.size:,}',
       *(column[name] for column in columns))
      for name, layer in plan_costs.layer_sparsities(run, 0).items()
  )
  return [
      ['sparsity of', 'layers', 'weights each', *(p.name for p in phases)],
      *([name, str(count), *cells] for (name, *cells), count in rows.items()),
  ]


def _phase_sparsities(run: Run, phase: Phase) -> dict[str, str]:
  """Formats the sparsity of each layer in a phase; a range if it changes."""
  end = run.plan.ends[phase.name]
  first, last = (
      plan_costs.layer_sparsities(run, step)
      for step in (end - phase.steps, end - 1)
  )
  return {
      name: f'{layer.sparsity:.2%}' if layer == last[name]
      else f'{layer.sparsity:.2%} to {last[name].sparsity:.2%}'
      for name, layer in first.items()
  }


def _dense_leaves(run: Run, layers: Iterable[str]) -> list[str]:
  names = [
      trees.path_name(path) for path, _ in
      jax.tree_util.tree_leaves_with_path(run.programs.abstract_state.params)
  ]
  chosen = {name.split('[')[0] for name in layers}
  kinds = collections.Counter(
      _numbered_together(name) for name in names if name not in chosen
  )
  return [f'{n} {kind}' if n > 1 else kind for kind, n in kinds.items()]


def _phase_rows(run: Run) -> list[list[str]]:
  rows = [[
      'phase', 'steps', 'batch', 'tokens', 'learning rate: first, peak, last'
  ]]
  for phase in run.plan.phases:
    rates_of = jax.jit(jax.vmap(phase.learning_rate))
    all_rates = np.asarray(rates_of(np.arange(phase.steps)))
    rates = all_rates[0], all_rates.max(), all_rates[-1]
    rows.append([
        phase.name,
        f'{phase.steps:,}',
        f'{phase.batch_size} x {phase.length}',
        f'{phase.tokens:,}',
        ', '.join(f'{rate:.2e}' for rate in rates),
    ])
  return rows


def _flops_rows(plan: dict[str, Any]) -> list[list[str]]:
  """Formats FLOPs and sparsity of each phase, and in total."""
  rows = [[
      'training', 'FLOPs', 'of dense', 'with embedding', 'sparsity', 'overall'
  ]]
  totals = [total for total in plan['totals'] if _same_steps(total)]
  for record in [*plan['phases'], *totals]:
    is_phase = 'overall_sparsity' in record
    total = plan_costs.total_of([record], [record]) if is_phase else record
    sparsity = record['sparsity' if is_phase else 'effective_sparsity']
    rows.append([
        record['name'],
        f'{total["flops"]:.3e}',
        f'{total["of_dense"]:.1%}',
        f'{total["of_dense_with_embedding"]:.1%}',
        f'{sparsity:.2%}',
        f'{record["overall_sparsity"]:.2%}' if is_phase else '',
    ])
  return rows


def _grows_dense(plan: dict[str, Any]) -> bool:
  """Returns whether the table shows a dense phase after a sparse one."""
  return any(
      before['sparsity'] and not phase['sparsity']
      and plan_costs.total_of([phase], [phase])['of_dense'] < _SHOWN_AS_WHOLE
      for before, phase in itertools.pairwise(plan['phases'])
  )


def _disk(run: Run) -> str:
  each = workdir.checkpoint_bytes(run.programs.abstract_state)
  number = run.most_checkpoints
  return (
      f'disk: {_size(each)} per checkpoint at most, {_size(number * each)} for '
      f'up to {number} at a time'
  )


def _same_steps(total: dict[str, Any]) -> bool:
  return total['phases'] == total['against']


def _budgets(plan: dict[str, Any]) -> list[str]:
  """Describes totals against dense training for the steps of fewer phases."""
  return [
      f'Against dense training for the steps of {" and ".join(t["against"])} '
      f'alone, {t["name"]} takes\n{t["of_dense"]:.1%} of the FLOPs, '
      f'{t["of_dense_with_embedding"]:.1%} with embedding'
      + (
          f'; effective sparsity {t["effective_sparsity"]:.2%},\n'
          'the fraction of the FLOPs of hidden matrices that it saves.'
          if 0 < t['effective_sparsity'] < 1 else '.'
      )
      for t in plan['totals'] if not _same_steps(t)
  ]


def _memory(run: Run) -> str:
  state, mesh = run.programs.abstract_state, run.programs.mesh
  params = _device_bytes(state.params)
  masks = _device_bytes(sparsity.get_mask(state.opt_state))
  optimizer = _device_bytes(state.opt_state) - masks
  temporaries = _step_memory(run)
  total = params + optimizer + masks + max(temporaries.values())
  axes = ', '.join(f'{k} {v}' for k, v in mesh.shape.items())
  where = f' on each of {mesh.size} devices ({axes})' if mesh.size > 1 else ''
  return (
      f'memory{where}: {_size(total)} in all: parameters {_size(params)}, '
      f'optimizer {_size(optimizer)}, masks {_size(masks)}, and with gradients '
      f'of {_size(params)} among them, '
      + '; '.join(
          f'temporaries of a step of {batch_size} x {length}: {_size(size)}'
          for (batch_size, length), size in temporaries.items()
      )
      + (
          f'\nMost are temporaries; {_lowered_by(run)} lower them.'
          if 2 * max(temporaries.values()) > total > 2**30 else ''
      )
  )


def _lowered_by(run: Run) -> str:
  """Names the fields that would lower the memory of temporaries."""
  unused = ['more micro_batches']
  if getattr(run.config.model.sizes, 'remat', 'full') != 'full':
    unused.append("model.remat='full'")
  if not run.config.loss.chunk:
    unused.append('loss.chunk')
  return ', '.join(unused)


def _step_memory(run: Run) -> dict[tuple[int, int], int]:
  """Returns the temporary bytes of the compiled step, by batch shape.

  A shape with no more tokens and no longer sequences than another needs less,
  so it is not compiled.
  """
  shapes = dict.fromkeys((p.batch_size, p.length) for p in run.plan.phases)
  sizes = {shape: (math.prod(shape), shape[1]) for shape in shapes}
  largest = [
      shape for shape in shapes if not any(
          other != shape and all(map(operator.ge, sizes[other], sizes[shape]))
          for other in shapes
      )
  ]
  compiled = {shape: run.programs.compile_step(*shape) for shape in largest}
  return {
      shape: step.memory_analysis().temp_size_in_bytes
      for shape, step in compiled.items()
  }


def _compact_memory(run: Run) -> list[str]:
  """Describes the size of the state in phases that store it compactly."""
  lines = []
  for phase in run.plan.phases:
    last = run.plan.ends[phase.name] - 1
    if not storage.is_compact_at(
        run.programs.storage, run.plan, last
    ):
      continue
    dense = run.programs.abstract_state
    state = storage.planned_state(dense, run.plan, run.model.where, last)
    each = storage.bytes_per_weight
    lines.append(
        f'stored compactly in phase {phase.name!r}: '
        f'{_size(workdir.checkpoint_bytes(state))} of parameters, optimizer '
        'and masks, '
        f'{each(state):.2f} bytes per weight of a sparsified layer instead of '
        f'{each(dense):.0f}'
    )
  return lines


def _device_bytes(tree: Any) -> int:
  """Returns the bytes of a tree's shards on one device."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(tree)
  )
