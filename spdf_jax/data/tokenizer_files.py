# SPDX-License-Identifier: Apache-2.0
"""Files of tokenizers: ours, and those of other libraries."""

import base64
from collections.abc import Callable
import json
import os
from pathlib import Path
from typing import Any
import uuid

from spdf_jax.data import tokenizers
from spdf_jax.data.tokenizers import Tokenizer
from spdf_jax.names import lookup

_VOCABULARIES = (('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe'))


def save_tokenizer(path: Path | str, tokenizer: Tokenizer) -> None:
  """Writes a tokenizer to a JSON file, atomically.

  Args:
    path: The file to write.
    tokenizer: The tokenizer.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> save_tokenizer(path, tokenizers.ByteTokenizer())
    >>> load_tokenizer(path)
    ByteTokenizer()
  """
  path = Path(path)
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.tmp')
  temporary.write_text(tokenizer.to_json(), encoding='utf-8')
  os.replace(temporary, path)


def load_tokenizer(path: Path | str) -> Tokenizer:
  """Reads a tokenizer written by `save_tokenizer`.

  Args:
    path: The file to read.

  Returns:
    A tokenizer with the kind and fingerprint of the saved one.

  Raises:
    ImportError: the tokenizer needs an extra that is not installed.
    ValueError: the file is not a tokenizer, or is of an unknown kind.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> tokenizer = tokenizers.train_bpe(['to be or not to be'] * 2, 258)
    >>> save_tokenizer(path, tokenizer)
    >>> load_tokenizer(path).vocab_size
    258
  """
  kinds: dict[str, Callable[[Any], Tokenizer]] = {
      'bytes': lambda fields: tokenizers.ByteTokenizer(),
      'bpe': lambda fields: tokenizers.bpe_from_parts(
          fields['vocab'], fields['merges']
      ),
      'tokenizers': lambda fields: tokenizers.library_tokenizer(
          json.dumps(fields['model'])
      ),
      'sentencepiece': lambda fields: tokenizers.sentencepiece_tokenizer(
          base64.b64decode(fields['model'])
      ),
  }
  text = Path(path).read_bytes()
  try:
    fields = json.loads(text)
    build = lookup('tokenizer kind', fields['kind'], kinds)
    tokenizer = build(fields)
    if fields.get('special_tokens'):
      return tokenizers.with_special_tokens(tokenizer)
    return tokenizer
  except (
      ValueError, KeyError, TypeError, AttributeError, RecursionError
  ) as error:
    raise ValueError(
        f'{path} is not a tokenizer file ({error}); write one with'
        ' save_tokenizer.'
    ) from error


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer from a file or folder.

  Args:
    path: A `tokenizer.json` of `tokenizers` or of `save_tokenizer`, a
      sentencepiece `.model`, or a folder with one of them or with GPT-2's
      `vocab.json` and `merges.txt` (also `encoder.json` and `vocab.bpe`).

  Returns:
    The tokenizer. The fingerprint of a GPT-2 tokenizer does not depend on the
    format.

  Raises:
    ImportError: the library of the tokenizer is not installed.
    ValueError: there is no tokenizer, or a file is damaged.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> tokenizer = tokenizers.train_bpe(['to be or not'] * 2, vocab_size=258)
    >>> _ = path.write_text(tokenizer.model.to_str())
    >>> open_tokenizer(path.parent).fingerprint == tokenizer.fingerprint
    True
  """
  path = Path(path).expanduser()
  if path.is_dir():
    path = _file_in(path)
  try:
    if path.name in {vocabulary for vocabulary, _ in _VOCABULARIES}:
      return _read_vocabulary(path)
    if path.suffix == '.model':
      return tokenizers.sentencepiece_tokenizer(path.read_bytes())
    text = path.read_bytes().decode('utf-8')
    fields = json.loads(text)
    if 'kind' in fields:
      return load_tokenizer(path)
    if _is_gpt2_like(fields):
      model = fields['model']
      merges = [
          merge.split(' ') if isinstance(merge, str) else merge
          for merge in model['merges']
      ]
      return tokenizers.bpe_from_parts(_full_vocabulary(fields), merges)
    return tokenizers.library_tokenizer(text)
  except (
      ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError
  ) as error:
    raise ValueError(
        f'tokenizer={str(path)!r} cannot be read ({error}); give a'
        ' tokenizer.json, a .model of sentencepiece, or a folder with'
        ' vocab.json and merges.txt.'
    ) from error


def export_tokenizer(
    path: str | os.PathLike[str], tokenizer: Tokenizer
) -> None:
  """Writes a tokenizer that transformers can read, if it is one of theirs.

  Args:
    path: The file to write, a `tokenizer.json`. A tokenizer of bytes or of
      sentencepiece is written as `save_tokenizer` does, for `open_tokenizer`.
    tokenizer: The tokenizer.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> tokenizer = tokenizers.train_bpe(['to be or not'] * 2, vocab_size=258)
    >>> export_tokenizer(path, tokenizer)
    >>> open_tokenizer(path).fingerprint == tokenizer.fingerprint
    True
  """
  if isinstance(tokenizer, tokenizers.LibraryTokenizer):
    Path(path).write_text(tokenizer.model.to_str(), encoding='utf-8')
  else:
    save_tokenizer(Path(path), tokenizer)


def tokenizer_paths(folder: str | os.PathLike[str]) -> list[Path]:
  """Returns the paths of the files of tokenizers in a folder.

  Args:
    folder: Folder that `open_tokenizer` may read.

  Returns:
    Paths of existing files, in a fixed order; none if there is no tokenizer.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / 'tokenizer.json').write_text('{}')
    2
    >>> [path.name for path in tokenizer_paths(folder)]
    ['tokenizer.json']
  """
  folder = Path(folder)
  names = ('tokenizer.json', *(x for pair in _VOCABULARIES for x in pair))
  paths = [folder / name for name in names]
  return [x for x in paths if x.exists()] + sorted(folder.glob('*.model'))


def _file_in(folder: Path) -> Path:
  for name in ('tokenizer.json', *(v for v, _ in _VOCABULARIES)):
    if (folder / name).exists():
      return folder / name
  models = sorted(folder.glob('*.model'))
  if models:
    return models[0]
  raise ValueError(
      f'tokenizer={str(folder)!r} holds no tokenizer.json, no vocab.json with'
      ' merges.txt and no .model; give the folder of a tokenizer.'
  )


def _read_vocabulary(path: Path) -> Tokenizer:
  vocab = json.loads(path.read_bytes())
  text = (path.parent / dict(_VOCABULARIES)[path.name]).read_bytes()
  lines = text.decode('utf-8').split('\n')
  merges = [
      line.split(' ') for line in lines
      if line.strip() and not line.startswith('#version')
  ]
  return tokenizers.bpe_from_parts(vocab, merges)


def _is_gpt2_like(fields: dict[str, Any]) -> bool:
  """Returns whether `bpe_from_parts` can build the tokenizer of a file."""
  pre = fields.get('pre_tokenizer') or {}
  model = fields['model']
  others = [t for t in fields.get('added_tokens', ())
            if t['content'] != tokenizers.END_OF_TEXT]
  return (
      model.get('type', 'BPE') == 'BPE'
      and not others
      and tokenizers.END_OF_TEXT in _full_vocabulary(fields)
      and fields.get('normalizer') is None
      and pre.get('type') == 'ByteLevel'
      and not pre.get('add_prefix_space')
      and pre.get('use_regex', True)
      and not model.get('byte_fallback')
      and not model.get('ignore_merges')
      and model.get('unk_token') in (None, tokenizers.END_OF_TEXT)
  )


def _full_vocabulary(fields: dict[str, Any]) -> dict[str, int]:
  added = {t['content']: t['id'] for t in fields.get('added_tokens', ())}
  return {**fields['model']['vocab'], **added}
