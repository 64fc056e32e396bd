"""Scored runs: workdirs found on disk, with their scores."""

from collections.abc import Iterator, Mapping, Sequence
import json
import os
import pathlib
from typing import Any, NamedTuple

from experiments.scores.ancestry import Ancestry
from experiments.scores.ancestry import read_ancestry
from experiments.scores.sheets import Settings
from spdf_jax.training.checkpoints.workdir import split_source

_KEYS = {'task', 'protocol', 'metric', 'value'}
_INSIDE_RUNS = {'checkpoints', 'generations'}
Scores = Mapping[tuple[str, str, str], float]


class ScoredRun(NamedTuple):
  """A finished run with its scores.

  Attributes:
    source: Workdir of the run, followed by `'@PHASE'` or `'@PHASE:best'` if the
      checkpoint of a phase before the last was scored, or of a best step.
    ancestry: Ancestry of the run.
    scores: Scores by task, protocol and metric; empty if it was not scored.
  """

  source: str
  ancestry: Ancestry
  scores: Scores


class ScoredRuns(NamedTuple):
  """The runs in some folders.

  Attributes:
    runs: Runs that can be read.
    problems: A sentence for each run or file that cannot be read or used.
  """

  runs: tuple[ScoredRun, ...]
  problems: tuple[str, ...]


def find_runs(folders: Sequence[str | os.PathLike[str]]) -> ScoredRuns:
  """Finds finished runs in folders, and their scores.

  Args:
    folders: Workdirs, or folders with workdirs at any depth, such as that of a
      sweep. Scores are read from JSON files in them, written by `--output` of
      `experiments.evaluate` or as `test.json` of a sweep; each file names its
      run or is in the run's workdir.

  Returns:
    The runs, sorted by source, and the problems.

  Raises:
    ValueError: a folder is missing or has no run, or a run has two different
      scores of one kind.
  """
  scores: dict[str, dict[tuple[str, str, str], float]] = {}
  problems = []
  names: dict[str, str] = {}  # By real path: a run may be given in two ways.
  for folder in map(pathlib.Path, folders):
    if not folder.is_dir():
      raise ValueError(
          f'{str(folder)!r} is no folder; give workdirs of runs, or folders '
          'that contain some.'
      )
    workdirs, files = _walk(folder)
    if not workdirs and not files:
      raise ValueError(
          f'{str(folder)!r} holds no run; give workdirs that '
          'experiments.train or experiments.sweep made.'
      )
    for workdir in workdirs:
      scores.setdefault(_name(workdir, names), {})
    for path, entry in files:
      located = _source_of(path, entry['model'])
      if located is None:
        problems.append(f'{path} scores {entry["model"]}, which is no run here')
        continue
      if trial := _trial(entry.get('settings', {})):
        problems.append(f'{path} has no official scores, since {trial}')
        continue
      run_dir, part = located
      source = _name(run_dir, names) + part
      _add(scores.setdefault(source, {}), entry['scores'], path, source)
  runs = []
  for source in sorted(scores):
    try:
      runs.append(ScoredRun(source, read_ancestry(source), scores[source]))
    except (ValueError, FileNotFoundError) as error:
      problems.append(str(error))
  return ScoredRuns(tuple(runs), tuple(dict.fromkeys(problems)))


def _walk(
    folder: pathlib.Path,
) -> tuple[list[str], list[tuple[pathlib.Path, Mapping[str, Any]]]]:
  """Returns workdirs, and pairs of a file of scores and an entry in it."""
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
    content = json.loads(path.read_text('utf-8'))
  except ValueError:
    return  # Not a file of scores.
  for entry in content if isinstance(content, list) else [content]:
    match entry:
      case {'model': str(), 'scores': list(scores)} if all(
          isinstance(score, Mapping) and _KEYS <= set(score) for score in scores
      ):
        yield entry


def _trial(settings: Mapping[str, Any]) -> str:
  """Returns why scores differ from those of a protocol; `''`: they do not."""
  official = Settings().as_dict()
  return ' and '.join(
      f'{name} is {settings[name]!r}' for name in ('limit', 'search')
      if settings.get(name, official[name]) != official[name]
  )


def _name(workdir: str | os.PathLike[str], names: dict[str, str]) -> str:
  """Returns the first name by which a workdir was found."""
  return names.setdefault(os.path.realpath(workdir), os.path.normpath(workdir))


def _source_of(
    path: pathlib.Path, model: str
) -> tuple[pathlib.Path, str] | None:
  """Returns the workdir that scores belong to, and `'@PHASE'` or `''`.

  It is found by the model's name or by the file's folder.
  """
  text, _, _ = split_source(model)
  phase = model.removeprefix(text)
  folders = [pathlib.Path(), *path.absolute().parents]
  for workdir in [*(folder / text for folder in folders), path.parent]:
    if (workdir / 'plan.json').is_file():
      return workdir, '' if phase == f'@{_last_phase(workdir)}' else phase
  return None


def _last_phase(workdir: pathlib.Path) -> str:
  """Returns the last phase of a plan, whose end is that of the run."""
  try:
    return json.loads((workdir / 'plan.json').read_text('utf-8'))[
        'phases'
    ][-1]['name']
  except (ValueError, LookupError, TypeError):
    return ''  # `read_ancestry` refuses a damaged plan.


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
          f'{known[key]}; leave out one of the files.'
      )
