"""BLEU and chrF have the published values of sacrebleu's own examples."""

import math

import pytest

from spdf_jax.evaluation import bleu
from spdf_jax.evaluation import chrf

# The example of sacrebleu's README: BLEU 48.53, chrF2 59.73.
HYPOTHESES = [
    'The dog bit the man.',
    "It wasn't surprising.",
    'The man had just bitten him.',
]
REFERENCES = [
    ['The dog bit the man.', 'The dog had bit the man.'],
    ['It was not unexpected.', 'No one was surprised.'],
    ['The man bit him first.', 'The man had bitten the dog.'],
]


def test_bleu_of_the_published_example():
  assert round(bleu(HYPOTHESES, REFERENCES), 2) == 48.53


def test_chrf_of_the_published_example():
  assert round(chrf(HYPOTHESES, REFERENCES), 2) == 59.73


@pytest.mark.parametrize('score', [bleu, chrf])
def test_identical_texts_score_100(score):
  texts = ['Return the name of the file.', 'Open a stream and read it.']
  assert score(texts, texts) == pytest.approx(100)
  assert score(texts, [['something else', text] for text in texts]) == (
      pytest.approx(100)
  )


@pytest.mark.parametrize('score', [bleu, chrf])
def test_texts_without_a_common_character_score_0(score):
  assert score(['aaa bbb'], ['xyz uvw']) == 0


def test_bleu_by_hand():
  # Of 5 words, 4 of 5, 3 of 4, 2 of 3 and 1 of 2 n-grams match; same length.
  expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
  assert bleu(['a b c d x'], ['a b c d e']) == pytest.approx(expected)
  # One word short: the same text cut is precise, but pays exp(1 - 5 / 4).
  brevity = 100 * math.exp(1 - 5 / 4)
  assert bleu(['a b c d'], ['a b c d e']) == pytest.approx(brevity)


def test_bleu_without_a_matching_4_gram_is_smoothed_not_zero():
  # 0 of 2 4-grams match: counted as half of one, the first order without.
  expected = 100 * (3 / 5 * 2 / 4 * 1 / 3 * (1 / 2) / 2) ** 0.25
  assert bleu(['a b c x y'], ['a b c d e']) == pytest.approx(expected)


def test_bleu_tells_upper_from_lower_case():
  assert bleu(['A B C D E'], ['a b c d e']) == 0


def test_bleu_pools_the_corpus_instead_of_averaging_sentences():
  hypotheses = ['a b c d e f', 'a b c d x']
  references = ['a b c d e f', 'a b c d e']
  matches = [(6 + 4) / 11, (5 + 3) / 9, (4 + 2) / 7, (3 + 1) / 5]
  expected = 100 * math.prod(matches) ** 0.25
  assert bleu(hypotheses, references) == pytest.approx(expected)


@pytest.mark.parametrize('score', [bleu, chrf])
def test_numbers_of_references_may_differ(score):
  texts = ['a b c d e', 'f g h i j']
  mixed = score(texts, [['x y', 'a b c d e', 'z'], 'f g h i j'])
  assert mixed == pytest.approx(100)
  # A missing reference is left out; it is not an empty one.
  hypotheses = ['a b c d', 'p q']  # to which an empty one would be closest
  padded = [['a b c d e', 'a b c x'], ['p q r s t', 'p q r s t']]
  missing = [['a b c d e', 'a b c x'], ['p q r s t']]
  assert score(hypotheses, missing) == score(hypotheses, padded)


@pytest.mark.parametrize('score', [bleu, chrf])
def test_different_lengths_are_refused(score):
  with pytest.raises(ValueError, match='has 2 entries and references has 1'):
    score(['a', 'b'], ['a'])


@pytest.mark.parametrize('score', [bleu, chrf])
def test_nothing_to_score_is_refused(score):
  with pytest.raises(ValueError, match='hypotheses is empty'):
    score([], [])
  with pytest.raises(ValueError, match=r'references\[1\] is empty'):
    score(['a', 'b'], ['a', []])
