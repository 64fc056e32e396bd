"""Fills the result blocks of README from committed files.

  python -m experiments.readme

A block names a Markdown file, a heading of it unless the whole file is meant,
and the command that wrote it. The text up to the end mark is replaced; a test
checks that it is up to date:

  <!-- results: experiments/results/claims-fair/table.md#Gates
  python -m experiments.reproduce --scale=fair --data=DIR -->
  <!-- end -->
"""


from experiments.launch import console
from experiments.papers.readme_blocks import fill_file


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, fill_file, 'README.md')


if __name__ == '__main__':
  console.start(main)
