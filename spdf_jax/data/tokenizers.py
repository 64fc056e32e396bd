# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, which convert text to token ids and back."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import logging
import os
import re
import types
from typing import Any, final, Literal, Protocol

from spdf_jax import extras
from spdf_jax.data.special_tokens import SpecialTokens

logger = logging.getLogger('spdf_jax')

END_OF_TEXT = '<|endoftext|>'

_UNSTATED = SpecialTokens()

LARGEST_VOCABULARY = 1 << 20
"""Largest `vocab_size` of `train_bpe`; its memory grows with `vocab_size`."""

_LONGEST_LEARNED = 512  # Bytes of a word; longer ones are learned in parts.

# Common names of the token that ends a document.
_ENDS = (
    END_OF_TEXT, '<|end_of_text|>', '</s>', '<eos>', '[EOS]',
)


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


@final
@dataclasses.dataclass(frozen=True, eq=False)
class LibraryTokenizer:
  """A tokenizer of the library `tokenizers`.

  Attributes:
    model: The `tokenizers.Tokenizer`.
    end_of_text: Id that ends a document.
    kind: `'bpe'`: byte-level byte-pair encoding, as in GPT-2 (Radford et al.,
      2019), which vocabulary and merges determine; `'tokenizers'`: any other.
    special_tokens: Whether text that spells a special token is encoded as that
      token, see `with_special_tokens`.
    special: The tokens that begin and end the texts of a model, as its files
      state them.

  Example:
    >>> tokenizer = train_bpe(['to be or not to be'] * 2, vocab_size=258)
    >>> tokenizer.decode(tokenizer.encode('to be, é'))
    'to be, é'
  """

  model: Any
  end_of_text: int
  kind: Literal['bpe', 'tokenizers']
  special_tokens: bool = False
  special: SpecialTokens = SpecialTokens()

  @property
  def vocab_size(self) -> int:
    """Largest id plus one."""
    if self.kind == 'bpe':  # Its ids have no gaps.
      return self.model.get_vocab_size()
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
    """Returns vocabulary and merges, or else the library's own JSON."""
    model = json.loads(self.model.to_str())
    fields = {'kind': self.kind, 'model': model}
    if self.kind == 'bpe':  # Independent of the library's format.
      fields = {'kind': 'bpe'} | {
          key: model['model'][key] for key in ('merges', 'vocab')
      }
    if self.special_tokens:
      fields['special_tokens'] = True
    return json.dumps(fields | _special_fields(self.special), sort_keys=True)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class SentencePieceTokenizer:
  """A sentencepiece tokenizer, as used by Llama 1 and 2.

  Attributes:
    proto: Bytes of the model file.
    model: The `sentencepiece.SentencePieceProcessor`.
    special: The tokens that begin and end the texts of a model, as its files
      state them.
  """

  proto: bytes
  model: Any
  special: SpecialTokens = SpecialTokens()

  @property
  def vocab_size(self) -> int:
    """Number of pieces."""
    return self.model.get_piece_size()

  @property
  def end_of_text(self) -> int:
    """Id of the end of a sequence."""
    return self.special.ends[0] if self.special.ends else self.model.eos_id()

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
    """Returns the text of `ids`, without ends of text.

    Ids that only a padded embedding has are left out, as in `LibraryTokenizer`.
    """
    kept = [int(i) for i in ids if int(i) != self.end_of_text]
    return self.model.decode([i for i in kept if i < self.vocab_size])

  def to_json(self) -> str:
    """Returns JSON with the model file in base 64."""
    text = base64.b64encode(self.proto).decode('ascii')
    return json.dumps(
        {'kind': 'sentencepiece', 'model': text} | _special_fields(self.special)
    )


