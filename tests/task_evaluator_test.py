"""A task's generations are written to disk, and its scores are theirs."""

import json

import pytest

from spdf_jax import evaluation
from spdf_jax.evaluation import task_evaluator


def count_up(params, prompts):
  """Continues with up to three next letters, to the eighth."""
  del params
  return [list(range(p[-1] + 1, min(p[-1] + 4, 9))) for p in prompts]


def letters(ids):
  return ''.join(chr(ord('a') + i) for i in ids)


def make_task(directory, references=('fgh', ['i', 'ii'], 'bcxx')):
  return task_evaluator(
      count_up,
      [[4], [7], [0, 0]],
      references,
      decode=letters,
      directory=directory,
  )


def test_task_writes_its_generations_and_scores_the_same_texts(tmp_path):
  directory = tmp_path / 'generations'
  scores = dict(make_task(directory)(120, None))
  path = directory / 'step_00000120.jsonl'
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert records == [
      {'context': 'e', 'reference': 'fgh', 'generation': 'fgh'},
      {'context': 'h', 'reference': ['i', 'ii'], 'generation': 'i'},
      {'context': 'aa', 'reference': 'bcxx', 'generation': 'bcd'},
  ]
  texts = [record['generation'] for record in records]
  references = [record['reference'] for record in records]
  assert scores == {
      'task/bleu': evaluation.bleu(texts, references),
      'task/chrf': evaluation.chrf(texts, references),
  }
  assert [p.name for p in directory.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_generations(tmp_path, monkeypatch):
  evaluate = make_task(tmp_path)
  list(evaluate(5, None))
  before = (tmp_path / 'step_00000005.jsonl').read_bytes()
  count = []

  def failing(*args, **kwargs):
    count.append(1)
    if len(count) == 2:
      raise OSError('no space left on device')
    return '{}'

  monkeypatch.setattr(json, 'dumps', failing)
  with pytest.raises(OSError, match='no space'):
    list(evaluate(5, None))
  assert (tmp_path / 'step_00000005.jsonl').read_bytes() == before
  assert len(list(tmp_path.iterdir())) == 1


def test_a_task_with_a_missing_reference_is_refused(tmp_path):
  with pytest.raises(ValueError, match='prompts has 3 entries'):
    make_task(tmp_path, references=['fgh'])
