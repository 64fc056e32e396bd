"""Scorecards: every kind of task, and refused input."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments import scoring
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.data.tasks import Input
from spdf_jax.data.tasks import task_of_inputs
from spdf_jax.evaluation import scorecard
from spdf_jax.evaluation.candidate import Candidate
from spdf_jax.runs import open_models

pytestmark = pytest.mark.ci

GREEDY = scorecard.Settings(search='greedy', max_new_tokens=4, batch_size=2)
TASK = [
    {'context': 'two', 'references': ['II', '2'], 'part': 'seen'},
    {'context': 'three', 'references': ['III'], 'part': 'unseen'},
    {'context': 'four', 'references': ['IV'], 'part': 'seen'},
]


@pytest.fixture(scope='module')
def candidate():
  model = models.create_model(
      'gpt-mini', vocab_size=257, n_layers=1, d_model=16, d_ff=32, max_length=32
  )
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = model.init(jax.random.key(0), tokens)['params']
  return Candidate('tiny', model, params, data.ByteTokenizer())


def test_answers_do_not_depend_on_their_batch_and_start_after_the_context(
    candidate,
):
  contexts = ['one', 'a much longer context that has to be cut', 'x']
  together = scorecard.answer(candidate, contexts, GREEDY)
  alone = [scorecard.answer(candidate, [c], GREEDY)[0] for c in contexts]
  assert together == alone
  prompt = [*b'one', 256]
  direct = evaluation.generate(
      evaluation.CachedModel(candidate.model), candidate.params, [prompt],
      max_new_tokens=4, end_of_text=256, batch_size=1, length=32,
  )
  assert together[0] == candidate.tokenizer.decode(direct[0]).strip()


def test_special_tokens_are_encoded_where_the_settings_say(
    candidate, tmp_path
):
  path = tmp_path / 'lambada.jsonl'
  path.write_text('{"text": "a<|endoftext|>b c"}\n')
  tokenizer = data.train_bpe(['a b c'], 257)
  candidate = dataclasses.replace(candidate, tokenizer=tokenizer)
  settings = dataclasses.replace(GREEDY, special_tokens=True)
  found = [
      scorecard.score_task(candidate, 'lambada', str(path), s)
      for s in (GREEDY, settings)
  ]
  assert [s[0].note for s in found] == ['1 items', '1 items; special tokens']
  assert found[0][1].value != found[1][1].value
  with pytest.raises(ValueError, match='special_tokens is set'):
    scorecard.score_task(
        dataclasses.replace(candidate, tokenizer=data.ByteTokenizer()),
        'lambada', str(path), settings,
    )


def test_lambada_has_both_protocols(candidate, tmp_path):
  path = tmp_path / 'lambada.jsonl'
  path.write_text('{"text": "say hello"}\n{"text": "see you"}\n')
  found = scorecard.score_task(candidate, 'lambada', str(path), GREEDY)
  assert [(s.protocol, s.metric) for s in found] == [
      ('lambada_last_word', 'accuracy'), ('lambada_last_word', 'perplexity'),
      ('lambada_megatron', 'accuracy'), ('lambada_megatron', 'perplexity'),
  ]
  direct = evaluation.score_lambada(
      candidate.subject.apply_fn, candidate.params,
      evaluation.read_lambada(path), candidate.tokenizer, length=32,
  )
  assert found[1].value == pytest.approx(direct['perplexity'])
  assert found[0].note == '2 items'


@pytest.mark.parametrize('limit, lines', [(None, 2), (1, 1)])
def test_wikitext_is_measured_by_its_words(candidate, tmp_path, limit, lines):
  path = tmp_path / 'wiki.tokens'
  text = [' = Title = \n', ' A few words , and one more . \n']
  path.write_text(''.join(text))
  settings = dataclasses.replace(GREEDY, limit=limit)
  found, = scorecard.score_task(candidate, 'wikitext', str(path), settings)
  direct = evaluation.adjusted_perplexity(
      candidate.subject.apply_fn, candidate.params, ''.join(text[:lines]),
      candidate.tokenizer, length=32,
  )
  assert found.value == pytest.approx(direct['adjusted_perplexity'])


def test_texts_are_scored_by_their_protocols_and_parts(
    candidate, tmp_path, monkeypatch
):
  pytest.importorskip('sacrebleu')
  pytest.importorskip('nltk')
  inputs = [
      Input(t['context'], tuple(t['references']), t['part']) for t in TASK
  ]
  task = task_of_inputs('webnlg', {'test': inputs})
  monkeypatch.setattr(data, 'load_task', lambda name, path: task)
  settings = scorecard.Settings(**vars(GREEDY) | {'generations': tmp_path})
  found = scorecard.score_task(candidate, 'webnlg', 'files', settings)
  labels = {s.task for s in found}
  assert labels == {'webnlg', 'webnlg (seen)', 'webnlg (unseen)'}
  assert {s.protocol for s in found} == {'lora_webnlg', 'webnlg17'}
  meteor = next(s for s in found if s.metric == 'meteor')
  assert meteor.value is None and 'meteor-1.5.jar' in meteor.note
  lines = (tmp_path / 'webnlg.jsonl').read_text().splitlines()
  texts = [json.loads(line)['generation'] for line in lines]
  direct = evaluation.score_texts(
      [texts[0], texts[2]], [TASK[0]['references'], TASK[2]['references']],
      'webnlg17',
  )
  seen, = [
      s for s in found
      if (s.task, s.protocol, s.metric) == ('webnlg (seen)', 'webnlg17', 'ter')
  ]
  assert seen.value == direct.values['ter'] and seen.note == '2 inputs'


def test_chance_has_a_column_where_answers_are_chosen_among():
  plain = scorecard.Score('lambada', 'x', 'accuracy', 0.5, '4 items')
  assert 'chance' not in scorecard.format_scores([plain])
  chosen = scorecard.Score('piqa', 'x', 'accuracy', 0.6, '5 items', 0.5)
  lines = scorecard.format_scores([plain, chosen]).splitlines()
  assert lines[0] == '| task | protocol | metric | value | chance | note |'
  assert lines[2].split('|')[4:7] == [' 0.5 ', ' – ', ' 4 items ']
  assert lines[3].split('|')[4:7] == [' 0.6 ', ' 0.5 ', ' 5 items ']


def test_an_equal_context_is_answered_once_and_written_for_each_input(
    candidate, tmp_path, monkeypatch
):
  pytest.importorskip('sacrebleu')
  pytest.importorskip('nltk')
  inputs = [Input('two', ('II',)), Input('one', ('I',)), Input('two', ('2',))]
  task = task_of_inputs('dart', {'test': inputs})
  monkeypatch.setattr(data, 'load_task', lambda name, path: task)
  asked = []

  def answer(candidate, contexts, settings):
    asked.extend(contexts)
    return [f'It is {context}.' for context in contexts]

  monkeypatch.setattr(scorecard, 'answer', answer)
  settings = scorecard.Settings(**vars(GREEDY) | {'generations': tmp_path})
  found = scorecard.score_task(candidate, 'dart', 'files', settings)
  assert asked == ['two', 'one']
  assert {(s.protocol, s.note) for s in found if s.value is not None} == {
      ('dart', '3 inputs'), ('lora_webnlg', '2 inputs')
  }
  lines = (tmp_path / 'dart.jsonl').read_text().splitlines()
  assert [json.loads(line)['generation'] for line in lines] == [
      'It is two.', 'It is one.', 'It is two.'
  ]


@pytest.mark.parametrize('name, message', [
    ('validation', 'tiny has no corpus to validate on'),
    ('lambda', "task 'lambda' is unknown; did you mean 'lambada'"),
])
def test_what_cannot_be_measured_is_named(candidate, name, message):
  with pytest.raises(ValueError, match=message):
    scorecard.score_task(candidate, name, '', GREEDY)


@pytest.mark.parametrize('task, message', [
    ('lambda', "task 'lambda' is unknown; did you mean 'lambada'"),
    ('lambada=no/such.jsonl', "task lambada: 'no/such.jsonl' does not exist"),
    ('wikitext', 'task wikitext has no path; give wikitext=PATH'),
    ('jsonl=.', 'task jsonl is given twice'),
    ('validation', 'tiny has no corpus to validate on'),
])
def test_all_tasks_are_checked_before_the_first_is_scored(
    candidate, task, message
):
  with pytest.raises(ValueError, match=message):
    next(scorecard.score_tasks(candidate, ['jsonl=.', task], GREEDY))


@pytest.mark.parametrize('changed, message', [
    ({'max_new_tokens': 31}, 'has 32 positions .* give at most 30'),
    ({'meteor_jar': 'no.jar'}, "meteor_jar is 'no.jar': METEOR needs no.jar"),
])
def test_settings_that_do_not_suit_are_refused_before_generation(
    candidate, changed, message
):
  settings = dataclasses.replace(GREEDY, **changed)
  with pytest.raises(ValueError, match=message):
    scorecard.score_task(candidate, 'jsonl', 'none', settings)


def test_answers_of_hu2021_end_at_a_token_of_a_blank_line(
    candidate, monkeypatch
):
  ends = []
  monkeypatch.setattr(
      evaluation, 'beam_search',
      lambda *_, end_of_text, **__: ends.append(end_of_text) or [[1]],
  )
  texts = ['\n\n\n\nx'] * 9
  for tokenizer in (data.ByteTokenizer(), data.train_bpe(texts, 258)):
    one = dataclasses.replace(
        candidate, tokenizer=tokenizer,
        model=models.create_model('gpt-mini', vocab_size=258, max_length=32),
    )
    settings = scorecard.Settings(max_new_tokens=4)
    scorecard.answer(one, ['a'], settings)
  (blank_line,) = tokenizer.encode('\n\n')
  assert ends == [256, [tokenizer.end_of_text, blank_line]]


def test_a_model_of_hugging_face_is_the_same_model(candidate, tmp_path):
  pytest.importorskip('safetensors')
  interop.save_hf(tmp_path, candidate.model.config, candidate.params)
  data.save_tokenizer(tmp_path / 'tokenizer.json', candidate.tokenizer)
  again = open_models.open_hf(str(tmp_path))
  tokens = jnp.arange(8)[None]
  for one, other in zip(
      (candidate, again), (again, candidate)
  ):
    logits = one.subject.apply_fn(one.params, tokens)
    same = other.subject.apply_fn(other.params, tokens)
    assert jnp.allclose(logits, same, atol=1e-5)


@pytest.mark.process
def test_the_command_prints_and_writes_the_scores_of_all_tasks(
    candidate, tmp_path
):
  pytest.importorskip('safetensors')
  interop.save_hf(tmp_path, candidate.model.config, candidate.params)
  data.save_tokenizer(tmp_path / 'tokenizer.json', candidate.tokenizer)
  (tmp_path / 'lambada.jsonl').write_text('{"text": "say hello"}\n')
  (tmp_path / 'wiki.tokens').write_text('Once upon a time .\n')
  tasks = f'lambada={tmp_path}/lambada.jsonl,wikitext={tmp_path}/wiki.tokens'
  found = subprocess.run(
      [
          sys.executable, '-m', 'experiments.evaluate', f'--hf={tmp_path}',
          f'--tasks={tasks}', f'--output={tmp_path}/new/scores.json',
      ],
      cwd=pathlib.Path(__file__).parent.parent, capture_output=True, text=True,
  )
  assert found.returncode == 0, found.stderr
  output = tmp_path / 'new' / 'scores.json'
  assert output.with_suffix('.md').read_text() == found.stdout
  scores = json.loads(output.read_text())['scores']
  for score in scores:
    assert f'| {score["task"]} | {score["protocol"]} |' in found.stdout
  assert {score['task'] for score in scores} == {'lambada', 'wikitext'}


def test_scores_are_kept_if_a_later_task_fails(
    candidate, tmp_path, monkeypatch
):
  def score_tasks(*_):
    yield [scorecard.Score('lambada', 'gpt2', 'accuracy', 0.5)]
    raise ValueError('later')

  monkeypatch.setattr(scoring.scorecard, 'score_tasks', score_tasks)
  monkeypatch.setattr(scoring, 'settings', lambda generations: GREEDY)
  score = lambda output: scoring.score(
      lambda: candidate, ['validation'], str(tmp_path / output)
  )
  with pytest.raises(ValueError, match='give a name that ends in .json'):
    score('scores')
  with pytest.raises(ValueError, match='later'):
    score('scores.json')
  entry = json.loads((tmp_path / 'scores.json').read_text())
  assert entry['scores'][0]['value'] == 0.5


def test_a_tokenizer_of_another_model_is_refused(candidate):
  model = models.create_model('gpt-mini', vocab_size=256)
  with pytest.raises(ValueError, match='vocabulary of 256 and its tokenizer'):
    Candidate('tiny', model, None, data.ByteTokenizer())


def test_a_run_without_checkpoints_is_refused(tmp_path):
  with pytest.raises(ValueError, match='names no checkpoint'):
    open_models.open_run(str(pathlib.Path(tmp_path)))
