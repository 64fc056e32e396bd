"""Lineages: everything that made a checkpoint, through all of its launches."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

from spdf_jax.costs.flops import effective_sparsity
from spdf_jax.models import PRESETS
from spdf_jax.runs.workdirs import read_run
from spdf_jax.training.config import RunConfig
from spdf_jax.training.identity import run_identity
from spdf_jax.training.settings import ModelConfig
from spdf_jax.training.workdir import read_workdir_config

_SIZES = ('n_layers', 'd_model', 'n_heads', 'd_ff')


class Stage(NamedTuple):
  """A phase that has been trained.

  Attributes:
    source: What it read: `'corpus'` or `'task'`.
    algorithm: `'dense'`, `'static'` or what moved its masks.
    sparsity: Fraction of zeros that it ends with.
    steps: It took.
    tokens: It read.
  """

  source: str
  algorithm: str
  sparsity: float
  steps: int
  tokens: int


class Lineage(NamedTuple):
  """What made the parameters of a checkpoint.

  Attributes:
    workdir: Of the last launch.
    model: The model's preset; `'… resized'` where a size is not the preset's.
    stages: All phases, those of earlier launches first.
    task: What it was fine-tuned on; `''`: nothing.
    seed: Of the last launch.
    identity: What its configs say but for seeds and places: equal for runs
      that are seeds of one another.
  """

  workdir: pathlib.Path
  model: str
  stages: tuple[Stage, ...]
  task: str
  seed: int
  identity: str
  sources: tuple[str, ...]

  @property
  def pretraining(self) -> tuple[Stage, ...]:
    """Its phases on a corpus."""
    return tuple(s for s in self.stages if s.source == 'corpus')

  @property
  def tokens(self) -> int:
    """Tokens that pre-training read."""
    return sum(stage.tokens for stage in self.pretraining)

  @property
  def recipe(self) -> tuple[str, float]:
    """How it was pre-trained: a word and the level of zeros.

    `('dense', 0)`; an algorithm at one level, by its last phase; `'variable'`:
    sparse, then dense, by its effective sparsity, of all tokens or of those of
    the first stage where that is what comes to three quarters; `'iterative'`:
    levels that rise, by the last one; `'unknown'`: no phase is on record.
    """
    return describe_stages(self.pretraining)

  @property
  def tuned_sparsely(self) -> bool:
    """Whether fine-tuning kept zeros."""
    return any(s.sparsity > 0 for s in self.stages if s.source == 'task')


def describe_stages(stages: tuple[Stage, ...]) -> tuple[str, float]:
  """Names a pre-training by its phases, see `Lineage.recipe`.

  Example:
    >>> sparse = Stage('corpus', 'static', 0.9, 500, 5000)
    >>> dense = Stage('corpus', 'dense', 0.0, 100, 1000)
    >>> describe_stages((sparse, dense))
    ('variable', 0.75)
    >>> describe_stages((sparse,)), describe_stages((dense,))
    (('static', 0.9), ('dense', 0.0))
  """
  levels = [stage.sparsity for stage in stages]
  if not levels:
    return 'unknown', 0.0
  if not any(levels):
    return 'dense', 0.0
  if levels[-1] == 0:
    first = next(s for s in stages if s.sparsity > 0)
    found = [
        effective_sparsity([s.tokens for s in stages], levels, reference)
        for reference in (sum(s.tokens for s in stages), first.tokens)
    ]
    nearest = min(found, key=lambda level: abs(level - 0.75))
    return 'variable', round(nearest, 6)
  if len(set(levels)) > 1 and sorted(levels) == levels and (
      len(levels) > 2 or levels[0] == 0
  ):
    return 'iterative', levels[-1]
  return stages[-1].algorithm, levels[-1]


def read_lineage(source: str | os.PathLike[str]) -> Lineage:
  """Reads what made a checkpoint from its workdir and those it started from.

  Where a run started from parameters that no training of ours left on record,
  the lineage begins with the run.

  Args:
    source: `'WORKDIR'`, of a finished run, or `'WORKDIR@PHASE'`, of a phase
      that has ended.

  Returns:
    The lineage.

  Raises:
    FileNotFoundError: a workdir is not there or lacks a file.
    ValueError: the run has not got to its end, or to that of the phase.
  """
  text, _, phase = str(source).partition('@')
  workdir = pathlib.Path(text)
  config = read_workdir_config(workdir)
  stages = tuple(_stages(workdir, phase, config))
  identity = run_identity(dataclasses.replace(config, seed=0))
  sources = (str(source),)
  if config.init_from:
    earlier = _read_start(config.init_from, workdir)
    if earlier is not None:
      stages = earlier.stages + stages
      sources = earlier.sources + sources
      identity['init_from'] = earlier.identity
  is_tuned = any(stage.source == 'task' for stage in stages)
  task = config.data.task if is_tuned else ''
  return Lineage(
      workdir, _model_name(config.model), stages, task, config.seed,
      json.dumps(identity, sort_keys=True, default=str), sources,
  )


def _stages(
    workdir: pathlib.Path, phase: str, config: RunConfig
) -> Iterator[Stage]:
  run = read_run(workdir)
  names = [record.name for record in run.phases]
  if phase and phase not in names:
    raise ValueError(
        f'{workdir} has no phase {phase!r}; its phases are {", ".join(names)}.'
    )
  last = names.index(phase) if phase else len(names) - 1
  if run.last_step < run.phases[last].end:
    raise ValueError(
        f'{workdir} is at step {run.last_step:,} of {run.phases[last].end:,}; '
        'train it to the end.'
    )
  specs = {phase.name: phase.sparsity for phase in config.phases}
  for record in run.phases[:last + 1]:
    spec = specs[record.name]
    yield Stage(
        record.source, _algorithm(spec, record.sparsity), record.sparsity,
        record.steps, record.tokens,
    )


def _algorithm(spec: Any, level: float) -> str:
  if not isinstance(spec, Mapping):
    return 'static' if level else 'dense'
  # RigL with a level that rises is what the Llama post calls GraNet.
  rises = 'sparsity' in spec and isinstance(spec['sparsity'], Mapping)
  name = spec['algorithm']
  return 'granet' if name == 'rigl' and rises else name


def _read_start(source: str, workdir: pathlib.Path) -> Lineage | None:
  """Reads what a run started from, named from the folder it was launched in.

  Returns:
    The lineage; `None` of parameters that were not trained by us.
  """
  text, at, phase = source.partition('@')
  for folder in [pathlib.Path(), *workdir.absolute().parents]:
    if (folder / text / 'checkpoints').is_dir():
      trained = (folder / text / 'plan.json').is_file()
      return read_lineage(f'{folder / text}{at}{phase}') if trained else None
  raise FileNotFoundError(
      f'{workdir} starts from {text}, which is not there; run the command '
      'where training was launched.'
  )


def _model_name(model: ModelConfig) -> str:
  preset = PRESETS[model.preset]
  same = all(getattr(model.sizes, s) == getattr(preset, s) for s in _SIZES)
  return model.preset if same else f'{model.preset} resized'
