"""The state on disk of an unfinished corpus, which survives kills."""

from collections.abc import Callable
import dataclasses
import json
import logging
import os
from pathlib import Path
import shutil
from typing import Any, BinaryIO, final
import zlib

from experiments.preparation.encoding import Encoded
from spdf_jax import files
from spdf_jax.data import corpora
from spdf_jax.data import token_files
from spdf_jax.data import tokenizer_files
from spdf_jax.data.corpora import Corpus
from spdf_jax.data.tokenizers import Tokenizer

_logger = logging.getLogger(__name__)

_REMOVED = '.partial.old'


@final
@dataclasses.dataclass(frozen=True)
class PreparationProgress:
  """The progress of a preparation.

  Attributes:
    read: Bytes of tokenized text, over all splits.
    tokens: Number of written tokens.
    files: Number of finished input files.
    total_files: Number of input files.
    seconds: Seconds since the start of this process' work.
    skipped: Numbers of skipped documents, by reason.
  """

  read: int
  tokens: int
  files: int
  total_files: int
  seconds: float
  skipped: dict[str, int]


class Unfinished:
  """A corpus, or a shard of one, that is being written in `output/partial`.

  Args:
    output: Folder of the corpus.
    made_from: Description of input and settings, JSON-able.
    modified: Times at which the inputs were modified, which must be the same
      when the work goes on; `None`: there are none.
    shard: Name of the shard's folder in `output/partial`; `''`: all of it.

  Attributes:
    tokenizer_path: File of the tokenizer.
    state: Counts and CRC-32 of each split, and the input position up to which
      they are complete.
  """

  def __init__(
      self, output: Path, made_from: dict[str, Any],
      modified: list[int] | None = None, shard: str = '',
  ):
    self._output, self._made_from = output, made_from
    self._modified = modified
    self._folder = output / 'partial' / shard
    self._mend = (
        f'delete {self._folder} and prepare this shard again.' if shard
        else f'delete {output} and prepare the corpus again.'
    )
    self.tokenizer_path = self._folder / 'tokenizer.json'
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise OSError(
          f'output={str(output)!r} cannot be written ({error}); give another'
          ' folder.'
      ) from error
    locked = self._folder if shard else output
    self._release = files.lock_folder(locked, 'output')
    self.state = self._read_state()
    self._files: dict[str, BinaryIO] = {}
    self._vocab_size = 1

  def _read_state(self) -> dict[str, Any]:
    path = self._folder / 'state.json'
    if not path.exists():
      splits = {
          s: dict(size=0, crc32=0, documents=0, bytes=0) for s in corpora.SPLITS
      }
      position = dict(file=0, items=0, skipped={}, documents=0, split=None)
      return dict(
          made_from=self._made_from, modified=self._modified, splits=splits,
          position=position,
      )
    state = read_state(path, self._mend)
    made_from = state['made_from']
    if made_from != self._made_from:
      raise ValueError(
          f'output={str(self._output)!r} holds the beginning of a corpus that'
          ' was prepared differently (other'
          f' {differences(made_from, self._made_from)}); give another folder,'
          ' or delete this one.'
      )
    if state['modified'] != self._modified:
      raise ValueError(
          f'output={str(self._output)!r} holds the beginning of a corpus, and'
          f' an input was modified since it was begun; {self._mend}'
      )
    _logger.info(
        'Resuming in %s after %d documents.', self._output,
        state['position']['documents'],
    )
    return state

  def tokenizer(self, make: Callable[[], Tokenizer]) -> Tokenizer:
    """Returns the tokenizer of the corpus, after creating it if missing."""
    if not self.tokenizer_path.exists():
      tokenizer_files.save_tokenizer(self.tokenizer_path, make())
    tokenizer = tokenizer_files.load_tokenizer(self.tokenizer_path)
    made_with = self.state.setdefault('tokenizer', tokenizer.fingerprint)
    if tokenizer.fingerprint != made_with:
      raise ValueError(
          f'{self.tokenizer_path} is not the tokenizer of the tokens beside it;'
          f' {self._mend}'
      )
    self._vocab_size = tokenizer.vocab_size
    return tokenizer

  def append(
      self, encoded: dict[str, Encoded], position: dict[str, Any]
  ) -> int:
    """Appends the tokens of a batch; returns the bytes of its text."""
    for split, result in encoded.items():
      file = self._file(split)
      with files.writing(self._folder / f'{split}.ids'):
        file.write(result.data)
        # Otherwise a file that an error left open could write into a later
        # corpus.
        file.flush()
      counts = self.state['splits'][split]
      counts['size'] += len(result.data)
      counts['crc32'] = zlib.crc32(result.data, counts['crc32'])
      counts['documents'] += result.documents
      counts['bytes'] += result.num_bytes
    self.state['position'] = position
    return sum(result.num_bytes for result in encoded.values())

  def _file(self, split: str) -> BinaryIO:
    if split not in self._files:
      path = self._folder / f'{split}.ids'
      size = self.state['splits'][split]['size']
      moved = self._output / f'{split}.bin'
      if size and moved.exists() and not path.exists():
        os.replace(moved, path)  # Moved by a process that was then killed.
      file = os.fdopen(files.open_regular(path), 'r+b')
      if path.stat().st_size < size:
        raise ValueError(
            f'{path} is shorter than the {size} bytes that its state.json'
            f' records; {self._mend}'
        )
      # Data after the last saved state is discarded and written again.
      file.truncate(size)
      file.seek(0, os.SEEK_END)
      self._files[split] = file
    return self._files[split]

  def save(self) -> None:
    """Saves the appended tokens and the state, so that they survive a kill."""
    for file in self._files.values():
      os.fsync(file.fileno())
    state = json.dumps(files.seal(self.state))
    files.write_atomically(self._folder / 'state.json', state)

  def progress(self, total_files: int, seconds: float) -> PreparationProgress:
    """Returns the progress."""
    counts = self.state['splits'].values()
    width = int(token_files.dtype_of(self._vocab_size)[-1])
    return PreparationProgress(
        read=sum(c['bytes'] for c in counts),
        tokens=sum(c['size'] for c in counts) // width,
        files=self.state['position']['file'],
        total_files=total_files,
        seconds=seconds,
        skipped=self.state['position']['skipped'],
    )

  def finish_shard(self) -> None:
    """Marks a shard as complete, after creating the files that are missing."""
    for split in corpora.SPLITS:
      self._file(split)
    self.state['finished'] = True
    self.save()
    for file in self._files.values():
      file.close()
    self._release()

  def finish(self, tokenizer: Tokenizer) -> Corpus:
    """Moves the files to their place and opens the corpus."""
    for split in corpora.SPLITS:
      self._file(split).close()
    counts = self.state['splits']
    shares = self._made_from['shares'] | {'train': 1}
    for split in corpora.SPLITS:
      if shares[split] and not counts[split]['documents']:
        raise ValueError(
            f'none of {self.state["position"]["documents"]} documents is in'
            f' the {split} split, whose share is {shares[split]}; give more'
            ' documents, or other shares and another output.'
        )
    tokenizer_files.save_tokenizer(self._output / 'tokenizer.json', tokenizer)
    for split in corpora.SPLITS:
      token_files.adopt_token_file(
          self._output / split, self._folder / f'{split}.ids',
          size=counts[split]['size'],
          crc32=counts[split]['crc32'],
          vocab_size=tokenizer.vocab_size,
          documents=counts[split]['documents'],
          num_bytes=counts[split]['bytes'],
          source={
              **self._made_from,
              'split': split,
              'skipped': self.state['position']['skipped'],
              'tokenizer_fingerprint': tokenizer.fingerprint,
          },
      )
    remove_leftover(self._output)
    # Renamed first, so that a kill does not leave a part of it in place.
    os.replace(self._folder, self._output / _REMOVED)
    remove_leftover(self._output)
    self._release()
    return corpora.open_corpus(self._output)


def remove_leftover(output: Path) -> None:
  """Removes what a kill has left of the work on a finished corpus.

  Args:
    output: Folder of the corpus.
  """
  shutil.rmtree(output / _REMOVED, ignore_errors=True)


def read_state(path: Path, mend: str) -> dict[str, Any]:
  """Reads the state of an unfinished corpus or shard.

  Args:
    path: The file.
    mend: What to do if it is damaged, for the error message.

  Returns:
    The state.

  Raises:
    ValueError: the file is damaged.
  """
  return files.unseal(files.read_object(path, mend), path, mend)


def differences(actual: dict[str, Any], wanted: dict[str, Any]) -> str:
  """Returns the keys whose values differ from the expected ones, as text.

  Example:
    >>> differences({'a': 1, 'b': 2}, {'a': 1, 'b': 3, 'c': 4})
    'b and c'
  """
  return ' and '.join(k for k in wanted if actual.get(k) != wanted[k])
