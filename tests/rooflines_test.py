"""GPUs gain nothing from unstructured zeros."""

import pytest

from spdf_jax.accelerator.wafer.closed_form import GPT3_XL
from spdf_jax.accelerator.wafer.closed_form import training_step
from spdf_jax.costs.rooflines import comparison_table
from spdf_jax.costs.rooflines import GPUS
from spdf_jax.costs.rooflines import roofline_seconds

STEP = training_step(GPT3_XL, 132, 2048, 0.75)


@pytest.mark.parametrize('gpu', GPUS)
def test_zeros_save_nothing_on_a_gpu_unless_they_are_two_of_four(gpu):
  dense = training_step(GPT3_XL, 64, 2048)
  half = training_step(GPT3_XL, 64, 2048, 0.5)
  seconds = roofline_seconds(dense, gpu)
  assert roofline_seconds(half, gpu) == seconds
  assert roofline_seconds(dense, gpu, two_of_four=True) == seconds
  structured = roofline_seconds(half, gpu, two_of_four=True)
  assert 0.5 < structured / seconds < 0.7  # Attention and the head are dense.
  assert roofline_seconds(dense, gpu, count=8) == pytest.approx(seconds / 8)


def test_the_comparison_shows_every_gpu():
  text = comparison_table(STEP, 8)
  assert all(gpu.name in text for gpu in GPUS.values())
  assert 'no speedup' in text


def test_an_unknown_gpu_is_answered_with_the_nearest():
  with pytest.raises(ValueError, match="'h100'"):
    roofline_seconds(STEP, 'h1000')
