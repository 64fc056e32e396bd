# SPDX-License-Identifier: Apache-2.0
"""Curation Corpus: summaries of news articles."""

import os
import random

from spdf_jax.data.tasks.files import find_files
from spdf_jax.data.tasks.files import read_table
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import Task
from spdf_jax.data.tasks.task import task_of_inputs

_FILE = 'curation-corpus-base-with-articles.csv'


def curation(directory: str | os.PathLike[str], seed: int = 0) -> Task:
  """Reads the table written by the scraper of the corpus.

  Pairs with an empty side are skipped; 39,911 remain of the full corpus. They
  are shuffled by the seed and split into eight tenths for training and one
  tenth each for validation and test. The score is the perplexity over the
  tokens of summaries, their end of text included.

  Args:
    directory: Folder with `curation-corpus-base-with-articles.csv`.
    seed: Seed of the split; results are comparable for equal seeds only.

  Returns:
    The task.

  Raises:
    ValueError: The file is missing, or lacks a column.

  Source: Curation 2020, `Curation Corpus Base
    <https://github.com/CurationCorp/curation-corpus>`_

  Example:
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> rows = ''.join(f'S{i},Article {i}\\n' for i in range(10)) + 'S,\\n'
    >>> _ = (folder / _FILE).write_text('summary,article_content\\n' + rows)
    >>> task = curation(folder)
    >>> len(task.train), len(task.validation), len(task.test)
    (8, 1, 1)
  """
  path = find_files(directory, {'train': [_FILE]})['train']
  rows = (
      (row['article_content'].strip(), row['summary'].strip())
      for row in read_table(path, ['article_content', 'summary'])
  )
  inputs = [Input(a, (summary,)) for a, summary in rows if a and summary]
  random.Random(seed).shuffle(inputs)
  first, second = len(inputs) * 8 // 10, len(inputs) * 9 // 10
  return task_of_inputs('curation', {
      'train': inputs[:first],
      'validation': inputs[first:second],
      'test': inputs[second:],
  })
