# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations, checkpoints and a clean exit."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import logging
import math
import os
import pathlib
import time
from typing import Any

import jax

from spdf_jax.folder_lock import lock_folder
from spdf_jax.training import checkpoints
from spdf_jax.training import identity
from spdf_jax.training.best_checkpoints import at_step
from spdf_jax.training.best_checkpoints import Best
from spdf_jax.training.best_checkpoints import step_values
from spdf_jax.training.evaluations import Evaluations
from spdf_jax.training.evaluations import Evaluator
from spdf_jax.training.losses import NotFinite
from spdf_jax.training.losses import take_step
from spdf_jax.training.metrics import AllWriters
from spdf_jax.training.metrics import MetricWriter
from spdf_jax.training.metrics import Open
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.metrics import Writer
from spdf_jax.training.plan import Plan
from spdf_jax.training.processes import Interrupts
from spdf_jax.training.processes import is_main_process
from spdf_jax.training.profiling import Profiler
from spdf_jax.training.progress import Progress
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.step import TrainState
from spdf_jax.training.workdir import check_free_space
from spdf_jax.training.workdir import CONFIG
from spdf_jax.training.workdir import find_checkpoint
from spdf_jax.training.workdir import open_workdir
from spdf_jax.training.workdir import past_ends
from spdf_jax.training.workdir import read_workdir_config
from spdf_jax.training.workdir import saved_steps
from spdf_jax.training.workdir import write_workdir_config

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


@dataclasses.dataclass
class Session:
  """A run that is ready to train: checked, opened and restored.

  Attributes:
    recipe: Recipe of the run.
    workdir: Directory of config, metrics and checkpoints.
    checkpoints: Checkpoints of the workdir.
    state: Initial state of the training; `None` once training has started.
    release: Function that releases the lock of the workdir.
    best: Best evaluations of the phases so far, by name of the phase.
  """

  recipe: Recipe
  workdir: pathlib.Path
  checkpoints: checkpoints.Checkpoints
  state: TrainState | None
  release: Callable[[], None] = lambda: None
  best: Mapping[str, Best] = dataclasses.field(default_factory=dict)

  def end_phase(self, step: int) -> Recipe:
    """Ends the current phase early, so that the next one starts here.

    Args:
      step: Steps completed.

    Returns:
      The recipe of the remaining steps.
    """
    plan = self.recipe.plan
    logger.info('phase %r ends early', plan.phase_at(step - 1).name)
    return self.follow({
        phase.name: min(start + phase.steps, step)
        for phase, start in zip(plan.phases, plan.starts) if start < step
    })

  def follow(self, ends: Mapping[str, int]) -> Recipe:
    """Applies the recorded ends of phases, see `Plan.with_ends`."""
    recipe = self.recipe.with_ends(ends)
    if recipe is not self.recipe:
      self.checkpoints.close()
      self.recipe = recipe
      self.checkpoints = _open_checkpoints(recipe, self.workdir)
    return recipe


def open_session(recipe: Recipe, workdir: str | os.PathLike[str]) -> Session:
  """Opens a workdir and creates or restores the state, with all checks.

  The state is the first of these that exists: the workdir's own latest
  checkpoint; the whole checkpoint of `config.resume`; a new state from the
  parameters of `config.init_from`; a new state from initial parameters. With
  the first, the `resume` and `init_from` that the workdir records are kept.

  Args:
    recipe: Recipe of the run.
    workdir: Working directory; created if missing.

  Returns:
    The session for `train`.

  Raises:
    ValueError: the workdir or a checkpoint is of another config, data or model,
      another process has the workdir open, or the run to resume has ended.
    OSError: the workdir cannot be written, or has too little space.
  """
  config = recipe.config
  workdir = open_workdir(workdir, config)
  phases = recipe.plan.phases
  best = sum(phase.early_stop is not None for phase in phases)
  check_free_space(
      workdir, recipe.abstract_state,
      # One more, since a new one is written before an old one is deleted.
      config.checkpoints.keep + len(phases) + best + 1,
  )
  release = lambda: None
  if is_main_process():
    release = lock_folder(workdir, 'workdir')
  try:
    return _open_session(recipe, workdir, release)
  except BaseException:
    release()
    raise


