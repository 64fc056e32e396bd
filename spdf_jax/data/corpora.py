# SPDX-License-Identifier: Apache-2.0
"""Corpora by name, tokenized once and then memory-mapped."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import hashlib
import json
import logging
import math
import os
from pathlib import Path
import shutil
from typing import Any, final, get_args
import uuid

from spdf_jax import files
from spdf_jax import names
from spdf_jax.data import copies
from spdf_jax.data import special_tokens
from spdf_jax.data import stdlib
from spdf_jax.data import token_files
from spdf_jax.data import tokenizer_files
from spdf_jax.data import tokenizers
from spdf_jax.data.mixtures import Mixture
from spdf_jax.data.sources import Source
from spdf_jax.data.sources import Windows
from spdf_jax.data.token_files import TokenFile
from spdf_jax.data.token_files import write_token_file
from spdf_jax.data.tokenizers import ByteTokenizer
from spdf_jax.data.tokenizers import Tokenizer

SPLITS: tuple[stdlib.Split, ...] = get_args(stdlib.Split)

CACHE_DIR = '~/.cache/spdf_jax'
"""The usual folder of prepared corpora."""

# Increment it when the tokens change for an unchanged interpreter.
_RECIPE_VERSION = 1

_LARGEST_VERIFIED = 1 << 32  # Bytes; reading as many takes some seconds.

_SMALL_FILES = ('tokenizer.json', *(f'{split}.json' for split in SPLITS))
_LARGE_FILES = tuple(f'{split}.bin' for split in SPLITS)

_logger = logging.getLogger(__name__)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Tokenized text in three splits.

  Attributes:
    name: Name of the corpus.
    tokenizer: Tokenizer of the text.
    train: Tokens for pre-training.
    validation: Tokens for model selection.
    test: Tokens for reported results.
    mixture: Source of training batches instead of `train`, if corpora are
      mixed; the splits are then those of the first corpus.
  """

  name: str
  tokenizer: Tokenizer
  train: TokenFile
  validation: TokenFile
  test: TokenFile
  mixture: Mixture | None = None

  @property
  def source(self) -> Source:
    """Source of training batches."""
    return Windows(self.train) if self.mixture is None else self.mixture

  @property
  def fingerprint(self) -> str:
    """SHA-256 over name, tokenizer, and tokens and source of each split."""
    facts = [self.name, self.tokenizer.fingerprint]
    for split in SPLITS:
      file = getattr(self, split)
      facts += [file.fingerprint, file.description['source']]
    if self.mixture is not None:
      facts.append(self.mixture.fingerprint)
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode('utf-8')).hexdigest()


