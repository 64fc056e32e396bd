"""Ancestry of a checkpoint: the phases of all launches that led to it."""

from collections.abc import Iterator, Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any, NamedTuple

from spdf_jax.costs import flops
from spdf_jax.models import PRESETS
from spdf_jax.runs import read
from spdf_jax.training.checkpoints.identity import run_identity
from spdf_jax.training.checkpoints.workdir import find_checkpoint
from spdf_jax.training.checkpoints.workdir import read_workdir_config
from spdf_jax.training.checkpoints.workdir import split_source
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.settings import ModelConfig

_SIZES = ('n_layers', 'd_model', 'n_heads', 'd_ff')


class Stage(NamedTuple):
  """A trained phase.

  Attributes:
    source: Source of the batches: `'corpus'` or `'task'`.
    algorithm: `'dense'`, `'static'` or the name of the algorithm that updated
      the masks.
    sparsity: Fraction of zeros at the end of the phase.
    steps: Number of steps.
    tokens: Number of training tokens.
  """

  source: str
  algorithm: str
  sparsity: float
  steps: int
  tokens: int


class Ancestry(NamedTuple):
  """The training that produced the parameters of a checkpoint.

  Attributes:
    workdir: Workdir of the last launch.
    model: Preset of the model; `'… resized'` if a size differs from the preset.
    stages: All phases, those of earlier launches first.
    task: Task of the fine-tuning; `''`: there was none.
    seed: Seed of the last launch.
    identity: Configs of all launches without seeds and paths, as JSON: equal
      for runs that differ only in their seeds.
    sources: Sources of all launches, `'WORKDIR'` or `'WORKDIR@PHASE'`, the
      earliest first.
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
    """The phases on a corpus."""
    return tuple(s for s in self.stages if s.source == 'corpus')

  @property
  def tokens(self) -> int:
    """Number of tokens in pre-training."""
    return sum(stage.tokens for stage in self.pretraining)

  @property
  def recipe(self) -> tuple[str, float]:
    """Kind of pre-training, and the sparsity that characterizes it.

    `('dense', 0)`; the algorithm and sparsity of the last phase; `'variable'`
    (sparse, then dense) with the effective sparsity, relative to the tokens of
    all phases or of the first sparse phase, whichever is closer to 0.75;
    `'iterative'` (increasing sparsity) with the last sparsity; `('unknown', 0)`
    if no phase is recorded.
    """
    return describe_stages(self.pretraining)

  @property
  def tuned_sparsely(self) -> bool:
    """Whether fine-tuning was sparse."""
    return any(s.sparsity > 0 for s in self.stages if s.source == 'task')


def describe_stages(stages: tuple[Stage, ...]) -> tuple[str, float]:
  """Classifies a pre-training by its phases; see `Ancestry.recipe`.

  Example:
    >>> sparse = Stage('corpus', 'static', 0.9, 500, 5000)
    >>> dense = Stage('corpus', 'dense', 0.0, 100, 1000)
    >>> describe_stages((sparse, dense))
    ('variable', 0.75)
    >>> describe_stages((sparse,)), describe_stages((dense,))
    (('static', 0.9), ('dense', 0.0))
  """
  sparsities = [stage.sparsity for stage in stages]
  if not sparsities:
    return 'unknown', 0.0
  if not any(sparsities):
    return 'dense', 0.0
  if sparsities[-1] == 0:
    first = next(s for s in stages if s.sparsity > 0)
    averages = [
        flops.effective_sparsity(
            [s.tokens for s in stages], sparsities, reference
        )
        for reference in (sum(s.tokens for s in stages), first.tokens)
    ]
    nearest = min(averages, key=lambda sparsity: abs(sparsity - 0.75))
    return 'variable', round(nearest, 6)
  if len(set(sparsities)) > 1 and sorted(sparsities) == sparsities and (
      len(sparsities) > 2 or sparsities[0] == 0
  ):
    return 'iterative', sparsities[-1]
  return stages[-1].algorithm, sparsities[-1]


def read_ancestry(source: str | os.PathLike[str]) -> Ancestry:
  """Reads the ancestry of a checkpoint from the workdirs of all launches.

  If a run started from parameters without a recorded training, e.g. imported
  ones, the ancestry begins with that run.

  Args:
    source: `'WORKDIR'` of a finished run, `'WORKDIR@PHASE'` of a finished
      phase, or `'WORKDIR@PHASE:best'` for its steps up to the best one.

  Returns:
    The ancestry.

  Raises:
    FileNotFoundError: a workdir or one of its files is missing.
    ValueError: the run or the phase is not finished, or there is no such phase.
  """
  text, phase, which = split_source(str(source))
  workdir = pathlib.Path(text)
  config = read_workdir_config(workdir)
  best = int(find_checkpoint(str(source)).name) if which else None
  stages = tuple(_stages(workdir, phase, config, best))
  identity = run_identity(dataclasses.replace(config, seed=0))
  sources: tuple[str, ...] = (str(source),)
  if config.init_from:
    earlier = _read_start(config.init_from, workdir)
    if earlier is not None:
      stages = earlier.stages + stages
      sources = earlier.sources + sources
      identity['init_from'] = earlier.identity
  is_tuned = any(stage.source == 'task' for stage in stages)
  task = config.data.task if is_tuned else ''
  return Ancestry(
      workdir, _model_name(config.model), stages, task, config.seed,
      json.dumps(identity, sort_keys=True, default=str), sources,
  )


def _stages(
    workdir: pathlib.Path, phase: str, config: RunConfig, until: int | None
) -> Iterator[Stage]:
  """Yields the stages up to the end of a phase, or up to a step in it."""
  run = read.read_run(workdir)
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
  specs = {phase.name: phase.algorithm for phase in config.phases}
  for record in run.until(until or run.phases[last].end).phases:
    algorithm = _algorithm(specs[record.name], record.sparsity)
    yield Stage(
        record.source, algorithm, record.sparsity, record.steps, record.tokens
    )


def _algorithm(spec: Mapping[str, Any], sparsity: float) -> str:
  name = spec['name']
  if name == 'static' and not sparsity:
    return 'dense'
  # Cerebras' Llama post uses the name GraNet for RigL with rising sparsity.
  rises = isinstance(spec.get('sparsity'), Mapping)
  return 'granet' if name == 'rigl' and rises else name


def _read_start(source: str, workdir: pathlib.Path) -> Ancestry | None:
  """Reads the ancestry of `init_from`, relative to the folder of the launch.

  Returns:
    The ancestry; `None` for parameters without a recorded training.
  """
  text, _, _ = split_source(source)
  for folder in [pathlib.Path(), *workdir.absolute().parents]:
    if (folder / text / 'plan.json').is_file():
      return read_ancestry(f'{folder / source}')
    if (folder / text / 'checkpoints').is_dir():
      return None
  raise FileNotFoundError(
      f'{workdir} starts from {text}, which is not found; run the command in '
      'the folder where training was launched.'
  )


def _model_name(model: ModelConfig) -> str:
  if model.preset not in PRESETS:
    return model.preset  # A user's own.
  preset = PRESETS[model.preset]
  same = all(getattr(model.sizes, s) == getattr(preset, s) for s in _SIZES)
  return model.preset if same else f'{model.preset} resized'
