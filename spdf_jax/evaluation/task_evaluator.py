# SPDX-License-Identifier: Apache-2.0
"""An evaluator of a generation task: it generates, stores and scores texts."""

from collections.abc import Callable, Iterator, Sequence
import json
import logging
import os
import pathlib
from typing import Any

import jax

from spdf_jax import extras
from spdf_jax import files
from spdf_jax.evaluation import texts
from spdf_jax.evaluation.loss import Evaluator
from spdf_jax.evaluation.texts import References

Generate = Callable[[Any, Sequence[Sequence[int]]], Sequence[Sequence[int]]]

logger = logging.getLogger('spdf_jax')


def write_json_lines(path: pathlib.Path, records: Sequence[Any]) -> None:
  """Writes records as JSON lines, replacing the file atomically.

  Args:
    path: File to write; missing folders are created.
    records: JSON-able objects, one for each line.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomically(path, ''.join(
      json.dumps(record, ensure_ascii=False) + '\n' for record in records
  ))


def task_evaluator(
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    references: References,
    *,
    decode: Callable[[Sequence[int]], str],
    directory: str | os.PathLike[str],
) -> Evaluator:
  """Builds an evaluator that continues prompts and scores the continuations.

  Each evaluation writes `<directory>/step_<step>.jsonl` (the step in eight
  digits) with one line `{"context", "reference", "generation"}` for each
  prompt, in order.

  Args:
    generate: `(params, prompts) -> continuations`, both token ids, e.g.
      `functools.partial(evaluation.generate, CachedModel(model), …)`.
    prompts: Token ids of each prompt.
    references: For each prompt a reference, or a list of them.
    decode: Function from token ids to text, for prompts and generations.
    directory: Folder for the generations, created if missing.

  Returns:
    A function `evaluate(step, params)` that yields `task/bleu` and `task/chrf`,
    both 0 to 100.

  Raises:
    ValueError: there is no prompt, or not one entry of `references` for each.
    ImportError: sacrebleu is not installed.

  Example:
    >>> import tempfile
    >>> def count_up(params, prompts):
    ...   return [[prompt[-1] + i for i in (1, 2, 3)] for prompt in prompts]
    >>> decode = lambda ids: ''.join(chr(ord('a') + i) for i in ids)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   evaluate = task_evaluator(
    ...       count_up, [[0], [9, 2]], ['bcd', 'dff'], decode=decode,
    ...       directory=directory)
    ...   chrf_score = dict(evaluate(40, None))['task/chrf']
    ...   print(pathlib.Path(directory, 'step_00000040.jsonl').read_text())
    {"context": "a", "reference": "bcd", "generation": "bcd"}
    {"context": "jc", "reference": "dff", "generation": "def"}
    <BLANKLINE>
  """
  if not len(prompts) or len(prompts) != len(references):
    raise ValueError(
        f'prompts has {len(prompts)} entries and references has '
        f'{len(references)}; give at least one prompt, and its reference.'
    )
  # Fail before training if sacrebleu is missing, not at the first evaluation.
  extras.require('sacrebleu', 'eval')
  directory = pathlib.Path(directory)
  contexts = [decode(prompt) for prompt in prompts]

  def evaluate(step: int, params: Any) -> Iterator[tuple[str, float]]:
    logger.info('step %d: generating %d texts', step, len(prompts))
    generations = generate(params, prompts)
    answers = [decode(generation) for generation in generations]
    records = [
        {'context': context, 'reference': reference, 'generation': text}
        for context, reference, text in zip(contexts, references, answers)
    ]
    if jax.process_index() == 0:
      write_json_lines(directory / f'step_{step:08d}.jsonl', records)
    yield 'task/bleu', bleu(answers, references)
    yield 'task/chrf', chrf(answers, references)

  return evaluate


def bleu(hypotheses: Sequence[str], references: References) -> float:
  """Computes the corpus BLEU of generations, 0 to 100.

  The settings are sacrebleu's defaults: 13a tokenization, case-sensitive, 1- to
  4-grams, exponential smoothing of n-gram orders without a match. Scores of
  other protocols are not comparable.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis a reference, or a list of them.

  Returns:
    BLEU of the corpus, in percent.

  Raises:
    ValueError: the lengths differ, there is no hypothesis, or one has an empty
      list of references.
    ImportError: sacrebleu is not installed.

  References:
    Papineni et al. 2002; Post 2018, "A Call for Clarity".

  Example:
    >>> round(bleu(['The cat sat on a mat.'], ['The cat sat on the mat.']), 2)
    48.89
  """
  aligned = texts.streams(
      texts.group_references(hypotheses, references)
  )
  metric = extras.require('sacrebleu', 'eval').BLEU(force=True)
  return float(metric.corpus_score(list(hypotheses), aligned).score)


def chrf(hypotheses: Sequence[str], references: References) -> float:
  """Computes the corpus chrF2 of generations, 0 to 100.

  The settings are sacrebleu's defaults: character 1- to 6-grams without
  spaces, no word n-grams, recall weighted twice as much as precision.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis a reference, or a list of them.

  Returns:
    chrF of the corpus, in percent.

  Raises:
    ValueError: the lengths differ, there is no hypothesis, or one has an empty
      list of references.
    ImportError: sacrebleu is not installed.

  References:
    Popović 2015, "chrF: character n-gram F-score".

  Example:
    >>> chrf(['Return the name.'], [['Returns a name.', 'Return the name.']])
    100.0
  """
  aligned = texts.streams(
      texts.group_references(hypotheses, references)
  )
  metric = extras.require('sacrebleu', 'eval').CHRF()
  return float(metric.corpus_score(list(hypotheses), aligned).score)
