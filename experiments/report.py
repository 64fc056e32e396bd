"""Reports on finished runs side by side: losses, costs, figures.

  python -m experiments.report --runs=runs/dense,runs/rigl --output=runs/both

The first run is the baseline. Writes report.md and its figures to the output.
Runs of different lengths are compared at equal tokens, FLOPs and seconds.
"""

from collections.abc import Iterator
import os
import pathlib

from absl import flags

from experiments.launch import console
from spdf_jax import files
from spdf_jax import runs

FLAGS = flags.FlagValues()
_RUNS = flags.DEFINE_list(
    'runs', None, 'Workdirs of runs, the baseline first, separated by commas.',
    required=True, flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder for the report.', required=True, flag_values=FLAGS
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _write, _RUNS.value, _OUTPUT.value)


def _write(workdirs: list[str], output: str) -> Iterator[str]:
  workdirs = [os.path.normpath(path) for path in workdirs]
  if len(set(workdirs)) < len(workdirs):
    raise ValueError(f'runs={",".join(workdirs)} repeats one; give each once.')
  shared = os.path.commonpath([os.path.dirname(path) for path in workdirs])
  labels = [os.path.relpath(path, shared or '.') for path in workdirs]
  with files.reading(
      f'runs={",".join(workdirs)}', 'restore their plan.json and metrics.jsonl.'
  ):
    records = {
        label: runs.read_run(path) for label, path in zip(labels, workdirs)
    }
    path = runs.write_report(pathlib.Path(output), records)
  yield str(path)


if __name__ == '__main__':
  console.start(main, FLAGS)
