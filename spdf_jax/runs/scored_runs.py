"""Scored runs: workdirs that are found on disk, with what they scored."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

from spdf_jax.runs.ancestry import Lineage
from spdf_jax.runs.ancestry import read_lineage

_INSIDE_RUNS = {'checkpoints', 'generations'}
Scores = Mapping[tuple[str, str, str], float]


class ScoredRun(NamedTuple):
  """A finished run.

  Attributes:
    source: Its workdir, and phase, if it is that which was scored.
    lineage: What made it.
    scores: By task, protocol and metric; none if it was not scored.
  """

  source: str
  lineage: Lineage
  scores: Scores


class Found(NamedTuple):
  """What is in some folders.

  Attributes:
    runs: Those that can be read.
    problems: Why others cannot, a sentence each.
  """

  runs: tuple[ScoredRun, ...]
  problems: tuple[str, ...]


def find_runs(folders: Sequence[str | os.PathLike[str]]) -> Found:
  """Finds finished runs in folders, and their scores.

  Args:
    folders: Workdirs, or folders with workdirs at any depth, such as that of a
      sweep. Scores are JSON files there, of `--output` of
      `experiments.evaluate` or `test.json` of a sweep; each names its run, or
      lies in its workdir.

  Returns:
    The runs, in the order of their names.

  Raises:
    ValueError: a folder is missing or has no run; or a run has two different
      scores of one kind.
  """
  scores: dict[str, dict[tuple[str, str, str], float]] = {}
  problems = []
  for folder in map(pathlib.Path, folders):
    if not folder.is_dir():
      raise ValueError(
          f'{str(folder)!r} is no folder; give workdirs of runs, or folders '
          'that hold some.'
      )
    workdirs, files = _walk(folder)
    if not workdirs and not files:
      raise ValueError(
          f'{str(folder)!r} holds no run; give workdirs that '
          'experiments.train or experiments.sweep made.'
      )
    for workdir in workdirs:
      scores.setdefault(os.path.normpath(workdir), {})
    for path, entry in files:
      source = _source_of(path, entry['model'])
      if source is None:
        problems.append(f'{path} scores {entry["model"]}, which is no run here')
        continue
      _add(scores.setdefault(source, {}), entry['scores'], path, source)
  runs = []
  for source in sorted(scores):
    try:
      runs.append(ScoredRun(source, read_lineage(source), scores[source]))
    except (ValueError, FileNotFoundError) as error:
      problems.append(str(error))
  return Found(tuple(runs), tuple(dict.fromkeys(problems)))


def _walk(
    folder: pathlib.Path,
) -> tuple[list[str], list[tuple[pathlib.Path, Mapping[str, Any]]]]:
  """Returns workdirs, and files of scores with each model's entry."""
  workdirs, files = [], []
  for place, folders, names in os.walk(folder):
    folders[:] = sorted(set(folders) - _INSIDE_RUNS)
    if {'config.json', 'plan.json'} <= set(names):
      workdirs.append(place)
    for name in sorted(names):
      if name.endswith('.json') and name not in ('config.json', 'plan.json'):
        path = pathlib.Path(place, name)
        files += [(path, entry) for entry in _entries(path)]
  return workdirs, files


def _entries(path: pathlib.Path) -> Iterator[Mapping[str, Any]]:
  try:
    found = json.loads(path.read_text('utf-8'))
  except ValueError:
    return  # Not ours.
  for entry in found if isinstance(found, list) else [found]:
    if isinstance(entry, Mapping) and {'model', 'scores'} <= set(entry):
      yield entry


def _source_of(path: pathlib.Path, model: str) -> str | None:
  """Finds the run that scores are of: as named, or where the file lies."""
  text, at, phase = model.partition('@')
  folders = [pathlib.Path(), *path.absolute().parents]
  for workdir in [*(folder / text for folder in folders), path.parent]:
    if (workdir / 'plan.json').is_file():
      found = os.path.relpath(workdir) if not workdir.is_absolute() else (
          os.path.normpath(workdir)
      )
      return found + at + phase
  return None


def _add(
    known: dict[tuple[str, str, str], float],
    scores: Sequence[Mapping[str, Any]],
    path: pathlib.Path,
    source: str,
) -> None:
  for score in scores:
    key = score['task'], score['protocol'], score['metric']
    value = score['value']
    if value is None:
      continue
    if known.setdefault(key, value) != value:
      raise ValueError(
          f'{path} has {" ".join(key)} {value} for {source} and another file '
          f'{known[key]}; leave out one of them.'
      )
