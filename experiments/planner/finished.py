"""Finished pre-trainings, to which scaling laws are fitted."""

from collections.abc import Iterator, Sequence
import math
import pathlib
from typing import NamedTuple

from experiments.papers import arm_report
from experiments.papers import json_files
from experiments.papers import reproduction
from experiments.papers import scales
from experiments.papers.arms import PRETRAINED
from experiments.planner.law import Point
from spdf_jax import models
from spdf_jax import names
from spdf_jax import runs
from spdf_jax.runs import markdown
from spdf_jax.runs import read
from spdf_jax.training.checkpoints import workdir as workdirs

_METHODS = 'dense', 'static', 'variable'
"""Arms of experiments.reproduce whose masks do not depend on the weights."""


class Setting(NamedTuple):
  """What is trained, and on what.

  Attributes:
    data: Name of the corpus and its tokenizer.
    sizes: Sizes of the model.
    length: Number of tokens in a sequence.
    batch_size: Number of sequences in a batch.
  """

  data: str
  sizes: models.Sizes
  length: int
  batch_size: int


def read_finished(folders: Sequence[str]) -> tuple[list[Point], Setting]:
  """Reads finished pre-trainings.

  Args:
    folders: Workdirs of runs, and results of `experiments.reproduce`, of which
      the dense, static and variable arms of GPTs are read, at the learning
      rates chosen there, without runs that diverged.

  Returns:
    The configurations, and the setting of the one that took the most FLOPs.

  Raises:
    FileNotFoundError: a folder has neither a run nor results.
    ValueError: a run is not finished or does not start from scratch, runs read
      different data, or there are none.
  """
  found = []
  for folder in folders:
    path = pathlib.Path(folder, 'results.json')
    found += _read_results(path) if path.exists() else [_read_workdir(folder)]
  if not found:
    raise ValueError(
        f'runs={",".join(folders)} has no finished pre-training of a GPT; give '
        'workdirs, or results of experiments.reproduce.'
    )
  different = sorted({setting.data for _, setting in found})
  if len(different) > 1:
    raise ValueError(
        f'runs read different data, {" and ".join(different)}, whose losses '
        'cannot be compared; give the runs of one corpus and tokenizer.'
    )
  points: dict[tuple, Point] = {}
  for point, _ in found:
    key = point[:4]
    losses = points[key].losses if key in points else ()
    points[key] = point._replace(losses=losses + point.losses)
  _, setting = max(found, key=lambda run: run[0].flops)
  return list(points.values()), setting


def _read_workdir(folder: str) -> tuple[Point, Setting]:
  run = runs.read_run(folder)
  phases = read.pretraining_phases(run)
  end = phases[-1].end if phases else 0
  step, loss = (end and run.at_end(phases[-1], PRETRAINED)) or (-1, 0.0)
  if step < end or not math.isfinite(loss):
    raise ValueError(
        f'{folder} has no finite {PRETRAINED} at the end of a pre-training, '
        f'step {end}; finish it, or leave it out.'
    )
  config = workdirs.read_workdir_config(folder)
  if config.init_from:
    raise ValueError(
        f'{folder} starts from the weights of {config.init_from}, whose '
        'training a law would not count; leave it out.'
    )
  parts = [
      (part.sparsity, part.steps * phase.tokens / phase.steps)
      for phase in phases for part in phase.parts
  ]
  flops = runs.flops_at(run, end)
  return _point(run.sparsified_parameters, parts, flops, loss), Setting(
      f'{run.data["corpus"]} as {run.data["tokenizer"]}', config.model.sizes,
      phases[0].length, phases[0].batch_size,
  )


def _read_results(path: pathlib.Path) -> Iterator[tuple[Point, Setting]]:
  found = json_files.read_json(path)
  if not found.keys() >= {'scale', 'identity', 'runs'}:
    raise ValueError(
        f'{path} is not of experiments.reproduce; give the folder of its '
        'results, or workdirs.'
    )
  scale = names.lookup('scale', found['scale'], scales.SCALES)
  entries = reproduction.Reproduction(
      found['scale'], scale, path.parent, path.parent
  ).entries
  data = f'{found["identity"]["data"]["corpus"][:12]} as {scale.tokenizer}'
  for arm, outcomes in arm_report.measured(entries, found['runs']).items():
    if arm.task or arm.method not in _METHODS or scale.sizes[arm.size].rotary:
      continue
    sizes, batch = scale.model(arm.size), scale.batch(arm.size)
    weights = sizes.n_layers * sizes.hidden_weights
    for outcome in outcomes.values():
      if not math.isfinite(outcome[PRETRAINED]):
        continue
      tokens = outcome['steps'] * batch * scale.length
      parts = [(arm.sparsity, tokens)]
      if arm.method == 'variable':
        dense = outcome['steps'] // 6 * batch * scale.length
        parts = [(arm.sparsity, tokens - dense), (0.0, dense)]
      point = _point(weights, parts, outcome['flops'], outcome[PRETRAINED])
      yield point, Setting(data, sizes, scale.length, batch)


def _point(
    weights: int, parts: Sequence[tuple[float, float]], flops: float,
    loss: float,
) -> Point:
  """Returns a run whose training has parts of a sparsity and of tokens."""
  total = sum(tokens for _, tokens in parts)
  mean = sum(sparsity * tokens for sparsity, tokens in parts) / total
  ends = dict.fromkeys(markdown.percent(parts[i][0]) for i in (0, -1))
  kind = ' to '.join(ends) if mean else 'dense'
  return Point(kind, weights, round(mean, 6), total, flops, (loss,))
