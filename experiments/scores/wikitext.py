"""WikiText: perplexity per word of the original text."""

from collections.abc import Mapping
import math
import re
from typing import Any

from spdf_jax import evaluation
from spdf_jax.data import special_tokens
from spdf_jax.evaluation import Continuation


def detokenize_wikitext(text: str) -> str:
  """Reverts WikiText's tokenization, by the rules of Megatron-LM.

  Args:
    text: Text of a `.tokens` file.

  Returns:
    The text with ordinary spacing; headings keep their equals signs.

  References:
    Shoeybi et al. 2019, "Megatron-LM", appendix E.

  Example:
    >>> detokenize_wikitext('He had 1 @,@ 000 songs ( of " note " ) , all')
    'He had 1,000 songs (of "note"), all'
  """
  text = text.replace("s '", "s'")
  for mark in '-,.':
    text = text.replace(f' @{mark}@ ', mark)
  for mark in ':;.!?,':
    text = text.replace(f' {mark} ', f'{mark} ')
  text = re.sub(r'\(\s*([^\)]*?)\s*\)', r'(\1)', text)
  text = re.sub(r'\[\s*([^\]]*?)\s*\]', r'[\1]', text)
  text = re.sub(r'{\s*([^}]*?)\s*}', r'{\1}', text)
  text = re.sub(r'"\s*([^"]*?)\s*"', r'"\1"', text)
  text = re.sub(r"'\s*([^']*?)\s*'", r"'\1'", text)
  for old, new in (
      ('= = = =', '===='), ('= = =', '==='), ('= =', '=='), (' ° ', '°'),
      (' \n', '\n'), ('\n ', '\n'), (' N ', ' 1 '), (" 's", "'s"),
  ):
    text = text.replace(old, new)
  return text


def overlapping_windows(
    tokens: list[int], length: int, stride: int
) -> list[Continuation]:
  """Splits a text into windows that begin every `stride` tokens.

  Each token but the first is a target once, in the first window that contains
  it.

  Args:
    tokens: Token ids of the text.
    length: Number of inputs of a window, at most the model's sequence length.
    stride: Number of tokens from one window to the next, at most `length`.

  Returns:
    The windows.

  Raises:
    ValueError: `stride` is not from 1 to `length`.

  Example:
    >>> overlapping_windows([0, 1, 2, 3, 4], length=3, stride=1)
    ... # doctest: +NORMALIZE_WHITESPACE
    [Continuation(context=[0], target=[1, 2, 3]),
     Continuation(context=[1, 2, 3], target=[4])]
  """
  if not 1 <= stride <= length:
    raise ValueError(
        f'stride={stride} is not from 1 to length={length}; give one that is.'
    )
  windows, done, start = [], 1, 0
  while done < len(tokens):
    end = min(start + length + 1, len(tokens))
    windows.append(Continuation(tokens[start:done], tokens[done:end]))
    start, done = start + stride, end
  return windows


def adjusted_perplexity(
    subject: evaluation.Subject, text: str, stride: int = 32
) -> Mapping[str, Any]:
  """Computes the perplexity per word of the tokenized original.

  `exp(loss (T - 1) / (W - 1))`, with the mean loss over the T tokens of the
  detokenized text and the W words of the original: 245,566 words and, for
  GPT-2's tokenizer, 278,365 tokens of WikiText-103's test split. The harness'
  task `wikitext` has a different definition.

  Args:
    subject: Model to evaluate.
    text: Text of `wiki.test.tokens`.
    stride: Number of tokens from one window to the next; 32 in Megatron-LM.

  Returns:
    `adjusted_perplexity`, `loss` (nats per token), `tokens` and `words`.

  Raises:
    ValueError: the text has less than two words, or `stride` is out of range.

  References:
    Shoeybi et al. 2019, "Megatron-LM", section 5.3 and appendix E.

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax.data import ByteTokenizer
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (257,))
    >>> subject = evaluation.Subject(uniform, None, ByteTokenizer(), length=4)
    >>> scores = adjusted_perplexity(subject, 'a b c', stride=2)
    >>> round(scores['adjusted_perplexity'])  # 4 times log 257 over 2 words
    66049
  """
  words = len(text.strip().split(' '))
  tokens = special_tokens.begun(
      subject.tokenizer, subject.tokenizer.encode(detokenize_wikitext(text))
  )
  if words < 2 or len(tokens) < 2:
    raise ValueError(f'text has {words} words; give two or more.')
  scores = evaluation.score_continuations(
      subject.apply_fn,
      subject.params,
      overlapping_windows(tokens, subject.length, stride),
      length=subject.length,
      batch_tokens=subject.batch_tokens,
  )
  nats = -sum(score.log_probability for score in scores)
  return {
      'adjusted_perplexity': math.exp(min(nats / (words - 1), 700.0)),
      'loss': nats / (len(tokens) - 1),
      'tokens': len(tokens),
      'words': words,
  }
