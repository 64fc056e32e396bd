# SPDX-License-Identifier: Apache-2.0
"""The continuation of a prompt, written as it is generated."""

from collections.abc import Iterator
from collections.abc import Sequence
import resource
import sys
import time
from typing import TextIO

import jax

from spdf_jax import evaluation
from spdf_jax.data import Tokenizer
from spdf_jax.evaluation.candidate import Candidate
from spdf_jax.evaluation.generation import Choose

_UNFINISHED = '\ufffd'  # Decoded from the first bytes of a character.


def write_continuation(
    candidate: Candidate,
    prompt: str,
    *,
    max_new_tokens: int,
    choose: Choose = evaluation.greedy,
    seed: int = 0,
    out: TextIO = sys.stdout,
    log: TextIO = sys.stderr,
) -> None:
  """Writes a prompt and its continuation, and then the speed and memory.

  Args:
    candidate: The model and its tokenizer.
    prompt: The prompt; an empty one is the end-of-text token.
    max_new_tokens: Maximum number of tokens to generate.
    choose: `greedy`, or a function that `sampler` returns.
    seed: Seed for sampling.
    out: File for the texts, written token by token.
    log: File for the number of tokens, the tokens per second without the first
      one, which includes compilation and the prompt, the bytes of the
      parameters, and the largest memory of the process.

  Raises:
    ValueError: The prompt is longer than the model, or `max_new_tokens` is
      below 1.
  """
  tokenizer = candidate.tokenizer
  ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
  times: list[float] = []

  def timed() -> Iterator[int]:
    for token in evaluation.stream(
        evaluation.CachedModel(candidate.model), candidate.params, ids,
        choose=choose, key=seed, max_new_tokens=max_new_tokens,
        end_of_text=tokenizer.end_of_text,
        length=candidate.model.config.max_length,
    ):
      times.append(time.perf_counter())
      yield token

  pieces = decode_pieces(tokenizer, timed(), ids)
  first = next(pieces, '')  # Bad input raises before anything is written.
  out.write(prompt + first)
  for piece in pieces:
    out.write(piece)
    out.flush()
  out.write('\n')
  out.flush()
  number = len(times)
  seconds = times[-1] - times[0] if number > 1 else 0
  speed = f'{(number - 1) / seconds:.1f} tokens/s' if seconds else 'one step'
  stored = sum(x.nbytes for x in jax.tree.leaves(candidate.params))
  # Linux gives KiB.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  log.write(
      f'{number} tokens, {speed}; parameters {stored / 2**20:,.0f} MiB, peak '
      f'memory {peak / 2**20:,.0f} MiB\n'
  )


def decode_pieces(
    tokenizer: Tokenizer, tokens: Iterator[int], prompt: Sequence[int] = ()
) -> Iterator[str]:
  """Decodes tokens one by one; a character is yielded when it is complete.

  Args:
    tokenizer: The tokenizer.
    tokens: Token ids.
    prompt: Token ids before them, which decide whether the first one begins
      with a space: tokenizers of Llama omit it at the beginning of a text.

  Yields:
    Texts, whose concatenation is the text of all tokens.

  Example:
    >>> from spdf_jax.data import ByteTokenizer
    >>> list(decode_pieces(ByteTokenizer(), iter('né'.encode())))
    ['n', '', 'é']
  """
  waiting = list(prompt)
  done = tokenizer.decode(waiting)
  for token in tokens:
    waiting.append(token)
    text = tokenizer.decode(waiting)
    if text.endswith(_UNFINISHED):
      yield ''
      continue
    yield text[len(done):]
    done = text
  rest = tokenizer.decode(waiting)[len(done):]
  if rest:
    yield rest
