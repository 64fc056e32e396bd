"""Figures of finished runs: which runs each of them shows."""

from collections.abc import Sequence
import math
from typing import Any

from experiments.papers import tuning_plots
from experiments.papers.run_groups import by_label
from experiments.papers.run_groups import describe_pretraining
from experiments.papers.run_groups import describe_run
from experiments.papers.run_groups import Group
from experiments.papers.run_groups import last_value
from experiments.papers.run_groups import means
from experiments.papers.run_groups import pretrained
from experiments.papers.run_groups import short_count
from experiments.papers.tuning_plots import Tuned
from spdf_jax.runs import training_plots
from spdf_jax.runs.change_plots import plot_mask_changes
from spdf_jax.runs.mask_changes import is_tracked
from spdf_jax.runs.plots import plot_layer_sparsity
from spdf_jax.runs.plots import plot_loss_over_flops
from spdf_jax.runs.workdirs import Run

_LOSS = 'Task loss (nats per token)'


class MissingRunsError(ValueError):
  """A figure needs runs that are not there.

  Every function here that draws raises it.
  """


def losses_over_flops(groups: Sequence[Group]) -> Any:
  """Draws validation loss over FLOPs of every pre-training."""
  runs = {
      label: run for label, run in _pretrainings(groups).items()
      if run.series('validation/loss')[0]
  }
  if not runs:
    raise MissingRunsError('no run with a validation loss')
  return plot_loss_over_flops(runs)


def sawtooth(groups: Sequence[Group]) -> Any:
  """Draws iterative pruning, and dense models that were trained as long."""
  chosen = [
      g for g in pretrained(groups) if g.lineage.recipe[0] == 'iterative'
  ]
  if not chosen:
    raise MissingRunsError('no run that was pruned in rounds')
  runs = means(by_label(chosen, describe_pretraining))
  dense = [g for g in pretrained(groups) if g.lineage.recipe[0] == 'dense']
  as_long = lambda group, other: (
      other.parameters == group.parameters
      and other.lineage.tokens == group.lineage.tokens
  )
  controls = {
      label: other.mean
      for label, group in zip(runs, chosen)
      for other in dense if as_long(group, other)
  }
  return training_plots.plot_sawtooth(runs, controls)


def rigl_and_granet(groups: Sequence[Group]) -> Any:
  """Draws RigL against GraNet; of several levels those that both have."""
  found: dict[str, list[Group]] = {'rigl': [], 'granet': []}
  for group in pretrained(groups):
    for algorithm in {s.algorithm for s in group.lineage.pretraining}:
      if algorithm in found:
        found[algorithm].append(group)
  missing = [name for name, held in found.items() if not held]
  if missing:
    raise MissingRunsError(f'no run of {" or ".join(missing)}')
  both = [g for held in found.values() for g in held]
  levels = lambda held: {g.lineage.pretraining[0].sparsity for g in held}
  shared = levels(found['rigl']) & levels(found['granet'])
  if shared:
    both = [g for g in both if g.lineage.pretraining[0].sparsity in shared]
  return training_plots.plot_algorithms(means(by_label(both, _first_stage)))


def _first_stage(group: Group) -> str:
  """Names the algorithm that a pre-training began with."""
  first = group.lineage._replace(stages=group.lineage.pretraining[:1])
  return describe_pretraining(group._replace(lineage=first))


def fine_tunings(groups: Sequence[Group]) -> Any:
  """Draws sparse against dense fine-tuning over zeros in pre-training."""
  points = tuned_points(groups)
  ways = {point.way for point in points if point.level}
  missing = [
      way for way in (tuning_plots.SPARSE, tuning_plots.DENSE)
      if way not in ways
  ]
  if missing:
    raise MissingRunsError(f'no {" and no ".join(missing)} of a sparse model')
  both = {
      p[:2] for p in points if p.way == tuning_plots.SPARSE and p.level
  }
  return tuning_plots.plot_fine_tuning([p for p in points if p[:2] in both])


def tuned_points(groups: Sequence[Group]) -> list[Tuned]:
  """Returns what fine-tunings of dense and static pre-trainings came to.

  Args:
    groups: From `group_runs`.

  Returns:
    The last loss on the task, and BLEU where it was scored, of every seed.
  """
  points = []
  for group in groups:
    algorithm, level = group.lineage.recipe
    if not group.task or algorithm not in ('dense', 'static'):
      continue
    sparse = group.lineage.tuned_sparsely
    way = tuning_plots.SPARSE if sparse else tuning_plots.DENSE
    place = (
        f'{group.lineage.model} ({short_count(group.parameters)} parameters), '
        f'{group.task}'
    )
    measured = {_LOSS: [last_value(run, 'target/loss') for run in group.runs]}
    for scores in group.scores:
      for (task, protocol, metric), value in scores.items():
        if metric == 'bleu':
          measured.setdefault(f'BLEU ({task}, {protocol})', []).append(value)
    points += [
        Tuned(place, name, level, way, tuple(values))
        for name, values in measured.items() if all(map(math.isfinite, values))
    ]
  return points


def mask_changes(groups: Sequence[Group]) -> Any:
  """Draws survival and exploration of masks that move."""
  runs = {
      label: run for label, run in _pretrainings(groups).items()
      if is_tracked(run)
  }
  if not runs:
    raise MissingRunsError('no run whose masks were tracked')
  return plot_mask_changes(runs)


def layer_sparsity(groups: Sequence[Group]) -> Any:
  """Draws the zeros found in each layer."""
  runs = {
      label: run for label, run in _pretrainings(groups).items()
      if run.series('sparsity/sparsified')[0]
  }
  if not runs:
    raise MissingRunsError('no run with logged sparsities')
  return plot_layer_sparsity(runs)


def levels(groups: Sequence[Group]) -> Any:
  """Draws the zeros asked for over training, fine-tuning too."""
  return training_plots.plot_levels(means(by_label(groups, describe_run)))


def _pretrainings(groups: Sequence[Group]) -> dict[str, Run]:
  return means(by_label(pretrained(groups), describe_pretraining))
