"""Builds the site: guides, notebooks with pictures, API reference, results.

  python -m experiments.docs --output=site

Then open site/index.html; no page needs a server or the network. Notebooks are
executed, which takes some minutes on two cores. build/docs keeps their outputs
for the next build: delete it if the library has changed.
The command fails if a page has a warning, or a link or picture is missing.
"""

import pathlib

from absl import flags

from experiments.launch import console
from experiments.site.build import build

_OUTPUT = flags.DEFINE_string(
    'output', 'site', 'Folder for the pages; an earlier site is replaced.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, build, pathlib.Path(_OUTPUT.value))


if __name__ == '__main__':
  console.start(main)
