"""Scores on every kind of task, their tables, and refused input."""

import dataclasses
import doctest
import json

import jax
import jax.numpy as jnp
import pytest

from experiments.scores import lambada
from experiments.scores import language_models
from experiments.scores import protocols
from experiments.scores import sheets
from experiments.scores import suites
from experiments.scores import task_scores
from experiments.scores import wikitext
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import extras
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.data import tokenizer_files
from spdf_jax.data.tasks import Input
from spdf_jax.data.tasks import task_of_inputs
from tests import command

pytestmark = pytest.mark.ci

GREEDY = sheets.Settings(search='greedy', max_new_tokens=4, batch_size=2)
TASK = [
    {'context': 'two', 'references': ['II', '2'], 'part': 'seen'},
    {'context': 'three', 'references': ['III'], 'part': 'unseen'},
    {'context': 'four', 'references': ['IV'], 'part': 'seen'},
]


@pytest.fixture(scope='module')
def model():
  module = models.create_model(
      'gpt-mini', vocab_size=257, n_layers=1, d_model=16, d_ff=32, max_length=32
  )
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = module.init(jax.random.key(0), tokens)['params']
  return language_models.LanguageModel(
      'tiny', module, params, data.ByteTokenizer()
  )


def test_answers_do_not_depend_on_their_batch_and_start_after_the_context(
    model,
):
  contexts = ['one', 'a much longer context that has to be cut', 'x']
  together = task_scores.answer(model, contexts, GREEDY)
  alone = [task_scores.answer(model, [c], GREEDY)[0] for c in contexts]
  assert together == alone
  prompt = [*b'one', 256]
  direct = evaluation.generate(
      evaluation.CachedModel(model.module), model.params, [prompt],
      max_new_tokens=4, end_of_text=256, batch_size=1, length=32,
  )
  assert together[0] == model.tokenizer.decode(direct[0]).strip()


def test_special_tokens_are_encoded_by_the_settings(
    model, tmp_path
):
  path = tmp_path / 'lambada.jsonl'
  path.write_text('{"text": "a<|endoftext|>b c"}\n')
  tokenizer = data.train_bpe(['a b c'], 257)
  model = dataclasses.replace(model, tokenizer=tokenizer)
  settings = dataclasses.replace(GREEDY, special_tokens=True)
  scores = [
      list(task_scores.score_task(model, 'lambada', str(path), s))
      for s in (GREEDY, settings)
  ]
  assert [s[0].note for s in scores] == ['1 items', '1 items; special tokens']
  assert scores[0][1].value != scores[1][1].value
  with pytest.raises(ValueError, match='special_tokens is set'):
    next(task_scores.score_task(
        dataclasses.replace(model, tokenizer=data.ByteTokenizer()),
        'lambada', str(path), settings,
    ))


@pytest.mark.parametrize('name, text', [
    ('lambada', '{"text": "a b c"}\n{"text": "Say hello"}\n'),
    ('wikitext', ' = Title = \n A few words , and more . \n'),
])
def test_a_byte_order_mark_is_no_part_of_a_text(model, tmp_path, name, text):
  scores = []
  for i, given in enumerate((text, '\ufeff' + text.replace('\n', '\r\n'))):
    path = tmp_path / f'{i}.txt'
    path.write_bytes(given.encode('utf-8'))
    scores.append(list(task_scores.score_task(model, name, str(path), GREEDY)))
  assert scores[0] == scores[1]
  path.write_bytes(b'\xe9')
  with pytest.raises(ValueError, match='1.txt cannot be read .*; convert it'):
    list(task_scores.score_task(model, name, str(path), GREEDY))


@pytest.mark.parametrize('limit, lines', [(None, 2), (1, 1)])
def test_wikitext_is_measured_by_its_words(model, tmp_path, limit, lines):
  path = tmp_path / 'wiki.tokens'
  text = [' = Title = \n', ' A few words , and one more . \n']
  path.write_text(''.join(text))
  settings = dataclasses.replace(GREEDY, limit=limit)
  score, = task_scores.score_task(model, 'wikitext', str(path), settings)
  direct = wikitext.adjusted_perplexity(
      model.subject, ''.join(text[:lines])
  )
  assert score.value == pytest.approx(direct['adjusted_perplexity'])


