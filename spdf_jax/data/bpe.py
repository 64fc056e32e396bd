# SPDX-License-Identifier: Apache-2.0
"""Byte-level byte-pair encoding, by the `tokenizers` library."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import types
from typing import Any
from typing import final

from spdf_jax.extras import require

END_OF_TEXT = '<|endoftext|>'

LARGEST_VOCABULARY = 1 << 20
"""Largest `vocab_size` of `train_bpe`; its memory grows with `vocab_size`."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class BPETokenizer:
  """Byte-level byte-pair encoding, as in GPT-2 (Radford et al., 2019).

  Attributes:
    model: The underlying `tokenizers.Tokenizer`.
    special_tokens: Whether text that spells a special token is encoded as that
      token, see `with_special_tokens`.

  Example:
    >>> tokenizer = train_bpe(['to be or not to be'] * 2, vocab_size=258)
    >>> tokenizer.decode(tokenizer.encode('to be, é'))
    'to be, é'
  """

  model: Any
  special_tokens: bool = False

  @property
  def vocab_size(self) -> int:
    """Number of token ids, the end of text included."""
    return self.model.get_vocab_size()

  @property
  def end_of_text(self) -> int:
    """Id of `'<|endoftext|>'`."""
    return self.model.token_to_id(END_OF_TEXT)

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
    """Returns the text of `ids`, without ends of text."""
    return self.model.decode([int(i) for i in ids], skip_special_tokens=True)

  def to_json(self) -> str:
    """Returns vocabulary and merges, independent of the library's format."""
    model = json.loads(self.model.to_str())['model']
    fields = {key: model[key] for key in ('merges', 'vocab')}
    if self.special_tokens:
      fields['special_tokens'] = True
    return json.dumps({'kind': 'bpe', **fields}, sort_keys=True)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
  """Learns a byte-level byte-pair encoding, deterministically.

  Args:
    texts: Documents to learn from.
    vocab_size: Number of token ids, 257 to `LARGEST_VOCABULARY`: the end of
      text, 256 bytes and the merges.

  Returns:
    The tokenizer, with exactly `vocab_size` ids.

  Raises:
    ImportError: The extra `data` is not installed.
    ValueError: `vocab_size` is out of range, or `texts` are too short to yield
      that many merges.

  Example:
    >>> train_bpe(['to be or not to be'] * 2, vocab_size=258).vocab_size
    258
  """
  if vocab_size < 257:
    raise ValueError(
        f'vocab_size={vocab_size} is too small for byte-pair encoding; use'
        ' at least 257 (256 bytes and the end of text).'
    )
  if vocab_size > LARGEST_VOCABULARY:
    raise ValueError(
        f'vocab_size={vocab_size} is too large for byte-pair encoding; use at'
        f' most {LARGEST_VOCABULARY}.'
    )
  library = _library()
  model = _byte_level(library, library.models.BPE())
  model.train_from_iterator(texts, library.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[END_OF_TEXT],
      initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  ))
  if model.get_vocab_size() != vocab_size:
    raise ValueError(
        f'vocab_size={vocab_size} is more than the texts can fill; they'
        f' yield {model.get_vocab_size()} tokens, so use at most that many or'
        ' give more text.'
    )
  return BPETokenizer(model)


def bpe_from_parts(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> BPETokenizer:
  """Builds the tokenizer of a known vocabulary.

  Args:
    vocab: Id of every token, in the byte-level alphabet. The ids are 0 to
      `len(vocab) - 1`, and the tokens include `'<|endoftext|>'`.
    merges: Pairs of tokens to merge, in the order in which they were learned.

  Returns:
    The tokenizer.

  Raises:
    ImportError: The extra `data` is not installed.
    ValueError: Vocabulary and merges do not fit each other.

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
  return BPETokenizer(tokenizer)


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
  return require('tokenizers', 'data')
