"""SIGTERM and Ctrl-C: asked to stop, training saves and leaves."""

import os
import signal
import types

import jax
from jax.experimental import multihost_utils


class Interrupts:
  """Notes the first SIGTERM or SIGINT; a second SIGINT stops at once.

  Use as a context manager. Of several processes all stop after the same step,
  whichever was asked: JAX's own service takes SIGTERM and lets them agree.

  Attributes:
    received: The signal's number or `None`.

  Example:
    >>> with Interrupts() as interrupts:
    ...   interrupts.stop_after(step=1)
    False
  """

  def __init__(self):
    self.received: int | None = None
    self._alone = jax.process_count() == 1
    self._previous: dict[int, object] = {}

  def __enter__(self) -> 'Interrupts':
    handlers = {signal.SIGINT: self._note}
    if self._alone:
      handlers[signal.SIGTERM] = self._note
    for number, handler in handlers.items():
      self._previous[number] = signal.signal(number, handler)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def stop_after(self, step: int) -> bool:
    """Whether to stop now; ask after every step, with its number."""
    if not self._alone and multihost_utils.reached_preemption_sync_point(step):
      self.received = self.received or signal.SIGTERM
      return True
    return self._alone and self.received is not None

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if self.received is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.received = number
    if not self._alone:
      os.kill(os.getpid(), signal.SIGTERM)
