"""Fills the results of README from the files that were committed.

  python -m experiments.readme

A block names a Markdown file, a heading of it if not all is wanted, and the
command that made it; what follows is written anew, and a test compares it:

  <!-- results: experiments/results/claims-fair/table.md#Gates
  python -m experiments.reproduce --scale=fair --data=DIR -->
  <!-- end -->
"""

import pathlib
import re

from absl import app
from absl import logging

from spdf_jax.names import lookup

ROOT = pathlib.Path(__file__).parents[1]
_START = '<!-- results: '
_BLOCK = re.compile(
    rf'(?P<start>{_START}(?P<path>[^#\n]+)(#(?P<heading>[^\n]+))?\n'
    r'(?P<command>[^>]+?) -->\n).*?(?P<end><!-- end -->)',
    re.S,
)


def fill(text: str, root: pathlib.Path = ROOT) -> str:
  """Writes into every block what its file says, and the command.

  Args:
    text: Markdown with blocks of results.
    root: What their paths are relative to.

  Returns:
    The text; unchanged, if it was filled before.

  Raises:
    ValueError: a block is not whole, or its file or heading is not there.

  Example:
    >>> fill('no results')
    'no results'
  """
  if text.count(_START) != len(_BLOCK.findall(text)):
    raise ValueError(
        'a block of results is not whole; give it a command, then " -->", and '
        'at its end "<!-- end -->".'
    )
  return _BLOCK.sub(lambda block: _filled(block, root), text)


def _filled(block: re.Match[str], root: pathlib.Path) -> str:
  path = root / block['path']
  if not path.is_file():
    raise ValueError(f'{path} is not there; make it: {block["command"]}')
  shown = path.read_text('utf-8')
  if block['heading']:
    parts = re.split(r'^#+ (.+)\n', shown, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2]))
    shown = lookup(f'heading of {path.name}', block['heading'], sections)
  command = f'```sh\n{block["command"]}\n```'
  return f'{block["start"]}{shown.strip()}\n\n{command}\n{block["end"]}'


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  readme = ROOT / 'README.md'
  try:
    readme.write_text(fill(readme.read_text('utf-8')), 'utf-8')
  except ValueError as error:
    logging.error('%s', error)
    return 1
  return 0


if __name__ == '__main__':
  app.run(main)
