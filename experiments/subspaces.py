r"""Measures how training rotates each hidden matrix: SPDF's figures 3 and 4.

  python -m experiments.subspaces --before=runs/a@pretrain --after=runs/a \
    --output=subspaces/

  python -m experiments.subspaces --before=runs/dense,runs/sparse \
    --after=runs/dense-dart,hf/sparse-dart --names='0 %,75 %'

A checkpoint is WORKDIR (its latest one), WORKDIR@PHASE (the end of a phase) or
a Hugging Face directory. Several pairs are separated by commas; a single
--before is compared with every --after. Prints the cosine distance of each
module, averaged over layers. In --output, distances.csv has the distances of
every layer, distances.png a heatmap for each pair on a common color scale.
"""

from collections.abc import Iterator
import pathlib

from absl import flags

from experiments.launch import console
from experiments.papers import subspace_plots
from experiments.papers import subspaces
from spdf_jax import files
from spdf_jax.runs import style

FLAGS = flags.FlagValues()
_BEFORE = flags.DEFINE_list(
    'before', None, 'Checkpoints before training.',
    required=True, flag_values=FLAGS,
)
_AFTER = flags.DEFINE_list(
    'after', None, 'Checkpoints after training, in the same order.',
    required=True, flag_values=FLAGS,
)
_NAMES = flags.DEFINE_list(
    'names', [], 'Names of the pairs; by default their paths and sparsity.',
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder for CSV and heatmaps.', flag_values=FLAGS
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _measure)


def _measure() -> Iterator[str]:
  pairs = subspaces.measure_pairs(
      _BEFORE.value, _AFTER.value, _NAMES.value
  )
  names, distances = list(pairs), list(pairs.values())
  yield subspaces.format_distances(names, distances)
  if _OUTPUT.value:
    output = pathlib.Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    files.write_atomically(
        output / 'distances.csv', subspaces.as_csv(pairs)
    )
    figure = subspace_plots.plot_distances(names, distances)
    style.save(figure, output / 'distances.png')
    yield f'{output}/distances.csv and distances.png are written'


if __name__ == '__main__':
  console.start(main, FLAGS)
