"""Datasets of Hugging Face are streamed as their files are read."""

import json
import os
import sys

import pytest

from spdf_jax.data import prepare_files
from spdf_jax.data import prepare_shard
from spdf_jax.data.corpora import SPLITS
from spdf_jax.data.prepare import files as preparation
from spdf_jax.data.prepare.documents import list_inputs

TEXTS = [f'Text {i}: élan. ' * (1 + i % 5) for i in range(60)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Files of a dataset, as `load_dataset` finds them."""
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  pytest.importorskip('datasets')
  folder = tmp_path / 'in'
  folder.mkdir()
  for name, texts in {
      'train-0': TEXTS[:20], 'train-1': [*TEXTS[20:40], ''],
      'validation': TEXTS[40:50], 'test': TEXTS[50:],
  }.items():
    (folder / f'{name}.jsonl').write_text(
        ''.join(json.dumps({'text': text, 'id': 1}) + '\n' for text in texts)
    )
  return folder


def prepare(source, output, **changes):
  return prepare_files(source, tokenizer='bytes', output=output, **changes)


def test_a_streamed_dataset_has_the_tokens_of_its_files(
    folder, tmp_path, monkeypatch
):
  files = prepare(folder, tmp_path / 'files')
  stream = f'hf:{folder}'
  assert [path.name for path in list_inputs(stream)] == [
      'train', 'validation', 'test'
  ]
  found = prepare(stream, tmp_path / 'x')
  for split in SPLITS:
    assert getattr(found, split).tokens.tobytes() == (
        getattr(files, split).tokens.tobytes()
    )
  source = found.train.description['source']
  assert source['skipped'] == {'empty': 1}
  assert str(tmp_path) not in json.dumps(source)
  assert prepare(stream, tmp_path / 'x').fingerprint == found.fingerprint

  monkeypatch.setattr(preparation, '_BATCH', 200)
  monkeypatch.setattr(preparation, '_SAVE_EVERY', 100)
  reports = []

  def stop(progress):
    reports.append(progress)
    if len(reports) == 5:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    prepare(stream, tmp_path / 'y' / 'x', report=stop)
  again = prepare(stream, tmp_path / 'y' / 'x')
  assert again.fingerprint == found.fingerprint

  os.utime(folder / 'train-0.jsonl', (1, 1))
  with pytest.raises(ValueError, match='a corpus of other inputs; give'):
    prepare(stream, tmp_path / 'x')


def test_a_stream_that_cannot_be_read_gets_one_sentence(folder, tmp_path):
  for source, changes, message in (
      ('hf:nobody/nothing', {}, "input='hf:nobody/nothing' cannot be streamed"),
      (f'hf:{folder},other', {}, 'cannot be streamed .* not found'),
      (f'hf:{folder}', {'field': 'body'}, "no column 'body' but text, id; set"),
  ):
    with pytest.raises(ValueError, match=message) as caught:
      prepare(source, tmp_path / 'x', **changes)
    assert '\n' not in str(caught.value)
  with pytest.raises(ValueError, match='is not divided into shards; download'):
    prepare_shard(
        f'hf:{folder}', '1/2', tokenizer='bytes', output=tmp_path / 'y'
    )


def test_without_the_library_the_extra_is_named(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ImportError, match=r'datasets is not .*\[stream'):
    prepare('hf:a/b', tmp_path / 'x')