def test_texts_are_scored_by_their_protocols_and_parts(
    model, tmp_path, monkeypatch
):
  pytest.importorskip('sacrebleu')
  pytest.importorskip('nltk')
  inputs = [
      Input(t['context'], tuple(t['references']), t['part']) for t in TASK
  ]
  task = task_of_inputs('webnlg', {'test': inputs})
  monkeypatch.setattr(data, 'load_task', lambda name, path: task)
  settings = sheets.Settings(**vars(GREEDY) | {'generations': tmp_path})
  scores = list(task_scores.score_task(model, 'webnlg', 'files', settings))
  labels = {s.task for s in scores}
  assert labels == {'webnlg', 'webnlg (seen)', 'webnlg (unseen)'}
  assert {s.protocol for s in scores} == {'lora_webnlg', 'webnlg17'}
  meteor = next(s for s in scores if s.metric == 'meteor')
  assert meteor.value is None and 'meteor-1.5.jar' in meteor.note
  lines = (tmp_path / 'webnlg.jsonl').read_text().splitlines()
  texts = [json.loads(line)['generation'] for line in lines]
  direct = protocols.score_texts(
      [texts[0], texts[2]], [TASK[0]['references'], TASK[2]['references']],
      'webnlg17',
  )
  seen, = [
      s for s in scores
      if (s.task, s.protocol, s.metric) == ('webnlg (seen)', 'webnlg17', 'ter')
  ]
  assert seen.value == direct.values['ter'] and seen.note == '2 inputs'


def test_multiple_choice_scores_have_a_column_for_chance():
  plain = sheets.Score('lambada', 'x', 'accuracy', 0.5, '4 items')
  assert 'chance' not in sheets.format_scores([plain])
  chosen = sheets.Score('piqa', 'x', 'accuracy', 0.6, '5 items', 0.5)
  lines = sheets.format_scores([plain, chosen]).splitlines()
  assert lines[0] == '| task | protocol | metric | value | chance | note |'
  assert lines[2].split('|')[4:7] == [' 0.5 ', ' – ', ' 4 items ']
  assert lines[3].split('|')[4:7] == [' 0.6 ', ' 0.5 ', ' 5 items ']


def test_equal_contexts_are_generated_once_and_written_for_each_input(
    model, tmp_path, monkeypatch
):
  pytest.importorskip('sacrebleu')
  pytest.importorskip('nltk')
  inputs = [Input('two', ('II',)), Input('one', ('I',)), Input('two', ('2',))]
  task = task_of_inputs('dart', {'test': inputs})
  monkeypatch.setattr(data, 'load_task', lambda name, path: task)
  answered = []

  def answer(model, contexts, settings):
    answered.extend(contexts)
    return [f'It is {context}.' for context in contexts]

  monkeypatch.setattr(task_scores, 'answer', answer)
  settings = sheets.Settings(**vars(GREEDY) | {'generations': tmp_path})
  scores = list(task_scores.score_task(model, 'dart', 'files', settings))
  assert answered == ['two', 'one']
  assert {(s.protocol, s.note) for s in scores if s.value is not None} == {
      ('dart', '3 inputs'), ('lora_webnlg', '2 inputs')
  }
  lines = (tmp_path / 'dart.jsonl').read_text().splitlines()
  assert [json.loads(line)['generation'] for line in lines] == [
      'It is two.', 'It is one.', 'It is two.'
  ]


@pytest.mark.parametrize('task, message', [
    ('lambda', "task 'lambda' is unknown; did you mean 'lambada'"),
    ('lambada=no/such.jsonl', "task lambada: 'no/such.jsonl' does not exist"),
    ('wikitext', 'task wikitext has no path; give wikitext=PATH'),
    ('jsonl=.', 'task jsonl is given twice'),
    ('validation', 'tiny has no corpus to validate on'),
])
def test_all_tasks_are_checked_before_the_first_is_scored(
    model, task, message
):
  with pytest.raises(ValueError, match=message):
    next(task_scores.score_tasks(model, ['jsonl=.', task], GREEDY))


def test_files_of_all_tasks_are_read_before_the_first_is_scored(
    model, tmp_path
):
  (tmp_path / 'text.jsonl').write_text('{"text": "say hello"}\n')
  pair = '{"context": "a", "target": "b"}\n'
  for split in ('train', 'validation'):
    (tmp_path / f'{split}.jsonl').write_text(pair)
  tasks = [f'lambada={tmp_path}/text.jsonl', f'jsonl={tmp_path}']
  with pytest.raises(ValueError, match="task 'jsonl' has no test split in"):
    next(task_scores.score_tasks(model, tasks, GREEDY))


