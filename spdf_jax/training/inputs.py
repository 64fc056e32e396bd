# SPDX-License-Identifier: Apache-2.0
"""Inputs of a run: its corpus, its task and the sources of batches."""

from collections.abc import Callable, Mapping, Sequence
import functools
import logging
import os

from spdf_jax import data
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.configs.settings import DataConfig

logger = logging.getLogger('spdf_jax')

# Losses of tokens deviate by some nats, so the mean over so many tokens
# deviates by hundredths.
_FEW_TOKENS = 10_000


def open_data(
    config: DataConfig,
    phases: Sequence[Phase],
    vocab_size: int,
    planning: bool,
) -> tuple[
    data.Corpus | data.PlannedCorpus,
    data.Task | data.PlannedExamples | None,
    dict[str, data.Source],
]:
  """Opens the corpus and the task, and creates the sources of batches.

  Args:
    config: The config of the data.
    phases: The phases, whose lengths bound those of encoded examples.
    vocab_size: Vocabulary size of the model.
    planning: Whether the data need not exist; then it may have a planned size.

  Returns:
    Corpus, task or `None`, and sources by the name that phases use, `'corpus'`
    and `'task'`.

  Raises:
    ValueError: the corpus cannot be prepared, or has token ids beyond the
      vocabulary of the model; or the task is unknown, cannot be read, has no
      training examples, or one that is too long.
  """
  task = _open_task(config, planning)
  corpus = _open_corpus(config, vocab_size, planning)
  return corpus, task, _create_sources(corpus, task, phases)


def _open_corpus(
    config: DataConfig, vocab_size: int, planning: bool
) -> data.Corpus | data.PlannedCorpus:
  """Opens the corpus, or its planned size where it need not exist."""
  planned = config.planned
  corpus: data.Corpus | data.PlannedCorpus
  if planning and planned.tokens and not os.path.exists(config.corpus):
    corpus = data.PlannedCorpus(
        config.corpus, int(planned.tokens),
        data.PlannedTokenizer(planned.vocab_size),
    )
  else:
    corpus = data.prepare_corpus(
        config.corpus, tokenizer=config.tokenizer, cache_dir=config.cache_dir
    )
  _check_vocabulary(corpus, vocab_size)
  return corpus


def _check_vocabulary(
    corpus: data.Corpus | data.PlannedCorpus, vocab_size: int
) -> None:
  if corpus.tokenizer.vocab_size > vocab_size:
    raise ValueError(
        f'corpus {corpus.name!r} has token ids up to '
        f'{corpus.tokenizer.vocab_size - 1} and the model a vocabulary of '
        f'{vocab_size}; set model.vocab_size to '
        f'{corpus.tokenizer.vocab_size} or use another tokenizer.'
    )


def _open_task(
    config: DataConfig, planning: bool
) -> data.Task | data.PlannedExamples | None:
  """Loads the task, or its planned size where its files need not exist."""
  if not config.task:
    return None
  examples = config.planned.examples
  try:
    if planning and examples and not os.path.exists(config.task_dir):
      return data.PlannedExamples(config.task, examples)
    return data.load_task(
        config.task, config.task_dir, cache_dir=config.cache_dir
    )
  except ValueError as error:
    raise ValueError(
        f'data.task is {config.task!r} and data.task_dir {config.task_dir!r}: '
        f'{error}'
    ) from error


def _create_sources(
    corpus: data.Corpus | data.PlannedCorpus,
    task: data.Task | data.PlannedExamples | None,
    phases: Sequence[Phase],
) -> dict[str, data.Source]:
  """Creates the sources of batches; planned sources have sizes only."""
  sources = {'corpus': corpus.source}
  if isinstance(task, data.PlannedExamples):
    return sources | {'task': task}
  if task is None:
    return sources
  if not task.train:
    raise ValueError(
        f'task {task.name!r} has no example to train on; add the file of its '
        'training split to data.task_dir.'
    )
  if isinstance(corpus, data.PlannedCorpus):
    # Without a tokenizer, examples can be counted but not encoded.
    return sources | {'task': data.PlannedExamples(task.name, len(task.train))}
  lengths = [phase.length for phase in phases if phase.data == 'task']
  # The example has one token more than a row, since a row of L tokens predicts
  # L targets.
  examples = data.encode_pairs(
      task.train, corpus.tokenizer, max(lengths, default=127) + 1
  )
  return sources | {'task': examples}


def tokens_per_epoch(
    sources: Mapping[str, data.Source]
) -> dict[str, Callable[[int], int]]:
  """Returns functions from the length of blocks to the tokens of an epoch.

  Args:
    sources: The sources, by name.

  Returns:
    The functions, by the name of their source.
  """
  tokens = lambda source, length: length * source.num_blocks(length)
  return {
      name: functools.partial(tokens, source)
      for name, source in sources.items()
  }


def check_validation(
    corpus: data.Corpus, task: data.Task | None, length: int
) -> None:
  """Raises ValueError if a validation split has nothing to evaluate.

  Warns of a split of so few tokens that its losses say little of others.

  Args:
    corpus: The corpus.
    task: The task; `None`: there is none.
    length: Tokens per sequence of the evaluations on the corpus.
  """
  if not data.Windows(corpus.validation).num_blocks(length):
    raise ValueError(
        f'corpus {corpus.name!r} has no row of {length} tokens in its '
        'validation split; prepare it with a larger validation split, or '
        'give phases a smaller length.'
    )
  tokens = len(corpus.validation.tokens)
  if tokens < _FEW_TOKENS:
    logger.warning(
        'the validation split of corpus %r has %d tokens, fewer than %d, so '
        'that its losses depend on them; prepare the corpus with a larger '
        'validation split', corpus.name, tokens, _FEW_TOKENS,
    )
  if task is not None and not task.validation:
    raise ValueError(
        f'task {task.name!r} has no example in its validation split; '
        'add the file of that split to data.task_dir.'
    )