def _special_fields(special: SpecialTokens) -> dict[str, Any]:
  """Returns the fields of a tokenizer's JSON for its special tokens."""
  return {} if special == SpecialTokens() else {'special': list(special)}


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
  size = int(match[1][:9])  # Numbers of nine digits or more are out of range.
  if not 257 <= size <= LARGEST_VOCABULARY:
    raise ValueError(
        f"tokenizer={name!r} is out of range; use 'bytes', or 'bpe-N' with N"
        f' from 257 to {LARGEST_VOCABULARY}.'
    )
  return lambda texts: train_bpe(texts, size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
  """Learns a byte-level byte-pair encoding, deterministically.

  Words of more than 512 bytes, such as base-64 data, are learned in parts.

  Args:
    texts: Documents to learn from.
    vocab_size: Number of token ids, 257 to 2^20: the end of text, 256 bytes
      and the merges.

  Returns:
    The tokenizer, with exactly `vocab_size` ids.

  Raises:
    ImportError: the extra `data` is not installed.
    ValueError: `vocab_size` is out of range, or `texts` are too short to yield
      that many merges.

  Example:
    >>> train_bpe(['to be or not to be'] * 2, vocab_size=258).vocab_size
    258
  """
  if not 257 <= vocab_size <= LARGEST_VOCABULARY:
    raise ValueError(
        f'vocab_size={vocab_size} is out of range for byte-pair encoding; use'
        f' 257 (256 bytes and the end of text) to {LARGEST_VOCABULARY}.'
    )
  library = _library()
  model = _byte_level(library, library.models.BPE())
  # Learning takes time quadratic in the length of the longest word.
  words, cut = model.pre_tokenizer, library.pre_tokenizers.Split(
      library.Regex(rf'[\s\S]{{1,{_LONGEST_LEARNED}}}'), 'isolated'
  )
  model.pre_tokenizer = library.pre_tokenizers.Sequence([words, cut])
  model.train_from_iterator(texts, library.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[END_OF_TEXT],
      initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  ))
  model.pre_tokenizer = words
  if model.get_vocab_size() != vocab_size:
    raise ValueError(
        f'vocab_size={vocab_size} is more than the texts can fill; they'
        f' yield {model.get_vocab_size()} tokens, so use at most that many or'
        ' give more text.'
    )
  return LibraryTokenizer(model, model.token_to_id(END_OF_TEXT), 'bpe')