def _open_session(
    recipe: Recipe, workdir: pathlib.Path, release: Callable[[], None]
) -> Session:
  recipe = _with_recorded_start(recipe, workdir)
  saved = _open_checkpoints(recipe, workdir)
  state, ends, best = _first_state(recipe, saved)
  session = Session(recipe, workdir, saved, state, release, best)
  session.follow(ends)
  # Written last, so that a run refused above leaves no config in the workdir.
  if is_main_process():
    write_workdir_config(workdir, recipe.config)
  return session


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
  log = _TrainLog(writer, progress, recipe, _skipped_in(rows))
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


class _TrainLog:
  """Training metrics, written one step late so that the host never waits."""

  def __init__(
      self, writer: Writer, progress: Progress, recipe: Recipe, skipped: int
  ):
    self._writer = writer
    self._progress = progress
    self.follow(recipe.plan)
    self._every = recipe.config.log_every
    self._max_skipped = recipe.config.max_skipped_steps
    self._skipped, self._skipped_in_a_row = skipped, 0
    self._pending: tuple[int, dict[str, jax.Array]] | None = None
    self._seconds = 0.0
    self._clock = time.monotonic()

  def follow(self, plan: Plan) -> None:
    """Replaces the plan after a phase has ended early."""
    self._plan = plan

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
    phase = self._plan.phase_at(step - 1).name
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
    if step % self._every and step not in self._plan.ends.values():
      return
    scalars = {name: float(value) for name, value in metrics.items()}
    self._stop_clock()
    self._writer.write_scalars(step, {
        'phase': self._plan.phase_at(step - 1).name,
        **scalars,
        **({'train/skipped_steps': self._skipped} if self._max_skipped else {}),
        'time/seconds': round(self._seconds, 4),
    })
    self._seconds = 0.0
    self._progress.update(step, scalars['train/loss'])


def _open_checkpoints(
    recipe: Recipe, workdir: pathlib.Path
) -> checkpoints.Checkpoints:
  return checkpoints.Checkpoints(
      workdir,
      phase_ends=recipe.plan.ends,
      keep=recipe.config.checkpoints.keep,
      config=recipe.config,
      fingerprints=recipe.fingerprints,
  )


def _rows_until(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
  path = workdir / 'metrics.jsonl'
  rows = read_rows(path) if path.exists() else []
  return [row for row in rows if row['step'] <= step]


def _skipped_in(rows: Sequence[Mapping[str, Any]]) -> int:
  name = 'train/skipped_steps'
  return next((row[name] for row in reversed(rows) if name in row), 0)


def _with_recorded_start(recipe: Recipe, workdir: pathlib.Path) -> Recipe:
  """Returns the recipe with the `init_from` and `resume` of a begun run."""
  if not saved_steps(workdir) or not (workdir / CONFIG).is_file():
    return recipe
  recorded, config = read_workdir_config(workdir), recipe.config
  different = identity.differences(*(
      {'init_from': each.init_from, 'resume': each.resume}
      for each in (recorded, config)
  ))
  if not different:
    return recipe
  logger.warning(
      '%s, but workdir %r goes on from its own checkpoint; give another '
      'workdir for another start.',
      '; '.join(different), str(workdir),
  )
  return dataclasses.replace(recipe, config=dataclasses.replace(
      config, init_from=recorded.init_from, resume=recorded.resume
  ))


def _first_state(
    recipe: Recipe, saved: checkpoints.Checkpoints
) -> tuple[TrainState, dict[str, int], dict[str, Best]]:
  """Returns the initial state, and ends and best evaluations of phases so far.
  """
  config = recipe.config
  state = saved.restore_latest(recipe.abstract_state)
  if state is not None:
    logger.info('resuming from step %d of this workdir', int(state.step))
    step = int(state.step)
    return state, saved.ends_until(step), saved.best_until(step)
  if config.resume:
    checkpoint = find_checkpoint(config.resume)
    ends = past_ends(checkpoint)
    last = recipe.plan.with_ends(ends).total_steps
    if int(checkpoint.name) >= last:
      raise ValueError(
          f'resume: {checkpoint} is at step {checkpoint.name} of {last}, which '
          'leaves nothing to train; give an earlier checkpoint.'
      )
    logger.info('resuming from %s', checkpoint)
    state = checkpoints.read_checkpoint(
        checkpoint,
        recipe.abstract_state,
        config=config,
        fingerprints=recipe.fingerprints,
    )
    return state, ends, {}
  if config.init_from:
    checkpoint = find_checkpoint(config.init_from)
    logger.info('starting from the parameters of %s', checkpoint)
    params = checkpoints.read_params(checkpoint, recipe.abstract_state.params)
    return recipe.state_from(params), {}, {}
  return recipe.create_state(), {}, {}
