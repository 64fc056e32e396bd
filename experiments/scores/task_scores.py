"""Scoring of models on named tasks, each by its protocols."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging
import pathlib
from typing import Any

from experiments.scores import lambada
from experiments.scores import metrics
from experiments.scores import protocols
from experiments.scores import suites
from experiments.scores import wikitext
from experiments.scores.language_models import LanguageModel
from experiments.scores.sheets import Score
from experiments.scores.sheets import Settings
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import extras
from spdf_jax import names
from spdf_jax.data import special_tokens
from spdf_jax.data.tasks import files as task_files

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


_WITHOUT_FILES = {'validation', 'python-docstrings', *suites.SUITES}
"""Tasks that need no path; without one, those of a suite are downloaded."""


def parse_tasks(tasks: Sequence[str]) -> list[tuple[str, str]]:
  """Reads tasks as commands take them, and checks them.

  Args:
    tasks: `NAME` or `NAME=PATH` of each task.

  Returns:
    Name and path of each task; `''` is no path.

  Raises:
    ValueError: a name is unknown or given twice, a path is missing, or nothing
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


def describe_tasks() -> str:
  """Returns the names of all tasks, and which of them need a path."""
  alone = [name for name in _scorers() if name in _WITHOUT_FILES]
  of_files = [name for name in _scorers() if name not in _WITHOUT_FILES]
  return (
      f'{", ".join(alone)}, or NAME=PATH with the path of its files, where '
      f'NAME is one of {", ".join(of_files)}'
  )


def score_tasks(
    model: LanguageModel, tasks: Sequence[str], settings: Settings
) -> Iterator[Score]:
  """Evaluates a model on tasks, one after another.

  Args:
    model: Model to evaluate.
    tasks: Tasks, as `parse_tasks` takes them.
    settings: Settings of generation and scoring.

  Yields:
    Every score as soon as it is known.

  Raises:
    ValueError: a task is invalid, or the model or a setting does not suit it;
      most of this is found before the first task is scored.
    ImportError: a library is missing.
  """
  named = parse_tasks(tasks)
  for name, _ in named:
    _check(model, name, settings)
  for name, path in named:
    _check_files(name, path)
  for name, path in named:
    logger.info('scoring %s', name)
    yield from score_task(model, name, path, settings)


def _check_files(name: str, path: str) -> None:
  """Raises if a task or a suite has no files to score."""
  if name in suites.SUITES and path:
    suites.local_tasks(path)
  if name in ('curation', *TEXT_PROTOCOLS) and not data.load_task(
      name, path or None
  ).test:
    raise ValueError(
        f'task {name!r} has no test split in {path!r}; add its file.'
    )


def _check(model: LanguageModel, name: str, settings: Settings) -> None:
  """Raises if a task cannot be scored with a model and settings."""
  if name == 'validation' and model.config is None:
    raise ValueError(
        f'{model.name} has no corpus to validate on; leave out task {name!r}.'
    )
  if name in suites.SUITES:
    extras.require('lm_eval.evaluator', 'harness')
  if name not in TEXT_PROTOCOLS:
    return
  extras.require('sacrebleu', 'eval')
  extras.require('nltk', 'eval')
  length = model.module.config.max_length
  if settings.max_new_tokens > length - 2:
    raise ValueError(
        f'max_new_tokens is {settings.max_new_tokens}, and {model.name} '
        f'has {length} positions for context and answer; give at most '
        f'{length - 2}.'
    )
  jar = settings.meteor_jar
  if jar and (reason := metrics.why_no_meteor(jar)):
    raise ValueError(f'meteor_jar is {jar!r}: {reason}')


