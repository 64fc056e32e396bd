# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations, checkpoints and a clean exit."""

from collections.abc import Callable, Sequence
import contextlib
import logging
import os
from typing import Any

import jax

from spdf_jax import files
from spdf_jax.training.checkpoints.workdir import saved_steps
from spdf_jax.training.loop import processes
from spdf_jax.training.loop import progress as progresses
from spdf_jax.training.loop import writers as metric_writers
from spdf_jax.training.loop.evaluations import Evaluations
from spdf_jax.training.loop.evaluations import Evaluators
from spdf_jax.training.loop.metrics import MetricWriter
from spdf_jax.training.loop.metrics import read_last_rows
from spdf_jax.training.loop.profiling import Profiler
from spdf_jax.training.run import Run
from spdf_jax.training.step import losses
from spdf_jax.training.step import state as states

logger = logging.getLogger('spdf_jax')

_NO_EVALUATORS = Evaluators()


class Interrupted(InterruptedError):
  """An exception for training stopped by a signal, after a checkpoint.

  It can be pickled, so that other processes can raise it.

  Attributes:
    signal: Number of the signal.
    step: Number of completed steps.
  """

  def __init__(self, signal: int, step: int):
    super().__init__(
        f'stopped by signal {signal} after step {step}; everything is saved; '
        'run the same command again to continue.'
    )
    self.signal = signal
    self.step = step

  def __reduce__(self) -> tuple[type['Interrupted'], tuple[int, int]]:
    return type(self), (self.signal, self.step)


def train(
    run: Run,
    *,
    evaluators: Evaluators = _NO_EVALUATORS,
    writers: Sequence[metric_writers.Open] = (),
    profile: range = range(0),
    on_early_end: Callable[[], object] = lambda: None,
) -> states.TrainState:
  """Trains through all phases, starting from the state of an open run.

  Args:
    run: The run, after `run.open`; its state is consumed, and it is closed at
      the end.
    evaluators: Evaluators of the parameters; by default none.
    writers: Functions that open writers of metrics in addition to that of
      `metrics.jsonl`, as `training.loop.writers.choose_writers` returns them.
    profile: Steps to trace, counted from 1, e.g. `range(10, 15)`; the trace is
      written to `profile/` in the workdir.
    on_early_end: Function without arguments, called after a phase has ended
      early and `run.plan` has changed. By default it does nothing.

  Returns:
    The final state, with arrays of all weights, pruned ones zero.

  Raises:
    Interrupted: the process received SIGTERM or SIGINT before the last step; a
      checkpoint is saved, from which the same command continues.
    NotFinite: the loss or the gradient norm is not finite, in more than
      `config.max_skipped_steps` steps in a row; or gradients overflow in
      float16 even with a loss scale of 1. That step is not saved.
    ValueError: the run is not open, or was trained already.
  """
  with (
      files.writing(run.workdir), contextlib.closing(run),
      processes.Interrupts() as interrupts,
  ):
    # The compact step copies the state first, so nothing else may hold it.
    state, run.state = run.state, None
    if state is None:
      raise ValueError(
          'run has no state, since it is not open or was trained already; call '
          'run.open before train.'
      )
    step = start = int(state.step)
    rows = _earlier_rows(run, start)
    if not rows and start >= run.config.log_every and saved_steps(run.workdir):
      logger.warning(
          'metrics.jsonl has no rows although training resumes from step %d of '
          'this workdir; those up to it are lost, and reports begin after it.',
          start,
      )
    evaluations = Evaluations(run, evaluators, rows)
    out = None if processes.is_main_process() else open(os.devnull, 'w')
    progress = progresses.Progress(run, start, out=out)
    writer = _open_writers(run, writers, start)
    log = progresses.TrainLog(
        writer, progress, run, progresses.skipped_in(rows, start)
    )
    if step < run.plan.total_steps:
      phase = run.plan.phase_at(step)
      logger.info('compiling the step of phase %r', phase.name)
    with Profiler(profile, run.workdir / 'profile') as profiler:
      while step < run.plan.total_steps:
        profiler.before_step(step + 1, state)
        step_fn, state = run.programs.prepare_step(state, step)
        state, metrics = take_step(
            step_fn, state, run.programs.device_batch_at(step), step
        )
        step += 1
        log.add(step, metrics)
        if step == start + 1 or step - 1 in run.plan.starts:
          # These steps include compilation, which is not training time.
          jax.block_until_ready(metrics)
          log.restart_clock()
          progress.restart(step)
        stop = interrupts.stop_after(step)
        ends = step in run.plan.ends.values()
        evaluate = ends or step % run.config.eval_every == 0
        save = stop or ends or step % run.config.checkpoints.every == 0
        if not evaluate and not save:
          continue
        log.flush()
        progress.pause()
        dense = run.programs.to_dense(state)
        if evaluate:
          row, ends_early = evaluations.run(step, dense)
          writer.write_scalars(step, row)
          if ends_early:
            run.end_phase(step)
            on_early_end()
          best = evaluations.best_of(step)
          if best is not None and best.step != step and (ends or ends_early):
            values = states.step_values(dense)
            # Frees this state before the best one is restored.
            del dense, state
            dense = state = run.checkpoints.restore_best(
                best, run.programs.abstract_state, values
            )
            writer.write_scalars(step, evaluations.run_best(step, dense))
          if ends_early:
            dense = state = states.with_dense_grads(dense, run.plan.algorithm)
          save |= ends_early or best is not None and best.step == step
        if save:
          # Flushed first, so that no checkpoint is ahead of the log on disk.
          writer.flush()
          run.checkpoints.save(dense, run.best)
        del dense
        log.restart_clock()
        progress.resume()
        if stop:
          break
    writer.close()
    if interrupts.received is not None and step < run.plan.total_steps:
      raise Interrupted(interrupts.received, step)
    return run.programs.to_dense(state)


