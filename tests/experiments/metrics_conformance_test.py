"""Every metric has the value that the official script prints."""

import csv
import functools
import importlib.util
import json
import pathlib

import pytest

from experiments.scores.metrics import ngrams
from experiments.scores.protocols import score_texts
from spdf_jax.evaluation.texts import fold_to_ascii
from spdf_jax.evaluation.texts import split_at_non_words
from spdf_jax.evaluation.texts import without_empty
from tests.real_data import data_path
from tests.real_data import meteor_jar

# Finds nltk without importing it, which takes seconds in every worker.
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('sacrebleu', 'nltk'))),
    reason='needs sacrebleu and nltk',
)

OWN = json.loads(
    (pathlib.Path(__file__).parent / 'own_tiny.json').read_text('utf-8')
)
EXPECTED = OWN['expected']
WEBNLG = [
    f'{system}_{part}-cat'
    for system in ('Baseline', 'GKB_Unimelb', 'PKUWriter')
    for part in ('all', 'old', 'new')
]


def expected_values(*names):
  values = json.loads(
      data_path('metrics_conformance/expected.json').read_text('utf-8')
  )
  for name in names:
    values = values[name]
  return values


def own_tiny(prepare=lambda text: text):
  hypotheses = [prepare(s['hyp']) for s in OWN['segments']]
  references = [[prepare(r) for r in s['refs']] for s in OWN['segments']]
  return hypotheses, references


def lines(*parts):
  path = data_path('metrics_conformance', *parts)
  return path.read_text('utf-8').removesuffix('\n').split('\n')


def reference_lines(hypotheses, pattern, count, *, blank=True):
  """Reads reference files side by side; blank lines are no references."""
  files = [lines(pattern.format(i)) for i in range(count)]
  groups = [[file[i] for file in files] for i in range(len(hypotheses))]
  return groups if blank else without_empty(groups)


@functools.cache
def e2e_system(name):
  with data_path('metrics_conformance/e2e_challenge/testset_w_refs.csv').open(
      encoding='utf-8-sig', newline=''
  ) as file:
    references = {}
    for row in csv.DictReader(file):
      references.setdefault(row['mr'], []).append(row['ref'])
  path = data_path(f'metrics_conformance/e2e_challenge/{name}.tsv')
  with path.open(encoding='utf-8-sig', newline='') as file:
    rows = csv.DictReader(file, delimiter='\t')
    outputs = {row['MR']: row['output'] for row in rows}
  return [outputs[mr] for mr in references], list(references.values())


def test_e2e_metrics_of_a_small_text_equal_the_official_ones():
  hypotheses, references = own_tiny()
  official = EXPECTED['e2e_official']
  scores = score_texts(hypotheses, references, 'e2e_raw').values
  assert round(scores['bleu'] / 100, 4) == official['BLEU']
  assert round(scores['nist'], 4) == official['NIST_perl']
  assert round(scores['rouge_l'], 5) == official['ROUGE_L']
  assert round(scores['cider'], 6) == official['CIDEr']
  scores = score_texts(hypotheses, references, 'lora_e2e').values
  assert round(scores['bleu'] / 100, 6) == official['BLEU_python(-p)']
  assert round(scores['nist'], 6) == official['NIST_python(-p)']


def test_multi_bleu_of_a_small_text_equals_the_official_one():
  hypotheses, references = own_tiny(split_at_non_words)
  kept = ngrams.multi_bleu(hypotheses, references)
  assert round(kept, 2) == EXPECTED['multi_bleu_lc_empty_refs_kept']
  detok = ngrams.multi_bleu_detok(
      [h.lower() for h in hypotheses],
      [[r.lower() for r in group] for group in references],
  )
  assert round(detok, 2) == EXPECTED['multi_bleu_detok_empty_refs_kept']
  padded = score_texts(*own_tiny(), 'lora_webnlg').values['bleu']
  assert round(padded, 2) == (
      EXPECTED['multi_bleu_detok_padded_with_ref0 (LoRA)']
  )


def test_ter_and_chrf_of_a_small_text_equal_the_official_ones():
  scores = score_texts(
      *own_tiny(), 'lora_webnlg', metrics=['chrf++', 'ter_segment_minima']
  ).values
  assert scores['ter_segment_minima'] == pytest.approx(
      EXPECTED['TER_pyter_mean_of_min (GenerationEval)'], abs=1e-12
  )
  assert scores['chrf++'] / 100 == pytest.approx(
      EXPECTED['chrF++'], abs=1e-12
  )
  assert score_texts(*own_tiny(), 'dart', metrics=['ter']).values[
      'ter'
  ] == pytest.approx(EXPECTED['TER_tercom'], abs=1e-6)


def test_meteor_of_a_small_text_equals_the_official_one():
  scores = score_texts(*own_tiny(), 'e2e_raw', metrics=['meteor'],
                       meteor_jar=meteor_jar())
  assert scores.values['meteor'] == pytest.approx(
      EXPECTED['e2e_official']['METEOR'], abs=1e-12
  )


@functools.cache
def e2e_example():
  text = data_path('metrics_conformance/e2e_example/devel-conc.txt').read_text(
      'utf-8'
  )
  references = [g.split('\n') for g in text.strip().split('\n\n')]
  return lines('e2e_example/baseline-output.txt'), references


@functools.cache
def webnlg_system(name):
  part = name.split('_')[-1]
  hypotheses = lines('webnlg17', f'{name}.txt')
  return hypotheses, reference_lines(
      hypotheses, f'webnlg17/gold-{part}-reference{{}}.lex', 3, blank=False
  )


