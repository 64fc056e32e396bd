"""The check of the built site: links, pictures, and that it works offline."""

from html.parser import HTMLParser
import pathlib
from typing import NamedTuple
from urllib.parse import unquote
from urllib.parse import urlsplit

_LOADED = {'img', 'link', 'script', 'iframe', 'source', 'video'}


class Page(HTMLParser):
  """The links of a page, and the anchors that others can link to."""

  def __init__(self, text: str):
    super().__init__()
    self.links: list[tuple[str, str]] = []  # of (tag, address)
    self.anchors: set[str] = set()
    self.feed(text)

  def handle_starttag(
      self, tag: str, attrs: list[tuple[str, str | None]]
  ) -> None:
    """Records the links and the anchor of a tag."""
    for name, value in attrs:
      if name in ('href', 'src') and value:
        self.links.append((tag, value))
      elif name in ('id', 'name') and value:
        self.anchors.add(value)


class Check(NamedTuple):
  """Result of the check."""

  pages: int
  """Number of pages."""

  links: int
  """Number of links and loaded files."""

  broken: list[str]
  """A sentence for each broken link."""


def check(site: pathlib.Path) -> Check:
  """Checks internal links, and that pages load no file from another host.

  Args:
    site: Folder of the site.

  Returns:
    The counts, and the links that lead nowhere or load from another host.
  """
  site = site.resolve()
  pages = {
      path.resolve(): Page(path.read_text('utf-8'))
      for path in sorted(site.rglob('*.html'))
      if '_static' not in path.parts  # Templates of the theme.
  }
  count, broken = 0, []
  for path, page in pages.items():
    for tag, link in page.links:
      count += 1
      reason = _problem(site, path, tag, link, pages)
      if reason:
        broken.append(f'{path.relative_to(site)}: {link} {reason}')
  return Check(len(pages), count, broken)


def _problem(
    site: pathlib.Path,
    path: pathlib.Path,
    tag: str,
    link: str,
    pages: dict[pathlib.Path, Page],
) -> str:
  parts = urlsplit(link)
  if parts.scheme in ('data', 'mailto'):
    return ''
  if parts.scheme or parts.netloc:
    return 'is loaded from another host' if tag in _LOADED else ''
  target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
  if not target.is_relative_to(site):
    return 'leaves the site'
  if not target.is_file():
    return 'is missing'
  anchor = unquote(parts.fragment)
  if anchor and target in pages and anchor not in pages[target].anchors:
    return 'has no such anchor'
  return ''
