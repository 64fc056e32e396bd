"""The training loop: steps, evaluations, checkpoints, and leaving cleanly."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import logging
import os
import pathlib
import time
from typing import Any

import jax

from spdf_jax.training import checkpoints
from spdf_jax.training import workdir as workdirs
from spdf_jax.training.evaluations import Evaluations
from spdf_jax.training.evaluations import Evaluator
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

logger = logging.getLogger('spdf_jax')


class Interrupted(Exception):
  """Training was asked to stop; everything is saved.

  Attributes:
    signal: The number of the signal.
  """

  def __init__(self, signal: int, step: int):
    super().__init__(
        f'stopped by signal {signal} after step {step}; everything is saved, '
        'the same command goes on from there.'
    )
    self.signal = signal


@dataclasses.dataclass
class Session:
  """A run that is ready to train: checked, opened and restored.

  Attributes:
    recipe: What is trained.
    workdir: Where config, metrics and checkpoints go.
    checkpoints: The workdir's checkpoints.
    state: Where training starts from; `None` once it has.
  """

  recipe: Recipe
  workdir: pathlib.Path
  checkpoints: checkpoints.Checkpoints
  state: TrainState | None

  def end_phase(self, step: int) -> Recipe:
    """Ends the phase of a step after it; the next ones follow there.

    Args:
      step: Steps completed.

    Returns:
      The recipe from there on.
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


def open_session(recipe: Recipe, workdir: str | os.PathLike) -> Session:
  """Opens a workdir and makes or restores the state: all that can be refused.

  Starts from the first of these that exists: the workdir's own latest
  checkpoint; everything of the checkpoint in `config.resume`; the parameters
  of the one in `config.init_from`; the initial parameters.

  Args:
    recipe: What to train.
    workdir: Made if missing.

  Returns:
    The session for `train`.

  Raises:
    ValueError: the workdir, or a checkpoint, is of another config or model.
    OSError: the workdir cannot be written, or has too little space.
  """
  config, plan = recipe.config, recipe.plan
  workdir = workdirs.open_workdir(workdir, config)
  workdirs.check_free_space(
      workdir, recipe.abstract_state,
      # One more is written before an old one is deleted.
      config.checkpoints.keep + len(plan.phases) + 1,
  )
  saved = _open_checkpoints(recipe, workdir)
  state, ends = _first_state(recipe, saved)
  session = Session(recipe, workdir, saved, state)
  session.follow(ends)
  # Last: a config that was refused does not claim the workdir.
  if is_main_process():
    workdirs.write_workdir_config(workdir, config)
  return session


def train(
    session: Session,
    *,
    evaluators: Sequence[Evaluator] = (),
    phase_end_evaluators: Sequence[Evaluator] = (),
    writers: Sequence[Open] = (),
    profile: range = range(0),
) -> TrainState:
  """Trains through all phases, from wherever the session starts.

  Args:
    session: From `open_session`; used up.
    evaluators: `(step, params) -> (name, value)` pairs, called every
      `config.eval_every` steps and at the end of each phase.
    phase_end_evaluators: The same, at the end of each phase only.
    writers: Open what gets metrics beside `metrics.jsonl`, from
      `choose_writers`.
    profile: Steps, counted from 1, of which a trace goes to the workdir's
      `profile/`; see `parse_window`.

  Returns:
    The final state.

  Raises:
    Interrupted: SIGTERM or Ctrl-C came; everything is saved.
    NotFinite: gradients overflow in float16 whatever the loss is scaled by.
  """
  recipe, state = session.recipe, session.state
  # The compact step copies the state first, so nothing else may hold it.
  session.state = None
  config = recipe.config
  start = int(state.step)
  writer = AllWriters([
      MetricWriter(session.workdir / 'metrics.jsonl', start),
      *(open_writer(start) for open_writer in writers),
  ] if is_main_process() else [])
  out = None if is_main_process() else open(os.devnull, 'w')
  progress = Progress(recipe.plan, start, out=out)
  log = _TrainLog(writer, progress, recipe)
  evaluations = Evaluations(
      evaluators, phase_end_evaluators, _rows_until(session.workdir, start)
  )
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
          progress.follow(recipe.plan)
          log.follow(recipe.plan)
          save = True
      if save:
        # What is logged is on disk before the checkpoint that follows it.
        writer.flush()
        session.checkpoints.save(dense)
      del dense
      log.restart_clock()
      progress.resume(step)
      if stop:
        break
  session.checkpoints.close()
  writer.close()
  if interrupts.received is not None and step < recipe.plan.total_steps:
    raise Interrupted(interrupts.received, step)
  return recipe.to_dense(state)


class _TrainLog:
  """Writes training metrics one step late, so that the host never waits."""

  def __init__(self, writer: Writer, progress: Progress, recipe: Recipe):
    self._writer = writer
    self._progress = progress
    self.follow(recipe.plan)
    self._every = recipe.config.log_every
    self._pending = None
    self._seconds = 0.0
    self._clock = time.monotonic()

  def follow(self, plan: Plan) -> None:
    """Takes the plan as it goes on."""
    self._plan = plan

  def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Takes the metrics of `step` and writes those of the step before."""
    self._write()
    self._pending = step, metrics

  def flush(self) -> None:
    """Writes what is pending, after waiting for it."""
    if self._pending is not None:
      jax.block_until_ready(self._pending[1])
    self._write()
    self._pending = None
    self._stop_clock()

  def restart_clock(self) -> None:
    """Leaves the time since the last reading out of the training time."""
    self._clock = time.monotonic()

  def _stop_clock(self) -> None:
    now = time.monotonic()
    self._seconds += now - self._clock
    self._clock = now

  def _write(self) -> None:
    if self._pending is None:
      return
    step, metrics = self._pending
    if step % self._every and step not in self._plan.ends.values():
      return
    scalars = {name: float(value) for name, value in metrics.items()}
    self._stop_clock()
    self._writer.write_scalars(step, {
        'phase': self._plan.phase_at(step - 1).name,
        **scalars,
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


def _first_state(
    recipe: Recipe, saved: checkpoints.Checkpoints
) -> tuple[TrainState, dict[str, int]]:
  """Returns what training starts from, and where phases have ended so far."""
  config = recipe.config
  state = saved.restore_latest(recipe.abstract_state)
  if state is not None:
    logger.info('going on from step %d of this workdir', int(state.step))
    return state, saved.ends_until(int(state.step))
  if config.resume:
    checkpoint = workdirs.find_checkpoint(config.resume)
    logger.info('going on from %s', checkpoint)
    state = checkpoints.read_checkpoint(
        checkpoint,
        recipe.abstract_state,
        config=config,
        fingerprints=recipe.fingerprints,
    )
    return state, workdirs.past_ends(checkpoint)
  if config.init_from:
    checkpoint = workdirs.find_checkpoint(config.init_from)
    logger.info('starting from the parameters of %s', checkpoint)
    params = checkpoints.read_params(checkpoint, recipe.abstract_state.params)
    return recipe.state_from(params), {}
  return recipe.create_state(), {}
