"""Data of experiments.reproduce: corpus and tasks, prepared in one folder."""

from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
from typing import NamedTuple

from experiments import preparation
from experiments.papers.scale import Scale
from spdf_jax import data
from spdf_jax import files

_VALIDATION, _TEST = 0.05, 0.03
"""Shares of the books; the evaluations need no more."""
_PAIRS = 16
"""Validation pairs of a task for each evaluated batch, evenly spaced."""


class Prepared(NamedTuple):
  """Prepared data of runs.

  Attributes:
    corpus: Name or folder of the corpus.
    tasks: Tasks by name, whole.
    domains: Bytes of the texts of other domains, by name.
    fingerprints: Fingerprints of corpus, tasks and domains, by name.
  """

  corpus: str
  tasks: dict[str, data.Task]
  domains: dict[str, bytes]
  fingerprints: dict[str, str]


def prepare(scale: Scale, source: str, directory: pathlib.Path) -> Prepared:
  """Tokenizes the corpus and reads the tasks.

  Args:
    scale: Scale whose corpus and tasks are prepared.
    source: Folder of the data; ignored if the scale reads no data from it.
    directory: Output folder of the corpus; parts that exist are kept.

  Returns:
    The prepared data.

  Raises:
    ValueError: the folder, or a folder that it must contain, is missing; or
      the output folder has the corpus of other files.
  """
  folders = [
      scale.corpus, *(task.folder for task in scale.tasks.values()),
      *(str(pathlib.Path(text).parent) for text in scale.domains.values()),
  ]
  for folder in filter(None, folders):
    if not (source and pathlib.Path(source, folder).is_dir()):
      raise ValueError(
          f'data is {source!r} and has no folder {folder!r}; give the folder '
          f'that contains {", ".join(sorted(set(filter(None, folders))))}, as '
          '--data or SPDF_DATA.'
      )
  if scale.corpus:
    name = str((directory / 'corpus').absolute())
    corpus = preparation.prepare_files(
        pathlib.Path(source, scale.corpus),
        tokenizer=scale.tokenizer,
        output=name,
        validation=_VALIDATION,
        test=_TEST,
        workers=len(os.sched_getaffinity(0)),
    )
  else:
    name = 'python-stdlib'
    corpus = data.prepare_corpus(
        name, tokenizer=scale.tokenizer, cache_dir='~/.cache/spdf_jax'
    )
  tasks = {
      key: data.load_task(
          task.kind, pathlib.Path(source, task.folder) if task.folder else ''
      )
      for key, task in scale.tasks.items()
  }
  domains = {
      key: pathlib.Path(source, text).read_bytes()
      for key, text in scale.domains.items()
  }
  return Prepared(
      name, tasks, domains,
      {'corpus': _digest_tokens(corpus)}
      | {key: task.fingerprint for key, task in tasks.items()}
      | {key: hashlib.sha256(text).hexdigest() for key, text in domains.items()}
  )


def write_tasks(
    scale: Scale, tasks: Mapping[str, data.Task], directory: pathlib.Path
) -> str:
  """Writes the share of each task that a scale uses; returns the folder."""
  folder = (directory / 'tasks').absolute()
  for key, task in tasks.items():
    _write_share(
        task, folder / key, scale.tasks[key].every, scale.batches * _PAIRS
    )
  return str(folder)


def _digest_tokens(corpus: data.Corpus) -> str:
  """Returns a SHA-256 of the tokens of all splits, from whatever files."""
  splits = corpus.train, corpus.validation, corpus.test
  text = ' '.join(split.fingerprint for split in splits)
  return hashlib.sha256(text.encode()).hexdigest()


def _write_share(
    task: data.Task, directory: pathlib.Path, every: int, validation: int
) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  step = max(len(task.validation) // validation, 1)
  splits = {
      'train': task.train[::every], 'validation': task.validation[::step],
      'test': (),  # Claims are judged on other seeds, not on another split.
  }
  for split, pairs in splits.items():
    text = ''.join(json.dumps(pair._asdict()) + '\n' for pair in pairs)
    path = directory / f'{split}.jsonl'
    if not path.exists() or path.read_text('utf-8') != text:
      files.write_atomically(path, text)
