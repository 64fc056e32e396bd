"""The first signal is recorded, and previous handlers are restored."""

import concurrent.futures
import os
import signal

import pytest

from spdf_jax.training.loop.processes import Interrupts

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', SIGNALS)
def test_the_first_signal_is_recorded_and_does_not_interrupt(number):
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


def test_in_a_thread_no_handlers_are_set(caplog):
  caplog.set_level('INFO', 'spdf_jax')
  before = [signal.getsignal(number) for number in SIGNALS]

  def enter():
    with Interrupts() as interrupts:
      assert [signal.getsignal(number) for number in SIGNALS] == before
      return interrupts.stop_after(step=1)

  with concurrent.futures.ThreadPoolExecutor(1) as executor:
    assert executor.submit(enter).result() is False
  message, = caplog.messages
  assert message.startswith('training runs in a thread, so that no handlers')


def test_signal_handlers_are_restored_even_after_an_error():
  before = [signal.getsignal(number) for number in SIGNALS]
  with pytest.raises(RuntimeError), Interrupts():
    assert signal.getsignal(signal.SIGTERM) != before[0]
    raise RuntimeError
  assert [signal.getsignal(number) for number in SIGNALS] == before
