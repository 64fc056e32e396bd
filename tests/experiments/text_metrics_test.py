"""Text metrics and protocols: published values, definitions, bad input."""

import importlib.util
import itertools
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.scores import metrics
from experiments.scores.metrics import cider
from experiments.scores.metrics import multi_bleu
from experiments.scores.metrics import nist
from experiments.scores.metrics import nist_python
from experiments.scores.metrics import rouge_l
from experiments.scores.metrics import why_no_meteor
from experiments.scores.metrics.edits import align
from experiments.scores.metrics.edits import edit_distances
from experiments.scores.metrics.edits import translation_edits
from experiments.scores.protocols import PROTOCOLS
from experiments.scores.protocols import score_texts
from spdf_jax.evaluation import bleu
from spdf_jax.evaluation import chrf
from spdf_jax.evaluation.texts import caption_words
from tests.refusals import refuse

# Finds nltk without importing it, which takes seconds in every worker.
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('sacrebleu', 'nltk'))),
    reason='needs sacrebleu and nltk',
)

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


@pytest.mark.parametrize('score, published', [(bleu, 48.53), (chrf, 59.73)])
def test_metrics_equal_published_scores_of_an_example(score, published):
  assert round(score(HYPOTHESES, REFERENCES), 2) == published


def test_bleu_is_cased_and_smoothed():
  assert bleu(['A B C D E'], ['a b c d e']) == 0
  # None of two 4-grams matches, the first such order, which counts as 1/2.
  expected = 100 * (3 / 5 * 2 / 4 * 1 / 3 * (1 / 2) / 2) ** 0.25
  assert bleu(['a b c x y'], ['a b c d e']) == pytest.approx(expected)


@pytest.mark.parametrize('score', [bleu, chrf])
def test_numbers_of_references_may_differ(score):
  texts = ['a b c d e', 'f g h i j']
  mixed = score(texts, [['x y', 'a b c d e', 'z'], 'f g h i j'])
  assert mixed == pytest.approx(100)
  # A missing reference is left out; it is not an empty one.
  hypotheses = ['a b c d', 'p q']  # An empty one would be closest to 'p q'.
  padded = [['a b c d e', 'a b c x'], ['p q r s t', 'p q r s t']]
  missing = [['a b c d e', 'a b c x'], ['p q r s t']]
  assert score(hypotheses, missing) == score(hypotheses, padded)


@pytest.mark.parametrize('protocol', list(PROTOCOLS))
def test_scores_carry_the_name_of_their_protocol(protocol):
  scores = score_texts(['A b c d .', 'e'], ['a b c d .', ['e', 'f']], protocol)
  assert scores.protocol == protocol
  assert scores.values['bleu'] == pytest.approx(100, abs=60)
  assert list(scores.values) == list(PROTOCOLS[protocol].metrics)


@pytest.mark.parametrize('protocol', list(PROTOCOLS))
def test_an_empty_generation_is_scored_by_every_metric(protocol):
  metrics = ['bleu', 'nist', 'rouge_l', 'cider', 'ter', 'ter_segment_minima',
             'chrf++']
  for hypotheses in (['', 'a b\nc'], ['', '']):
    scores = score_texts(
        hypotheses, [['x y'], ['a b c', 'd']], protocol, metrics=metrics
    )
    assert all(math.isfinite(value) for value in scores.values.values())


def test_meteor_without_its_program_is_none_with_a_reason(tmp_path):
  scores = score_texts(['a'], ['a'], 'dart', metrics=['meteor'])
  assert scores.values == {'meteor': None}
  assert 'meteor-1.5.jar' in scores.reasons['meteor']
  jar = tmp_path / 'meteor-1.5.jar'
  assert str(jar) in why_no_meteor(jar)
  jar.touch()
  assert 'paraphrase-en.gz' in why_no_meteor(jar)


def test_a_missing_java_is_named_in_the_error(tmp_path, monkeypatch):
  (tmp_path / 'data').mkdir()
  for name in ('meteor-1.5.jar', 'data/paraphrase-en.gz'):
    (tmp_path / name).touch()
  monkeypatch.setenv('PATH', str(tmp_path))
  assert '`java`' in why_no_meteor(tmp_path / 'meteor-1.5.jar')


