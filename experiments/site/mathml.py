"""Mathematics as MathML, which browsers draw without scripts or fonts."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
  writer.body.append(tex2mathml(node.astext()))
  raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
  writer.body.append(f'<div class="math">{_displayed(node)}</div>\n')
  raise nodes.SkipNode


def _displayed(node: nodes.math_block) -> str:
  return tex2mathml(node.astext(), as_block=True)


def setup(app: Sphinx) -> dict[str, Any]:
  """Registers the renderer, and chooses it."""
  app.add_html_math_renderer('mathml', (_inline, None), (_block, None))
  app.config.html_math_renderer = 'mathml'
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