@functools.cache
def dart_system():
  hypotheses = lines('dart_bart/hyp.txt')
  return hypotheses, reference_lines(
      hypotheses, 'dart_bart/reference{}.txt', 3, blank=False
  )


@functools.cache
def lora_system():
  hypotheses = lines('lora_webnlg_bart/hyp')
  return hypotheses, reference_lines(
      hypotheses, 'lora_webnlg_bart/reference{}', 6
  )


@functools.cache
def generation_eval():
  hypotheses = lines('webnlg_eval_en/hypothesis')
  return hypotheses, reference_lines(
      hypotheses, 'webnlg_eval_en/reference{}', 4
  )


def case(texts, protocol, metric, digits, *wanted):
  """A metric of a system; without `digits`, it is compared to 1e-12."""
  # Other systems are scored by the same code on other data.
  is_slow = metric in SLOW or OTHERS & {name.split('_')[0] for name in wanted}
  marks = [pytest.mark.slow] if is_slow else []
  return pytest.param(
      texts, protocol, metric, digits, wanted, marks=marks,
      id='-'.join((protocol, *wanted)),
  )


SLOW = ('meteor', 'ter', 'ter_segment_minima', 'chrf++')
OTHERS = {'slug', 'sheff2', 'GKB', 'PKUWriter'}
E2E = dict(BLEU='bleu', NIST='nist', ROUGE_L='rouge_l', CIDEr='cider',
           METEOR='meteor')
CASES = [
    *(
        case(functools.partial(e2e_system, system), 'e2e_raw', metric, 4,
             'e2e_challenge', 'systems', system, name)
        for system in ('tgen', 'slug', 'sheff2') for name, metric in E2E.items()
    ),
    *(
        case(functools.partial(e2e_system, system), 'lora_e2e', 'nist', 4,
             'e2e_challenge', 'systems', system, 'py_NIST')
        for system in ('tgen', 'slug', 'sheff2')
    ),
    *(
        case(e2e_example, 'e2e_raw', metric, 4, 'e2e_example', name)
        for name, metric in E2E.items()
    ),
    *(
        case(functools.partial(webnlg_system, system), 'webnlg17', metric,
             digits, 'webnlg17', 'systems', system, name)
        for system in WEBNLG
        for name, metric, digits in (
            ('BLEU', 'bleu', 2), ('METEOR', 'meteor', None),
            ('TER', 'ter', None),
        )
        # There is no official METEOR of the baseline.
        if not (metric == 'meteor' and system.startswith('Baseline'))
    ),
    case(dart_system, 'dart', 'bleu', 2, 'dart_bart', 'BLEU'),
    case(dart_system, 'dart', 'meteor', None, 'dart_bart', 'METEOR'),
    *(
        case(texts, protocol, metric, digits, folder, name)
        for texts, protocol, folder in (
            (lora_system, 'lora_webnlg', 'lora_webnlg_bart'),
            (generation_eval, 'generation_eval', 'webnlg_eval_en'),
        )
        for name, metric, digits in (
            ('BLEU', 'bleu', 2), ('chrF++', 'chrf++', 5),
            ('METEOR', 'meteor', 5),
        )
    ),
    case(generation_eval, 'generation_eval', 'ter_segment_minima', 5,
         'webnlg_eval_en', 'TER'),
]


@pytest.mark.parametrize('texts, protocol, metric, digits, wanted', CASES)
def test_scores_of_systems_are_those_of_the_official_scripts(
    texts, protocol, metric, digits, wanted
):
  jar = meteor_jar() if metric == 'meteor' else None
  official = expected_values(*wanted)
  scores = score_texts(
      *texts(), protocol, metrics=[metric], meteor_jar=jar
  )
  score = scores.values[metric]
  if (protocol, metric) == ('e2e_raw', 'bleu') or metric == 'chrf++':
    score /= 100
  if digits is None:
    assert score == pytest.approx(official, abs=1e-12)
  else:
    assert round(score, digits) == official


@pytest.mark.slow
def test_segment_minima_by_the_protocol_of_hu_et_al():
  wanted = expected_values('lora_webnlg_bart')
  hypotheses, references = lora_system()
  values = score_texts(
      hypotheses, references, 'lora_webnlg',
      metrics=['bleu', 'ter_segment_minima'],
  ).values
  assert round(values['bleu'] / 100, 5) == wanted['BLEU_NLTK']
  # There the empty line after the last one counts as a segment of rate 1.
  count = len(hypotheses)
  with_line = (values['ter_segment_minima'] * count + 1) / (count + 1)
  assert round(with_line, 5) == wanted['TER_with_trailing_empty_line']


def test_references_of_webnlg_2017_are_prepared_as_the_organisers_did():
  path = data_path('webnlg17/test.jsonl')
  entries = [json.loads(x) for x in path.read_text('utf-8').splitlines()]
  files = [lines(f'webnlg17/gold-all-cat-reference{i}.lex') for i in range(3)]
  for i, entry in enumerate(entries):
    texts = [lex['text'] for lex in entry['lexs']]
    prepared = [
        split_at_non_words(fold_to_ascii(text.lower())) for text in texts
    ]
    expected = [file[i].strip() for file in files]
    assert (prepared + ['', ''])[:3] == expected


def test_references_of_dart_are_prepared_as_its_authors_did():
  entries = json.loads(
      data_path('dart/dart-v1.1.1-full-test.json').read_text('utf-8')
  )
  files = [lines(f'dart_bart/reference{i}.txt') for i in range(3)]
  for i, entry in enumerate(entries):
    prepared = [
        split_at_non_words(a['text']).lower() for a in entry['annotations']
    ]
    assert (prepared + ['', ''])[:3] == [file[i].strip() for file in files]
