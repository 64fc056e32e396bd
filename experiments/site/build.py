"""Builds and checks the pages of the site."""

import pathlib
import time

from experiments.site.links import check
from spdf_jax.extras import require

_ROOT = pathlib.Path(__file__).parents[2]
_CACHE = _ROOT / 'build' / 'docs'
_NEEDED = (
    'sphinx.cmd.build', 'sphinx_book_theme', 'sphinx_copybutton',
    'sphinx_design', 'myst_nb', 'ipykernel', 'matplotlib.pyplot', 'equinox',
)


def build(output: pathlib.Path) -> str:
  """Builds and checks the site.

  Args:
    output: Folder for the pages; files in it are overwritten.

  Returns:
    A line with the numbers of pages and links, the size and the time.

  Raises:
    ImportError: the extra docs is not installed.
    ValueError: a page has a warning or a broken link.
  """
  started = time.monotonic()
  sphinx, *_ = (require(name, 'docs') for name in _NEEDED)
  status = sphinx.build_main([
      '-qaE', '--fail-on-warning', '--keep-going', '-b', 'html',
      '-c', str(_ROOT / 'experiments' / 'site'),
      '-d', str(_CACHE / 'doctrees'),
      '-D', f'nb_execution_cache_path={_CACHE / "notebooks"}',
      str(_ROOT / 'experiments'), str(output),
  ])
  if status:
    raise ValueError('the site has the warnings above; correct its pages.')
  pages, links, broken = check(output)
  if broken:
    raise ValueError(f'{len(broken)} broken links: {"; ".join(broken)}')
  size = sum(path.stat().st_size for path in output.rglob('*.*'))
  return (
      f'{output / "index.html"} is written: {pages} pages, {links:,} links, 0 '
      f'broken, {size / 1e6:.1f} MB, {time.monotonic() - started:.0f} s'
  )
