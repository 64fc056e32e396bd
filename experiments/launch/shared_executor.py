"""An executor for several machines that run the same command."""

from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any
from typing import NamedTuple

from experiments.launch import workers
from spdf_jax.files import FolderInUse

_SECONDS = 5.0
"""Seconds before a call whose folder is in use is retried."""


class _Call(NamedTuple):
  """A call that waits.

  Attributes:
    result: Future of the call.
    make: Makes the call.
    start: Earliest time of its start, of `time.monotonic`.
  """

  result: concurrent.futures.Future
  make: Callable[[], Any]
  start: float = 0.0


class SharedExecutor(concurrent.futures.Executor):
  """An executor that makes calls in turn with those of other machines.

  Calls run one at a time in a process of this machine. A call that raises
  `FolderInUse`, because another machine makes it, is retried; it then returns
  the stored result, or resumes the run if the other machine was lost. So if the
  same calls are made on several machines with a shared disk, each runs on one
  of them, and all machines get all results.

  Attributes:
    slots: Number of machines, for estimates of time.
  """

  def __init__(self, slots: int):
    self.slots = slots
    self._process = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context('spawn'), _start,
        (sys.argv, os.getpid()),
    )
    # Calls wait here, since the process pool takes one ahead, which it makes
    # even if it is shut down.
    self._calls: deque[_Call] = deque()
    self._changed = threading.Condition()
    self._is_open = True
    self._thread = threading.Thread(target=self._make_calls, daemon=True)
    self._thread.start()

  def submit(
      self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future:
    """Schedules a call; its future has the result or the call's exception."""
    call = _Call(
        concurrent.futures.Future(), functools.partial(fn, *args, **kwargs)
    )
    with self._changed:
      if not self._is_open:
        raise RuntimeError(
            'the executor is shut down; submit calls to a new one.'
        )
      self._calls.append(call)
      self._changed.notify()
    return call.result

  def _make_calls(self) -> None:
    """Makes one call after another until the executor is shut down."""
    while self._is_open:
      with self._changed:
        call = self._take() if self._is_open else None
        if self._is_open and call is None:
          starts = [waiting.start for waiting in self._calls]
          self._changed.wait(
              max(min(starts) - time.monotonic(), 0) if starts else None
          )
      if call is not None:
        self._make(call)
    for waiting in self._calls:
      waiting.result.cancel()
      waiting.result.set_running_or_notify_cancel()

  def _take(self) -> _Call | None:
    """Takes the first call whose start has come."""
    now = time.monotonic()
    for call in self._calls:
      if call.start <= now:
        self._calls.remove(call)
        return call
    return None

  def _make(self, call: _Call) -> None:
    value: Any = None
    error: BaseException | None = None
    try:
      value = self._process.submit(call.make).result()
    except FolderInUse:
      with self._changed:
        start = time.monotonic() + _SECONDS
        self._calls.append(call._replace(start=start))
      return
    except concurrent.futures.BrokenExecutor:
      error = OSError(
          'the process that trains was killed; finished runs are kept, so '
          'repeat the same command.'
      )
    except BaseException as raised:
      error = raised
    if not call.result.set_running_or_notify_cancel():
      return
    if error is None:
      call.result.set_result(value)
    else:
      call.result.set_exception(error)

  def stop(self) -> None:
    """Sends SIGTERM to the process, and makes no other call.

    It takes no lock, so that a handler of signals can call it.
    """
    self._is_open = False
    for child in multiprocessing.active_children():
      child.terminate()

  def shutdown(
      self, wait: bool = True, *, cancel_futures: bool = False
  ) -> None:
    """Ends the process after the call that it makes; no other call is made."""
    del cancel_futures
    with self._changed:
      self._is_open = False
      self._changed.notify()
    if wait:
      self._thread.join()
    self._process.shutdown(wait, cancel_futures=True)


@contextlib.contextmanager
def open_shared(slots: int) -> Iterator[SharedExecutor]:
  """Opens an executor; SIGTERM to this process ends it after a save.

  Args:
    slots: Number of machines.

  Raises:
    InterruptedError: this process received SIGTERM; everything is saved.
  """
  executor = SharedExecutor(slots)

  def stop(number: int, frame: Any) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The run is being saved.
    executor.stop()
    raise InterruptedError('stopped; repeat the same command to continue.')

  before = signal.signal(signal.SIGTERM, stop)
  try:
    with executor:  # Its end waits for the process.
      yield executor
  finally:
    signal.signal(signal.SIGTERM, before)


def _start(argv: list[str], parent: int) -> None:
  workers.start(argv)
  workers.end_with(parent)
