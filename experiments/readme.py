"""Fills the result blocks of README, and makes the notebooks.

  python -m experiments.readme

A block names a Markdown file, a heading of it unless the whole file is meant,
and the command that wrote it. The text up to the end mark is replaced; a test
checks that it is up to date:

  <!-- results: experiments/results/claims-fair/table.md#Gates
  python -m experiments.reproduce --scale=fair --data=DIR -->
  <!-- end -->

Each notebook is made from its script, and installs the library from the
repository that spdf_jax/extras.py names.
"""

from experiments.launch import console
from experiments.papers import readme_blocks
from experiments.site import notebooks


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _write)


def _write() -> None:
  readme_blocks.fill_file('README.md')
  notebooks.write_all()


if __name__ == '__main__':
  console.start(main)
