"""Fills the results of README from the files that were committed.

  python -m experiments.readme

A block names a Markdown file, one of its headings if not all of it is wanted,
and the command that wrote the file:

  <!-- results: experiments/results/claims-tiny/table.md#Choices
  python -m experiments.reproduce --scale=tiny --data=DIR -->
  <!-- end -->

What stands between is written anew; a test compares it with the file.
"""

import pathlib
import re

from absl import app
from absl import logging

from spdf_jax.names import lookup
from spdf_jax.training.metrics import write_atomically

ROOT = pathlib.Path(__file__).parents[1]
_START = '<!-- results: '
_BLOCK = re.compile(
    rf'({_START}(?P<path>[^#\n]+)(#(?P<heading>[^\n]+))?\n'
    r'(?P<command>[^>]+?) -->\n).*?(<!-- end -->)',
    re.S,
)


def fill(text: str, root: pathlib.Path = ROOT) -> str:
  """Writes what every block asks for into it.

  Args:
    text: Markdown with blocks of results.
    root: What their paths are relative to.

  Returns:
    The text with every block filled; itself, if all were.

  Raises:
    ValueError: a block has no command or no end, or its file or heading is not
      there.

  Example:
    >>> fill('no results')
    'no results'
  """
  started, found = text.count(_START), len(_BLOCK.findall(text))
  if started != found:
    raise ValueError(
        f'{started} blocks of results begin and {found} are whole; give each '
        'its command, " -->" after it, and "<!-- end -->".'
    )
  return _BLOCK.sub(lambda block: _filled(block, root), text)


def _filled(block: re.Match[str], root: pathlib.Path) -> str:
  path = root / block['path']
  if not path.is_file():
    raise ValueError(
        f'results {block["path"]!r} are not there; make them: '
        f'{block["command"]}'
    )
  shown = path.read_text('utf-8')
  if block['heading']:
    parts = re.split(r'^#+ (.+)\n', shown, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2]))
    shown = lookup(f'heading of {path.name}', block['heading'], sections)
  command = f'```sh\n{block["command"]}\n```'
  return f'{block[1]}{shown.strip()}\n\n{command}\n{block[5]}'


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  readme = ROOT / 'README.md'
  try:
    write_atomically(readme, fill(readme.read_text('utf-8')))
  except ValueError as error:
    logging.error('%s', error)
    return 1
  return 0


if __name__ == '__main__':
  app.run(main)
