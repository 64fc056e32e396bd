"""Words that were tokenized before: the fast way through much text."""

import re
from typing import Any

import numpy as np

# Unicode's white space; Python's \s holds four characters more.
_SPACE = r'\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000'
_MARK = rf'(?:[^\w{_SPACE}]|_)'
# White space, then marks, then letters and digits: after either of the last
# two GPT-2's pattern cuts before anything of another kind, always.
_WORDS = re.compile(
    rf'[{_SPACE}]*{_MARK}*[^\W_]+|[{_SPACE}]*{_MARK}+|[{_SPACE}]+'
)
_MOST_WORDS = 300_000  # About 60 MB.


class WordCache(dict):
  """Token ids of words as bytes, made when first asked for.

  Text is cut where the pattern of GPT-2's pre-tokenizer cuts too, and each
  part is tokenized once: the ids are those of the whole text.

  Attributes:
    tokenizer: What makes ids of a word: byte-level BPE as in GPT-2.
    dtype: Type of the ids.

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
