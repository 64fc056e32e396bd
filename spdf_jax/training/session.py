# SPDX-License-Identifier: Apache-2.0
"""Session: a run that is checked, opened and restored, ready to train."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import logging
import os
import pathlib

from spdf_jax.files import lock_folder
from spdf_jax.training import checkpoint_files
from spdf_jax.training import checkpoints
from spdf_jax.training import identity
from spdf_jax.training.best_checkpoints import Best
from spdf_jax.training.processes import is_main_process
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
    state = checkpoint_files.read_checkpoint(
        checkpoint,
        recipe.abstract_state,
        config=config,
        fingerprints=recipe.fingerprints,
    )
    return state, ends, {}
  if config.init_from:
    checkpoint = find_checkpoint(config.init_from)
    logger.info('starting from the parameters of %s', checkpoint)
    params = checkpoint_files.read_params(
        checkpoint, recipe.abstract_state.params
    )
    return recipe.state_from(params), {}, {}
  return recipe.create_state(), {}, {}
