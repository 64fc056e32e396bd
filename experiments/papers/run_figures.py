"""Figures of finished runs: selection of the runs that each shows."""

from collections.abc import Callable, Sequence
import math
from typing import Any

from experiments.papers import run_groups
from experiments.papers import training_plots
from experiments.papers.run_groups import Group
from experiments.papers.training_plots import Tuned
from spdf_jax.runs import mask_plots
from spdf_jax.runs import plots
from spdf_jax.runs import read
from spdf_jax.runs.read import RunRecord

_LOSS = 'Task loss (nats per token)'


class MissingRunsError(ValueError):
  """A figure needs runs that were not found.

  Every drawing function of this module raises it.
  """


def losses_over_flops(groups: Sequence[Group]) -> Any:
  """Draws validation loss over FLOPs of every pre-training."""
  return plots.plot_loss_over_flops(_pretrainings(
      groups, 'no run with a validation loss',
      lambda run: run.series('validation/loss')[0],
  ))


def sawtooth(groups: Sequence[Group]) -> Any:
  """Draws iterative pruning, and dense models trained on as many tokens."""
  chosen = [
      g for g in run_groups.pretrained(groups)
      if g.ancestry.recipe[0] == 'iterative'
  ]
  if not chosen:
    raise MissingRunsError('no run that was pruned in rounds')
  runs = run_groups.means(
      run_groups.by_label(chosen, run_groups.describe_pretraining)
  )
  dense = [
      g for g in run_groups.pretrained(groups)
      if g.ancestry.recipe[0] == 'dense'
  ]
  as_long = lambda group, other: (
      other.parameters == group.parameters
      and other.ancestry.tokens == group.ancestry.tokens
  )
  controls = {
      label: other.mean
      for label, group in zip(runs, chosen)
      for other in dense if as_long(group, other)
  }
  return training_plots.plot_sawtooth(runs, controls)


def rigl_and_granet(groups: Sequence[Group]) -> Any:
  """Draws RigL against GraNet, at sparsities of both if there are any."""
  groups_of: dict[str, list[Group]] = {'rigl': [], 'granet': []}
  for group in run_groups.pretrained(groups):
    for algorithm in {s.algorithm for s in group.ancestry.pretraining}:
      if algorithm in groups_of:
        groups_of[algorithm].append(group)
  missing = [name for name, held in groups_of.items() if not held]
  if missing:
    raise MissingRunsError(f'no run of {" or ".join(missing)}')
  both = [g for held in groups_of.values() for g in held]
  sparsities = lambda held: {g.ancestry.pretraining[0].sparsity for g in held}
  shared = sparsities(groups_of['rigl']) & sparsities(groups_of['granet'])
  if shared:
    both = [g for g in both if g.ancestry.pretraining[0].sparsity in shared]
  return training_plots.plot_algorithms(
      run_groups.means(run_groups.by_label(both, _first_stage))
  )


def _first_stage(group: Group) -> str:
  """Returns the name of the first stage's algorithm in pre-training."""
  first = group.ancestry._replace(stages=group.ancestry.pretraining[:1])
  return run_groups.describe_pretraining(group._replace(ancestry=first))


def fine_tunings(groups: Sequence[Group]) -> Any:
  """Draws sparse against dense fine-tuning over sparsity in pre-training."""
  points = tuned_points(groups)
  ways = {point.way for point in points if point.sparsity}
  missing = [
      way for way in (training_plots.SPARSE, training_plots.DENSE)
      if way not in ways
  ]
  if missing:
    raise MissingRunsError(f'no {" and no ".join(missing)} of a sparse model')
  both = {
      p[:2] for p in points if p.way == training_plots.SPARSE and p.sparsity
  }
  return training_plots.plot_fine_tuning([p for p in points if p[:2] in both])


def tuned_points(groups: Sequence[Group]) -> list[Tuned]:
  """Returns the results of fine-tuning dense and static pre-trained models.

  Args:
    groups: Groups of runs, see `group_runs`.

  Returns:
    The last loss on the task and, if scored, BLEU of every seed.
  """
  points = []
  for group in groups:
    algorithm, sparsity = group.ancestry.recipe
    if not group.task or algorithm not in ('dense', 'static'):
      continue
    sparse = group.ancestry.tuned_sparsely
    way = training_plots.SPARSE if sparse else training_plots.DENSE
    place = (
        f'{group.ancestry.model} ({run_groups.short_count(group.parameters)} '
        f'parameters), {group.task}'
    )
    measured = {
        _LOSS: [run_groups.last_value(run, 'target/loss') for run in group.runs]
    }
    for scores in group.scores:
      for (task, protocol, metric), value in scores.items():
        if metric == 'bleu':
          measured.setdefault(f'BLEU ({task}, {protocol})', []).append(value)
    points += [
        Tuned(place, name, sparsity, way, tuple(values))
        for name, values in measured.items() if all(map(math.isfinite, values))
    ]
  return points


def mask_changes(groups: Sequence[Group]) -> Any:
  """Draws survival and exploration of weights under mask updates."""
  return mask_plots.plot_mask_updates(_pretrainings(
      groups, 'no run whose masks were tracked', read.is_tracked
  ))


def layer_sparsity(groups: Sequence[Group]) -> Any:
  """Draws the measured sparsity of each layer."""
  return plots.plot_layer_sparsity(_pretrainings(
      groups, 'no run with logged sparsities',
      lambda run: run.series('sparsity/sparsified')[0],
  ))


def sparsities(groups: Sequence[Group]) -> Any:
  """Draws the requested sparsity over training and fine-tuning."""
  return training_plots.plot_sparsities(
      run_groups.means(run_groups.by_label(groups, run_groups.describe_run))
  )


def _pretrainings(
    groups: Sequence[Group], missing: str, condition: Callable[[RunRecord], Any]
) -> dict[str, RunRecord]:
  """Returns the pre-trainings that meet a condition, or raises if none does."""
  runs = run_groups.means(run_groups.by_label(
      run_groups.pretrained(groups), run_groups.describe_pretraining
  ))
  chosen = {label: run for label, run in runs.items() if condition(run)}
  if not chosen:
    raise MissingRunsError(missing)
  return chosen
