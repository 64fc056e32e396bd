"""LAMBADA: prediction of the last word of a passage, by two protocols."""

from collections.abc import Mapping, Sequence
import functools
import json
import math
import os
from pathlib import Path
from typing import Any

from spdf_jax import evaluation
from spdf_jax import files
from spdf_jax import names
from spdf_jax.data import special_tokens
from spdf_jax.data import Tokenizer
from spdf_jax.data.tasks import files as task_files
from spdf_jax.evaluation import Continuation


def read_lambada(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
  """Reads passages and their last words.

  Args:
    path: File of JSON lines, each with `text`, or with `context` and
      `continuation`.

  Returns:
    A pair (passage without its last word, last word) for each line.

  Raises:
    ValueError: a line has neither `text` nor both other fields, or a text has
      a single word.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'lambada.jsonl'
    >>> _ = path.write_text('{"text": "Say hello"}')
    >>> read_lambada(path)
    [('Say', 'hello')]
  """
  passages = []
  lines = task_files.read_text(Path(path)).split('\n')
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    with files.reading(
        f'{path} line {number}', 'write {"text": …} with two words or more.'
    ):
      fields = json.loads(line)
      if 'text' in fields:
        context, space, word = fields['text'].rpartition(' ')
      else:
        context, space, word = fields['context'], ' ', fields['continuation']
      if not (context and space and word):
        raise ValueError('it has no two words')
    passages.append((context, word))
  return passages


def last_word(
    tokenizer: Tokenizer, context: str, word: str
) -> Continuation:
  """Returns all tokens of the last word as target, as lm-eval does.

  Args:
    tokenizer: Tokenizer of the model.
    context: Passage without its last word.
    word: Last word of the passage.

  Returns:
    Context and target.

  Example:
    >>> from spdf_jax.data import ByteTokenizer
    >>> last_word(ByteTokenizer(), 'a', 'bc')
    Continuation(context=[97], target=[32, 98, 99])
  """
  begun = functools.partial(special_tokens.begun, tokenizer)
  given = begun(tokenizer.encode(context))
  whole = begun(tokenizer.encode(f'{context} {word}'))
  # The rest is empty if one token spans the word and the context's end.
  return Continuation(given, whole[len(given):] or tokenizer.encode(f' {word}'))


def last_token(
    tokenizer: Tokenizer, context: str, word: str
) -> Continuation:
  """Returns the last token as target, as Megatron-LM does if not strict.

  Args:
    tokenizer: Tokenizer of the model.
    context: Passage without its last word.
    word: Last word of the passage.

  Returns:
    Context and target.

  Example:
    >>> from spdf_jax.data import ByteTokenizer
    >>> last_token(ByteTokenizer(), 'a', 'bc')
    Continuation(context=[97, 32, 98], target=[99])
  """
  whole = special_tokens.begun(
      tokenizer, tokenizer.encode(f'{context} {word}')
  )
  return Continuation(whole[:-1], whole[-1:])


LAMBADA_PROTOCOLS = {
    'lambada_last_word': last_word,
    'lambada_megatron': last_token,
}
"""Functions that return context and target of a passage, by protocol."""


def score_lambada(
    subject: evaluation.Subject,
    passages: Sequence[tuple[str, str]],
    protocol: str = 'lambada_last_word',
) -> Mapping[str, Any]:
  """Computes the accuracy of greedy decoding on the last words of passages.

  Args:
    subject: Model to evaluate.
    passages: Passages and their last words, as `read_lambada` returns them.
    protocol: `'lambada_last_word'` or `'lambada_megatron'`.

  Returns:
    `accuracy` (0 to 1), `perplexity` of targets (the exponential of their mean
    negative log probability, per target) and `items`.

  Raises:
    ValueError: the protocol is unknown, or there is no passage.

  References:
    Paperno et al. 2016, "The LAMBADA dataset".

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax.data import ByteTokenizer
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (257,))
    >>> subject = evaluation.Subject(uniform, None, ByteTokenizer(), length=16)
    >>> scores = score_lambada(subject, [('Say', 'a')], 'lambada_megatron')
    >>> scores['accuracy'], round(scores['perplexity'], 2)
    (0.0, 257.0)
  """
  target_of = names.lookup('protocol', protocol, LAMBADA_PROTOCOLS)
  if not passages:
    raise ValueError('passages is empty; give at least one.')
  scores = evaluation.score_continuations(
      subject.apply_fn,
      subject.params,
      [target_of(subject.tokenizer, *passage) for passage in passages],
      length=subject.length,
      batch_tokens=subject.batch_tokens,
  )
  mean = sum(score.log_probability for score in scores) / len(scores)
  return {
      'accuracy': sum(score.greedy for score in scores) / len(scores),
      'perplexity': math.exp(min(-mean, 700.0)),
      'items': len(scores),
  }
