# SPDX-License-Identifier: Apache-2.0
"""Texts to score: references of each hypothesis, and official tokenizations."""

from collections.abc import Sequence
import functools
import re
import unicodedata

from spdf_jax import extras

References = Sequence[str | Sequence[str]]

# Replacements for characters that NFKD decomposition does not turn into ASCII.
_ASCII = str.maketrans({
    '–': '-', '—': '--', '‑': '-', '−': '-', '‘': "'", '’': "'", '“': '"',
    '”': '"', '…': '...', 'ı': 'i', 'ø': 'o', 'Ø': 'O', 'ł': 'l', 'Ł': 'L',
    'đ': 'd', 'Đ': 'D', 'ß': 'ss', 'æ': 'ae', 'Æ': 'AE', 'œ': 'oe',
    'Œ': 'OE', '£': 'PS', '€': 'EUR', '°': 'deg', 'þ': 'th', 'Þ': 'Th',
    'ð': 'd', 'Ð': 'D', '×': 'x', '·': '*',
})
# Tokens that COCO's caption evaluation removes. It lists brackets as '-LRB-' in
# upper case, which never matches lower-case tokens, so brackets are kept.
_PUNCTUATION = frozenset(
    ("''", "'", '``', '`', '.', '?', '!', ',', ':', '-', '--', '...', ';')
)


def group_references(
    hypotheses: Sequence[str], references: References
) -> list[list[str]]:
  """Returns a list of references for each hypothesis, after checking them.

  Args:
    hypotheses: One generation for each input.
    references: One or several references of each hypothesis.

  Returns:
    A list of at least one reference for each hypothesis.

  Raises:
    ValueError: the lengths differ, there is nothing to score, or a hypothesis
      has no reference.

  Example:
    >>> group_references(['a', 'b'], ['x', ('y', 'z')])
    [['x'], ['y', 'z']]
  """
  if len(hypotheses) != len(references):
    raise ValueError(
        f'hypotheses has {len(hypotheses)} entries and references has '
        f'{len(references)}; give the references of each hypothesis.'
    )
  if not len(hypotheses):
    raise ValueError('hypotheses is empty; give at least one to score.')
  groups = [[r] if isinstance(r, str) else list(r) for r in references]
  for index, group in enumerate(groups):
    if not group:
      raise ValueError(
          f'references[{index}] is empty; give at least one reference for '
          'each hypothesis.'
      )
  return groups


def streams(
    references: Sequence[Sequence[str]], *, empty: bool = False
) -> list[list[str | None]]:
  """Converts references per hypothesis to sacrebleu's aligned streams.

  Args:
    references: References of each hypothesis.
    empty: Whether a missing reference counts as one of length 0, as in
      multi-bleu; otherwise it is ignored.

  Returns:
    Streams, each with one reference for each hypothesis.

  Example:
    >>> streams([['x'], ['y', 'z']])
    [['x', 'y'], [None, 'z']]
  """
  count = max(map(len, references))
  missing = '' if empty else None
  return [
      [group[i] if i < len(group) else missing for group in references]
      for i in range(count)
  ]


def without_empty(references: Sequence[Sequence[str]]) -> list[list[str]]:
  """Removes references without a word, keeping at least one per hypothesis.

  Args:
    references: References of each hypothesis.

  Returns:
    The remaining references; `['']` where there is none.

  Example:
    >>> without_empty([['a', ' '], ['']])
    [['a'], ['']]
  """
  kept = ([r for r in group if r.strip()] for group in references)
  return [group or [''] for group in kept]


def fold_to_ascii(text: str) -> str:
  """Converts text to ASCII, removing characters without an equivalent.

  Args:
    text: Any text.

  Returns:
    The text without accents, with plain dashes and quotes.

  Example:
    >>> fold_to_ascii('Adolfo Suárez Madrid–Barajas')
    'Adolfo Suarez Madrid-Barajas'
  """
  decomposed = unicodedata.normalize('NFKD', text.translate(_ASCII))
  return decomposed.encode('ascii', 'ignore').decode()


def split_at_non_words(text: str) -> str:
  r"""Inserts spaces around every non-word character (`\W`).

  Args:
    text: Any text; text that is already split does not change.

  Returns:
    The text with single spaces between tokens.

  Example:
    >>> split_at_non_words('Abilene, Texas (18L/36R).')
    'Abilene , Texas ( 18L / 36R ) .'
  """
  return ' '.join(' '.join(re.split(r'(\W)', text)).split())


def treebank_words(text: str) -> str:
  """Tokenizes a single sentence as nltk's `word_tokenize` does.

  Args:
    text: Any text.

  Returns:
    The tokens, joined by spaces.

  Raises:
    ImportError: nltk is not installed.

  Example:
    >>> treebank_words("It isn't kid-friendly.")
    "It is n't kid-friendly ."
  """
  return ' '.join(_treebank().tokenize(text))


@functools.lru_cache(maxsize=1 << 15)
def caption_words(text: str) -> tuple[str, ...]:
  """Tokenizes as COCO's caption evaluation does: PTB words, no punctuation.

  Replaces Stanford's PTBTokenizer 3.4.1 (`-lowerCase`), which needs Java: both
  agree on all 6,583 outputs and references of three E2E systems.

  Args:
    text: Any text.

  Returns:
    The words, lower case.

  Raises:
    ImportError: nltk is not installed.

  References:
    Chen et al. 2015, "Microsoft COCO Captions", section 4.

  Example:
    >>> caption_words('Cheap (under £20). It is near Café Rosa.')
    ... # doctest: +NORMALIZE_WHITESPACE
    ('cheap', '(', 'under', '#', '20', ')', 'it', 'is', 'near', 'café',
     'rosa')
  """
  tokens = _treebank().tokenize(text.replace('£', ' # ').lower())
  words = []
  for token, after in zip(tokens, [*tokens[1:], '']):
    if len(token) > 1 and token[0] == '.' and token[1].isalpha():
      token = token[1:]
    token = token.rstrip("-'") or token
    # Before a comma, a full stop belongs to an abbreviation and is kept.
    if len(token) > 1 and token.endswith('.') and after != ',':
      token = token.rstrip("'-.")
    if token and token not in _PUNCTUATION:
      words.append(token)
  return tuple(words)


@functools.cache
def _treebank():
  return extras.require('nltk.tokenize.destructive', 'eval').NLTKWordTokenizer()
