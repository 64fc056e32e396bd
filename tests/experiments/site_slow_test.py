"""The site in a browser: pages, pictures, mathematics, search, both widths.

Needs the extra docs, playwright and Chromium. `SPDF_SITE` may name a site that
is built already; `SPDF_SHOTS` a folder for screenshots.
"""

import functools
import http.server
import os
import pathlib
import shutil
import threading

import pytest

from experiments import docs

pytestmark = pytest.mark.slow

PAGES = {
    'landing': 'index.html',
    'guide': 'guides/first_run.html',
    'notebook': 'colabs/quickstart.html',
    'reference': 'site/reference/spdf_jax.html',
    'index': 'guides/reference.html',
    'results': 'site/results.html',
}
SIZES = {'wide': (1400, 1000), 'narrow': (390, 844)}
PICTURES = {'landing': 1, 'notebook': 3}
# A picture that lies below is loaded when it is scrolled into view.
MISSING = """async () => {
  for (const image of document.images) {
    image.loading = 'eager';
    await image.decode().catch(() => {});
  }
  return [...document.images].filter(x => !x.naturalWidth).map(x => x.src);
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):

  def log_message(self, *args):
    pass


@pytest.fixture(scope='module')
def address(tmp_path_factory):
  """Serves the site; yields its address."""
  site = os.environ.get('SPDF_SITE')
  if not site:
    pytest.importorskip('sphinx_book_theme')
    site = tmp_path_factory.mktemp('site')
    assert ', 0 broken, ' in docs.build(site)
  handler = functools.partial(Quiet, directory=str(site))
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


@pytest.fixture(scope='module')
def browser():
  sync_api = pytest.importorskip('playwright.sync_api')
  path = shutil.which('chromium')
  if path is None:
    pytest.skip('Chromium is not installed')
  with sync_api.sync_playwright() as playwright:
    launched = playwright.chromium.launch(
        executable_path=path, args=['--no-sandbox']
    )
    yield launched
    launched.close()


@pytest.fixture(params=SIZES)
def page(request, browser, address):
  """Yields an empty page; nothing may fail while it is used."""
  width, height = SIZES[request.param]
  opened = browser.new_page(viewport={'width': width, 'height': height})
  opened.size = request.param
  opened.set_default_timeout(300_000)
  problems = []
  opened.on('pageerror', lambda error: problems.append(str(error)))
  opened.on('console', lambda message: problems.append(message.text)
            if message.type in ('error', 'warning') else None)
  # Leaving a page ends its requests, such as those for excerpts.
  opened.on('requestfailed', lambda sent: problems.append(sent.url)
            if sent.failure != 'net::ERR_ABORTED' else None)
  opened.on('request', lambda sent: problems.append(sent.url)
            if not sent.url.startswith((address, 'data:')) else None)
  yield opened
  opened.close()
  assert problems == []


@pytest.mark.parametrize('name', PAGES)
def test_a_page_renders_without_errors(name, page, address):
  page.goto(f'{address}/{PAGES[name]}', wait_until='networkidle')
  assert page.locator('article h1').first.is_visible()
  assert page.evaluate(MISSING) == []
  assert len(page.locator('main img').all()) >= PICTURES.get(name, 0)
  wider = 'document.documentElement.scrollWidth - window.innerWidth'
  assert page.evaluate(wider) <= 0
  if 'SPDF_SHOTS' in os.environ:
    folder = pathlib.Path(os.environ['SPDF_SHOTS'])
    page.screenshot(path=folder / f'{name}-{page.size}.png')
    page.screenshot(path=folder / f'{name}-{page.size}-full.png',
                    full_page=True)


def test_mathematics_is_drawn(page, address):
  page.goto(f'{address}/{PAGES["reference"]}')
  heights = page.evaluate(
      "[...document.querySelectorAll('math')].map(x => x.clientHeight || "
      'x.getBoundingClientRect().height)'
  )
  assert len(heights) > 20 and min(heights) > 5
  assert '\\mathrm' not in page.locator('main').inner_text()


def test_the_search_of_the_site_finds_rigl(page, address):
  page.goto(f'{address}/index.html')
  page.keyboard.press('Control+k')
  page.keyboard.type('rigl')
  page.keyboard.press('Enter')
  link = page.locator('#search-results a', has_text='spdf_jax.rigl').first
  link.wait_for()
  if 'SPDF_SHOTS' in os.environ:
    folder = pathlib.Path(os.environ['SPDF_SHOTS'])
    page.screenshot(path=folder / f'search-{page.size}.png')
  link.click()
  page.wait_for_url('**/site/reference/spdf_jax.html**')
  assert page.locator('[id="spdf_jax.rigl"]').is_visible()