def test_unknown_names_are_refused_with_the_nearest():
  refuse("'e2e_rwa'.*'e2e_raw'", score_texts, ['a'], ['a'], 'e2e_rwa')
  with pytest.raises(ValueError, match="metric 'rouge'.*'rouge_l'"):
    score_texts(['a'], ['a'], 'e2e_raw', metrics=['rouge'])


def test_a_missing_reference_is_of_length_zero_in_multi_bleu():
  # The closest reference length: 4 is closer to 6 than to 0.
  assert multi_bleu(['a b c d'], [['a b c d e f']]) < 100
  pair = ['a b c d', 'x y z w'], [['a b c d'], ['x y z w', 'q']]
  assert multi_bleu(*pair) == pytest.approx(100)
  far = multi_bleu(['a b c d', 'x'], [['a b c d', 'y'], ['x y z', 'x y']])
  kept = multi_bleu(['a b c d', 'x'], [['a b c d', ''], ['x y z']])
  assert kept == pytest.approx(100)  # The length 1 is closer to 0 than to 3.
  assert far < 100


def test_nist_equals_a_computation_by_hand():
  # 3 words once each: log2 3 bits a word; each bigram and trigram is certain
  # given what comes before it.
  assert nist(['a b c'], [['a b c']]) == pytest.approx(math.log2(3))
  # The brevity penalty of two thirds of the length is one half.
  assert nist(['a b'], [['a b c']]) == pytest.approx(math.log2(3) / 2)
  # An extra word lowers the precision to 3 of 4, without a brevity penalty.
  assert nist(['a b c x'], [['a b c']]) == pytest.approx(3 * math.log2(3) / 4)


def test_the_two_nists_average_reference_lengths_differently():
  hypotheses = ['a b c d e f', 'a b c d e f']
  references = [['a b c d e f g h i j'], ['a b c d e f'] * 3]
  # 10 + 18 words over 2 references a segment, against 10 + 6 words.
  ratio = lambda length: math.exp(
      math.log(0.5) / math.log(1.5) ** 2 * math.log(min(1, 12 / length)) ** 2
  )
  assert nist(hypotheses, references) / nist_python(
      hypotheses, references
  ) == pytest.approx(ratio(14) / ratio(16))


def test_rouge_l_takes_precision_and_recall_from_different_references():
  # Precision 1 of the first, recall 1 of the second.
  assert rouge_l(['a b c'], [['a x b y c', 'b c']]) == pytest.approx(1)
  # 2 of 3 words, 2 of 4.
  precision, recall, beta2 = 2 / 3, 2 / 4, 1.44
  expected = (1 + beta2) * precision * recall / (recall + beta2 * precision)
  assert rouge_l(['a x c'], [['a b d c']]) == pytest.approx(expected)
  assert rouge_l([''], [['a']]) == 0


def test_cider_ignores_a_word_of_all_documents():
  # 'the' is in both documents and tells nothing.
  score = cider(['the cat', 'the'], [['the cat'], ['the dog']])
  # Orders 1 and 2 of the first agree; of the second nothing does.
  assert score == pytest.approx(10 * (2 / 4) / 2)


@pytest.mark.parametrize('text, words', [
    ('It is cheap. It is near.', 'it is cheap it is near'),
    ('in the city center., close by', 'in the city center. close by'),
    ('£20- 25 for "food"', '# 20 25 for food'),
    ("isn't 'good'.", "is n't good"),
    ('', ''),
])
def test_words_are_those_of_the_ptb_tokenizer(text, words):
  # Written down from Stanford's tokenizer 3.4.1.
  assert caption_words(text) == tuple(words.split())


@pytest.mark.parametrize('score', [
    bleu, chrf, lambda *texts: score_texts(*texts, 'e2e_raw')
])
def test_unequal_numbers_and_missing_references_are_refused(score):
  refuse('has 2 entries and references has 1', score, ['a', 'b'], ['a'])
  refuse(r'references\[1\] is empty', score, ['a', 'b'], ['a', []])
  refuse('hypotheses is empty', score, [], [])


TEXTS = st.lists(st.sampled_from('abcde'), max_size=12)


def plain_table(words, wanted):
  table = {}
  for i, j in itertools.product(range(len(words) + 1), range(len(wanted) + 1)):
    if not i or not j:
      table[i, j] = i + j
    else:
      table[i, j] = min(
          table[i - 1, j] + 1, table[i, j - 1] + 1,
          table[i - 1, j - 1] + (words[i - 1] != wanted[j - 1]),
      )
  return table


