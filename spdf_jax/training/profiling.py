"""Profiles: a trace of some steps, for xprof or Perfetto."""

import logging
import os
import re
from typing import Any

import jax

logger = logging.getLogger('spdf_jax')


def parse_window(text: str, total_steps: int) -> range:
  """Reads which steps to trace.

  Args:
    text: `'FIRST:COUNT'`, the first step as the log counts them, from 1 on, or
      `''` for none.
    total_steps: Of the plan.

  Returns:
    The steps.

  Raises:
    ValueError: it is something else, or beyond the plan.

  Example:
    >>> parse_window('10:5', total_steps=100)
    range(10, 15)
  """
  if not text:
    return range(0)
  match = re.fullmatch(r'(\d+):(\d+)', text)
  first, count = map(int, match.groups()) if match else (0, 0)
  if first < 1 or count < 1:
    raise ValueError(
        f'profile is {text!r}; write FIRST:COUNT, the first step, from 1 on, '
        "and how many: '10:5'."
    )
  if first + count - 1 > total_steps:
    raise ValueError(
        f'profile is {text!r} and the plan has {total_steps} steps; choose '
        'steps within it.'
    )
  return range(first, first + count)


class Profiler:
  """Traces the steps of a window; a context, which ends a trace that runs.

  Args:
    window: The steps, counted from 1; an empty one traces nothing.
    directory: Where the trace goes, in a folder named by the time.
  """

  def __init__(self, window: range, directory: str | os.PathLike):
    self._window = window
    self._directory = os.fspath(directory)
    self._runs = False

  def __enter__(self) -> 'Profiler':
    return self

  def __exit__(self, *unused: Any) -> None:
    self._stop()

  def before_step(self, step: int, state: Any) -> None:
    """Starts or ends the trace where the window does.

    Args:
      step: Which comes next, counted from 1.
      state: The state so far: a trace has whole steps.
    """
    if (step in self._window) == self._runs:
      return
    jax.block_until_ready(state)
    if self._runs:
      self._stop()
    else:
      jax.profiler.start_trace(self._directory)
      self._runs = True

  def _stop(self) -> None:
    if self._runs:
      jax.profiler.stop_trace()
      self._runs = False
      logger.info('a trace is in %s', self._directory)