def prepare_corpus(
    name: str, *, tokenizer: str, cache_dir: Path | str
) -> Corpus:
  """Opens a corpus, after building it if it is not cached.

  The only corpus with a name is `'python-stdlib'`: the standard library of the
  running Python, about 8 MB of sources with docstrings, split by module (see
  `module_split`); one document is one file. It needs no download.

  Args:
    name: `'python-stdlib'`; or the path, with a separator in it, of a folder
      that `open_corpus` opens, e.g. `'./books'`, or its URL in a bucket, e.g.
      `'gs://bucket/books'`, as `etils.epath` takes it; or a mixture of such
      folders by weight, `'./books=3,./news=1'`.
    tokenizer: `'bytes'`, or `'bpe-N'` for a byte-level byte-pair encoding of
      N tokens learned on the training split, e.g. `'bpe-1024'`; `''` for a
      folder, which has its own tokenizer.
    cache_dir: Folder of prepared corpora and of copies from buckets; created
      if missing. Several processes may prepare the same corpus at once.

  Returns:
    The corpus, with memory-mapped tokens.

  Raises:
    ImportError: the tokenizer or the URL needs an extra that is not installed.
    OSError: `cache_dir` cannot be written, or a file of the folder is missing.
    ValueError: `name` or `tokenizer` is unknown, they do not fit together, or
      the folder does not exist, is not finished or is damaged.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   corpus = prepare_corpus(
    ...       'python-stdlib', tokenizer='bytes', cache_dir=folder)
    >>> corpus.train.vocab_size, corpus.test.description['source']['split']
    (257, 'test')
  """
  if _is_prepared_folder(name):
    if _is_mixture(name):
      return _open_mixture(name, tokenizer, cache_dir)
    return _open_prepared(name, tokenizer, cache_dir)
  read = names.lookup('corpus', name, _CORPORA)
  make_tokenizer = tokenizers.tokenizer_maker(tokenizer)
  if make_tokenizer is None:
    raise ValueError(
        f"tokenizer={tokenizer!r} is unknown; use 'bytes', or 'bpe-N' with N"
        " at least 257, e.g. 'bpe-1024'."
    )
  source = {
      'corpus': name, 'recipe': _RECIPE_VERSION, **stdlib.python_identity()
  }
  directory = _cache_path(name, tokenizer, cache_dir)
  if os.path.exists(directory):
    try:
      return _open(directory, name, source)
    except (OSError, ValueError) as error:
      _logger.warning('Building the corpus in %s again: %s', directory, error)
  temporary = directory.with_name(f'.{directory.name}.{uuid.uuid4().hex}.tmp')
  try:
    temporary.mkdir(parents=True)
    _logger.info(
        'Preparing the corpus in %s, once; it takes up to a minute.', directory
    )
    _build(temporary, read(), make_tokenizer, source)
    try:
      os.rename(temporary, directory)
    except OSError:
      if not directory.is_dir():
        raise
      # Replaces the files of a damaged folder, or of one that another process
      # has built meanwhile. This is safe while others read or replace them,
      # since all build the same files.
      for file in temporary.iterdir():
        os.replace(file, directory / file.name)
    return _open(directory, name, source)
  except OSError as error:
    raise OSError(
        f'cache_dir={str(cache_dir)!r} cannot hold the corpus {name!r}'
        f' ({error}); pass a folder that can be written.'
    ) from error
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def is_cached(name: str, tokenizer: str, cache_dir: Path | str) -> bool:
  """Returns whether `prepare_corpus` finds a corpus in `cache_dir`."""
  return _cache_path(name, tokenizer, cache_dir).exists()


def _cache_path(name: str, tokenizer: str, cache_dir: Path | str) -> Path:
  python = stdlib.python_identity()['python']
  return Path(cache_dir).expanduser() / f'{name}-{python}-{tokenizer}'


def read_tokenizer(
    name: str, *, tokenizer: str, cache_dir: Path | str
) -> Tokenizer:
  """Reads the tokenizer of a prepared corpus, without its data.

  Nothing is written. `'bytes'` needs no prepared corpus.

  Args:
    name: Corpus, as `prepare_corpus` takes it.
    tokenizer: Tokenizer of the corpus, as `prepare_corpus` takes it.
    cache_dir: Folder of prepared corpora, as `prepare_corpus` takes it.

  Returns:
    The tokenizer; of a mixture, that of its first folder.

  Raises:
    ImportError: the tokenizer needs an extra that is not installed.
    OSError: the corpus has no file `tokenizer.json`, as it is not prepared.
    ValueError: the file of the tokenizer is damaged.

  Example:
    >>> read_tokenizer('python-stdlib', tokenizer='bytes', cache_dir='none')
    ByteTokenizer()
  """
  if tokenizer == 'bytes':
    return ByteTokenizer()
  if not _is_prepared_folder(name):
    directory = _cache_path(name, tokenizer, cache_dir)
  else:
    if _is_mixture(name):
      name = name.split(',')[0].rsplit('=', 1)[0].strip()
    directory = copies.local_path(name, cache_dir)
  return tokenizer_files.load_tokenizer(directory / 'tokenizer.json')


