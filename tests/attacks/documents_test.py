"""Attacks on the readers of documents, tasks and tokenizers."""


import pytest

from experiments import preparation
from spdf_jax import data
from spdf_jax.data import tokenizer_files
from tests.refusals import refuse

DEEP = '[' * 200_000


@pytest.mark.parametrize('size', ['1048577', '9' * 5000, '256'])
def test_vocabularies_out_of_range_are_refused_at_once(tmp_path, size):
  name = f'bpe-{size}'
  path = tmp_path / 'a.txt'
  path.write_text('some text')
  message = 'is out of range; .* 257 to 1048576'
  with pytest.raises(ValueError, match=message):
    data.prepare_corpus('python-stdlib', tokenizer=name, cache_dir=tmp_path)
  with pytest.raises(ValueError, match=message):
    preparation.prepare_files(path, tokenizer=name, output=tmp_path / 'out')
  with pytest.raises(ValueError, match='vocab_size=4000000000 is out of'):
    data.train_bpe(['some text'], 4_000_000_000)
  assert [p.name for p in tmp_path.iterdir()] == ['a.txt']


@pytest.mark.parametrize('text', [
    DEEP, '[]', '{"kind": []}', '{"kind": "bpe", "vocab": [], "merges": []}',
    '{"kind": "tokenizers", "model": {"model": ' + '[' * 500 + ']' * 500 + '}}',
    '{"kind": "sentencepiece", "model": 3}',
])
@pytest.mark.parametrize('read', [
    tokenizer_files.load_tokenizer, data.open_tokenizer
])
def test_broken_tokenizers_are_refused_with_their_name(tmp_path, text, read):
  path = tmp_path / 'tokenizer.json'
  path.write_text(text)
  refuse('tokenizer.json', read, path)


@pytest.mark.parametrize('task, name, text', [
    ('webnlg', 'test.json', DEEP), ('webnlg', 'test.jsonl', '9' * 5000),
    ('dart', 'test.json', '9' * 5000), ('jsonl', 'test.jsonl', DEEP),
])
def test_broken_tasks_are_refused_with_the_name_of_the_file(
    tmp_path, task, name, text
):
  (tmp_path / name).write_text(text)
  refuse(rf'{name}.* cannot be read', data.load_task, task, tmp_path)
