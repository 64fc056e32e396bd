# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the libraries `tokenizers` and sentencepiece."""

import base64
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
from typing import Any
from typing import final

from spdf_jax.extras import require

# Common names of the token that ends a document.
_ENDS = (
    '<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[EOS]',
)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class LibraryTokenizer:
  """A tokenizer of a `tokenizer.json` of the library `tokenizers`.

  Attributes:
    model: The `tokenizers.Tokenizer`.
    end_of_text: Id that ends a document.
    special_tokens: Whether text that spells a special token is encoded as that
      token, see `with_special_tokens`.

  Example:
    >>> from spdf_jax.data.bpe import train_bpe
    >>> text = train_bpe(['to be or not'] * 2, vocab_size=258).model.to_str()
    >>> tokenizer = library_tokenizer(text)
    >>> tokenizer.decode(tokenizer.encode('to be'))
    'to be'
  """

  model: Any
  end_of_text: int
  special_tokens: bool = False

  @property
  def vocab_size(self) -> int:
    """Largest id plus one."""
    return max(self.model.get_vocab(with_added_tokens=True).values()) + 1

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `to_json()`, in hexadecimal."""
    return hashlib.sha256(self.to_json().encode('utf-8')).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Returns the token ids of `text`, without an end of text."""
    return self.model.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of every text."""
    batch = self.model.encode_batch_fast(
        list(texts), add_special_tokens=False
    )
    return [encoding.ids for encoding in batch]

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`, without special tokens."""
    return self.model.decode([int(i) for i in ids], skip_special_tokens=True)

  def to_json(self) -> str:
    """Returns the library's own JSON, with the kind of the tokenizer."""
    fields = {'kind': 'tokenizers', 'model': json.loads(self.model.to_str())}
    if self.special_tokens:
      fields['special_tokens'] = True
    return json.dumps(fields, sort_keys=True)


def library_tokenizer(text: str) -> LibraryTokenizer:
  """Builds a tokenizer from the text of a `tokenizer.json`.

  Args:
    text: JSON as the library `tokenizers` writes it.

  Returns:
    The tokenizer; it encodes the names of special tokens as text.

  Raises:
    ImportError: The extra `data` is not installed.
    ValueError: The JSON is not a tokenizer, or has no token that ends a
      document.
  """
  os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
  library = require('tokenizers', 'data')
  try:
    model = library.Tokenizer.from_str(text)
  except Exception as error:  # The library raises no narrower exception.
    raise ValueError(
        f'it is not a tokenizer of `tokenizers`: {error}'
    ) from error
  model.encode_special_tokens = True
  model.no_truncation()
  model.no_padding()
  for end in _ENDS:
    if model.token_to_id(end) is not None:
      return LibraryTokenizer(model, model.token_to_id(end))
  raise ValueError(
      f'it has none of the tokens {", ".join(_ENDS)} that could end a'
      ' document; add one.'
  )


@final
@dataclasses.dataclass(frozen=True, eq=False)
class SentencePieceTokenizer:
  """A sentencepiece tokenizer, as used by Llama 1 and 2.

  Attributes:
    proto: Bytes of the model file.
    model: The `sentencepiece.SentencePieceProcessor`.
  """

  proto: bytes
  model: Any

  @property
  def vocab_size(self) -> int:
    """Number of pieces."""
    return self.model.get_piece_size()

  @property
  def end_of_text(self) -> int:
    """Id of the end of a sequence."""
    return self.model.eos_id()

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `to_json()`, in hexadecimal."""
    return hashlib.sha256(self.to_json().encode('utf-8')).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without begin and end of sequence."""
    return self.model.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of every text."""
    return self.model.encode(list(texts))

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`, without ends of text."""
    kept = [int(i) for i in ids if int(i) != self.end_of_text]
    return self.model.decode(kept)

  def to_json(self) -> str:
    """Returns JSON with the model file in base 64."""
    text = base64.b64encode(self.proto).decode('ascii')
    return json.dumps({'kind': 'sentencepiece', 'model': text})


def sentencepiece_tokenizer(proto: bytes) -> SentencePieceTokenizer:
  """Builds a tokenizer from the bytes of a sentencepiece model file.

  Args:
    proto: Bytes of the file.

  Returns:
    The tokenizer.

  Raises:
    ImportError: The extra `prepare` is not installed.
    ValueError: The bytes are not a model, or the model has no end of a
      sequence.
  """
  library = require('sentencepiece', 'prepare')
  try:
    model = library.SentencePieceProcessor(model_proto=proto)
  except Exception as error:  # The library raises no narrower exception.
    raise ValueError(f'it is not a sentencepiece model: {error}') from error
  if model.eos_id() < 0:
    raise ValueError('the model has no </s> that could end a document.')
  return SentencePieceTokenizer(proto, model)
