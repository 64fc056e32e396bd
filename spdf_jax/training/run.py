# SPDX-License-Identifier: Apache-2.0
"""A run: its config, model, data and programs, and once open its state."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import logging
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import data
from spdf_jax import files
from spdf_jax.training import checks
from spdf_jax.training import initial_state
from spdf_jax.training import inputs
from spdf_jax.training import plan as plans
from spdf_jax.training import programs as programs_
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import manager
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.configs import config as configs
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.early_stop import Best
from spdf_jax.training.loop import processes
from spdf_jax.training.plan import Plan
from spdf_jax.training.programs import Programs
from spdf_jax.training.step import mesh as meshes
from spdf_jax.training.step import teacher
from spdf_jax.training.step.state import TrainState
from spdf_jax.training.step.state import with_dense_grads

PyTree = Any

logger = logging.getLogger('spdf_jax')


@dataclasses.dataclass
class Run:
  """A run, from its config to its state.

  `Run.create` checks a config and builds all parts that do not need a workdir;
  `open` then locks the workdir, and creates or restores the state that `train`
  consumes. A phase that ends early replaces `programs`, in `end_phase`.

  Attributes:
    corpus: Text to pre-train on.
    task: Task to fine-tune on; `None`: there is none.
    programs: Config, model and plan, and all that follows from them.
    state: State to train from; `None` until the run is open, and once training
      has started.
    best: Best evaluations of the phases so far, by name of the phase.

  Example:
    >>> run = Run.create(config, 'runs/a').open()  # doctest: +SKIP
    >>> train(run)  # doctest: +SKIP
  """

  corpus: data.Corpus | data.PlannedCorpus
  task: data.Task | data.PlannedExamples | None
  programs: Programs
  state: TrainState | None = None
  best: dict[str, Best] = dataclasses.field(default_factory=dict)
  _workdir: pathlib.Path | None = None
  _checkpoints: manager.Checkpoints | None = None
  _release: Callable[[], None] = lambda: None

  @classmethod
  def create(
      cls,
      config: Any,
      workdir: str | os.PathLike[str] | None = None,
      *,
      planning: bool = False,
  ) -> 'Run':
    """Builds a run from a config and checks it, without writing anything.

    All that does not depend on the data is checked before the data is read.

    Args:
      config: A ConfigDict, or mapping, as `configs/base.py` documents it.
      workdir: Working directory of the run; `None`: it is not known yet.
      planning: Whether the run is only planned. If so, a corpus or the files of
        a task need not exist; their sizes are then those of
        `config.data.planned`.

    Returns:
      The run.

    Raises:
      ValueError: the config is not valid, see `parse`, or does not fit the
        devices, the data or the workdir, see `check_workdir`.
    """
    config = configs.parse(config)
    mesh = meshes.create_mesh(**dataclasses.asdict(config.mesh))
    model = config.model.create_model()
    init = jax.jit(functools.partial(_init_params, model, config.seed))
    params = jax.eval_shape(init)
    parameters = _number_of_parameters(params)
    plan = plans.create_plan(config.phases, parameters=parameters)
    draft = checks.Draft(config, mesh, model, params, plan, workdir)
    for check in checks.BEFORE_DATA:
      check(draft)
    corpus, task, sources = inputs.open_data(
        config.data, config.phases, model.config.vocab_size, planning
    )
    if any(phase.counts_epochs for phase in config.phases):
      plan = plans.create_plan(
          config.phases, parameters=parameters,
          tokens_per_epoch=inputs.tokens_per_epoch(sources),
      )
    programs = Programs(
        config, model, mesh, sources, init,
        teacher.loss_opener(config.loss, mesh), plan,
    )
    for check_programs in checks.WITH_DATA:
      check_programs(programs)
    run = cls(
        corpus, task, programs,
        _workdir=None if workdir is None else pathlib.Path(workdir),
    )
    if not planning:
      inputs.check_validation(*run.real_data, run.validation_length)
    return run

  def open(self, workdir: str | os.PathLike[str] | None = None) -> 'Run':
    """Opens the workdir and creates or restores the state, with all checks.

    The state is the first of these that exists: the workdir's own latest
    checkpoint; the whole checkpoint of `config.resume`; a new state from the
    parameters of `config.init_from`; a new state from initial parameters. With
    the first, the `resume` and `init_from` that the workdir records are kept.

    Args:
      workdir: Working directory; by default that of `create`.

    Returns:
      This run, ready to train; nothing is left of a new workdir if it is
      refused.

    Raises:
      ValueError: the workdir or a checkpoint is of another config, data or
        model, another process has the workdir open, or the run to resume has
        ended.
      OSError: the workdir cannot be written, or has too little space.
    """
    if workdir is not None:
      workdirs.check_workdir(workdir, self.config)
      self._workdir = pathlib.Path(workdir)
    with workdirs.created(self.workdir):
      workdirs.check_free_space(
          self.workdir, self.programs.abstract_state, self.most_checkpoints
      )
      if processes.is_main_process():
        self._release = files.lock_folder(self.workdir, 'workdir')
      try:
        self._restore()
      except BaseException:
        self.close()
        raise
    return self

  def _restore(self) -> None:
    """Creates or restores the state, and records the config of the run."""
    config = workdirs.with_recorded_start(self.config, self.workdir)
    if config is not self.config:
      self.programs = dataclasses.replace(self.programs, config=config)
    start = initial_state.find_start(
        self.programs, self.checkpoints, self.workdir, self.fingerprints
    )
    self.best = dict(start.best)
    self._follow(start.ends)
    # The next phase may be another than that for which the state was saved.
    self.state = with_dense_grads(start.state, self.plan.algorithm)
    # Written last, so that a run refused above leaves no config in the workdir.
    if processes.is_main_process():
      workdirs.write_workdir_config(self.workdir, self.config)

  def close(self) -> None:
    """Completes the saves that have begun, and releases the workdir."""
    try:
      self._close_checkpoints()
    finally:
      self._release()

  def _close_checkpoints(self) -> None:
    if self._checkpoints is not None:
      self._checkpoints.close()
      self._checkpoints = None

  def end_phase(self, step: int) -> None:
    """Ends the current phase early, so that the next one starts here.

    Args:
      step: Steps completed.
    """
    logger.info('phase %r ends early', self.plan.phase_at(step - 1).name)
    self._follow({
        phase.name: min(start + phase.steps, step)
        for phase, start in zip(self.plan.phases, self.plan.starts)
        if start < step
    })

  def _follow(self, ends: Mapping[str, int]) -> None:
    """Applies the recorded ends of phases, see `Plan.with_ends`."""
    plan = self.plan.with_ends(ends)
    if plan is not self.plan:
      self.programs = dataclasses.replace(self.programs, plan=plan)
      self._close_checkpoints()

  @property
  def config(self) -> RunConfig:
    """The config."""
    return self.programs.config

  @property
  def model(self) -> Any:
    """The model, a `models.Model`."""
    return self.programs.model

  @property
  def plan(self) -> Plan:
    """The phases."""
    return self.programs.plan

  @property
  def workdir(self) -> pathlib.Path:
    """Directory of config, metrics and checkpoints.

    Raises:
      ValueError: it is not known.
    """
    if self._workdir is None:
      raise ValueError(
          'run has no workdir; give one to Run.create or run.open.'
      )
    return self._workdir

  @property
  def checkpoints(self) -> manager.Checkpoints:
    """Checkpoints of the workdir of an open run."""
    if self._checkpoints is None:
      self._checkpoints = manager.Checkpoints(
          self.workdir,
          phase_ends=self.plan.ends,
          keep=self.config.checkpoints.keep,
          config=self.config,
          fingerprints=self.fingerprints,
      )
    return self._checkpoints

  def read_checkpoint(self, checkpoint: pathlib.Path) -> TrainState:
    """Restores the state of a checkpoint of this config and data."""
    return checkpoint_files.read_checkpoint(
        checkpoint, self.programs.abstract_state, config=self.config,
        fingerprints=self.fingerprints,
    )

  @property
  def most_checkpoints(self) -> int:
    """Largest number of checkpoints in the workdir at one time."""
    phases = self.plan.phases
    best = sum(phase.early_stop is not None for phase in phases)
    # One checkpoint more, since a new one is written before an old one is
    # deleted.
    return self.config.checkpoints.keep + len(phases) + best + 1

  @property
  def real_data(self) -> tuple[data.Corpus, data.Task | None]:
    """The corpus and the task.

    Raises:
      ValueError: one of them has a planned size only.
    """
    corpus, task = self.corpus, self.task
    if isinstance(corpus, data.PlannedCorpus) or isinstance(
        task, data.PlannedExamples
    ):
      raise ValueError(
          f'run was created with planning=True, so the data, of corpus '
          f'{corpus.name!r}, is not read; create it with planning=False.'
      )
    return corpus, task

  @property
  def fingerprints(self) -> dict[str, str]:
    """Fingerprints of the data, by source, the tokenizer and the teacher."""
    return {
        name: source.fingerprint
        for name, source in self.programs.sources.items()
    } | {
        'tokenizer': self.corpus.tokenizer.fingerprint
    } | self._teacher_fingerprint

  @functools.cached_property
  def _teacher_fingerprint(self) -> dict[str, str]:
    # Read once, so that a run continues if its teacher is deleted meanwhile.
    source = self.config.loss.teacher
    if source is None:
      return {}
    return {'teacher': teacher.teacher_fingerprint(source)}

  @property
  def parameters(self) -> int:
    """Number of parameters of the model."""
    return _number_of_parameters(self.programs.abstract_state.params)

  @property
  def validation_length(self) -> int:
    """Tokens per sequence of the evaluations on the corpus."""
    return max(
        (p.length for p in self.plan.phases if p.data == 'corpus'),
        default=self.model.config.max_length,
    )


def _init_params(model: Any, seed: int) -> PyTree:
  key = jax.random.fold_in(jax.random.key(seed), programs_.PARAMS)
  return model.init(key, jnp.zeros((1, 2), jnp.int32))['params']


def _number_of_parameters(params: PyTree) -> int:
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
