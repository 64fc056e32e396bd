"""Blocks of results in README, each with the text of a committed file."""

import pathlib
import re

from spdf_jax import names

ROOT = pathlib.Path(__file__).parents[2]
_START = '<!-- results: '
_BLOCK = re.compile(
    rf'(?P<start>{_START}(?P<path>[^#\n]+)(#(?P<heading>[^\n]+))?\n'
    r'(?P<command>[^>]+?) -->\n).*?(?P<end><!-- end -->)',
    re.S,
)


def fill_file(name: str, root: pathlib.Path = ROOT) -> None:
  """Fills the blocks of a Markdown file.

  Args:
    name: Path of the file, relative to `root`.
    root: Folder that the paths of blocks are relative to.

  Raises:
    ValueError: see `fill`.
  """
  path = root / name
  path.write_text(fill(path.read_text('utf-8'), root), 'utf-8')


def fill(text: str, root: pathlib.Path = ROOT) -> str:
  """Fills every block with the text of its file, and the command.

  Args:
    text: Markdown with blocks of results.
    root: Folder that the paths of blocks are relative to.

  Returns:
    The text with filled blocks; unchanged if they were up to date.

  Raises:
    ValueError: a block is incomplete, or its file or heading is missing.

  Example:
    >>> fill('no results')
    'no results'
  """
  if text.count(_START) != len(_BLOCK.findall(text)):
    raise ValueError(
        'a block of results is incomplete; give it a command, then " -->", and '
        'at its end "<!-- end -->".'
    )
  return _BLOCK.sub(lambda block: _filled(block, root), text)


def _filled(block: re.Match[str], root: pathlib.Path) -> str:
  path = root / block['path']
  if not path.is_file():
    raise ValueError(
        f'{path} is missing; write it with: {block["command"]}'
    )
  shown = path.read_text('utf-8')
  if block['heading']:
    parts = re.split(r'^#+ (.+)\n', shown, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2]))
    shown = names.lookup(f'heading of {path.name}', block['heading'], sections)
  command = f'```sh\n{block["command"]}\n```'
  return f'{block["start"]}{shown.strip()}\n\n{command}\n{block["end"]}'