def write_corpus(
    directory: Path | str,
    texts: Mapping[str, Iterable[str]],
    tokenizer: Tokenizer,
) -> Corpus:
  """Writes documents as a corpus, which is named by its folder.

  Documents are streamed. To prepare files, in several processes that may be
  killed, use `python -m experiments.prepare`.

  Args:
    directory: Folder of the corpus, created if missing.
    texts: Documents of `'train'`, `'validation'` and `'test'`.
    tokenizer: Tokenizer, e.g. `ByteTokenizer()` or the result of `train_bpe`.

  Returns:
    The corpus, opened.

  Raises:
    ValueError: a split is missing.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / 'numbers'
    >>> texts = {'train': map('Number {}.'.format, range(9)),
    ...          'validation': ['Number 9.'], 'test': ['Number 10.']}
    >>> corpus = write_corpus(folder, texts, ByteTokenizer())
    >>> len(corpus.train.tokens), corpus.test.description['documents']
    (90, 1)
  """
  if missing := set(SPLITS) - set(texts):
    raise ValueError(
        f'texts has no documents of {", ".join(sorted(missing))}; give all of '
        f'{", ".join(SPLITS)}, each possibly empty.'
    )
  directory = Path(directory).expanduser()
  directory.mkdir(parents=True, exist_ok=True)
  _write(directory, texts, tokenizer, lambda split: {
      'split': split, 'tokenizer_fingerprint': tokenizer.fingerprint
  })
  return open_corpus(directory)


def open_corpus(directory: Path | str) -> Corpus:
  """Opens a corpus of `experiments.prepare` or `write_corpus`, and checks it.

  The tokens of files above 4 GiB are not read, only their number is checked;
  `verify_corpus` reads them too.

  Args:
    directory: Folder of the corpus.

  Returns:
    The corpus, named by the folder.

  Raises:
    ImportError: the tokenizer needs an extra that is not installed.
    OSError: a file is missing.
    ValueError: the corpus is not finished, or a file is damaged.
  """
  return _open_verified(directory, _LARGEST_VERIFIED)


def verify_corpus(directory: Path | str) -> Corpus:
  """Reads all files of a corpus, of any size, and checks their fingerprints.

  This takes about a second per gigabyte.

  Args:
    directory: Folder of a corpus, as `open_corpus` takes it.

  Returns:
    The corpus.

  Raises:
    ImportError: the tokenizer needs an extra that is not installed.
    OSError: a file is missing.
    ValueError: the corpus is not finished, or a file is damaged; the message
      names the file.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / 'texts'
    >>> texts = {split: ['A text.'] for split in SPLITS}
    >>> _ = write_corpus(folder, texts, ByteTokenizer())
    >>> verify_corpus(folder).name
    'texts'
  """
  return _open_verified(directory, math.inf)


def _open_verified(directory: Path | str, largest: float) -> Corpus:
  """Opens a corpus; reads token files of at most `largest` bytes."""
  directory = Path(directory).expanduser()
  if (directory / 'partial').exists():
    raise ValueError(
        f'corpus {str(directory)!r} is not finished, as it has a folder'
        ' partial; run its preparation again, which continues, or join its'
        ' shards.'
    )
  if not (directory / 'tokenizer.json').is_file():
    raise FileNotFoundError(
        f'corpus {str(directory)!r} has no tokenizer.json; give a folder that'
        ' `python -m experiments.prepare` wrote.'
    )
  tokenizer, opened = _open_files(directory, largest)
  for split, file in opened.items():
    source = file.description['source']
    if (source.get('split'), source.get('tokenizer_fingerprint')) != (
        split, tokenizer.fingerprint
    ):
      raise ValueError(
          f'{file.path} is not the {split} split that was made with the'
          ' tokenizer.json beside it; prepare the corpus again.'
      )
  return Corpus(directory.name, tokenizer, **opened)


def _open_files(
    directory: Path, largest: float
) -> tuple[Tokenizer, dict[str, Any]]:
  """Opens tokenizer and splits; verifies files of at most `largest` bytes."""
  tokenizer = tokenizer_files.load_tokenizer(directory / 'tokenizer.json')
  opened: dict[str, Any] = {}
  for split in SPLITS:
    opened[split] = token_files.open_token_file(directory / split)
    if opened[split].tokens.nbytes <= largest:
      token_files.verify_token_file(opened[split])
  return tokenizer, opened


def _is_prepared_folder(name: str) -> bool:
  """Returns whether the name of a corpus is a path, or a mixture of paths."""
  return os.sep in name or name.startswith('~')