def score_task(
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  """Evaluates a model on a task.

  Args:
    model: Model to evaluate.
    name: `'validation'` (loss on the validation split of the model's corpus),
      `'lambada'`, `'wikitext'`, a suite of the harness, `'curation'`
      (perplexity of the targets) or a task of `TEXT_PROTOCOLS`; the last two
      use the test split.
    path: The file of `'lambada'` and `'wikitext'`, the folder of the other
      tasks (`''` downloads the files of a suite); unused by `'validation'`.
    settings: Settings of generation and scoring.

  Yields:
    The scores.

  Raises:
    ValueError: the name is unknown, or the files do not belong to the task.
    ImportError: a library is missing.
  """
  score = _scorer(name)
  _check(model, name, settings)
  # The corpus of a run is already encoded.
  if settings.special_tokens and name != 'validation':
    model = dataclasses.replace(
        model, tokenizer=data.with_special_tokens(model.tokenizer)
    )
  if not getattr(model.tokenizer, 'special_tokens', False):
    yield from score(model, name, path, settings)
    return
  for entry in score(model, name, path, settings):
    yield entry._replace(note=f'{entry.note}; special tokens'.lstrip('; '))


def _scorer(name: str) -> Callable[..., Iterator[Score]]:
  """Returns the function that scores a task; raises if there is none."""
  return names.lookup('task', name, _scorers())


def _scorers() -> dict[str, Callable[..., Iterator[Score]]]:
  return {
      'validation': _validation, 'lambada': _lambada, 'wikitext': _wikitext,
      'curation': _targets,
      **dict.fromkeys(suites.SUITES, _suite),
      **dict.fromkeys(TEXT_PROTOCOLS, _texts),
  }


def _validation(
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  del path
  config = model.config.data
  corpus = data.prepare_corpus(
      config.corpus, tokenizer=config.tokenizer, cache_dir=config.cache_dir
  )
  batches = data.evaluation_batches(
      data.Windows(corpus.validation),
      batch_size=settings.batch_size,
      length=model.module.config.max_length,
      max_batches=-(-(settings.limit or 10**9) // settings.batch_size),
  )
  loss = evaluation.evaluate_loss(
      model.subject.apply_fn, model.params, batches
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
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  passages = lambada.read_lambada(path)[:settings.limit]
  subject = model.subject
  for protocol in lambada.LAMBADA_PROTOCOLS:
    scores = lambada.score_lambada(subject, passages, protocol)
    for metric in ('accuracy', 'perplexity'):
      yield Score(
          name, protocol, metric, scores[metric], f'{scores["items"]:,} items'
      )


def _wikitext(
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  text = task_files.read_text(pathlib.Path(path)).replace('\r\n', '\n')
  lines = text.splitlines(keepends=True)
  results = wikitext.adjusted_perplexity(
      model.subject, ''.join(lines[:settings.limit])
  )
  note = f'{results["words"]:,} words, {results["tokens"]:,} tokens'
  yield Score(
      name, 'wikitext_megatron', 'adjusted_perplexity',
      results['adjusted_perplexity'], note,
  )


def _suite(
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  yield from suites.score_suite(
      model.subject, name, directory=path or None, limit=settings.limit
  )


def _targets(
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  pairs = data.load_task(name, path or None).test[:settings.limit]
  loss = target_loss(model.subject, pairs, settings.batch_size)
  note = f'{loss.tokens:,.0f} tokens'
  for metric in ('perplexity', 'loss'):
    yield Score(name, 'target_tokens', metric, getattr(loss, metric), note)


def _texts(
    model: LanguageModel, name: str, path: str, settings: Settings
) -> Iterator[Score]:
  task = data.load_task(name, path or None)
  inputs = task.inputs_of('test')[:settings.limit]
  contexts = list(dict.fromkeys(entry.context for entry in inputs))
  written = dict(zip(contexts, answer(model, contexts, settings)))
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
          data.tasks.merge_equal_contexts(held) if protocol.startswith('lora_')
          else held
      )
      scores = protocols.score_texts(
          [written[entry.context] for entry in chosen],
          [list(entry.references) for entry in chosen],
          protocol,
          meteor_jar=settings.meteor_jar,
      )
      for metric, value in scores.values.items():
        note = scores.reasons.get(metric) or f'{len(chosen):,} inputs'
        yield Score(label, protocol, metric, value, note)


def answer(
    model: LanguageModel, contexts: Sequence[str], settings: Settings
) -> list[str]:
  """Generates an answer to each context, with the prompt format of Hu et al.

  Args:
    model: Model that generates.
    contexts: Contexts of the task.
    settings: Settings of generation.

  Returns:
    The answers, in the order of the contexts.
  """
  tokenizer, module = model.tokenizer, model.module
  end, length = tokenizer.end_of_text, module.config.max_length
  ends = special_tokens.special_of(tokenizer).ends
  room = length - settings.max_new_tokens  # At least 2, as `_check` ensures.
  prompts = [
      [*special_tokens.begun(tokenizer, tokens)[:room - 1], end]
      for tokens in tokenizer.encode_batch(contexts)
  ]
  given: dict[str, Any] = dict(
      max_new_tokens=settings.max_new_tokens, end_of_text=ends,
      batch_size=settings.batch_size, length=length,
  )
  decoder = evaluation.CachedModel(module)
  if settings.search == 'greedy':
    outputs = evaluation.generate(decoder, model.params, prompts, **given)
  else:
    search = names.lookup('search', settings.search, evaluation.PROTOCOLS)
    blank_line = tokenizer.encode('\n\n')
    if settings.search == 'hu2021' and len(blank_line) == 1:
      given['end_of_text'] = [*ends, *blank_line]
    outputs = evaluation.beam_search(
        decoder, model.params, prompts, search=search, **given
    )
  return [tokenizer.decode(tokens).strip() for tokens in outputs]


def target_loss(
    subject: evaluation.Subject, pairs: Sequence[data.Pair], batch_size: int
) -> evaluation.TokenLoss:
  """Evaluates the targets of a task, including their end tokens.

  SPDF reports their perplexity on Curation Corpus. Tokens of the contexts have
  no weight; contexts are truncated on the right so that the target fits
  (`data.encode_pairs`).

  Args:
    subject: Model to evaluate.
    pairs: Contexts and targets, e.g. the `test` split of a task.
    batch_size: Number of pairs in a batch.

  Returns:
    The total loss of the targets.

  Raises:
    ValueError: there are no pairs, or a size is not positive.

  References:
    Thangarasa et al. 2023, "SPDF", section 3.

  Example:
    >>> import jax.numpy as jnp
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (257,))
    >>> subject = evaluation.Subject(
    ...     uniform, None, data.ByteTokenizer(), length=16)
    >>> loss = target_loss(subject, [data.Pair('An article', 'It')], 2)
    >>> round(loss.perplexity, 2), loss.tokens  # ' It' and its end
    (257.0, 4.0)
  """
  examples = data.encode_pairs(pairs, subject.tokenizer, subject.length + 1)
  batches = data.evaluation_batches(
      examples, batch_size=batch_size, length=subject.length,
      max_batches=len(pairs),
  )
  return evaluation.evaluate_loss(subject.apply_fn, subject.params, batches)
