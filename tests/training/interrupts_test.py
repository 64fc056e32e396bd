"""The first signal is recorded, and previous handlers are restored."""

import os
import signal

import pytest

from spdf_jax.training.loop.processes import Interrupts

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', SIGNALS)
def test_the_first_signal_is_noted_and_stops_nothing(number):
  with Interrupts() as interrupts:
    assert interrupts.received is None
    send(number)
    assert interrupts.received == number


@pytest.mark.parametrize('first', SIGNALS)
def test_a_second_ctrl_c_stops_at_once(first):
  with pytest.raises(KeyboardInterrupt):
    with Interrupts():
      send(first)
      send(signal.SIGINT)


def test_a_second_sigterm_waits_like_the_first():
  with Interrupts() as interrupts:
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert interrupts.received == signal.SIGTERM


def test_handlers_are_put_back_even_after_an_error():
  before = [signal.getsignal(number) for number in SIGNALS]
  with pytest.raises(RuntimeError), Interrupts():
    assert signal.getsignal(signal.SIGTERM) != before[0]
    raise RuntimeError
  assert [signal.getsignal(number) for number in SIGNALS] == before
