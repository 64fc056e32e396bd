"""The papers' figures by name: what each needs, drawn from finished runs."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import os
import pathlib
from typing import Any
from typing import NamedTuple

from spdf_jax.analysis import diagrams
from spdf_jax.analysis import flops_plots
from spdf_jax.analysis import training_plots
from spdf_jax.analysis import tuning_plots
from spdf_jax.analysis.change_plots import plot_mask_changes
from spdf_jax.analysis.mask_changes import is_tracked
from spdf_jax.analysis.plots import plot_layer_sparsity
from spdf_jax.analysis.plots import plot_loss_over_flops
from spdf_jax.analysis.run_groups import by_label
from spdf_jax.analysis.run_groups import describe_pretraining
from spdf_jax.analysis.run_groups import describe_run
from spdf_jax.analysis.run_groups import Group
from spdf_jax.analysis.run_groups import group_runs
from spdf_jax.analysis.run_groups import last_value
from spdf_jax.analysis.run_groups import means
from spdf_jax.analysis.run_groups import pretrained
from spdf_jax.analysis.run_groups import short_count
from spdf_jax.analysis.scored_runs import find_runs
from spdf_jax.analysis.tuning_plots import Tuned
from spdf_jax.analysis.wafer_plots import plot_appendix_c
from spdf_jax.analysis.workdirs import Run
from spdf_jax.names import lookup

ALL = 'all'
_LOSS = 'Loss on the task (nats per token)'


class MissingRunsError(ValueError):
  """A figure needs runs that are not there."""


class Figure(NamedTuple):
  """A figure that can be drawn.

  Attributes:
    shows: What is on it.
    draw: Draws it, from groups of runs if it needs any.
    needs: Which runs; `''`: none.
  """

  shows: str
  draw: Callable[..., Any]
  needs: str = ''


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
      p.panel for p in points if p.way == tuning_plots.SPARSE and p.level
  }
  return tuning_plots.plot_fine_tuning([p for p in points if p.panel in both])


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
        f'{group.task}: '
    )
    measured = {_LOSS: [last_value(run, 'target/loss') for run in group.runs]}
    for scores in group.scores:
      for (task, protocol, metric), value in scores.items():
        if metric == 'bleu':
          measured.setdefault(f'BLEU of {task}, {protocol}', []).append(value)
    points += [
        Tuned(place + name, level, way, tuple(values))
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


def _pretrainings(groups: Sequence[Group]) -> dict[str, Run]:
  return means(by_label(pretrained(groups), describe_pretraining))


def _all_means(groups: Sequence[Group]) -> dict[str, Run]:
  return means(by_label(groups, describe_run))


FIGURES = {
    'mask': Figure('a dense network, a mask, and what it leaves: a diagram',
                   diagrams.plot_mask_diagram),
    'spdf': Figure('sparse pre-training, dense fine-tuning: a diagram',
                   diagrams.plot_spdf_diagram),
    'variable-spdf': Figure('two stages, then fine-tuning: a diagram',
                            diagrams.plot_variable_diagram),
    'flops-bars': Figure("the papers' FLOPs by phase and model",
                         flops_plots.plot_flops_bars),
    'flops-reduction': Figure('how many times fewer FLOPs, over model size',
                              flops_plots.plot_flops_reduction),
    'speedup': Figure('speed-up over zeros on the modeled wafer',
                      plot_appendix_c),
    'fine-tuning': Figure(
        'sparse against dense fine-tuning over zeros in pre-training',
        fine_tunings, 'a sparse model fine-tuned both sparsely and densely',
    ),
    'sawtooth': Figure(
        'iterative pruning: loss and zeros over steps', sawtooth,
        'iterative pruning; a dense run as long, if there is one',
    ),
    'loss-over-flops': Figure(
        'validation loss over training FLOPs', losses_over_flops,
        'pre-training',
    ),
    'rigl-granet': Figure(
        'RigL against GraNet over steps', rigl_and_granet,
        'a run of each',
    ),
    'sparsity': Figure(
        'zeros asked for over training, a bar a run',
        lambda groups: training_plots.plot_levels(_all_means(groups)),
        'any runs',
    ),
    'layers': Figure(
        'zeros found in each layer at the end of each phase',
        layer_sparsity, 'pre-training',
    ),
    'masks': Figure(
        'survival and exploration of masks over steps', mask_changes,
        'masks that move: SET, RigL, GraNet, pruning',
    ),
}
"""By the name of `--figure`."""


class Written(NamedTuple):
  """What `write_figures` did.

  Attributes:
    paths: The files that were written.
    left_out: Why a figure was not drawn, by its name.
    notes: Why runs are on none, a sentence each.
  """

  paths: tuple[pathlib.Path, ...]
  left_out: Mapping[str, str]
  notes: tuple[str, ...]


def write_figures(
    name: str,
    folders: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
) -> Written:
  """Draws a figure, or all that can be drawn, as PNG.

  Args:
    name: A key of `FIGURES`, or `'all'`.
    folders: Workdirs of runs, or folders that hold some; none for figures that
      need no runs.
    output: A folder; made if missing.

  Returns:
    What was written, and what was not.

  Raises:
    MissingRunsError: the one figure asked for needs runs that are not there.
    ValueError: the figure is unknown, or a folder holds no run.
    ImportError: matplotlib is not installed.
  """
  if name != ALL:
    lookup('figure', name, FIGURES | {ALL: None})
  names = list(FIGURES) if name == ALL else [name]
  groups, notes = [], []
  if folders and any(FIGURES[n].needs for n in names):
    found = find_runs(folders)
    groups, notes = group_runs(found.runs)
    notes = [*found.problems, *notes]
  output = pathlib.Path(output)
  paths, left_out = [], {}
  for each in names:
    figure = FIGURES[each]
    try:
      drawn = _draw(figure, groups)
    except MissingRunsError as error:
      if name != ALL:
        raise MissingRunsError(
            f'figure {each!r} needs {figure.needs}, and there is {error}; '
            'give such runs in --runs.'
        ) from None
      left_out[each] = f'{error}; it needs {figure.needs}'
      continue
    output.mkdir(parents=True, exist_ok=True)
    paths.append(output / f'{each}.png')
    drawn.savefig(paths[-1])
  return Written(tuple(paths), left_out, tuple(notes))


def _draw(figure: Figure, groups: Sequence[Group]) -> Any:
  if not figure.needs:
    return figure.draw()
  if not groups:
    raise MissingRunsError('no run')
  return figure.draw(groups)