def test_scores_of_a_suite_are_written_before_its_next_task_is_run(
    model, tmp_path, monkeypatch
):
  def score_suite(*args, **kwargs):
    yield sheets.Score('piqa', 'cerebras_gpt', 'accuracy', 0.5)
    raise ValueError('no more questions')

  monkeypatch.setattr(suites, 'score_suite', score_suite)
  monkeypatch.setattr(extras, 'require', lambda *args: None)
  monkeypatch.setattr(language_models, 'open_hf', lambda path: model)
  output = tmp_path / 'scores.json'
  done = command.run(
      'evaluate', '--hf=tiny', '--tasks=cerebras_gpt', f'--output={output}'
  )
  assert done.status and 'no more questions' in done.log
  score, = json.loads(output.read_text())['scores']
  assert (score['task'], score['value']) == ('piqa', 0.5)


@pytest.mark.parametrize('changed, message', [
    ({'max_new_tokens': 31}, 'has 32 positions .* give at most 30'),
    ({'meteor_jar': 'no.jar'}, "meteor_jar is 'no.jar': METEOR needs no.jar"),
])
def test_settings_that_do_not_suit_are_refused_before_generation(
    model, changed, message
):
  settings = dataclasses.replace(GREEDY, **changed)
  with pytest.raises(ValueError, match=message):
    next(task_scores.score_task(model, 'jsonl', 'none', settings))


def test_answers_of_hu2021_end_at_a_token_of_a_blank_line(
    model, monkeypatch
):
  ends = []
  monkeypatch.setattr(
      evaluation, 'beam_search',
      lambda *_, end_of_text, **__: ends.append(end_of_text) or [[1]],
  )
  texts = ['\n\n\n\nx'] * 9
  for tokenizer in (data.ByteTokenizer(), data.train_bpe(texts, 258)):
    one = dataclasses.replace(
        model, tokenizer=tokenizer,
        module=models.create_model('gpt-mini', vocab_size=258, max_length=32),
    )
    settings = sheets.Settings(max_new_tokens=4)
    task_scores.answer(one, ['a'], settings)
  (blank_line,) = tokenizer.encode('\n\n')
  assert ends == [(256,), [tokenizer.end_of_text, blank_line]]


def run_command(folder, tasks, output):
  return command.run(
      'evaluate', f'--hf={folder}', f'--tasks={tasks}', f'--output={output}'
  )


def test_the_command_keeps_its_scores_if_a_later_task_fails(model, tmp_path):
  pytest.importorskip('safetensors')
  interop.save_hf(tmp_path, model.module.config, model.params)
  tokenizer_files.save_tokenizer(tmp_path / 'tokenizer.json', model.tokenizer)
  (tmp_path / 'lambada.jsonl').write_text('{"text": "say hello"}\n')
  text = tmp_path / 'wiki.tokens'
  text.write_text('Once upon a time .\n')
  tasks = f'lambada={tmp_path}/lambada.jsonl,wikitext={text}'
  output = tmp_path / 'new' / 'scores.json'
  done = run_command(tmp_path, tasks, output)
  assert done.status == 0, done.log
  assert output.with_suffix('.md').read_text() == done.output
  scores = json.loads(output.read_text())['scores']
  for score in scores:
    assert f'| {score["task"]} | {score["protocol"]} |' in done.output
  assert {(s['task'], s['protocol'], s['metric']) for s in scores} == {
      ('lambada', 'lambada_last_word', 'accuracy'),
      ('lambada', 'lambada_last_word', 'perplexity'),
      ('lambada', 'lambada_megatron', 'accuracy'),
      ('lambada', 'lambada_megatron', 'perplexity'),
      ('wikitext', 'wikitext_megatron', 'adjusted_perplexity'),
  }
  text.write_text('once')
  done = run_command(tmp_path, tasks, output)
  assert done.status == 1 and 'text has 1 words' in done.log
  kept = json.loads(output.read_text())['scores']
  assert kept == [score for score in scores if score['task'] == 'lambada']


@pytest.mark.parametrize('module', [
    lambada, protocols, sheets, suites, task_scores, wikitext
])
def test_the_examples_of_docstrings_run(module):
  assert not doctest.testmod(module).failed
