# SPDX-License-Identifier: Apache-2.0
"""Progress of training: the line that is shown and the metrics logged."""

from collections.abc import Callable, Mapping, Sequence
import logging
import math
import sys
import time
from typing import Any, TextIO

import jax

from spdf_jax.training.loop.writers import Writer
from spdf_jax.training.run import Run
from spdf_jax.training.step.losses import NotFinite

# The module of stdout and stderr in Jupyter and Colab.
_NOTEBOOK = 'ipykernel.iostream'
_FINITE = ('train/loss', 'train/grad_norm')
_COUNT = 'train/skipped_steps'


class LiveLine:
  """A printer of the current state of long work.

  Terminals and notebooks show one line, which is overwritten; files get a line
  for each call.

  Args:
    out: Output stream; `None`: stderr.

  Attributes:
    overwrites: Whether the line is overwritten.

  Example:
    >>> line = LiveLine(sys.stdout)
    >>> line.show('step 1'), line.show('step 2', last=True)
    step 1
    step 2
    (None, None)
  """

  def __init__(self, out: TextIO | None = None):
    self._out = sys.stderr if out is None else out
    self.overwrites = (
        self._out.isatty() or type(self._out).__module__ == _NOTEBOOK
    )
    self._shown = 0

  def show(self, line: str, *, last: bool = False) -> None:
    """Replaces the line; the last one stays."""
    if self.overwrites:
      # Notebooks ignore the code that erases a line, so it is padded.
      text = '\r' + line.ljust(self._shown) + ('\n' if last else '')
      self._shown = 0 if last else len(line)
    else:
      text = line + '\n'
    self._out.write(text)
    self._out.flush()

  def clear(self) -> None:
    """Removes the line, before other output; a log keeps its lines."""
    if self.overwrites and self._shown:
      self._out.write('\r' + ' ' * self._shown + '\r')
      self._out.flush()
      self._shown = 0


