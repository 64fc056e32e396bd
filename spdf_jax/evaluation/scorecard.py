# SPDX-License-Identifier: Apache-2.0
"""Scorecards: scores of a model on named tasks, each with its protocol."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import logging
import math
import pathlib
import statistics
from typing import Any
from typing import NamedTuple

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax.evaluation.candidate import Candidate
from spdf_jax.evaluation.lambada import LAMBADA_PROTOCOLS
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.evaluation.metrics.meteor import why_no_meteor
from spdf_jax.extras import require
from spdf_jax.names import lookup

logger = logging.getLogger('spdf_jax')

TEXT_PROTOCOLS = {
    'e2e': ('lora_e2e',),
    'e2e_csv': ('e2e_raw',),
    'webnlg': ('lora_webnlg', 'webnlg17'),
    'dart': ('dart', 'lora_webnlg'),
    'dart_smoke': ('dart', 'lora_webnlg'),
    'jsonl': ('generation_eval',),
    'python-docstrings': ('generation_eval',),
}
"""Protocols of text metrics by generation task; papers report the first."""


_WITHOUT_FILES = {'validation', 'python-docstrings', *evaluation.SUITES}
"""Tasks that need no path; without one, those of a suite are downloaded."""


class Score(NamedTuple):
  """One score of a model.

  Attributes:
    task: Name of the task; `'task (part)'` for a part of a task.
    protocol: Name of the definition of the metric.
    metric: Name of the metric.
    value: The score; `None` if it could not be computed.
    note: Number of scored items, or the reason why there is no score.
    chance: Expected score of random guessing; `None` unless the task is
      multiple choice.
  """

  task: str
  protocol: str
  metric: str
  value: float | None
  note: str = ''
  chance: float | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of generation and scoring.

  Attributes:
    search: A name of `evaluation.PROTOCOLS`, or `'greedy'`.
    max_new_tokens: Maximum number of tokens in an answer.
    batch_size: Number of sequences in a batch.
    limit: Maximum number of inputs, questions or lines of a text, for a trial;
      `None`: all.
    meteor_jar: Path of `meteor-1.5.jar`; `None`: no METEOR.
    generations: Folder for the answers; `None`: answers are not stored.
    special_tokens: Whether text that spells a special token is encoded as that
      token, see `data.with_special_tokens`; the notes of the scores say so.
  """

  search: str = 'hu2021'
  max_new_tokens: int = 64
  batch_size: int = 8
  limit: int | None = None
  meteor_jar: str | None = None
  generations: pathlib.Path | None = None
  special_tokens: bool = False

  def as_dict(self) -> dict[str, Any]:
    """Returns the settings that scores depend on, by name."""
    return dataclasses.asdict(self) | {'generations': None}


def parse_tasks(tasks: Sequence[str]) -> list[tuple[str, str]]:
  """Reads tasks as commands take them, and checks them.

  Args:
    tasks: `NAME` or `NAME=PATH` of each task.

  Returns:
    Name and path of each task; `''` is no path.

  Raises:
    ValueError: A name is unknown or given twice, a path is missing, or nothing
      is there.

  Example:
    >>> parse_tasks(['validation'])
    [('validation', '')]
  """
  named: list[tuple[str, str]] = []
  for task in tasks:
    name, _, path = task.partition('=')
    _scorer(name)
    if not path and name not in _WITHOUT_FILES:
      raise ValueError(
          f'task {name} has no path; give {name}=PATH of its files.'
      )
    if path and not pathlib.Path(path).exists():
      raise ValueError(
          f'task {name}: {path!r} does not exist; give the path of its files.'
      )
    if name in dict(named):
      raise ValueError(
          f'task {name} is given twice; score it with each path by itself.'
      )
    named.append((name, path))
  return named


def score_tasks(
    candidate: Candidate, tasks: Sequence[str], settings: Settings
) -> Iterator[list[Score]]:
  """Evaluates a model on tasks, one after another.

  Args:
    candidate: Model to evaluate.
    tasks: Tasks, as `parse_tasks` takes them.
    settings: Settings of generation and scoring.

  Yields:
    The scores of each task.

  Raises:
    ValueError: A task is invalid, or the model or a setting does not suit it;
      most of this is found before the first task is scored.
    ImportError: A library is missing.
  """
  named = parse_tasks(tasks)
  for name, _ in named:
    _check(candidate, name, settings)
  for name, path in named:
    logger.info('scoring %s', name)
    yield score_task(candidate, name, path, settings)


def _check(candidate: Candidate, name: str, settings: Settings) -> None:
  """Raises if a task cannot be scored with a model and settings."""
  if name == 'validation' and candidate.config is None:
    raise ValueError(
        f'{candidate.name} has no corpus to validate on; leave out task '
        f'{name!r}.'
    )
  if name not in TEXT_PROTOCOLS:
    return
  require('sacrebleu', 'eval')
  length = candidate.model.config.max_length
  if settings.max_new_tokens > length - 2:
    raise ValueError(
        f'max_new_tokens is {settings.max_new_tokens}, and {candidate.name} '
        f'has {length} positions for context and answer; give at most '
        f'{length - 2}.'
    )
  if settings.meteor_jar and (reason := why_no_meteor(settings.meteor_jar)):
    raise ValueError(f'meteor_jar is {settings.meteor_jar!r}: {reason}')