def _is_mixture(name: str) -> bool:
  """Returns whether a path with = names no folder, but folders and weights."""
  last = name if ',' in name else name.rsplit(os.sep, 1)[-1]
  return '=' in last and not Path(name).expanduser().exists()


def _read_stdlib() -> dict[stdlib.Split, list[str]]:
  texts: dict[stdlib.Split, list[str]] = {split: [] for split in SPLITS}
  for module, text in stdlib.module_sources():
    texts[stdlib.module_split(module)].append(text)
  return texts


_CORPORA: Mapping[str, Callable[[], dict[stdlib.Split, list[str]]]] = {
    'python-stdlib': _read_stdlib,
}


def _open_prepared(
    name: str, tokenizer: str, cache_dir: Path | str
) -> Corpus:
  if not files.is_url(name) and not Path(name).expanduser().is_dir():
    raise ValueError(
        f'corpus={name!r} is not a folder; prepare it with `python -m'
        ' experiments.prepare`.'
    )
  if tokenizer:
    raise ValueError(
        f'corpus={name!r} is a prepared folder, which has its own tokenizer,'
        f" but tokenizer={tokenizer!r}; set tokenizer to ''."
    )
  return open_corpus(copies.fetch(
      name, cache_dir, compared=_SMALL_FILES, copied=_LARGE_FILES
  ))


def _open_mixture(
    name: str, tokenizer: str, cache_dir: Path | str
) -> Corpus:
  try:
    parts = [part.rsplit('=', 1) for part in name.split(',')]
    weights = {folder.strip(): float(weight) for folder, weight in parts}
  except ValueError as error:
    raise ValueError(
        f'corpus={name!r} is neither an existing folder nor a mixture; write'
        ' a mixture as ./books=3,./news=1.'
    ) from error
  if len(weights) < len(parts):
    raise ValueError(
        f'corpus={name!r} names a folder twice; give each one with one weight.'
    )
  corpora = [_open_prepared(folder, tokenizer, cache_dir) for folder in weights]
  first = corpora[0]
  for corpus in corpora:
    if corpus.tokenizer.fingerprint != first.tokenizer.fingerprint:
      raise ValueError(
          f'corpus={name!r} mixes {first.name!r} and {corpus.name!r}, which'
          ' have different tokenizers; prepare them with the same one.'
      )
  sources = [Windows(corpus.train) for corpus in corpora]
  mixture = Mixture(dict(zip(weights, sources)), weights)
  return dataclasses.replace(first, mixture=mixture)


def _build(
    directory: Path,
    texts: Mapping[stdlib.Split, list[str]],
    make_tokenizer: Callable[[Iterable[str]], Tokenizer],
    source: Mapping[str, Any],
) -> None:
  tokenizer = make_tokenizer(texts['train'])
  _write(directory, texts, tokenizer, lambda split: {
      **source, 'split': split, 'tokenizer': tokenizer.fingerprint
  })


def _write(
    directory: Path,
    texts: Mapping[Any, Iterable[str]],
    tokenizer: Tokenizer,
    source_of: Callable[[str], Mapping[str, Any]],
) -> None:
  tokenizer_files.save_tokenizer(directory / 'tokenizer.json', tokenizer)
  for split in SPLITS:
    write_token_file(
        directory / split,
        _documents(texts[split], tokenizer),
        vocab_size=tokenizer.vocab_size,
        source=source_of(split),
    )


def _documents(
    texts: Iterable[str], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], int]]:
  for text in texts:
    ids = special_tokens.begun(tokenizer, tokenizer.encode(text))
    yield [*ids, tokenizer.end_of_text], len(text.encode('utf-8'))


def _open(directory: Path, name: str, source: Mapping[str, Any]) -> Corpus:
  """Opens a prepared corpus; raises OSError or ValueError if it is damaged."""
  tokenizer, opened = _open_files(directory, math.inf)
  for split, file in opened.items():
    expected = {**source, 'split': split, 'tokenizer': tokenizer.fingerprint}
    if file.description['source'] != expected:
      raise ValueError(
          f'{file.path} was made from {file.description["source"]}, not from'
          f' {expected}.'
      )
  return Corpus(name, tokenizer, **opened)