class Progress:
  """A printer of phase, step, loss, tokens/s and time left.

  On a terminal and in a notebook the line is overwritten in place; elsewhere a
  new line is printed every ten seconds.

  Args:
    run: The run.
    start: Step that training starts from.
    out: Output stream; `None`: stderr.
    clock: Monotonic clock, in seconds.
  """

  def __init__(
      self,
      run: Run,
      start: int,
      *,
      out: TextIO | None = None,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._run = run
    self._line = LiveLine(out)
    self._every = 0.5 if self._line.overwrites else 10.0
    self._clock = clock
    self._last_time = self._paused_at = clock()
    self._last_tokens = self._tokens_until(start)
    self._rate = 0.0

  def update(self, step: int, loss: float) -> None:
    """Records that `step` steps are completed; prints if a line is due."""
    now = self._clock()
    done = step == self._run.plan.total_steps
    if now - self._last_time < self._every and not done:
      return
    tokens = self._tokens_until(step)
    if now - self._last_time >= self._every or not self._rate:
      rate = (tokens - self._last_tokens) / max(now - self._last_time, 1e-9)
      # Averaged with the previous rate, since single intervals fluctuate.
      self._rate = 0.5 * (self._rate + rate) if self._rate else rate
    self._last_time, self._last_tokens = now, tokens
    left = self._tokens_until(self._run.plan.total_steps) - tokens
    phase = self._run.plan.phase_at(max(step - 1, 0))
    time_left = format_seconds(left / self._rate) if self._rate else '?'
    line = (
        f'{phase.name}  step {step}/{self._run.plan.total_steps}  '
        f'loss {loss:.4f}  {self._rate:,.0f} tokens/s  {time_left} left'
    )
    if phase.name in self._run.best:
      line += f'  best at step {self._run.best[phase.name].step}'
    self._line.show(line, last=done)

  def pause(self) -> None:
    """Clears the progress line, so that other output begins on an empty one."""
    self._line.clear()
    self._paused_at = self._clock()

  def resume(self) -> None:
    """Excludes the time since `pause` from the next tokens per second."""
    self._last_time += self._clock() - self._paused_at

  def restart(self, step: int) -> None:
    """Excludes all steps since the last line from it, as they compiled."""
    self._last_time = self._clock()
    self._last_tokens = self._tokens_until(step)

  def _tokens_until(self, step: int) -> int:
    return sum(
        max(0, min(step - start, phase.steps)) * phase.tokens_per_step
        for phase, start in zip(self._run.plan.phases, self._run.plan.starts)
    )


def format_seconds(seconds: float) -> str:
  """Formats a time as h:mm:ss or m:ss.

  Example:
    >>> format_seconds(3700), format_seconds(61)
    ('1:01:40', '1:01')
  """
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{seconds:02}'
  return f'{minutes}:{seconds:02}'


logger = logging.getLogger('spdf_jax')


class TrainLog:
  """Training metrics, written one step late so that the host never waits.

  Args:
    writer: Writer of the metrics.
    progress: Progress that shows the logged losses.
    run: The run.
    skipped: Numbers of skipped steps before a restart, see `skipped_in`.
  """

  def __init__(
      self, writer: Writer, progress: Progress, run: Run,
      skipped: tuple[int, int],
  ):
    self._writer = writer
    self._progress = progress
    self._run = run
    self._every = run.config.log_every
    self._max_skipped = run.config.max_skipped_steps
    self._skipped, self._skipped_in_a_row = skipped
    self._pending: tuple[int, dict[str, jax.Array]] | None = None
    self._seconds = 0.0
    self._clock = time.monotonic()

  def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Keeps the metrics of a step, and logs those of the step before."""
    self._write()
    self._pending = step, metrics

  def flush(self) -> None:
    """Waits for the pending metrics, checks and writes them."""
    self._write()
    self._pending = None
    self._stop_clock()

  def restart_clock(self) -> None:
    """Excludes the time since the last reading from the training time."""
    self._clock = time.monotonic()

  def _stop_clock(self) -> None:
    now = time.monotonic()
    self._seconds += now - self._clock
    self._clock = now

  def _is_skipped(self, step: int, metrics: dict[str, jax.Array]) -> bool:
    bad = [name for name in _FINITE if not math.isfinite(metrics[name])]
    if not bad:
      self._skipped_in_a_row = 0
      return False
    self._skipped += 1
    self._skipped_in_a_row += 1
    phase = self._run.plan.phase_at(step - 1).name
    problem = (
        f'{bad[0]} of step {step}, in phase {phase!r}, is '
        f'{float(metrics[bad[0]])}'
    )
    if self._skipped_in_a_row > self._max_skipped:
      raise NotFinite(
          f'{problem}; training stops, and the latest checkpoint is one of an '
          'earlier step. Raise max_skipped_steps to continue from it, or train '
          'in another workdir with a lower learning rate or clip_norm.'
      )
    logger.warning('%s; the step is skipped, %d so far', problem, self._skipped)
    return True

  def _write(self) -> None:
    if self._pending is None:
      return
    step, metrics = self._pending
    # All skipped steps are logged, so that a restart counts them.
    if not self._is_skipped(step, metrics) and step % self._every and (
        step not in self._run.plan.ends.values()
    ):
      return
    scalars = {name: float(value) for name, value in metrics.items()}
    self._stop_clock()
    self._writer.write_scalars(step, {
        'phase': self._run.plan.phase_at(step - 1).name,
        **scalars,
        **({_COUNT: self._skipped} if self._max_skipped else {}),
        'time/seconds': round(self._seconds, 4),
    })
    self._seconds = 0.0
    self._progress.update(step, scalars['train/loss'])


def skipped_in(
    rows: Sequence[Mapping[str, Any]], step: int
) -> tuple[int, int]:
  """Returns the numbers of all skipped steps, and of the last ones in a row.

  Args:
    rows: Rows of `metrics.jsonl`, which has all skipped steps.
    step: The step.

  Example:
    >>> row = {'train/loss': None, 'train/grad_norm': 1.0}
    >>> rows = [{'step': s, 'train/skipped_steps': s, **row} for s in (1, 2)]
    >>> skipped_in(rows, 2), skipped_in(rows, 3)
    ((2, 2), (2, 0))
  """
  logged = {row['step']: row for row in rows if _COUNT in row}
  in_a_row = 0
  while any(
      logged.get(step - in_a_row, {}).get(name, 0) is None for name in _FINITE
  ):
    in_a_row += 1
  return max((row[_COUNT] for row in logged.values()), default=0), in_a_row
