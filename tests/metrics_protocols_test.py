"""Protocols by hand: each number's definition, names, and bad input."""

import importlib.util
import itertools
import math
import random

import pytest

from experiments.scores.protocols import PROTOCOLS
from experiments.scores.protocols import score_texts
from spdf_jax.evaluation.metrics import cider
from spdf_jax.evaluation.metrics import edits
from spdf_jax.evaluation.metrics import multi_bleu
from spdf_jax.evaluation.metrics import nist
from spdf_jax.evaluation.metrics import nist_python
from spdf_jax.evaluation.metrics import rouge_l
from spdf_jax.evaluation.metrics import ter
from spdf_jax.evaluation.metrics import ter_segment_minima
from spdf_jax.evaluation.metrics import why_no_meteor
from spdf_jax.evaluation.metrics.texts import caption_words

# Finds nltk without importing it, which takes seconds in every worker.
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('sacrebleu', 'nltk'))),
    reason='needs sacrebleu and nltk',
)


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


@pytest.mark.parametrize('protocol', list(PROTOCOLS))
def test_meteor_without_its_program_is_none_with_a_reason(protocol, tmp_path):
  scores = score_texts(['a'], ['a'], protocol, metrics=['meteor'])
  assert scores.values == {'meteor': None}
  assert 'meteor-1.5.jar' in scores.reasons['meteor']
  jar = tmp_path / 'meteor-1.5.jar'
  assert str(jar) in why_no_meteor(jar)
  jar.touch()
  assert 'paraphrase-en.gz' in why_no_meteor(jar)


def test_no_java_is_named(tmp_path, monkeypatch):
  (tmp_path / 'data').mkdir()
  for name in ('meteor-1.5.jar', 'data/paraphrase-en.gz'):
    (tmp_path / name).touch()
  monkeypatch.setenv('PATH', str(tmp_path))
  assert '`java`' in why_no_meteor(tmp_path / 'meteor-1.5.jar')


@pytest.mark.parametrize('protocol', list(PROTOCOLS))
def test_unequal_numbers_and_missing_references_are_refused(protocol):
  with pytest.raises(ValueError, match='has 2 entries and references has 1'):
    score_texts(['a', 'b'], ['a'], protocol)
  with pytest.raises(ValueError, match=r'references\[1\] is empty'):
    score_texts(['a', 'b'], ['a', []], protocol)
  with pytest.raises(ValueError, match='hypotheses is empty'):
    score_texts([], [], protocol)


def test_unknown_names_are_answered_with_the_nearest():
  with pytest.raises(ValueError, match="'e2e_rwa'.*'e2e_raw'"):
    score_texts(['a'], ['a'], 'e2e_rwa')
  with pytest.raises(ValueError, match="metric 'rouge'.*'rouge_l'"):
    score_texts(['a'], ['a'], 'e2e_raw', metrics=['rouge'])


def test_a_missing_reference_is_of_length_zero_in_multi_bleu():
  # 4 words stand nearer to 6 than to 0, 2 words nearer to 0.
  assert multi_bleu(['a b c d'], [['a b c d e f']]) < 100
  pair = ['a b c d', 'x y z w'], [['a b c d'], ['x y z w', 'q']]
  assert multi_bleu(*pair) == pytest.approx(100)
  far = multi_bleu(['a b c d', 'x'], [['a b c d', 'y'], ['x y z', 'x y']])
  kept = multi_bleu(['a b c d', 'x'], [['a b c d', ''], ['x y z']])
  assert kept == pytest.approx(100)  # 'x' is nearer to nothing than to three.
  assert far < 100


def test_nist_by_hand():
  # 3 words once each: log2 3 bits a word; each bigram and trigram is certain
  # given what comes before it.
  assert nist(['a b c'], [['a b c']]) == pytest.approx(math.log2(3))
  # Two thirds of the length are worth half.
  assert nist(['a b'], [['a b c']]) == pytest.approx(math.log2(3) / 2)
  # One word too many costs precision, not length: 3 of 4 words tell.
  assert nist(['a b c x'], [['a b c']]) == pytest.approx(3 * math.log2(3) / 4)


def test_reference_lengths_of_the_two_nists():
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


def test_cider_of_a_rare_and_a_common_word():
  # 'the' is in both documents and tells nothing.
  score = cider(['the cat', 'the'], [['the cat'], ['the dog']])
  # Orders 1 and 2 of the first agree; of the second nothing does.
  assert score == pytest.approx(10 * (2 / 4) / 2)


def edit_distance(a, b):
  row = list(range(len(b) + 1))
  for i, x in enumerate(a, start=1):
    above, row = row, [i]
    for j, y in enumerate(b):
      row.append(min(above[j] + (x != y), above[j + 1] + 1, row[-1] + 1))
  return row[-1]


def test_edit_distances_are_those_of_the_textbook():
  draw = random.Random(0)
  np = pytest.importorskip('numpy')
  for _ in range(200):
    wanted = [draw.randrange(4) for _ in range(draw.randrange(1, 8))]
    length = draw.randrange(8)
    many = [[draw.randrange(4) for _ in range(length)] for _ in range(3)]
    found = edits.edit_distances(
        np.array(many, np.int32).reshape(3, length), np.array(wanted)
    )
    assert found.tolist() == [edit_distance(row, wanted) for row in many]


def test_segment_minima_of_published_example():
  # Snover et al. 2006, section 2: one shift, two edits, one word more.
  reference = ('SAUDI ARABIA denied THIS WEEK information published in the'
               ' AMERICAN new york times')
  hypothesis = ('THIS WEEK THE SAUDIS denied information published in the new'
                ' york times')
  assert ter_segment_minima([hypothesis], [[reference]]) == 4 / 13


def test_segment_minima_are_at_most_edit_distances():
  draw = random.Random(1)
  for _ in range(50):
    words = [draw.choice('abcd') for _ in range(draw.randrange(7))]
    reference = [draw.choice('abcd') for _ in range(draw.randrange(1, 7))]
    rate = ter_segment_minima([' '.join(words)], [[' '.join(reference)]])
    assert rate <= edit_distance(words, reference) / len(reference)
    assert (rate == 0) == (words == reference)


def test_both_rates_count_a_shift_as_one_edit():
  for metric in (ter, ter_segment_minima):
    assert metric(['c d a b'], [['a b c d']]) == 0.25
    assert metric(['c d a b', 'x'], [['a b c d', ''], ['x']]) == (
        pytest.approx(0.2 if metric is ter else 0.125)
    )


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


def test_protocols_do_not_depend_on_the_order_of_references():
  hypothesis = 'the cafe is by the river and cheap'
  references = ['a cheap cafe', 'the cafe is cheap', 'by the river']
  for name in ('bleu', 'nist', 'rouge_l', 'cider', 'chrf++'):
    found = {
        round(score_texts(
            [hypothesis, 'a'], [list(order), ['b']], 'e2e_raw', metrics=[name]
        ).values[name], 9)
        for order in itertools.permutations(references)
    }
    assert len(found) == 1


@pytest.mark.parametrize('hypothesis, rate', [('', 0.0), ('a b', 1.0)])
def test_ter_without_a_word_in_references_is_that_of_sacrebleu(
    hypothesis, rate
):
  import sacrebleu

  assert ter([hypothesis], [['']]) == rate
  theirs = sacrebleu.TER().corpus_score([hypothesis], [['']])
  assert theirs.score / 100 == rate
