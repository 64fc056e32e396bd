"""Builds the site: guides, notebooks with pictures, API reference, results.

  python -m experiments.docs --output=site

Then open site/index.html; no page needs a server or the network. Notebooks are
executed, which takes some minutes on two cores. build/docs keeps their outputs
for the next build: delete it if the library has changed.
The command fails if a page has a warning, or a link or picture is missing.
"""

import os
import pathlib
import tempfile
import time

from absl import flags

from experiments.launch import console
from experiments.site.links import check
from spdf_jax.extras import require

FLAGS = flags.FlagValues()
_OUTPUT = flags.DEFINE_string(
    'output', 'site', 'Folder for the pages; an earlier site is replaced.',
    flag_values=FLAGS,
)
_FOLDER = pathlib.Path(__file__).parent
_CACHE = _FOLDER.parent / 'build' / 'docs'
_NEEDED = (
    'sphinx.cmd.build', 'sphinx_book_theme', 'sphinx_copybutton',
    'sphinx_design', 'myst_nb', 'ipykernel', 'matplotlib.pyplot', 'equinox',
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, build, pathlib.Path(_OUTPUT.value))


def build(output: pathlib.Path) -> str:
  """Builds and checks the site.

  Args:
    output: Folder for the pages; a site in it is replaced when the new one is
      built and checked.

  Returns:
    A line with the numbers of pages and links, the size and the time.

  Raises:
    ImportError: the extra docs is not installed.
    ValueError: a page has a warning or a broken link, or the folder has other
      files than a site's.
  """
  started = time.monotonic()
  _refuse_other_files(output)
  for name in _NEEDED:
    require(name, 'docs')
  place = output.resolve()
  place.parent.mkdir(parents=True, exist_ok=True)
  # A new folder, so that no page of an earlier build is checked or published.
  with tempfile.TemporaryDirectory(
      dir=place.parent, prefix=f'.{place.name}.'
  ) as folder:
    built = pathlib.Path(folder, 'site')
    render(
        built, _CACHE / 'doctrees',
        f'nb_execution_cache_path={_CACHE / "notebooks"}',
    )
    pages, links, broken = check(built)
    if broken:
      raise ValueError(f'{len(broken)} broken links: {"; ".join(broken)}')
    if place.exists():
      os.replace(place, pathlib.Path(folder, 'old'))
    os.replace(built, place)
  size = sum(path.stat().st_size for path in output.rglob('*.*'))
  return (
      f'{output / "index.html"} is written: {pages} pages, {links:,} links, 0 '
      f'broken, {size / 1e6:.1f} MB, {time.monotonic() - started:.0f} s'
  )


def render(
    output: pathlib.Path, doctrees: pathlib.Path, *settings: str
) -> None:
  """Renders all pages by Sphinx.

  Args:
    output: Folder for the pages.
    doctrees: Folder for the parsed pages.
    *settings: Settings of Sphinx, as `name=value`.

  Raises:
    ImportError: the extra docs is not installed.
    ValueError: a page has a warning.
  """
  status = require('sphinx.cmd.build', 'docs').build_main([
      '-qaE', '--fail-on-warning', '--keep-going', '-b', 'html',
      '-c', str(_FOLDER / 'site'), '-d', str(doctrees),
      *(f'-D{setting}' for setting in settings),
      str(_FOLDER), str(output),
  ])
  if status:
    raise ValueError('the site has the warnings above; correct its pages.')


def _refuse_other_files(output: pathlib.Path) -> None:
  """Raises ValueError if replacing a folder would lose other files."""
  if not output.exists():
    return
  names = set(os.listdir(output)) if output.is_dir() else {output.name}
  # A site has the .buildinfo of Sphinx; a checkout of one has commits to keep.
  if names and ('.buildinfo' not in names or '.git' in names):
    raise ValueError(
        f'output={str(output)!r} has other files than those of a site, which '
        'would be lost; give a new folder.'
    )


if __name__ == '__main__':
  console.start(main, FLAGS)
