"""The harness with the project's adapter agrees with a direct computation."""

import dataclasses
import importlib.util
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.scores import suites
from spdf_jax import data
from spdf_jax.evaluation import generate
from spdf_jax.evaluation import harness_model
from tests.evaluation import likelihood_test
from tests.real_data import data_path
from tests.refusals import refuse

LENGTH = 256
LIMIT = 12

# 758 MB with what it needs: see the extra `harness`.
needs_harness = pytest.mark.slow


class Request:
  """Request of the harness to a model."""

  def __init__(self, *args):
    self.args = args


@pytest.fixture(scope='module')
def subject():
  return likelihood_test.byte_subject(LENGTH, n_layers=2)


@pytest.fixture(scope='module')
def offline(tmp_path_factory):
  """Prevents downloads, and moves caches out of the home folder."""
  pytest.importorskip('lm_eval')
  folder = tmp_path_factory.mktemp('cache')
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('HF_HUB_OFFLINE', '1')
    patch.setenv('HF_DATASETS_OFFLINE', '1')
    datasets = pytest.importorskip('datasets')
    patch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(folder))
    yield


def directly(subject, context, target):
  """Scores a continuation alone; both are texts."""
  whole, given = (context + target).encode(), context.rstrip().encode()
  return likelihood_test.directly(subject, given, whole[len(given):])


def rows(name):
  path = data_path('lm_eval_tasks/data', name)
  lines = path.read_text('utf-8').splitlines()[:LIMIT]
  return [json.loads(line) for line in lines]


def best(subject, pairs, gold, *, per_byte=False):
  scores = [
      directly(subject, context, target)[0] / (
          len(target.strip().encode()) if per_byte else 1
      )
      for context, target in pairs
  ]
  return int(np.argmax(scores)) == gold


def direct_accuracy(subject, task, *, per_byte=False):
  """Fraction of questions that the model answers right, by hand."""
  files = {
      'arc_easy': 'arc_easy.jsonl', 'arc_challenge': 'arc_challenge.jsonl',
      'openbookqa': 'openbook_qa.jsonl', 'piqa': 'piqa.jsonl',
      'winogrande': 'winogrande.jsonl', 'hellaswag': 'hellaswag_val_1000.jsonl',
      'lambada_openai': 'lambada_openai.jsonl',
  }
  prompts = {
      'arc_easy': '{}\nAnswer:', 'arc_challenge': '{}\nAnswer:',
      'openbookqa': '{}', 'piqa': '{}Answer:',
  }
  right = []
  for row in rows(files[task]):
    if task == 'lambada_openai':
      right.append(
          directly(subject, row['context'], ' ' + row['continuation'])[1]
      )
      continue
    if task == 'winogrande':
      pairs = [(c, ' ' + row['continuation']) for c in row['context_options']]
    elif task == 'hellaswag':
      context = suites.clean_hellaswag(
          f'{row["activity_label"]}: {row["ctx_a"]} {row["ctx_b"].capitalize()}'
      )
      pairs = [
          (context, ' ' + suites.clean_hellaswag(end)) for end in row['endings']
      ]
    else:
      context = prompts[task].format(row['query'])
      pairs = [(context, ' ' + choice) for choice in row['choices']]
    gold = row['label'] if task == 'hellaswag' else row['gold']
    right.append(best(subject, pairs, gold, per_byte=per_byte))
  return np.mean(right)


@needs_harness
def test_scores_of_the_suite_of_cerebras_gpt_equal_a_direct_computation(
    subject, offline
):
  *scores, mean = suites.score_suite(
      subject, 'cerebras_gpt', directory=data_path('lm_eval_tasks/data'),
      limit=LIMIT,
  )
  expected = {
      measure.task: direct_accuracy(subject, measure.task)
      for measure in suites.SUITES['cerebras_gpt']
  }
  values = {score.task: score.value for score in scores}
  assert values == pytest.approx(expected)
  assert mean.value == pytest.approx(np.mean(list(expected.values())))
  assert {score.note for score in scores} == {f'{LIMIT} items'}
  # Read from the files: ARC has questions with three and five answers.
  chosen = {
      'arc_easy': ('arc_easy.jsonl', 'choices'),
      'arc_challenge': ('arc_challenge.jsonl', 'choices'),
      'openbookqa': ('openbook_qa.jsonl', 'choices'),
      'piqa': ('piqa.jsonl', 'choices'),
      'winogrande': ('winogrande.jsonl', 'context_options'),
      'hellaswag': ('hellaswag_val_1000.jsonl', 'endings'),
  }
  chance = {s.task: s.chance for s in scores if s.chance is not None}
  assert chance == pytest.approx({
      task: np.mean([1 / len(row[field]) for row in rows(name)])
      for task, (name, field) in chosen.items()
  })
  # lm-eval imports it where it is installed, but does not need it.
  assert 'torch' not in sys.modules or importlib.util.find_spec('torch')


@needs_harness
def test_the_leaderboard_names_what_is_missing(subject, offline, tmp_path):
  for name in ('arc_challenge.jsonl', 'winogrande.jsonl'):
    os.symlink(data_path('lm_eval_tasks/data', name), tmp_path / name)
  *scores, mean = suites.score_suite(
      subject, 'open_llm', directory=tmp_path, limit=4
  )
  measured = {s.task for s in scores if s.value is not None}
  assert measured == {'arc_challenge', 'winogrande'}
  assert (mean.task, mean.value) == ('mean', None)
  assert {s.task for s in scores if 'has no file of' in s.note} == {
      'hellaswag', 'truthfulqa_mc2', 'mmlu', 'gsm8k'
  }