def ids(text):
  return np.array([ord(word) for word in text], np.int32)


@given(TEXTS, TEXTS)
@settings(deadline=None)
def test_distances_are_those_of_plain_loops(words, wanted):
  expected = plain_table(words, wanted)[len(words), len(wanted)]
  assert edit_distances(ids(words)[None], ids(wanted)).tolist() == [expected]
  assert align(ids(words), ids(wanted)).edits == expected


@given(TEXTS, TEXTS)
@settings(deadline=None)
def test_an_alignment_spells_its_edits(words, wanted):
  alignment = align(ids(words), ids(wanted))
  kept = [j for j in range(len(wanted)) if not alignment.missed[j]]
  assert [words[alignment.places[j]] for j in kept] == [wanted[j] for j in kept]
  assert alignment.differs.sum() == len(words) - len(kept)
  assert (np.diff(alignment.places) >= 0).all()
  substituted = sum(
      alignment.missed[j] and alignment.places[j] >= 0
      and alignment.places[j] != (alignment.places[j - 1] if j else -1)
      and bool(alignment.differs[alignment.places[j]])
      for j in range(len(wanted))
  )
  gone, added = alignment.differs.sum(), alignment.missed.sum()
  assert max(gone, added) <= alignment.edits <= gone + added
  assert alignment.edits >= gone + added - substituted


@given(TEXTS, TEXTS)
@settings(deadline=None)
def test_shifts_never_cost_more_than_they_save(words, wanted):
  plain = plain_table(words, wanted)[len(words), len(wanted)]
  edits = translation_edits(words, wanted)
  assert abs(len(words) - len(wanted)) <= edits <= plain
  assert (edits == 0) == (words == wanted)


@pytest.mark.parametrize('words, wanted, edits', [
    ('b c a d', 'a b c d', 1),
    ('d e f a b c', 'a b c d e f', 1),
    ('a b c', 'a b c', 0),
    ('', 'a b', 2),
    ('x y', '', 2),
    ('c b a', 'a b c', 2),
])
def test_ter_of_small_texts_equals_a_count_by_hand(words, wanted, edits):
  assert translation_edits(words.split(), wanted.split()) == edits


def test_ter_shifts_ten_words_at_once_but_not_eleven():
  for count, edits in ((10, 1), (11, 2)):
    run = [f'w{i}' for i in range(count)]
    rest = [f'r{i}' for i in range(30)]
    assert translation_edits(rest + run, run + rest) == edits


def test_segment_minima_of_the_published_example_equal_the_published_ones():
  # Snover et al. 2006, section 2: one shift, two edits, one word more.
  reference = ('SAUDI ARABIA denied THIS WEEK information published in the'
               ' AMERICAN new york times')
  hypothesis = ('THIS WEEK THE SAUDIS denied information published in the new'
                ' york times')
  assert metrics.ter_segment_minima([hypothesis], [[reference]]) == 4 / 13


@given(TEXTS, TEXTS.filter(bool))
@settings(deadline=None)
def test_segment_minima_are_at_most_edit_distances(words, wanted):
  rate = metrics.ter_segment_minima([' '.join(words)], [[' '.join(wanted)]])
  distance = plain_table(words, wanted)[len(words), len(wanted)]
  assert rate <= distance / len(wanted)
  assert (rate == 0) == (words == wanted)


def test_both_rates_count_a_shift_as_one_edit():
  for metric in (metrics.ter, metrics.ter_segment_minima):
    assert metric(['c d a b'], [['a b c d']]) == 0.25
    assert metric(['c d a b', 'x'], [['a b c d', ''], ['x']]) == (
        pytest.approx(0.2 if metric is metrics.ter else 0.125)
    )


@pytest.mark.parametrize('hypothesis, rate', [('', 0.0), ('a b', 1.0)])
def test_ter_without_a_word_in_references_is_that_of_sacrebleu(
    hypothesis, rate
):
  sacrebleu = pytest.importorskip('sacrebleu')
  assert metrics.ter([hypothesis], [['']]) == rate
  theirs = sacrebleu.TER().corpus_score([hypothesis], [['']])
  assert theirs.score / 100 == rate