def bpe_from_parts(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> LibraryTokenizer:
  """Builds the tokenizer of a known vocabulary.

  Args:
    vocab: Id of every token, in the byte-level alphabet. The ids are 0 to
      `len(vocab) - 1`, and the tokens include `'<|endoftext|>'`.
    merges: Pairs of tokens to merge, in the order in which they were learned.

  Returns:
    The tokenizer.

  Raises:
    ImportError: the extra `data` is not installed.
    ValueError: vocabulary and merges do not fit each other.

  Example:
    >>> fields = json.loads(
    ...     train_bpe(['to be or not to be'] * 2, 258).to_json())
    >>> bpe_from_parts(fields['vocab'], fields['merges']).vocab_size
    258
  """
  library = _library()
  if sorted(vocab.values()) != list(range(len(vocab))):
    raise ValueError(
        f'vocab has {len(vocab)} tokens but its ids are not 0 to'
        f' {len(vocab) - 1}; number the tokens without gaps.'
    )
  if END_OF_TEXT not in vocab:
    raise ValueError(f'vocab has no token {END_OF_TEXT!r}; add one.')
  try:
    model = library.models.BPE(
        vocab=dict(vocab), merges=[tuple(merge) for merge in merges]
    )
  except Exception as error:  # The library raises no narrower exception.
    raise ValueError(f'vocab and merges do not fit: {error}.') from error
  tokenizer = _byte_level(library, model)
  tokenizer.add_special_tokens([END_OF_TEXT])
  return LibraryTokenizer(tokenizer, vocab[END_OF_TEXT], 'bpe')


def library_tokenizer(
    text: str, special: SpecialTokens = _UNSTATED
) -> LibraryTokenizer:
  """Builds a tokenizer from the text of a `tokenizer.json`.

  Args:
    text: JSON as the library `tokenizers` writes it.
    special: Special tokens; without ends, the token that ends a document is
      found by its name.

  Returns:
    The tokenizer; it encodes the names of special tokens as text.

  Raises:
    ImportError: the extra `data` is not installed.
    ValueError: the JSON is not a tokenizer, or has no token that ends a
      document.
  """
  library = _library()
  try:
    model = library.Tokenizer.from_str(text)
  except Exception as error:  # The library raises no narrower exception.
    raise ValueError(
        'the file is not a tokenizer.json of the Hugging Face library '
        f'tokenizers: {error}'
    ) from error
  model.encode_special_tokens = True
  model.no_truncation()
  model.no_padding()
  if special.ends:
    return LibraryTokenizer(
        model, special.ends[0], 'tokenizers', special=special
    )
  for end in _ENDS:
    if model.token_to_id(end) is not None:
      logger.warning(
          'no file of the tokenizer states which token ends a text; %r does, '
          'by its name', end,
      )
      return LibraryTokenizer(
          model, model.token_to_id(end), 'tokenizers', special=special
      )
  raise ValueError(
      f'the tokenizer has none of the tokens {", ".join(_ENDS)} that could end'
      ' a document; add one.'
  )


def sentencepiece_tokenizer(proto: bytes) -> SentencePieceTokenizer:
  """Builds a tokenizer from the bytes of a sentencepiece model file.

  Args:
    proto: Bytes of the file.

  Returns:
    The tokenizer.

  Raises:
    ImportError: the extra `prepare` is not installed.
    ValueError: the bytes are not a model, or the model has no end of a
      sequence.
  """
  library = extras.require('sentencepiece', 'prepare')
  try:
    model = library.SentencePieceProcessor(model_proto=proto)
  except Exception as error:  # The library raises no narrower exception.
    raise ValueError(f'it is not a sentencepiece model: {error}') from error
  if model.eos_id() < 0:
    raise ValueError('the model has no </s> that could end a document.')
  return SentencePieceTokenizer(proto, model)


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
  """Returns a tokenizer that encodes the text of a special token as that token.

  By default, `'<|endoftext|>'` in a text is encoded like any other text, since
  a document must not contain an end of text. The libraries `tokenizers` and
  transformers encode it as the end of text; with this function, scores that
  were computed with them can be reproduced.

  Args:
    tokenizer: A `LibraryTokenizer`, as of `train_bpe` or a `tokenizer.json`.

  Returns:
    A copy of the tokenizer, with another fingerprint.

  Raises:
    ValueError: the tokenizer is of bytes or of sentencepiece, whose special
      tokens no text spells.

  Example:
    >>> tokenizer = with_special_tokens(train_bpe(['to be'] * 2, 258))
    >>> tokenizer.encode('<|endoftext|>') == [tokenizer.end_of_text]
    True
  """
  if not isinstance(tokenizer, LibraryTokenizer):
    raise ValueError(
        'special_tokens is set and the tokenizer is a'
        f' {type(tokenizer).__name__}, which encodes no text as a special'
        " token; give a tokenizer.json or GPT-2's vocabulary, or leave"
        ' special_tokens out.'
    )
  # The library does not write the setting, so the copy has its default, False.
  model = type(tokenizer.model).from_str(tokenizer.model.to_str())
  model.encode_special_tokens = False
  return dataclasses.replace(tokenizer, model=model, special_tokens=True)


def _byte_level(library: types.ModuleType, model: Any) -> Any:
  tokenizer = library.Tokenizer(model)
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  tokenizer.decoder = library.decoders.ByteLevel()
  # Encodes the special token as text, so that it cannot end a document.
  tokenizer.encode_special_tokens = True
  return tokenizer


def _library() -> types.ModuleType:
  # Disables threads, since they do not survive a fork: releases before 0.23
  # warn about it, or hang. A setting of the user is respected.
  os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
  return extras.require('tokenizers', 'data')
