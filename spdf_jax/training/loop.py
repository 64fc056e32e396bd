# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations, checkpoints and a clean exit."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import logging
import os
import pathlib
from typing import Any

import jax

from spdf_jax.training.best_checkpoints import at_step
from spdf_jax.training.best_checkpoints import step_values
from spdf_jax.training.evaluations import Evaluations
from spdf_jax.training.evaluations import Evaluator
from spdf_jax.training.losses import take_step
from spdf_jax.training.metrics import MetricWriter
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.processes import Interrupts
from spdf_jax.training.processes import is_main_process
from spdf_jax.training.profiling import Profiler
from spdf_jax.training.progress import Progress
from spdf_jax.training.session import Session
from spdf_jax.training.step import TrainState
from spdf_jax.training.train_log import TrainLog
from spdf_jax.training.writers import AllWriters
from spdf_jax.training.writers import Open

logger = logging.getLogger('spdf_jax')


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
    session: Session,
    *,
    evaluators: Sequence[Evaluator] = (),
    phase_end_evaluators: Sequence[Evaluator] = (),
    writers: Sequence[Open] = (),
    profile: range = range(0),
    on_early_end: Callable[[], None] = lambda: None,
) -> TrainState:
  """Trains through all phases, starting from the state of a session.

  Args:
    session: Session of `open_session`; its state is consumed.
    evaluators: `(step, params) -> (name, value)` pairs, called every
      `config.eval_every` steps and at the end of each phase.
    phase_end_evaluators: The same, called at the end of each phase, and at
      every evaluation of a phase whose early stop needs generations.
    writers: Functions of `choose_writers` that open writers of metrics beside
      `metrics.jsonl`.
    profile: Steps to trace, counted from 1; the trace is written to `profile/`
      in the workdir. See `parse_window`.
    on_early_end: Function called when a phase has ended early, which changes
      `session.recipe`.

  Returns:
    The final state.

  Raises:
    Interrupted: the process received SIGTERM or SIGINT; everything is saved.
    NotFinite: a loss or gradient norm is not finite, or gradients overflow in
      float16 even with a loss scale of 1; nothing is saved after that step.
    ValueError: the session was trained already.
  """
  try:
    return _train(
        session, evaluators, phase_end_evaluators, writers, profile,
        on_early_end,
    )
  finally:
    try:
      session.checkpoints.close()  # Saves that have begun are completed.
    finally:
      session.release()


def _train(
    session: Session,
    evaluators: Sequence[Evaluator],
    phase_end_evaluators: Sequence[Evaluator],
    writers: Sequence[Open],
    profile: range,
    on_early_end: Callable[[], None],
) -> TrainState:
  recipe, state = session.recipe, session.state
  # The compact step copies the state first, so nothing else may hold it.
  session.state = None
  if state is None:
    raise ValueError(
        'session has no state, since it was trained already; give a new one of '
        'open_session.'
    )
  config = recipe.config
  start = int(state.step)
  writer = AllWriters([
      MetricWriter(session.workdir / 'metrics.jsonl', start),
      *(open_writer(start) for open_writer in writers),
  ] if is_main_process() else [])
  out = None if is_main_process() else open(os.devnull, 'w')
  progress = Progress(recipe.plan, start, out=out)
  rows = _rows_until(session.workdir, start)
  log = TrainLog(writer, progress, recipe, _skipped_in(rows))
  evaluations = Evaluations(
      evaluators, phase_end_evaluators, rows, session.best
  )
  progress.best = evaluations.best
  profiler = Profiler(profile, session.workdir / 'profile')
  with Interrupts() as interrupts, profiler:
    step = start
    while step < recipe.plan.total_steps:
      profiler.before_step(step + 1, state)
      step_fn, state = recipe.prepare_step(state, step)
      state, metrics = take_step(
          step_fn, state, recipe.device_batch_at(step), step
      )
      step += 1
      log.add(step, metrics)
      if step == start + 1:
        # The first step includes compilation, which is not training time.
        jax.block_until_ready(metrics)
        log.restart_clock()
        progress.resume(step)
      stop = interrupts.stop_after(step)
      ends = step in recipe.plan.ends.values()
      evaluate = ends or step % config.eval_every == 0
      save = stop or ends or step % config.checkpoints.every == 0
      if not evaluate and not save:
        continue
      log.flush()
      progress.pause()
      dense = recipe.to_dense(state)
      if evaluate:
        row, ends_early = evaluations.run(recipe, step, dense)
        writer.write_scalars(step, row)
        if ends_early:
          recipe = session.end_phase(step)
          on_early_end()
          progress.follow(recipe.plan)
          log.follow(recipe.plan)
        phase = recipe.plan.phase_at(step - 1).name
        best = evaluations.best.get(phase)
        if best is not None and best.step == step:
          save = True
        elif best is not None and (ends or ends_early):
          values = step_values(dense)
          del dense, state  # Not held beside the best state.
          dense = state = at_step(
              session.checkpoints.restore_best(best, recipe.abstract_state),
              values,
          )
          logger.info('phase %r ends with its best weights: %s', phase, best)
          writer.write_scalars(step, evaluations.run_best(recipe, step, dense))
        save = save or ends_early
      if save:
        # Flushed first, so that no checkpoint is ahead of the log on disk.
        writer.flush()
        session.checkpoints.save(dense, evaluations.best)
      del dense
      log.restart_clock()
      progress.resume(step)
      if stop:
        break
  writer.close()
  if interrupts.received is not None and step < recipe.plan.total_steps:
    raise Interrupted(interrupts.received, step)
  return recipe.to_dense(state)


def _rows_until(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
  path = workdir / 'metrics.jsonl'
  rows = read_rows(path) if path.exists() else []
  return [row for row in rows if row['step'] <= step]


def _skipped_in(rows: Sequence[Mapping[str, Any]]) -> int:
  name = 'train/skipped_steps'
  return next((row[name] for row in reversed(rows) if name in row), 0)
