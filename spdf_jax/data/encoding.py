"""Batches of documents to token ids, in as many processes as asked for."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Iterator
import concurrent.futures
import multiprocessing
from pathlib import Path
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.data.bpe import BPETokenizer
from spdf_jax.data.pieces import Piece
from spdf_jax.data.token_files import dtype_of
from spdf_jax.data.tokenizers import load_tokenizer
from spdf_jax.data.tokenizers import Tokenizer
from spdf_jax.data.word_cache import WordCache


class Batch(NamedTuple):
  """Pieces to encode together.

  Attributes:
    pieces: (split, piece) in their order.
    position: Whatever the caller wants back with the result.
  """

  pieces: list[tuple[str, Piece]]
  position: Any


class Encoded(NamedTuple):
  """What one split got of a batch.

  Attributes:
    data: Token ids, ends of text among them, as bytes.
    documents: How many documents ended.
    num_bytes: Bytes of the text in UTF-8.
  """

  data: bytes
  documents: int
  num_bytes: int


class Encoder:
  """Encodes batches, remembering words.

  Attributes:
    tokenizer: Makes the ids.
  """

  def __init__(self, tokenizer: Tokenizer):
    self.tokenizer = tokenizer
    self._dtype = dtype_of(tokenizer.vocab_size)
    self._end = np.array([tokenizer.end_of_text], self._dtype).tobytes()
    self._words = (
        WordCache(tokenizer, self._dtype)
        if isinstance(tokenizer, BPETokenizer) else None
    )

  def __call__(self, batch: Batch) -> dict[str, Encoded]:
    """Returns what each split gets."""
    results = {}
    for split, piece in batch.pieces:
      data, documents, num_bytes = results.get(split, ([], 0, 0))
      ids, size = self._encode(piece.content)
      data.append(ids)
      if piece.last:
        data.append(self._end)
      results[split] = data, documents + piece.last, num_bytes + size
    return {
        split: Encoded(b''.join(data), documents, num_bytes)
        for split, (data, documents, num_bytes) in results.items()
    }

  def _encode(self, content: str | np.ndarray) -> tuple[bytes, int]:
    if isinstance(content, str):
      size = len(content.encode('utf-8'))
      if self._words is not None:
        return self._words.encode(content), size
      return np.array(
          self.tokenizer.encode(content), self._dtype
      ).tobytes(), size
    if content.size and content.max() >= self.tokenizer.vocab_size:
      raise ValueError(
          f'the input holds token id {content.max()}, outside the vocabulary'
          f' [0, {self.tokenizer.vocab_size}); give the tokenizer that made it.'
      )
    text = self.tokenizer.decode(content)
    return content.astype(self._dtype).tobytes(), len(text.encode('utf-8'))


def encode_batches(
    batches: Iterable[Batch], tokenizer_path: Path, workers: int
) -> Iterator[tuple[Batch, dict[str, Encoded]]]:
  """Encodes batches in their order, a few at a time.

  Args:
    batches: What to encode; read no further ahead than workers need.
    tokenizer_path: A file of `save_tokenizer`.
    workers: Processes; 1 is this one.

  Yields:
    Batches (without pieces) and their results, in order.
  """
  if workers == 1:
    encode = Encoder(load_tokenizer(tokenizer_path))
    for batch in batches:
      yield batch._replace(pieces=[]), encode(batch)
    return
  # Fork from a process without threads, which imports all of it once.
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['spdf_jax.data.encoding'])
  with concurrent.futures.ProcessPoolExecutor(
      workers, mp_context=context, initializer=_start_worker,
      initargs=(str(tokenizer_path),),
  ) as pool:
    pending = deque()
    try:
      for batch in batches:
        future = pool.submit(_work, batch)
        pending.append((batch._replace(pieces=[]), future))
        if len(pending) > 2 * workers:
          waiting, future = pending.popleft()
          yield waiting, future.result()
      while pending:
        waiting, future = pending.popleft()
        yield waiting, future.result()
    finally:
      for _, future in pending:
        future.cancel()


_encoder: Encoder | None = None


def _start_worker(tokenizer_path: str) -> None:
  global _encoder
  _encoder = Encoder(load_tokenizer(tokenizer_path))


def _work(batch: Batch) -> dict[str, Encoded]:
  return _encoder(batch)
