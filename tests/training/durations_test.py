"""Durations are parsed as they are formatted."""

import pytest

from spdf_jax.training.configs.phases import resolve_duration

SIZES = dict(tokens_per_step=100, tokens_per_epoch=1_050, parameters=30)


@pytest.mark.parametrize('duration, steps', [
    ('1 step', 1),
    ('1500 steps', 1_500),
    ('1.5k steps', 1_500),
    (' 2 K  steps ', 2_000),
    ('1000 tokens', 10),
    ('1049 tokens', 10),
    ('1051 tokens', 11),
    ('2.5M tokens', 25_000),
    ('2.5B tokens', 25_000_000),
    ('20 tokens/parameter', 6),
    ('1 epoch', 10),
    ('2 epochs', 21),
    ('0.5 epochs', 5),
])
def test_a_duration_is_a_number_of_steps(duration, steps):
  assert resolve_duration(duration, **SIZES) == steps


def test_a_duration_in_epochs_is_the_most_whole_steps():
  for tokens_per_step in range(1, 60):
    sizes = SIZES | dict(tokens_per_step=tokens_per_step)
    steps = resolve_duration('3 epochs', **sizes)
    assert steps * tokens_per_step <= 3 * 1_050
    assert (steps + 1) * tokens_per_step > 3 * 1_050


@pytest.mark.parametrize('duration', [
    '', '10', 'steps', '10 step per day', 'ten steps', '-5 steps', '1e3 steps',
    '5 minutes', '10 stepss', None, 10, '1G tokens', 'nan steps',
])
def test_a_text_that_is_no_duration_is_refused(duration):
  with pytest.raises(ValueError, match='write a number and one of steps'):
    resolve_duration(duration, **SIZES)


@pytest.mark.parametrize('duration', [
    '0 steps', '0.4 steps', '10 tokens', '0.05 epochs', '0 tokens/parameter',
])
def test_a_duration_below_one_step_is_refused(duration):
  with pytest.raises(ValueError, match='is less than one step of 100 tokens'):
    resolve_duration(duration, **SIZES)
