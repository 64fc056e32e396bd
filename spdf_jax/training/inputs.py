"""Inputs of a recipe: its corpus, its task, and the sources of batches."""

from collections.abc import Mapping
from collections.abc import Sequence
import os
from typing import Any

from spdf_jax import data


def open_corpus(
    config: Mapping[str, Any], planning: bool
) -> data.Corpus | data.PlannedCorpus:
  """Opens the corpus that a config names.

  Args:
    config: `config.data`.
    planning: Nothing will be read: a corpus that is not there yet is as
      `planned` says.

  Returns:
    The corpus.

  Raises:
    ValueError: there is none.

  Example:
    >>> planned = dict(tokens=371e9, vocab_size=50257)
    >>> open_corpus(dict(corpus='./pile', planned=planned), True).tokens
    371000000000
  """
  planned = config.get('planned')
  if planning and planned and not os.path.exists(config['corpus']):
    return data.PlannedCorpus(
        config['corpus'], int(planned['tokens']),
        data.PlannedTokenizer(planned['vocab_size']),
    )
  return data.prepare_corpus(
      config['corpus'],
      tokenizer=config['tokenizer'],
      cache_dir=config['cache_dir'],
  )


def open_task(
    config: Mapping[str, Any], planning: bool
) -> data.Task | data.PlannedExamples | None:
  """Reads the task that a config names.

  Args:
    config: `config.data`.
    planning: Nothing will be read: a task whose folder is not there yet has as
      many examples as `planned` says.

  Returns:
    The task; `None` without.

  Raises:
    ValueError: there is no such task, or its files are not there.

  Example:
    >>> files = dict(task='e2e', task_dir='./e2e', planned=dict(examples=42061))
    >>> open_task(files, True).examples
    42061
  """
  name, directory = config['task'], config.get('task_dir')
  if not name:
    return None
  planned = config.get('planned') or {}
  if planning and 'examples' in planned and not os.path.exists(directory):
    return data.PlannedExamples(name, planned['examples'])
  return data.load_task(name, directory)


def create_sources(
    corpus: data.Corpus | data.PlannedCorpus,
    task: data.Task | data.PlannedExamples | None,
    specs: Mapping[str, Any],
    order: Sequence[str],
) -> dict[str, data.Source]:
  """Makes what batches are read from.

  Args:
    corpus: From `open_corpus`.
    task: From `open_task`.
    specs: Of the phases, by name.
    order: Those that run.

  Returns:
    Sources: `'corpus'`, and `'task'` if there is one; of a planned corpus both
    can be counted only.

  Raises:
    ValueError: the task has no example to train on.

  Example:
    >>> corpus = data.PlannedCorpus('pile', 99, data.PlannedTokenizer(9))
    >>> list(create_sources(corpus, None, {}, []))
    ['corpus']
  """
  sources = {'corpus': corpus.source}
  if isinstance(task, data.PlannedExamples):
    sources['task'] = task
  elif task is not None:
    sources['task'] = _encode_task(corpus, task, specs, order)
  return sources


def _encode_task(corpus, task, specs, order) -> data.Source:
  if not task.train:
    raise ValueError(
        f'task {task.name!r} has no example to train on; add the file of its '
        'training split to data.task_dir.'
    )
  if isinstance(corpus, data.PlannedCorpus):
    # Without its tokenizer, examples can only be counted.
    return data.PlannedExamples(task.name, len(task.train))
  lengths = [
      specs[name]['length'] for name in order
      if specs.get(name, {}).get('data') == 'task'
  ]
  # A row of L tokens predicts L targets, so the example has one more.
  return data.encode_pairs(
      task.train, corpus.tokenizer, max(lengths, default=127) + 1
  )
