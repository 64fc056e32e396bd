"""Draws the papers' figures: diagrams, FLOPs, and plots of finished runs.

  python -m experiments.figures --figure=flops-bars --output=figures/
  python -m experiments.figures --figure=all --runs=runs/,sweeps/ \\
    --output=figures/

Runs, and the scores that experiments.evaluate and sweeps wrote, are found at
any depth of the folders. Seeds of one config are averaged. Of configs that
differ only in a learning rate or a schedule, the figures show the one with the
most seeds, and of those the one with the lowest loss. `all` draws every figure
that these runs suffice for, and prints which it left out, and why.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
from typing import Any, NamedTuple

from absl import flags

from experiments.launch import console
from experiments.papers import diagrams
from experiments.papers import flops_plots
from experiments.papers import run_figures
from experiments.papers import run_groups
from experiments.papers.run_figures import MissingRunsError
from experiments.papers.run_groups import Group
from experiments.scores import scored_runs
from experiments.wafer import plots
from spdf_jax import files
from spdf_jax.names import lookup
from spdf_jax.runs import style

ALL = 'all'


class Figure(NamedTuple):
  """A figure that can be drawn.

  Attributes:
    shows: Content of the figure.
    draw: Function that draws it, of groups of runs if it needs any.
    needs: Runs that it needs; `''`: none.
  """

  shows: str
  draw: Callable[..., Any]
  needs: str = ''


FIGURES = {
    'mask': Figure('a dense network, a mask, and the sparse network: a diagram',
                   diagrams.plot_mask_diagram),
    'spdf': Figure('sparse pre-training, dense fine-tuning: a diagram',
                   diagrams.plot_spdf_diagram),
    'variable-spdf': Figure('two stages, then fine-tuning: a diagram',
                            diagrams.plot_variable_diagram),
    'flops-bars': Figure("the papers' FLOPs by phase and model",
                         flops_plots.plot_flops_bars),
    'flops-reduction': Figure('reduction of FLOPs over model size',
                              flops_plots.plot_flops_reduction),
    'speedup': Figure('speed-up over sparsity on the modeled wafer',
                      plots.plot_appendix_c),
    'fine-tuning': Figure(
        'sparse against dense fine-tuning over the sparsity of pre-training',
        run_figures.fine_tunings,
        'a sparse model fine-tuned both sparsely and densely',
    ),
    'sawtooth': Figure(
        'iterative pruning: loss and sparsity over steps',
        run_figures.sawtooth,
        'iterative pruning, optionally a dense run of the same length',
    ),
    'loss-over-flops': Figure(
        'validation loss over training FLOPs', run_figures.losses_over_flops,
        'pre-training',
    ),
    'rigl-granet': Figure(
        'RigL against GraNet over steps', run_figures.rigl_and_granet,
        'a run of each',
    ),
    'sparsity': Figure(
        'requested sparsity over training, one bar per run',
        run_figures.sparsities, 'any run',
    ),
    'layers': Figure(
        'measured sparsity of each layer at the end of each phase',
        run_figures.layer_sparsity, 'pre-training',
    ),
    'masks': Figure(
        'survival and exploration of masks over steps',
        run_figures.mask_changes,
        'runs with mask updates: SET, RigL, GraNet, pruning',
    ),
}
"""Figures by the name for `--figure`."""


class Written(NamedTuple):
  """Result of `write_figures`.

  Attributes:
    paths: Files that were written.
    left_out: Reasons why figures were not drawn, by name.
    notes: Reasons why runs are in no figure, a sentence each.
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
    folders: Workdirs of runs, or folders that contain some; empty for figures
      that need no runs.
    output: Output folder; created if missing.

  Returns:
    Files that were written, and reasons for those that were not.

  Raises:
    MissingRunsError: the requested figure needs runs that were not found.
    ValueError: the figure is unknown, or a folder contains no run.
    ImportError: matplotlib is not installed.
  """
  if name != ALL:
    lookup('figure', name, FIGURES | {ALL: None})
  names = list(FIGURES) if name == ALL else [name]
  groups, notes = [], []
  if folders and any(FIGURES[n].needs for n in names):
    scored = scored_runs.find_runs(folders)
    with _reading(folders):
      groups, notes = run_groups.group_runs(scored.runs)
    notes = [*scored.problems, *notes]
  output = pathlib.Path(output)
  paths, left_out = [], {}
  for each in names:
    figure = FIGURES[each]
    with _reading(folders):
      drawn = _drawn(figure, groups)
    if isinstance(drawn, MissingRunsError):
      if name != ALL:
        raise MissingRunsError(
            f'figure {each!r} needs {figure.needs}, and there is {drawn}; '
            'give such runs in --runs.'
        )
      left_out[each] = f'{drawn}; it needs {figure.needs}'
      continue
    output.mkdir(parents=True, exist_ok=True)
    paths.append(output / f'{each}.png')
    style.save(drawn, paths[-1])
  return Written(tuple(paths), left_out, tuple(notes))


def _reading(
    folders: Sequence[str | os.PathLike[str]],
) -> contextlib.AbstractContextManager[None]:
  place = f'--runs={",".join(map(os.fspath, folders))}'
  return files.reading(place, 'restore their files.')


def _drawn(figure: Figure, groups: Sequence[Group]) -> Any:
  """Returns a drawn figure, or the error for runs that it needs."""
  if not figure.needs:
    return figure.draw()
  if not groups:
    return MissingRunsError('no run')
  try:
    return figure.draw(groups)
  except MissingRunsError as error:
    return error


FLAGS = flags.FlagValues()
_FIGURE = flags.DEFINE_string(
    'figure', None, f'{ALL}, or one of:\n' + '\n'.join(
        f'{name}: {figure.shows}'
        + (f' (needs {figure.needs})' if figure.needs else '')
        for name, figure in FIGURES.items()
    ),
    required=True, flag_values=FLAGS,
)
_RUNS = flags.DEFINE_list(
    'runs', [], 'Workdirs, or folders that contain some, separated by commas.',
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder for FIGURE.png.', required=True, flag_values=FLAGS
)
_MOST = 20
"""Number of notes that are printed at most."""


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _draw)


def _draw() -> Iterator[str]:
  written = write_figures(_FIGURE.value, _RUNS.value, _OUTPUT.value)
  yield from map(str, written.paths)
  for name, reason in written.left_out.items():
    yield f'left out {name}: {reason}'
  for note in written.notes[:_MOST]:
    yield f'not shown: {note}'
  if len(written.notes) > _MOST:
    yield f'not shown: and {len(written.notes) - _MOST} more'


if __name__ == '__main__':
  console.start(main, FLAGS)
