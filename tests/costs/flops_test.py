"""FLOPs are those of the papers' tables, misprints named."""

import pytest

from spdf_jax import models
from spdf_jax.costs.flops import effective_sparsity
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import training_flops

SMALL, XL = models.PRESETS['gpt2-small'], models.PRESETS['gpt3-xl']


# FLOPs of a sequence, by ours and as printed, exaFLOPs in all, of dense.
@pytest.mark.parametrize('shape, sparsity, exact, printed, total, ratio', [
    (SMALL, 0.0, '1.987e+12', '1.99e+12', '2.43', '1.000'),
    (SMALL, 0.5, '1.465e+12', '1.47e+12', '1.79', '0.737'),
    # The paper prints 1.46 and 0.601.
    (SMALL, 0.75, '1.204e+12', '1.20e+12', '1.47', '0.606'),
    (XL, 0.0, '1.860e+13', '1.86e+13', '236.09', '1.000'),  # 236.10 in print
    (XL, 0.5, '1.117e+13', '1.12e+13', '141.87', '0.601'),
    (XL, 0.75, '7.464e+12', '7.46e+12', '94.76', '0.401'),
])
def test_pre_training_flops_are_the_published_ones(
    shape, sparsity, exact, printed, total, ratio
):
  flops = training_flops(shape, 2048, sparsity)
  sequences = {SMALL: 2.5e9, XL: 26e9}[shape] / 2048
  assert (f'{flops:.3e}', f'{flops:.2e}') == (exact, printed)
  assert f'{flops * sequences / 1e18:.2f}' == total
  assert f'{flops / training_flops(shape, 2048):.3f}' == ratio


def test_fine_tuning_table_prints_forward_flops_beside_training_totals():
  assert f'{forward_flops(SMALL, 512):.3e}' == '1.363e+11'
  assert f'{forward_flops(XL, 512):.3e}' == '1.394e+12'
  # E2E, 1.26e5 sequences: printed 0.052, and 0.524 where ours is 0.527.
  assert f'{training_flops(SMALL, 512) * 1.26e5 / 1e18:.3f}' == '0.052'
  assert f'{training_flops(XL, 512) * 1.26e5 / 1e18:.3f}' == '0.527'


def test_attention_and_head_stay_dense_at_any_sparsity():
  shape = models.GPTConfig(50, 3, 2, 8, 20, 16)
  attention = 3 * (4 * 16**2 * 8 + 3 * 2 * 16**2)
  head = 2 * 16 * 8 * 50
  assert forward_flops(shape, 16, 1.0) == attention + head
  hidden = 3 * (2 * 16 * 8 * 8 * 4 + 2 * 2 * 16 * 8 * 20)
  assert forward_flops(shape, 16) == attention + head + hidden
  assert forward_flops(shape, 16, 0.25) == attention + head + 0.75 * hidden


def test_effective_sparsity_of_both_readings_of_variable_spdf_is_75_percent():
  # Split: 5/6 of the standard budget at 90 %, 1/6 dense.
  assert effective_sparsity([500, 100], [0.9, 0.0], 600) == pytest.approx(0.75)
  # Extended: the whole budget at 90 %, then 15 % more steps, dense.
  extended = effective_sparsity([62_523, 9_379], [0.9, 0.0], 62_523)
  assert extended == pytest.approx(0.75, abs=1e-5)


def test_a_step_with_dense_gradients_has_a_dense_product_for_weights():
  sparse, dense = (training_flops(SMALL, 16, s) for s in (0.75, 0.0))
  actual = training_flops(SMALL, 16, 0.75, dense_grads=True)
  assert actual == pytest.approx(2 / 3 * sparse + 1 / 3 * dense)
  assert training_flops(SMALL, 16, 0.0, dense_grads=True) == dense


@pytest.mark.parametrize('call, message', [
    (lambda: training_flops(SMALL, 2048, float('nan')), 'sparsity is nan'),
    (lambda: effective_sparsity([1, 2], [0.5], 3), 'steps has 2 entries'),
])
def test_arguments_out_of_range_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
