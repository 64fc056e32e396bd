"""A generation task: prompts and references, answered, scored and kept."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any

import jax

from spdf_jax.evaluation.metrics.segments import References
from spdf_jax.evaluation.perplexity import Evaluator
from spdf_jax.evaluation.text_metrics import bleu
from spdf_jax.evaluation.text_metrics import chrf
from spdf_jax.extras import require

Generate = Callable[[Any, Sequence[Sequence[int]]], Sequence[Sequence[int]]]

def write_json_lines(path: pathlib.Path, records: Sequence[Any]) -> None:
  """Writes records, one a line: the whole file appears, or none of it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'.{path.name}.{os.getpid()}')
  try:
    with partial.open('w', encoding='utf-8') as file:
      for record in records:
        file.write(json.dumps(record, ensure_ascii=False) + '\n')
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def task_evaluator(
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    references: References,
    *,
    decode: Callable[[Sequence[int]], str],
    directory: str | os.PathLike[str],
) -> Evaluator:
  """Builds an evaluator that answers prompts and scores the answers.

  Each evaluation writes `<directory>/step_<step>.jsonl` (the step in eight
  digits), one line `{"context", "reference", "generation"}` for each prompt,
  in order.

  Args:
    generate: `(params, prompts) -> continuations`, e.g. a partial `generate`
      or `beam_search`.
    prompts: Token ids of each prompt.
    references: For each prompt one reference or several of them.
    decode: Turns token ids into text, of prompts and of generations.
    directory: Where generations are written; made if missing.

  Returns:
    `evaluate(step, params)`, which yields `task/bleu` and `task/chrf`, both
    0 to 100.

  Raises:
    ValueError: There is no prompt, or a reference is missing.
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
  # Asked for now: an hour of training is too late to find it missing.
  require('sacrebleu', 'eval')
  directory = pathlib.Path(directory)
  contexts = [decode(prompt) for prompt in prompts]

  def evaluate(step: int, params: Any) -> Iterator[tuple[str, float]]:
    generations = generate(params, prompts)
    texts = [decode(generation) for generation in generations]
    records = [
        {'context': context, 'reference': reference, 'generation': text}
        for context, reference, text in zip(contexts, references, texts)
    ]
    if jax.process_index() == 0:
      write_json_lines(directory / f'step_{step:08d}.jsonl', records)
    yield 'task/bleu', bleu(texts, references)
    yield 'task/chrf', chrf(texts, references)

  return evaluate
