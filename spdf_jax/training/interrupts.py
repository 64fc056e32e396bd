"""SIGTERM and Ctrl-C: asked to stop, training saves and leaves."""

import signal
import types


class Interrupts:
  """Notes the first SIGTERM or SIGINT; a second SIGINT stops at once.

  Use as a context manager; `received` is the signal's number or `None`.

  Example:
    >>> with Interrupts() as interrupts:
    ...   interrupts.received is None
    True
  """

  def __init__(self):
    self.received: int | None = None
    self._previous: dict[int, object] = {}

  def __enter__(self) -> 'Interrupts':
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if self.received is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.received = number
