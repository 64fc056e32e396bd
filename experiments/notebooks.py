"""Makes the notebooks of experiments/colabs from their scripts.

  python -m experiments.notebooks

Each installs the library from the repository that spdf_jax/extras.py names.
"""

import pathlib
import re

from absl import flags

from experiments.launch import console
from spdf_jax import extras

FOLDER = pathlib.Path(__file__).parent / 'colabs'
_LINE = re.compile(r"^  repository = '.*'$", re.M)
_GITHUB = re.compile(r'https://github\.com/([^/]+/[^/]+?)(\.git)?/?')
_LINK = re.compile(r'^# \[Open in Colab\]\(.*\)\n#\n', re.M)
_TITLE = re.compile(r'^# # .*\n#\n', re.M)
FLAGS = flags.FlagValues()


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, write_all)


def write_all(repository: str = extras.REPOSITORY) -> None:
  """Writes the address of the repository into all scripts and notebooks.

  Args:
    repository: Address of the repository; empty: notebooks install from their
      clone.

  Raises:
    ImportError: jupytext is not installed.
  """
  jupytext = extras.require('jupytext', 'dev')
  for script in sorted(FOLDER.glob('*.py')):
    text = addressed(script.read_text('utf-8'), script.stem, repository)
    script.write_text(text, 'utf-8')
    notebook = script.with_suffix('.ipynb')
    made = jupytext.reads(text, fmt='py:percent')
    if notebook.is_file():  # Ids of cells stay the same.
      for cell, old in zip(made.cells, jupytext.read(notebook).cells):
        cell.id = old.id
    jupytext.write(made, notebook)


def addressed(text: str, name: str, repository: str) -> str:
  """Returns a script that installs from an address and links to Colab.

  Args:
    text: Text of the script.
    name: Name of the notebook.
    repository: Address of the repository, of GitHub for a link; may be empty.

  Returns:
    The script with the address in its first cell and the link below its title.

  Example:
    >>> addressed("  repository = ''", 'quickstart', 'https://example.org/a')
    "  repository = 'https://example.org/a'"
  """
  text = _LINE.sub(f"  repository = '{repository}'", _LINK.sub('', text))
  github = _GITHUB.fullmatch(repository)
  if not github:
    return text
  link = (
      f'https://colab.research.google.com/github/{github[1]}/blob/main/'
      f'experiments/colabs/{name}.ipynb'
  )
  return _TITLE.sub(
      lambda title: f'{title[0]}# [Open in Colab]({link})\n#\n', text, count=1
  )


if __name__ == '__main__':
  console.start(main, FLAGS)
