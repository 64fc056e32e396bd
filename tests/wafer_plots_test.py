"""Plots of the modeled wafer show its numbers, and no measured ones."""

import numpy as np
from plots_test import assert_texts_stand_free
import pytest

from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer.closed_form import Decoder
from spdf_jax.accelerator.wafer.closed_form import training_step
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.runs.wafer_plots import plot_appendix_c
from spdf_jax.runs.wafer_plots import plot_roofline
from spdf_jax.runs.wafer_plots import speedups

STEP = training_step(Decoder(24, 2048, 8192, 16, 50257), 132, 2048, 0.75)


@pytest.mark.parametrize('device', ['cs2', 'cs3'])
def test_theory_stands_at_exactly_one_to_ten(device):
  figure = plot_appendix_c(device)
  (ax,) = figure.axes
  theory, curve, points, vendor = ax.get_lines()
  assert theory.get_xdata().tolist() == list(range(1, 11))
  assert theory.get_ydata().tolist() == list(range(1, 11))
  default = create_device(device).as_kernel()
  np.testing.assert_allclose(
      points.get_ydata(), speedups(default, 1 - 1 / np.arange(1, 11))
  )
  assert (curve.get_ydata() <= curve.get_xdata() + 1e-9).all()
  assert set(vendor.get_ydata()) == {1e18 / 120e15}
  texts = [text.get_text() for text in ax.texts]
  assert 'measured series of Appendix C: not available' in texts
  assert any('calibrated' in text for text in texts)
  labels = [label.get_text() for label in ax.get_xticklabels()]
  # As the paper rounds them.
  assert labels == [
      '0', '0.5', '0.67', '0.75', '0.8', '0.83', '0.86', '0.88', '0.89', '0.9',
  ]
  assert_texts_stand_free(figure)


def test_the_band_holds_the_default():
  at = 1 - 1 / np.arange(2, 11)
  low, middle, high = (
      speedups(create_device('cs2', band).as_kernel(), at)
      for band in ('pessimistic', 'default', 'optimistic')
  )
  assert (low < middle).all() and (middle < high).all()
  assert (high < np.arange(2, 11)).all()


@pytest.mark.parametrize('systems', [1, 16])
def test_products_stand_below_their_roofs(systems):
  device = create_device('cs2')
  figure = plot_roofline(report_on(STEP, device, systems))
  lines = figure.axes[0].get_lines()
  points = [line for line in lines if line.get_linestyle() == 'None']
  assert points
  for line in points:
    x, y = line.get_data()
    roof = np.minimum(
        device.peak_flops * device.efficiency, x * device.io_bandwidth / 8
    )
    assert (y <= roof * (1 + 1e-9)).all()
  assert_texts_stand_free(figure)


def test_a_roofline_without_products_is_refused():
  with pytest.raises(ValueError, match='no products'):
    plot_roofline(report_on(Program(), create_device('cs2')))
