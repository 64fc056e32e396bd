# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, which convert text to token ids and back."""

import base64
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import re
from typing import Any
from typing import final
from typing import Protocol
import uuid

from spdf_jax.data.bpe import bpe_from_parts
from spdf_jax.data.bpe import BPETokenizer
from spdf_jax.data.bpe import LARGEST_VOCABULARY
from spdf_jax.data.bpe import train_bpe
from spdf_jax.data.library_tokenizers import library_tokenizer
from spdf_jax.data.library_tokenizers import LibraryTokenizer
from spdf_jax.data.library_tokenizers import sentencepiece_tokenizer
from spdf_jax.names import lookup

__all__ = [
    'BPETokenizer',
    'ByteTokenizer',
    'Tokenizer',
    'load_tokenizer',
    'save_tokenizer',
    'tokenizer_maker',
    'train_bpe',
    'with_special_tokens',
]


class Tokenizer(Protocol):
  """The interface of tokenizers.

  Example:
    >>> tokenizer: Tokenizer = ByteTokenizer()
    >>> tokenizer.vocab_size
    257
  """

  @property
  def vocab_size(self) -> int:
    """Number of token ids, the end of text included."""

  @property
  def end_of_text(self) -> int:
    """Id that ends a document.

    Encoding text never produces it, except `with_special_tokens`.
    """

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `to_json()`, in hexadecimal."""

  def encode(self, text: str) -> list[int]:
    """Returns the token ids of `text`, without an end of text."""

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of every text."""

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`, without ends of text."""

  def to_json(self) -> str:
    """Returns JSON from which this tokenizer can be rebuilt."""


@final
@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """A tokenizer whose ids are the bytes of UTF-8; it needs no library.

  Example:
    >>> ByteTokenizer().encode('hé')
    [104, 195, 169]
    >>> ByteTokenizer().decode([104, 195, 169, 256])
    'hé'
  """

  vocab_size = 257
  end_of_text = 256

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `to_json()`, in hexadecimal."""
    return hashlib.sha256(self.to_json().encode('utf-8')).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Returns the bytes of `text`."""
    return list(text.encode('utf-8'))

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the bytes of every text."""
    return [self.encode(text) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; invalid UTF-8 becomes U+FFFD."""
    kept = bytes(int(i) for i in ids if 0 <= i < 256)
    return kept.decode('utf-8', errors='replace')

  def to_json(self) -> str:
    """Returns JSON with the kind of the tokenizer, its only property."""
    return json.dumps({'kind': 'bytes'})


def tokenizer_maker(
    name: str,
) -> Callable[[Iterable[str]], Tokenizer] | None:
  """Returns the function that makes the tokenizer of a name from texts.

  Args:
    name: `'bytes'`, or `'bpe-N'` for `train_bpe` with N tokens.

  Returns:
    The function; `None` for other names.

  Raises:
    ValueError: N is out of range.

  Example:
    >>> tokenizer_maker('bytes')([])
    ByteTokenizer()
    >>> tokenizer_maker('bpe-258')(['to be or not to be'] * 2).vocab_size
    258
  """
  if name == 'bytes':
    return lambda texts: ByteTokenizer()
  match = re.fullmatch(r'bpe-([1-9][0-9]*)', name)
  if not match:
    return None
  size = int(match[1][:9])  # Nine digits are out of range, as more are.
  if not 257 <= size <= LARGEST_VOCABULARY:
    raise ValueError(
        f"tokenizer={name!r} is out of range; use 'bytes', or 'bpe-N' with N"
        f' from 257 to {LARGEST_VOCABULARY}.'
    )
  return lambda texts: train_bpe(texts, size)


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
  """Encodes text that spells a special token as that token.

  The libraries `tokenizers` and transformers do so by default, so that scores
  computed with them can be reproduced. Our tokenizers encode such text as any
  other text, since a document must not contain an end of text.

  Args:
    tokenizer: A tokenizer of `train_bpe` or of a `tokenizer.json`.

  Returns:
    The tokenizer with another fingerprint; it decodes to the text without
    special tokens.

  Raises:
    ValueError: The tokenizer knows no text of special tokens.

  Example:
    >>> tokenizer = with_special_tokens(train_bpe(['to be'] * 2, 258))
    >>> tokenizer.encode('<|endoftext|>') == [tokenizer.end_of_text]
    True
  """
  if not isinstance(tokenizer, BPETokenizer | LibraryTokenizer):
    raise ValueError(
        f'special_tokens is set and the tokenizer a {type(tokenizer).__name__},'
        ' in which no text spells a special token; give a tokenizer.json or'
        ' GPT-2\'s vocabulary, or leave it out.'
    )
  # The library does not write the setting, so the copy has its default, False.
  model = type(tokenizer.model).from_str(tokenizer.model.to_str())
  model.encode_special_tokens = False
  return dataclasses.replace(tokenizer, model=model, special_tokens=True)


def save_tokenizer(path: Path | str, tokenizer: Tokenizer) -> None:
  """Writes a tokenizer to a JSON file, atomically.

  Args:
    path: The file to write.
    tokenizer: The tokenizer.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> save_tokenizer(path, ByteTokenizer())
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
    ImportError: The tokenizer needs an extra that is not installed.
    ValueError: The file is not a tokenizer, or is of an unknown kind.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'tokenizer.json'
    >>> save_tokenizer(path, train_bpe(['to be or not to be'] * 2, 258))
    >>> load_tokenizer(path).vocab_size
    258
  """
  kinds: dict[str, Callable[[Any], Tokenizer]] = {
      'bytes': lambda fields: ByteTokenizer(),
      'bpe': lambda fields: bpe_from_parts(fields['vocab'], fields['merges']),
      'tokenizers': lambda fields: library_tokenizer(
          json.dumps(fields['model'])
      ),
      'sentencepiece': lambda fields: sentencepiece_tokenizer(
          base64.b64decode(fields['model'])
      ),
  }
  text = Path(path).read_bytes()
  try:
    fields = json.loads(text)
    build = lookup('tokenizer kind', fields['kind'], kinds)
    tokenizer = build(fields)
    if fields.get('special_tokens'):
      return with_special_tokens(tokenizer)
    return tokenizer
  except (
      ValueError, KeyError, TypeError, AttributeError, RecursionError
  ) as error:
    raise ValueError(
        f'{path} is not a tokenizer file ({error}); write one with'
        ' save_tokenizer.'
    ) from error
