"""An executor for several machines that run the same command."""

from collections.abc import Callable
import concurrent.futures
import multiprocessing
import os
import sys
import threading
from typing import Any

from experiments.launch import workers
from spdf_jax import training
from spdf_jax.folder_lock import FolderInUse

_SECONDS = 5.0
"""Seconds before a call whose folder is in use is made again."""


class SharedExecutor(concurrent.futures.Executor):
  """An executor that makes calls in turn with those of other machines.

  Calls run one at a time in a process of this machine. A call that raises
  `FolderInUse`, because another machine makes it, is made again later, when it
  finds what the other machine has written, or continues it if that machine was
  lost. So if the same calls are made on several machines with a shared disk,
  each runs on one of them, and all machines get all results.

  Attributes:
    slots: Number of machines, for estimates of time.
  """

  def __init__(self, slots: int):
    self.slots = slots
    self._process = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context('spawn'), _start,
        (sys.argv, os.getpid()),
    )

  def submit(
      self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future:
    """Schedules a call; its future has the result or the call's exception."""
    result: concurrent.futures.Future = concurrent.futures.Future()
    result.set_running_or_notify_cancel()
    self._attempt(result, fn, args, kwargs)
    return result

  def _attempt(
      self,
      result: concurrent.futures.Future,
      fn: Callable[..., Any],
      args: tuple,
      kwargs: dict[str, Any],
  ) -> None:
    def pass_on(done: concurrent.futures.Future) -> None:
      error = done.exception()
      if isinstance(error, FolderInUse):
        timer = threading.Timer(
            _SECONDS, self._attempt, (result, fn, args, kwargs)
        )
        timer.daemon = True
        timer.start()
      elif isinstance(error, concurrent.futures.BrokenExecutor):
        result.set_exception(OSError(
            'the process that trains was killed; finished runs are kept, so '
            'repeat the same command.'
        ))
      elif error is not None:
        result.set_exception(error)
      else:
        result.set_result(done.result())

    attempt: concurrent.futures.Future
    try:
      attempt = self._process.submit(_call, fn, args, kwargs)
    except RuntimeError as error:  # The process was killed, or shut down.
      attempt = concurrent.futures.Future()
      attempt.set_exception(error)
    attempt.add_done_callback(pass_on)

  def shutdown(
      self, wait: bool = True, *, cancel_futures: bool = False
  ) -> None:
    """Ends the process after the call that it makes."""
    self._process.shutdown(wait, cancel_futures=True)


def _start(argv: list[str], parent: int) -> None:
  workers.start(argv)
  workers.end_with(parent)


def _call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
  try:
    return fn(*args, **kwargs)
  except training.Interrupted as interrupted:
    raise InterruptedError(str(interrupted)) from None
