# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, saved in the background and checked before a restore."""

from collections.abc import Mapping, Sequence
import logging
import os
import pathlib
import types
from typing import Any

import jax

from spdf_jax.files import seal
from spdf_jax.sparsity.state import mask_paths
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import identity
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.early_stop import Best
from spdf_jax.training.configs.early_stop import read_bests
from spdf_jax.training.step import state as states
from spdf_jax.training.step.optimizers import schedule_free_path
from spdf_jax.training.step.state import TrainState

logger = logging.getLogger('spdf_jax')

_ITEMS = ('params', 'opt_state', 'data', 'meta')


class Checkpoints:
  """The checkpoints of one working directory.

  Each holds `params`, `opt_state` (masks included), `data` (the step and the
  fingerprints of the data, which determine the batches, and in float16 the
  loss scale) and `meta` (config, phase ends, best evaluations, shapes, dtypes
  and digests). The latest `keep` checkpoints, the one at the end of every phase
  and the best one of every phase are not deleted.

  Args:
    workdir: The working directory; checkpoints go to `checkpoints/` in it.
    phase_ends: Steps completed at the end of each phase, by name.
    keep: Number of the latest checkpoints to keep.
    config: The config of the run.
    fingerprints: Fingerprints of the data, by source.
    densified: Names of the phases before the step at which the state was
      densified; empty if it was not.
  """

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      *,
      phase_ends: Mapping[str, int],
      keep: int,
      config: RunConfig,
      fingerprints: Mapping[str, str],
      densified: Sequence[str] = (),
  ):
    import orbax.checkpoint as ocp  # Most commands need no checkpoint.

    self._densified = list(densified)
    self._phase_ends = dict(phase_ends)
    self._config = config
    self._fingerprints = dict(fingerprints)
    self._directory = pathlib.Path(workdir).absolute() / 'checkpoints'
    self._best_steps = _Steps()
    policies = ocp.checkpoint_managers
    self._manager = ocp.CheckpointManager(
        self._directory,
        item_names=_ITEMS,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([
                policies.LatestN(keep),
                policies.CustomSteps(list(self._phase_ends.values())),
                self._best_steps,
            ]),
        ),
    )

  def save(
      self,
      state: TrainState,
      best: Mapping[str, Best] = types.MappingProxyType({}),
  ) -> None:
    """Saves in the background; does nothing if the step is saved already.

    Args:
      state: The state, dense.
      best: Best evaluations of the phases so far, by name; their checkpoints
        are kept, and earlier best ones are not.
    """
    import orbax.checkpoint as ocp

    step = int(state.step)
    self._best_steps.steps = {each.step for each in best.values()}
    if step in self._manager.all_steps():
      return
    save, save_json = ocp.args.StandardSave, ocp.args.JsonSave
    self._manager.save(
        step,
        args=ocp.args.Composite(
            params=save(state.params),
            opt_state=save(state.opt_state),
            data=save_json(seal({
                'step': step,
                'fingerprints': self._fingerprints,
                'loss_scale': jax.tree.map(
                    lambda x: x.item(), jax.tree.leaves(state.loss_scale)
                ),
            })),
            meta=save_json(seal({
                'config': self._config.as_dict(),
                'phase_ends': self._phase_ends,
                'best': {name: list(each) for name, each in best.items()},
                'arrays': identity.describe_arrays(state),
                'digests': identity.digest_arrays(state),
                'masks': mask_paths(state.opt_state),
                'schedule_free': schedule_free_path(state.opt_state),
                'densified': self._densified,
            })),
        ),
    )

  def restore_latest(self, abstract: TrainState) -> TrainState | None:
    """Restores the latest checkpoint that can be read.

    A damaged checkpoint is moved aside, with a warning, and the one before it
    is tried. This holds only if its files are still damaged when they are read
    again: an error that may pass, such as that of a device without memory or of
    a file system, is raised and nothing is moved.

    Args:
      abstract: Shapes, dtypes and shardings of the state.

    Returns:
      The state; `None` if there are no checkpoints.

    Raises:
      MismatchError: the checkpoint was made with another config, data or model.
      ValueError: there are checkpoints and none can be read, now or in an
        earlier launch; or there are several processes and the latest checkpoint
        cannot be read.
      Exception: a sound checkpoint cannot be restored now.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return checkpoint_files.read_checkpoint(
            self._directory / str(step),
            abstract,
            config=self._config,
            fingerprints=self._fingerprints,
        )
      except identity.MismatchError:
        raise
      except Exception as error:  # Damage may raise any exception.
        if not checkpoint_files.is_damaged(
            self._directory / str(step), error
        ):
          raise
        if jax.process_count() > 1:
          raise ValueError(
              f'checkpoint {step} in {self._directory} cannot be read '
              f'({type(error).__name__}), and a run of several processes does '
              'not move it aside; move it out of this folder to use the one '
              'before it.'
          ) from error
        aside = workdirs.free_name(
            self._directory.parent / 'damaged_checkpoints' / str(step)
        )
        aside.parent.mkdir(exist_ok=True)
        os.rename(self._directory / str(step), aside)
        self._manager.reload()
        logger.warning(
            'checkpoint %d cannot be read (%s: %s); it was moved to %s and '
            'the one before it is used.',
            step, type(error).__name__, str(error).split('\n')[0][:200], aside,
        )
    if steps:
      raise ValueError(
          f'none of the checkpoints {steps} in {self._directory} can be read; '
          'they were moved to damaged_checkpoints beside it; put back a copy, '
          'or start with another workdir.'
      )
    damaged = self._directory.parent / 'damaged_checkpoints'
    if damaged.is_dir() and any(damaged.iterdir()):
      raise ValueError(
          f'{self._directory} has no checkpoint, and {damaged} has those that '
          'could not be read; put back a copy, start with another workdir, or '
          'delete damaged_checkpoints to train from the beginning.'
      )
    return None

  def ends_until(self, step: int) -> dict[str, int]:
    """Returns the ends of phases up to a saved step, by name."""
    return workdirs.past_ends(self._directory / str(step))

  def best_until(self, step: int) -> dict[str, Best]:
    """Returns the best evaluations up to a saved step that are saved too."""
    saved = self._manager.all_steps()
    bests = read_bests(workdirs.read_meta(self._directory / str(step)))
    return {name: best for name, best in bests.items() if best.step in saved}

  def restore_best(
      self, best: Best, abstract: TrainState, later: TrainState
  ) -> TrainState:
    """Restores the checkpoint of a best evaluation, once it is saved.

    Args:
      best: The best evaluation.
      abstract: Shapes, dtypes and shardings of the state.
      later: Result of `step_values` for the state at the end of the phase.

    Returns:
      The best parameters, masks and moments, at the step of the later state.

    Raises:
      ValueError: the checkpoint cannot be read.
    """
    self.wait()
    checkpoint = self._directory / str(best.step)
    logger.info('the phase ends with its best weights: %s', best)
    try:
      return states.at_step(checkpoint_files.read_checkpoint(
          checkpoint,
          abstract,
          config=self._config,
          fingerprints=self._fingerprints,
      ), later)
    except Exception as error:  # Damage may raise any exception.
      raise ValueError(
          f'checkpoint {checkpoint}, the best one of its phase, cannot be read '
          f'({type(error).__name__}); move it out of its folder and run the '
          'same command again, to go on without it.'
      ) from error

  def wait(self) -> None:
    """Waits for all saves to finish; raises the error of one that failed."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for all saves and closes the checkpoint manager."""
    self.wait()
    self._manager.close()


class _Steps:
  """A preservation policy of steps that change."""

  def __init__(self) -> None:
    self.steps: set[int] = set()

  def should_preserve(
      self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    del context
    return [checkpoint.step in self.steps for checkpoint in checkpoints]
