"""Parallel encoding of batches of documents to token ids."""

from collections import deque
from collections.abc import Iterable, Iterator
import concurrent.futures
import concurrent.futures.process
import multiprocessing
import os
from pathlib import Path
import re
import threading
from typing import Any, NamedTuple

import numpy as np

from experiments.preparation.documents import Piece
from spdf_jax.data import special_tokens
from spdf_jax.data import token_files
from spdf_jax.data import tokenizer_files
from spdf_jax.data.tokenizers import LibraryTokenizer
from spdf_jax.data.tokenizers import Tokenizer


class DocumentBatch(NamedTuple):
  """Pieces to encode together.

  Attributes:
    pieces: Pairs (split, piece), in order.
    position: Any value of the caller, returned with the result.
  """

  pieces: list[tuple[str, Piece]]
  position: Any


class Encoded(NamedTuple):
  """The encoded pieces of a batch that belong to one split.

  Attributes:
    data: Token ids, including ends of text, as bytes.
    documents: Number of documents that end in the batch.
    num_bytes: Bytes of the text in UTF-8.
  """

  data: bytes
  documents: int
  num_bytes: int


class Encoder:
  """An encoder of batches, which caches the ids of words.

  After a document come its end of text, and the beginning of the next one if
  the model's texts begin with a token.

  Attributes:
    tokenizer: The tokenizer.
  """

  def __init__(self, tokenizer: Tokenizer):
    self.tokenizer = tokenizer
    self._dtype = token_files.dtype_of(tokenizer.vocab_size)
    between = [tokenizer.end_of_text, *special_tokens.begun(tokenizer, [])]
    self._end = np.array(between, self._dtype).tobytes()
    self._words = (
        WordCache(tokenizer, self._dtype)
        if isinstance(tokenizer, LibraryTokenizer)
        and tokenizer.kind == 'bpe'
        and not tokenizer.special_tokens  # Words are parts of special tokens.
        else None
    )

  def __call__(self, batch: DocumentBatch) -> dict[str, Encoded]:
    """Encodes a batch; returns the results by split."""
    results: dict[str, tuple[list[bytes], int, int]] = {}
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
          f' [0, {self.tokenizer.vocab_size}); give the tokenizer that made'
          ' the input.'
      )
    text = self.tokenizer.decode(content)
    return content.astype(self._dtype).tobytes(), len(text.encode('utf-8'))


def encode_batches(
    batches: Iterable[DocumentBatch], tokenizer_path: Path, workers: int
) -> Iterator[tuple[DocumentBatch, dict[str, Encoded]]]:
  """Encodes batches in order, a few at a time.

  Args:
    batches: Batches to encode, prefetched only as far as workers need.
    tokenizer_path: A file of `save_tokenizer`.
    workers: Number of processes; 1: this process only.

  Yields:
    Batches (without pieces) and their results, in order.

  Raises:
    ChildProcessError: a process has ended, for example because it imports a
      script that prepares again.
  """
  if workers == 1:
    encode = Encoder(tokenizer_files.load_tokenizer(tokenizer_path))
    for batch in batches:
      yield batch._replace(pieces=[]), encode(batch)
    return
  # Forks from a server process, which has no threads and imports this module
  # only once.
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['experiments.preparation.encoding'])
  with concurrent.futures.ProcessPoolExecutor(
      workers, mp_context=context, initializer=_start_worker,
      initargs=(str(tokenizer_path),),
  ) as pool:
    pending: deque[
        tuple[DocumentBatch, concurrent.futures.Future[dict[str, Encoded]]]
    ] = deque()
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
    except concurrent.futures.process.BrokenProcessPool as error:
      raise ChildProcessError(
          f'one of workers={workers} processes has ended. In a script, prepare '
          "under `if __name__ == '__main__':`, as each process imports the "
          'script; else free memory, or give workers=1: the same call then '
          'continues.'
      ) from error
    finally:
      for _, future in pending:
        future.cancel()


_encoder: Encoder  # Set by `_start_worker`.


def _start_worker(tokenizer_path: str) -> None:
  global _encoder
  # If this command is killed, its workers would wait forever.
  threading.Thread(target=_end_with_parent, daemon=True).start()
  _encoder = Encoder(tokenizer_files.load_tokenizer(tokenizer_path))


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)


def _work(batch: DocumentBatch) -> dict[str, Encoded]:
  return _encoder(batch)


# Unicode's white space; Python's \s matches four more characters.
_SPACE = r'\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000'
_MARK = rf'(?:[^\w{_SPACE}]|_)'
# White space, then marks, then letters and digits. After marks, or letters and
# digits, GPT-2's pattern always cuts before a character of another kind.
_WORDS = re.compile(
    rf'[{_SPACE}]*{_MARK}*[^\W_]+|[{_SPACE}]*{_MARK}+|[{_SPACE}]+'
)
_MOST_WORDS = 300_000  # About 60 MB.


class WordCache(dict[str, bytes]):
  """A cache of the token ids of words, as bytes.

  Text is cut only at positions where GPT-2's pre-tokenizer also cuts, so that
  the ids of the parts are those of the whole text.

  Attributes:
    tokenizer: Tokenizer of words, a byte-level BPE as in GPT-2.
    dtype: Dtype of the ids.

  Example:
    >>> from spdf_jax.data.tokenizers import ByteTokenizer
    >>> words = WordCache(ByteTokenizer(), '<u2')
    >>> np.frombuffer(words.encode('a b'), '<u2').tolist()
    [97, 32, 98]
    >>> list(words)
    ['a', ' b']
  """

  def __init__(self, tokenizer: Any, dtype: str):
    super().__init__()
    self.tokenizer = tokenizer
    self.dtype = dtype

  def __missing__(self, word: str) -> bytes:
    data = np.array(self.tokenizer.encode(word), self.dtype).tobytes()
    if len(self) < _MOST_WORDS:
      self[word] = data
    return data

  def encode(self, text: str) -> bytes:
    """Returns the ids of `text` as bytes of `dtype`."""
    return b''.join(map(self.__getitem__, _WORDS.findall(text)))