def take_step(
    step_fn: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: Any,
    batch: Any,
    step: int,
) -> tuple[Any, dict[str, Any]]:
  """Takes a training step, and repeats it while float16 gradients overflow.

  A step that overflows changes only the loss scale, and is repeated on the same
  batch, so that data, phases and masks stay in step.

  Args:
    step_fn: The jitted `train_step`.
    state: The state before the step; donated.
    batch: Batch of the step.
    step: Number of the step, from 0.

  Returns:
    The state after the step and its metrics; with a loss scale, they include
    the number of attempts, `train/attempts`.

  Raises:
    NotFinite: gradients overflow even with the scale 1.
  """
  if state.loss_scale is None:
    return step_fn(state, batch)
  attempts = 0
  while True:
    attempts += 1
    state, metrics = step_fn(state, batch)
    if int(state.step) > step:
      return state, metrics | {'train/attempts': attempts}
    if metrics['train/loss_scale'] <= losses.LEAST_SCALE:
      raise losses.NotFinite(
          f'gradients of step {step + 1} are not finite in float16, with a '
          'loss scale of 1 either; that step is not saved: lower the '
          "learning rate, or set model.dtype to 'bfloat16' or 'float32'."
      )


def _open_writers(
    run: Run, writers: Sequence[metric_writers.Open], start: int
) -> metric_writers.AllWriters:
  """Opens all writers of metrics in the main process, and none in others."""
  if not processes.is_main_process():
    return metric_writers.AllWriters([])
  return metric_writers.AllWriters([
      MetricWriter(run.workdir / 'metrics.jsonl', start),
      *metric_writers.open_all(
          writers, run.workdir, run.config.as_dict(), start
      ),
  ])


def _earlier_rows(run: Run, step: int) -> list[dict[str, Any]]:
  """Returns the last rows before a restart, as far as training needs them."""
  path = run.workdir / 'metrics.jsonl'
  if not step or not path.is_file():
    return []
  # The last rows contain the number of skipped steps, and those in a row.
  after = step - run.config.log_every - run.config.max_skipped_steps - 1
  if run.plan.phase_at(step - 1).early_stop is not None:
    after = min(after, max(x for x in run.plan.starts if x < step))
  return read_last_rows(path, after, step)
