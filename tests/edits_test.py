"""Edits and shifts, and their rates, against plain loops and by hand."""

import itertools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax.evaluation import metrics
from spdf_jax.evaluation.metrics.edits import align
from spdf_jax.evaluation.metrics.edits import edit_distances
from spdf_jax.evaluation.metrics.edits import translation_edits

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
  found = align(ids(words), ids(wanted))
  kept = [j for j in range(len(wanted)) if not found.missed[j]]
  assert [words[found.places[j]] for j in kept] == [wanted[j] for j in kept]
  assert found.differs.sum() == len(words) - len(kept)
  assert (np.diff(found.places) >= 0).all()
  substituted = sum(
      found.missed[j] and found.places[j] >= 0
      and found.places[j] != (found.places[j - 1] if j else -1)
      and bool(found.differs[found.places[j]])
      for j in range(len(wanted))
  )
  gone, added = found.differs.sum(), found.missed.sum()
  assert max(gone, added) <= found.edits <= gone + added
  assert found.edits >= gone + added - substituted


@given(TEXTS, TEXTS)
@settings(deadline=None)
def test_shifts_never_cost_more_than_they_save(words, wanted):
  plain = plain_table(words, wanted)[len(words), len(wanted)]
  found = translation_edits(words, wanted)
  assert abs(len(words) - len(wanted)) <= found <= plain
  assert (found == 0) == (words == wanted)


@pytest.mark.parametrize('words, wanted, edits', [
    ('b c a d', 'a b c d', 1),
    ('d e f a b c', 'a b c d e f', 1),
    ('a b c', 'a b c', 0),
    ('', 'a b', 2),
    ('x y', '', 2),
    ('c b a', 'a b c', 2),
])
def test_small_texts_by_hand(words, wanted, edits):
  assert translation_edits(words.split(), wanted.split()) == edits


def test_ten_words_move_together_and_eleven_do_not():
  for count, edits in ((10, 1), (11, 2)):
    run = [f'w{i}' for i in range(count)]
    rest = [f'r{i}' for i in range(30)]
    assert translation_edits(rest + run, run + rest) == edits


def test_segment_minima_of_published_example():
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
