"""Processes that run calls of a command: how they start and end."""

from collections.abc import Sequence
import os
import signal
import threading
import time

from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import console


def start(argv: Sequence[str]) -> None:
  """Applies the command's flags in a process of its own.

  Args:
    argv: Words of the command line; flags that the process does not know are
      ignored.
  """
  flags.FLAGS(argv, known_only=True)
  console.prepare()
  compilation_cache.prepare()


def end_with(parent: int) -> None:
  """Starts a thread that stops this process once its parent has ended.

  It is stopped with SIGTERM, on which it saves.

  Args:
    parent: Id of the parent process.
  """
  threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: int) -> None:
  while os.getppid() == parent:
    time.sleep(1)
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(60)
  os._exit(1)