@needs_harness
def test_likelihoods_of_texts_are_those_of_the_model(subject, offline):
  model = harness_model(subject)
  pairs = [('The sky is', ' blue'), ('One two ', 'three'), ('é' * 300, ' end')]
  likelihoods = model.loglikelihood(
      [Request(*pair) for pair in pairs], disable_tqdm=True
  )
  for (log, greedy), pair in zip(likelihoods, pairs):
    expected = directly(subject, *pair)
    assert log == pytest.approx(expected[0], rel=1e-4)
    assert greedy == expected[1]
  (empty,) = model.loglikelihood([Request('', 'ab')], disable_tqdm=True)
  ids = jnp.array([[256, *b'a']])
  logits = jax.nn.log_softmax(subject.apply_fn(subject.params, ids)[0])
  expected = float(logits[0, ord('a')] + logits[1, ord('b')])
  assert empty[0] == pytest.approx(expected, rel=1e-4)


@needs_harness
def test_a_target_longer_than_the_model_is_scored_in_windows(subject, offline):
  context, target = 'One', ' ab' * 150
  ids = [*context.encode(), *target.encode()]
  expected, greedy = 0.0, True
  for start in range(len(context), len(ids), LENGTH):
    end = min(start + LENGTH, len(ids))
    seen = ids[max(end - 1 - LENGTH, 0):end - 1]
    logits = subject.apply_fn(subject.params, jnp.array([seen]))[0]
    log, wanted = jax.nn.log_softmax(logits), np.array(ids[start:end])
    log = log[-len(wanted):]
    expected += float(log[np.arange(len(wanted)), wanted].sum())
    greedy &= bool((log.argmax(-1) == wanted).all())
  (likelihood,) = harness_model(subject).loglikelihood(
      [Request(context, target)], disable_tqdm=True
  )
  assert likelihood == (pytest.approx(expected, rel=1e-5), greedy)


@needs_harness
def test_a_continuation_that_a_token_joins_to_its_context_is_scored(
    subject, offline
):
  class Joining(data.ByteTokenizer):
    """Bytes, and one token for an `x` and what is before it."""

    def encode(self, text):
      return list(re.sub(b'.x', b'z', text.encode()))

  joined = dataclasses.replace(subject, tokenizer=Joining())
  ask = lambda subject, *pair: harness_model(subject).loglikelihood(
      [Request(*pair)], disable_tqdm=True
  )
  assert ask(joined, 'ab', 'x') == ask(subject, 'ab', 'x') != [(0.0, True)]


@needs_harness
def test_generation_stops_at_the_given_strings(subject, offline):
  model = harness_model(subject)
  contexts = ['The sky', 'x' * 40, 'One more']
  most = 50
  whole = [
      subject.tokenizer.decode(ids) for ids in generate(
          subject.decoder, subject.params,
          [list(c.encode()) for c in contexts], max_new_tokens=most,
          end_of_text=256, batch_size=3, length=LENGTH,
      )
  ]
  stop = whole[0][9]
  ask = lambda **settings: model.generate_until([
      Request(c, {'max_gen_toks': most, **settings}) for c in contexts
  ])
  assert ask(until=[]) == whole
  assert ask(until=[stop, '']) == [text.split(stop)[0] for text in whole]
  for settings in (dict(temperature=0.7, do_sample=False), dict(temperature=0)):
    assert ask(until=stop, **settings) == ask(until=[stop])
  (short,) = model.generate_until([Request(contexts[0], {'max_new_tokens': 9})])
  assert short == whole[0][:9]
  refuse('use sampling', ask, do_sample=True)
  refuse(f'max_gen_toks is {LENGTH}, and', ask, max_gen_toks=LENGTH)


def test_tasks_of_a_folder_without_files_are_refused(tmp_path):
  refuse('none of the files arc_easy.jsonl', suites.local_tasks, tmp_path)


def test_shots_of_gsm8k_come_from_its_training_file(tmp_path):
  (tmp_path / 'gsm8k_test.jsonl').touch()
  assert 'fewshot_split' not in suites.local_tasks(tmp_path)['gsm8k']
  (tmp_path / 'gsm8k_train.jsonl').touch()
  assert suites.local_tasks(tmp_path)['gsm8k']['fewshot_split'] == 'train'


def test_without_the_harness_its_extra_is_named(subject, monkeypatch):
  monkeypatch.setitem(sys.modules, 'lm_eval.evaluator', None)
  with pytest.raises(ImportError, match=r'\[harness\]'):
    next(suites.score_suite(subject, 'cerebras_gpt'))


def test_suites_are_those_of_the_papers():
  cerebras = suites.SUITES['cerebras_gpt']
  leaderboard = suites.SUITES['open_llm']
  assert len(cerebras) == 7
  assert {(m.shots, m.metric, m.in_mean) for m in cerebras} == {
      (0, 'acc,none', True)
  }
  assert {m.task: m.shots for m in leaderboard} == {
      'arc_challenge': 25, 'hellaswag': 10, 'truthfulqa_mc2': 0, 'mmlu': 5,
      'winogrande': 5, 'gsm8k': 5,
  }
  assert [m.task for m in leaderboard if not m.in_mean] == ['gsm8k']
