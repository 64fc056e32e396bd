# SPDX-License-Identifier: Apache-2.0
"""Profiles: traces of some steps, for xprof or Perfetto."""

import logging
import os
import re
from typing import Any

import jax

logger = logging.getLogger('spdf_jax')


def parse_window(text: str, total_steps: int) -> range:
  """Parses the range of steps to trace.

  Args:
    text: `'FIRST:COUNT'`, the first step, counted from 1 as in the log, and the
      number of steps; or `''` for none.
    total_steps: Number of steps of the plan.

  Returns:
    The steps.

  Raises:
    ValueError: the text has another form, or a step is beyond the plan.

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
        "and the number of steps: '10:5'."
    )
  if first + count - 1 > total_steps:
    raise ValueError(
        f'profile is {text!r} and the plan has {total_steps} steps; choose '
        'steps within it.'
    )
  return range(first, first + count)


class Profiler:
  """A context manager that traces a range of steps.

  Leaving the context ends a running trace.

  Args:
    window: The steps to trace, counted from 1; an empty range for none.
    directory: Directory of the trace, in which it has a folder named by the
      time.
  """

  def __init__(self, window: range, directory: str | os.PathLike[str]):
    self._window = window
    self._directory = os.fspath(directory)
    self._runs = False

  def __enter__(self) -> 'Profiler':
    return self

  def __exit__(self, *unused: Any) -> None:
    self._stop()

  def before_step(self, step: int, state: Any) -> None:
    """Starts or ends the trace at the start or end of the window.

    Args:
      step: The next step, counted from 1.
      state: The current state, which is waited for, so that the trace contains
        whole steps.
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
