"""`plot_masks` shows the density of blocks, the layers in their places."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers
import pytest

from spdf_jax.runs.mask_plots import block_density
from spdf_jax.runs.mask_plots import plot_masks

pytestmark = pytest.mark.ci


def panels(figure):
  """Returns (title, percentage, image) of every panel with one, in order."""
  return [
      (ax.get_title(), ax.texts[0].get_text(), np.asarray(
          ax.images[0].get_array()
      ))
      for ax in figure.axes if ax.images and ax.texts
  ]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
def test_blocks_hold_every_weight_once(inputs, outputs, seed):
  layer = np.random.default_rng(seed).random((inputs, outputs)) < 0.3
  density = block_density(layer)
  assert density.shape == (min(inputs, 64), min(outputs, 64))
  rows = np.diff([r * inputs // min(inputs, 64) for r in range(64)][:inputs],
                 append=inputs)
  columns = np.diff(
      [c * outputs // min(outputs, 64) for c in range(64)][:outputs],
      append=outputs,
  )
  kept = density * np.outer(rows, columns)
  np.testing.assert_allclose(kept.sum(), layer.sum(), rtol=1e-12)
  np.testing.assert_allclose(kept, np.round(kept), atol=1e-9)


def test_blocks_are_where_their_weights_are():
  layer = np.zeros((128, 256), bool)
  layer[0, 0] = layer[2:4, 4:8] = layer[-1, -1] = True
  density = block_density(layer)
  assert density.shape == (64, 64)
  assert density[0, 0] == density[-1, -1] == 1 / 8
  assert density[1, 1] == 1 and np.count_nonzero(density) == 3


def test_repeated_layers_share_a_row_in_their_order():
  mask = {
      f'h_{i}': {'wi': jnp.arange(64).reshape(8, 8) < i, 'bias': None}
      for i in range(12)
  }
  figure = plot_masks(mask)
  assert figure.axes[0].get_ylabel() == 'h_*/wi'
  found = panels(figure)
  assert [title for title, _, _ in found] == [str(i) for i in range(12)]
  assert [text for _, text, _ in found][:3] == ['100%', '98.4%', '96.9%']
  np.testing.assert_array_equal(found[5][2], mask['h_5']['wi'])


def test_all_panels_have_one_scale():
  # The densest block of b holds 2 of 4 weights.
  mask = {'a': np.ones((4, 4), bool), 'b': np.eye(128, dtype=bool)}
  figure = plot_masks(mask)
  assert [image.get_clim() for ax in figure.axes[:2] for image in ax.images
          ] == [(0, 1), (0, 1)]
  assert [title for title, _, _ in panels(figure)] == ['a', 'b']


def test_stacked_layers_and_their_axes_are_those_of_where():
  stack = np.zeros((3, 4, 6), bool)
  stack[1, 0] = True
  found = panels(plot_masks({'w': stack}))
  assert [text for _, text, _ in found] == ['100%', '75%', '100%']
  # The same leaf, told to be one layer of transposed matrices side by side.
  where = lambda path, leaf: MuonDimensionNumbers((2,), (0, 1))
  params = {'w': jnp.ones((3, 4, 6))}
  (_, text, image), = panels(plot_masks({'w': stack}, params, where=where))
  np.testing.assert_array_equal(image, stack.reshape(12, 6).T)
  assert text == '91.7%'


@pytest.mark.parametrize('blocks', [12, 72])
def test_texts_of_many_layers_do_not_touch(blocks):
  figure = plot_masks({'blocks': np.ones((blocks, 4, 4), bool)})
  figure.draw_without_rendering()
  shown = [ax for ax in figure.axes if ax.images and ax.texts]
  assert len(shown) == blocks
  boxes = [text.get_window_extent() for ax in shown
           for text in (ax.title, ax.texts[0])]
  assert max(box.count_overlaps(boxes) for box in boxes) == 1  # Itself.
  width, height = figure.get_size_inches()
  assert width < 15 and height < 15


def test_a_mask_without_leaves_is_refused():
  with pytest.raises(ValueError, match='mask has no leaf'):
    plot_masks({'w': None})
