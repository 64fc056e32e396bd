"""FLOPs are those of the papers' tables, misprints named."""

import pytest

from spdf_jax import models
from spdf_jax.costs.flops import effective_sparsity
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import training_flops

SMALL, XL = models.PRESETS['gpt2-small'], models.PRESETS['gpt3-xl']


@pytest.mark.parametrize(
    'shape, sparsity, expected, printed',
    [
        (SMALL, 0.0, '1.987e+12', '1.99e+12'),
        (SMALL, 0.5, '1.465e+12', '1.47e+12'),
        (SMALL, 0.75, '1.204e+12', '1.20e+12'),
        (XL, 0.0, '1.860e+13', '1.86e+13'),
        (XL, 0.5, '1.117e+13', '1.12e+13'),
        (XL, 0.75, '7.464e+12', '7.46e+12'),
    ],
)
def test_pre_training_flops_per_sequence_are_the_published_ones(
    shape, sparsity, expected, printed
):
  flops = training_flops(shape, 2048, sparsity)
  assert f'{flops:.3e}' == expected
  assert f'{flops:.2e}' == printed


@pytest.mark.parametrize(
    'shape, tokens, sparsity, expected',
    [
        (SMALL, 2.5e9, 0.0, '2.43'),
        (SMALL, 2.5e9, 0.5, '1.79'),
        (SMALL, 2.5e9, 0.75, '1.47'),  # the paper prints 1.46
        (XL, 26e9, 0.0, '236.09'),  # the paper prints 236.10
        (XL, 26e9, 0.5, '141.87'),
        (XL, 26e9, 0.75, '94.76'),
    ],
)
def test_total_pre_training_exaflops_are_the_published_ones(
    shape, tokens, sparsity, expected
):
  sequences = tokens / 2048
  total = training_flops(shape, 2048, sparsity) * sequences / 1e18
  assert f'{total:.2f}' == expected


@pytest.mark.parametrize('shape, sparsity, expected', [
    (SMALL, 0.5, '0.737'),
    (SMALL, 0.75, '0.606'),  # the paper prints 0.601
    (XL, 0.5, '0.601'),
    (XL, 0.75, '0.401'),
])
def test_flops_against_dense_are_the_published_ones(shape, sparsity, expected):
  ratio = training_flops(shape, 2048, sparsity) / training_flops(shape, 2048)
  assert f'{ratio:.3f}' == expected


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
