r"""Runs a command in several processes on this machine.

  python -m experiments.launch.local --processes=2 -- \
    python -m experiments.train --config=configs/quickstart.py --workdir=runs/a

Environment variables give each process its number and the coordinator's
address; its lines are printed with its number in front. Ctrl-C and SIGTERM are
forwarded to all processes; if one fails, the others are stopped. This is for
trying out programs for several machines: on one machine one process is faster.
"""

from collections.abc import Sequence
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from absl import app
from absl import flags

from experiments.launch import console

FLAGS = flags.FlagValues()
_PROCESSES = flags.DEFINE_integer(
    'processes', 2, 'Number of processes to start.', lower_bound=1,
    flag_values=FLAGS,
)
_GRACE = flags.DEFINE_float(
    'grace', 30.0, 'Seconds between SIGTERM and SIGKILL after one has failed.',
    lower_bound=0.0, flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns the first exit status that is not 0."""
  if len(argv) < 2:
    raise app.UsageError('give the command after --.')
  return run(argv[1:], _PROCESSES.value, _GRACE.value)


def run(command: Sequence[str], number: int, grace: float) -> int:
  """Runs a command in several processes until all have ended.

  Args:
    command: The command and its arguments.
    number: Number of processes.
    grace: Seconds between SIGTERM and SIGKILL for the others when one fails.

  Returns:
    The first exit status that is not 0; 128 and the signal's number for a
    process that a signal ended.
  """
  if shutil.which(command[0]) is None:
    raise app.UsageError(f'{command[0]!r} is no program; give one after --.')
  coordinator = f'127.0.0.1:{_free_port()}'
  children = [
      subprocess.Popen(
          command,
          env=os.environ | dict(
              JAX_COORDINATOR_ADDRESS=coordinator,
              JAX_NUM_PROCESSES=str(number),
              JAX_PROCESS_ID=str(i),
          ),
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          # Ctrl-C reaches this process only, which then sends SIGTERM to all.
          start_new_session=True,
      )
      for i in range(number)
  ]
  readers = [
      threading.Thread(target=_show, args=(i, child))
      for i, child in enumerate(children)
  ]
  for reader in readers:
    reader.start()
  forward = lambda *_: _signal(children, signal.SIGTERM)
  for number_of_signal in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number_of_signal, forward)
  status = _wait(children, grace)
  for reader in readers:
    reader.join()
  return status


def _wait(children: Sequence[subprocess.Popen], grace: float) -> int:
  """Waits for all processes; if one fails, stops the others."""
  deadline = None
  status = 0
  while None in [child.poll() for child in children]:
    failed = [child.returncode for child in children if child.returncode]
    if failed and deadline is None:
      status = failed[0]
      deadline = time.monotonic() + grace
      _signal(children, signal.SIGTERM)
    if deadline is not None and time.monotonic() > deadline:
      _signal(children, signal.SIGKILL)
    time.sleep(0.1)
  status = status or next((c.returncode for c in children if c.returncode), 0)
  return 128 - status if status < 0 else status


def _signal(children: Sequence[subprocess.Popen], number: int) -> None:
  for child in children:
    if child.poll() is None:
      child.send_signal(number)


def _show(number: int, child: subprocess.Popen) -> None:
  for line in child.stdout:
    sys.stdout.write(f'[{number}] {line.decode(errors="replace")}')
    sys.stdout.flush()


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


if __name__ == '__main__':
  console.start(main, FLAGS)