def score_task(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> list[Score]:
  """Evaluates a model on a task.

  Args:
    candidate: Model to evaluate.
    name: `'validation'` (loss on the validation split of the model's corpus),
      `'lambada'`, `'wikitext'`, a suite of the harness, `'curation'`
      (perplexity of the targets) or a task of `TEXT_PROTOCOLS`; the last two
      use the test split.
    path: The file of `'lambada'` and `'wikitext'`, the folder of the other
      tasks (`''` downloads the files of a suite); unused by `'validation'`.
    settings: Settings of generation and scoring.

  Returns:
    The scores.

  Raises:
    ValueError: The name is unknown, or the files do not belong to the task.
    ImportError: A library is missing.
  """
  score = _scorer(name)
  _check(candidate, name, settings)
  # The corpus of a run is already encoded.
  if not settings.special_tokens or name == 'validation':
    return list(score(candidate, name, path, settings))
  candidate = dataclasses.replace(
      candidate, tokenizer=data.with_special_tokens(candidate.tokenizer)
  )
  return [
      found._replace(note=f'{found.note}; special tokens'.lstrip('; '))
      for found in score(candidate, name, path, settings)
  ]


def _scorer(name: str) -> Callable[..., Iterator[Score]]:
  """Returns the function that scores a task; raises if there is none."""
  return lookup('task', name, {
      'validation': _validation, 'lambada': _lambada, 'wikitext': _wikitext,
      'curation': _targets,
      **dict.fromkeys(evaluation.SUITES, _suite),
      **dict.fromkeys(TEXT_PROTOCOLS, _texts),
  })


def _validation(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  del path
  config = candidate.config.data
  corpus = data.prepare_corpus(
      config.corpus, tokenizer=config.tokenizer, cache_dir=config.cache_dir
  )
  batches = data.evaluation_batches(
      data.Windows(corpus.validation),
      batch_size=settings.batch_size,
      length=candidate.model.config.max_length,
      max_batches=-(-(settings.limit or 10**9) // settings.batch_size),
  )
  loss = evaluation.evaluate_loss(
      candidate.subject.apply_fn, candidate.params, batches
  )
  facts = corpus.validation.description
  note = f'{loss.tokens:,.0f} tokens'
  bits = evaluation.bits_per_byte(loss, facts['tokens'] / facts['bytes'])
  for metric, value in (
      ('loss', loss.loss), ('perplexity', loss.perplexity),
      ('bits_per_byte', bits),
  ):
    yield Score(name, 'mean over tokens', metric, value, note)


def _lambada(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  passages = evaluation.read_lambada(path)[:settings.limit]
  subject = candidate.subject
  for protocol in LAMBADA_PROTOCOLS:
    found = evaluation.score_lambada(
        subject.apply_fn, subject.params, passages, subject.tokenizer,
        protocol=protocol, length=subject.length,
    )
    for metric in ('accuracy', 'perplexity'):
      yield Score(
          name, protocol, metric, found[metric], f'{found["items"]:,} items'
      )


def _wikitext(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  subject = candidate.subject
  lines = pathlib.Path(path).read_text('utf-8').splitlines(keepends=True)
  found = evaluation.adjusted_perplexity(
      subject.apply_fn, subject.params, ''.join(lines[:settings.limit]),
      subject.tokenizer, length=subject.length,
  )
  note = f'{found["words"]:,} words, {found["tokens"]:,} tokens'
  yield Score(
      name, found['protocol'], 'adjusted_perplexity',
      found['adjusted_perplexity'], note,
  )


def _suite(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  found = evaluation.run_suite(
      candidate.subject, name, directory=path or None, limit=settings.limit
  )
  for task, value in found.values.items():
    note = found.reasons.get(task) or f'{found.items[task]:,} items'
    yield Score(
        task, name, 'accuracy', value, note, found.chance.get(task)
    )
  yield Score('mean', name, 'accuracy', found.mean)


def _targets(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  subject = candidate.subject
  found = evaluation.target_perplexity(
      subject.apply_fn, subject.params,
      data.load_task(name, path or None).test[:settings.limit],
      subject.tokenizer, length=subject.length, batch_size=settings.batch_size,
  )
  note = f'{found["tokens"]:,} tokens'
  for metric in ('perplexity', 'loss'):
    yield Score(name, found['protocol'], metric, found[metric], note)


def _texts(
    candidate: Candidate, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  task = data.load_task(name, path or None)
  inputs = task.inputs_of('test')[:settings.limit]
  if not inputs:
    raise ValueError(
        f'task {name!r} has no test split in {path!r}; add its file.'
    )
  contexts = list(dict.fromkeys(entry.context for entry in inputs))
  written = dict(zip(contexts, answer(candidate, contexts, settings)))
  if settings.generations is not None:
    evaluation.write_json_lines(
        settings.generations / f'{name}.jsonl',
        [
            entry._asdict() | {'generation': written[entry.context]}
            for entry in inputs
        ],
    )
  parts = sorted({entry.part for entry in inputs} - {''})
  for part in (None, *parts):
    held = [entry for entry in inputs if part in (None, entry.part)]
    label = name if part is None else f'{name} ({part})'
    for protocol in TEXT_PROTOCOLS[name]:
      chosen = (
          data.merge_equal_contexts(held) if protocol.startswith('lora_')
          else held
      )
      found = evaluation.score_texts(
          [written[entry.context] for entry in chosen],
          [list(entry.references) for entry in chosen],
          protocol,
          meteor_jar=settings.meteor_jar,
      )
      for metric, value in found.values.items():
        note = found.reasons.get(metric) or f'{len(chosen):,} inputs'
        yield Score(label, protocol, metric, value, note)


def answer(
    candidate: Candidate, contexts: Sequence[str], settings: Settings
) -> list[str]:
  """Generates an answer to each context, with the prompt format of Hu et al.

  Args:
    candidate: Model that generates.
    contexts: Contexts of the task.
    settings: Settings of generation.

  Returns:
    The answers, in the order of the contexts.
  """
  tokenizer, model = candidate.tokenizer, candidate.model
  end, length = tokenizer.end_of_text, model.config.max_length
  room = length - settings.max_new_tokens  # At least 2, see `_check`.
  prompts = [
      [*tokens[:room - 1], end] for tokens in tokenizer.encode_batch(contexts)
  ]
  given: dict[str, Any] = dict(
      max_new_tokens=settings.max_new_tokens, end_of_text=end,
      batch_size=settings.batch_size, length=length,
  )
  decoder = evaluation.CachedModel(model)
  if settings.search == 'greedy':
    found = evaluation.generate(decoder, candidate.params, prompts, **given)
  else:
    search = lookup('search', settings.search, evaluation.PROTOCOLS)
    blank_line = tokenizer.encode('\n\n')
    if settings.search == 'hu2021' and len(blank_line) == 1:
      given['end_of_text'] = [end, *blank_line]
    found = evaluation.beam_search(
        decoder, candidate.params, prompts, search=search, **given
    )
  return [tokenizer.decode(tokens).strip() for tokens in found]


def format_scores(scores: Sequence[Score]) -> str:
  """Formats scores as a Markdown table.

  The table has a column `chance` if any of the tasks is multiple choice.

  Example:
    >>> print(format_scores([Score('e2e', 'lora_e2e', 'bleu', 61.25)]))
    | task | protocol | metric | value | note |
    | --- | --- | --- | ---: | --- |
    | e2e | lora_e2e | bleu | 61.25 |  |
  """
  number = lambda x: MISSING if x is None else f'{x:.5g}'
  by_chance = any(score.chance is not None for score in scores)
  return markdown_table(
      ['task', 'protocol', 'metric', 'value', *['chance'] * by_chance, 'note'],
      [
          [
              score.task, score.protocol, score.metric, number(score.value),
              *[number(score.chance)] * by_chance, score.note,
          ]
          for score in scores
      ],
      numbers=['value', 'chance'],
  )


def to_json(
    candidate: Candidate, scores: Sequence[Score], settings: Settings
) -> Mapping[str, Any]:
  """Returns the scores of a model as JSON-serializable data.

  JSON has no infinite or NaN numbers: such a score is `None`, with a note.
  """
  return {
      'model': candidate.name,
      'settings': settings.as_dict(),
      'scores': [_finite(score)._asdict() for score in scores],
  }


def _finite(score: Score) -> Score:
  if score.value is None or math.isfinite(score.value):
    return score
  return score._replace(value=None, note=f'the score is {score.value}')


def format_means(runs: Sequence[Mapping[str, Any]]) -> str:
  """Formats means and standard deviations over runs of one config.

  Args:
    runs: Results of `to_json`, all with the same tasks.

  Returns:
    A Markdown table.

  Example:
    >>> score = Score('e2e', 'lora_e2e', 'bleu', 60.0)
    >>> runs = [{'scores': [score._replace(value=v)._asdict()]}
    ...         for v in (60.0, 62.0)]
    >>> print(format_means(runs))
    | task | protocol | metric | mean | deviation | runs |
    | --- | --- | --- | ---: | ---: | ---: |
    | e2e | lora_e2e | bleu | 61 | 1.4 | 2 |
  """
  rows = []
  for same in zip(*(run['scores'] for run in runs), strict=True):
    values = [score['value'] for score in same if score['value'] is not None]
    mean = f'{statistics.fmean(values):.5g}' if values else MISSING
    deviation = (
        f'{statistics.stdev(values):.2g}' if len(values) > 1 else MISSING
    )
    rows.append([
        same[0]['task'], same[0]['protocol'], same[0]['metric'], mean,
        deviation, str(len(values)),
    ])
  numbers = ['mean', 'deviation', 'runs']
  return markdown_table(
      ['task', 'protocol', 'metric', *numbers], rows, numbers=numbers
  )
