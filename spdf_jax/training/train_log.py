# SPDX-License-Identifier: Apache-2.0
"""Metrics of training steps, checked and logged one step late."""

import logging
import math
import time

import jax

from spdf_jax.training.losses import NotFinite
from spdf_jax.training.progress import Progress
from spdf_jax.training.run import Run
from spdf_jax.training.writers import Writer

logger = logging.getLogger('spdf_jax')


class TrainLog:
  """Training metrics, written one step late so that the host never waits.

  Args:
    writer: Writer of the metrics.
    progress: Progress that shows the logged losses.
    run: The run.
    skipped: Number of steps skipped before a restart.
  """

  def __init__(
      self, writer: Writer, progress: Progress, run: Run, skipped: int
  ):
    self._writer = writer
    self._progress = progress
    self._run = run
    self._every = run.config.log_every
    self._max_skipped = run.config.max_skipped_steps
    self._skipped, self._skipped_in_a_row = skipped, 0
    self._pending: tuple[int, dict[str, jax.Array]] | None = None
    self._seconds = 0.0
    self._clock = time.monotonic()

  def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Stores the metrics of `step`; checks and writes those before it."""
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

  def _check_finite(self, step: int, metrics: dict[str, jax.Array]) -> None:
    names = ('train/loss', 'train/grad_norm')
    bad = [name for name in names if not math.isfinite(metrics[name])]
    if not bad:
      self._skipped_in_a_row = 0
      return
    self._skipped += 1
    self._skipped_in_a_row += 1
    phase = self._run.plan.phase_at(step - 1).name
    found = (
        f'{bad[0]} of step {step}, in phase {phase!r}, is '
        f'{float(metrics[bad[0]])}'
    )
    if self._skipped_in_a_row > self._max_skipped:
      raise NotFinite(
          f'{found}; training stops, and the latest checkpoint is one of an '
          'earlier step. Lower the learning rate or clip_norm in another '
          'workdir, or raise max_skipped_steps to go on from there.'
      )
    logger.warning('%s; the step is skipped, %d so far', found, self._skipped)

  def _write(self) -> None:
    if self._pending is None:
      return
    step, metrics = self._pending
    self._check_finite(step, metrics)
    if step % self._every and step not in self._run.plan.ends.values():
      return
    scalars = {name: float(value) for name, value in metrics.items()}
    self._stop_clock()
    self._writer.write_scalars(step, {
        'phase': self._run.plan.phase_at(step - 1).name,
        **scalars,
        **({'train/skipped_steps': self._skipped} if self._max_skipped else {}),
        'time/seconds': round(self._seconds, 4),
    })
    self._seconds = 0.0
    self._progress.update(step, scalars['train/loss'])
