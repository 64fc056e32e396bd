"""A corpus made in shards is that of one machine, token for token."""

import itertools
import json
import os
import shutil

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from experiments.preparation import files as preparation
from experiments.preparation import join_shards
from experiments.preparation import prepare_files
from experiments.preparation import prepare_shard
from experiments.preparation import shards
from experiments.preparation.inputs import read_documents
from spdf_jax.data import open_corpus
from tests.refusals import refuse
from tests.text_files import flip_bit
from tests.text_files import stop_after

ARGUMENTS = dict(tokenizer='bpe-280', validation=0.2, test=0.2)


@pytest.fixture
def texts(tmp_path):
  """Files of several kinds, with empty and faulty lines."""
  folder = tmp_path / 'in'
  folder.mkdir()
  for name in 'ac':
    lines = [
        json.dumps({'text': f'Élan {name} {i}. ' * (1 + i % 7)}) + '\n'
        for i in range(40)
    ]
    lines[5:5] = ['\n', '{"text": ""}\n', '[]\n']
    (folder / f'{name}.jsonl').write_text(''.join(lines)[:-1], 'utf-8')
  for i in range(5):
    (folder / f'b{i}.txt').write_text(f'Text {i}. ' * 20 * i + 'end', 'utf-8')
  for name in ('b9.txt', 'd.txt', 'e.txt'):  # The last two end the input.
    (folder / name).touch()
  return folder


def prepare_all(texts, output, total, **changes):
  for number in range(1, total + 1):
    prepare_shard(
        texts, f'{number}/{total}', output=output,
        **{**ARGUMENTS, 'max_faults': 0.1, **changes},
    )


def whole(texts, output, **changes):
  return prepare_files(
      texts, output=output, **{**ARGUMENTS, 'max_faults': 0.1, **changes}
  )


@pytest.mark.parametrize('total', [3, 13])
def test_joined_shards_are_the_whole_byte_by_byte(texts, tmp_path, total):
  expected = whole(texts, tmp_path / 'one' / 'x')
  prepare_all(texts, tmp_path / 'many' / 'x', total)
  joined = join_shards(tmp_path / 'many' / 'x')
  assert joined.fingerprint == expected.fingerprint
  contents = lambda folder: {
      path.name: path.read_bytes() for path in folder.iterdir()
      if path.name != '.lock'
  }
  assert contents(tmp_path / 'one' / 'x') == contents(tmp_path / 'many' / 'x')
  assert join_shards(tmp_path / 'many' / 'x').fingerprint == joined.fingerprint
  again = prepare_shard(
      texts, f'1/{total}', output=tmp_path / 'many' / 'x', **ARGUMENTS
  )
  assert again.fingerprint == joined.fingerprint


@given(
    st.lists(st.tuples(st.booleans(), st.lists(
        st.sampled_from(['', 'a', 'bb', 'c' * 9]), max_size=6
    )), min_size=1, max_size=4),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=30)
def test_every_line_is_in_exactly_one_shard(tmp_path_factory, contents, total):
  folder = tmp_path_factory.mktemp('in')
  files = []
  for i, (is_lines, words) in enumerate(contents):
    path = folder / (f'{i}.jsonl' if is_lines else f'{i}.txt')
    path.write_text('\n'.join(
        json.dumps({'text': f'{word}{j}'}) for j, word in enumerate(words)
    ))
    files.append(path)
  sizes = [file.stat().st_size for file in files]
  read = lambda spans: [
      item[0] for span in spans for item in read_documents(
          span.file, start=span.start, stop=span.stop
      )
  ]
  lines = [
      text for number in range(1, total + 1)
      for text in read(
          shards.spans_of(files, sizes, shards.Shard(number, total))
      )
  ]
  assert lines == read([shards.FilePart(file) for file in files])


def test_a_killed_shard_and_a_killed_join_continue(
    texts, tmp_path, monkeypatch
):
  expected = whole(texts, tmp_path / 'one' / 'x')
  output = tmp_path / 'many' / 'x'
  monkeypatch.setattr(preparation, '_BATCH', 300)
  monkeypatch.setattr(preparation, '_SAVE_EVERY', 100)
  prepare_shard(texts, '1/2', output=output, max_faults=0.1, **ARGUMENTS)
  full = []
  prepare_shard(
      texts, '2/2', output=output, max_faults=0.1, report=full.append,
      **ARGUMENTS,
  )
  shutil.rmtree(output / 'partial' / '2-of-2')
  with pytest.raises(KeyboardInterrupt):
    prepare_shard(
        texts, '2/2', output=output, max_faults=0.1, report=stop_after(4),
        **ARGUMENTS,
    )
  refuse('shard 2/2 in .* is not finished; run', join_shards, output)
  again = []
  prepare_shard(
      texts, '2/2', output=output, max_faults=0.1, report=again.append,
      **ARGUMENTS,
  )
  assert 0 < len(again) < len(full)  # It continued.
  counts = [report.tokens for report in full[-len(again):]]
  assert [report.tokens for report in again] == counts

  replace = os.replace
  for most in itertools.count():  # Killed before each of its renamings.
    moved = []

    def replace_some(source, target, most=most, moved=moved):
      if len(moved) == most:
        raise KeyboardInterrupt
      moved.append(target)
      replace(source, target)

    # A shard that is started again does not stand in the way of the join.
    assert not prepare_shard(
        texts, '1/2', output=output, max_faults=0.1, **ARGUMENTS
    )
    with monkeypatch.context() as patch:
      patch.setattr(os, 'replace', replace_some)
      try:
        join_shards(output)
      except KeyboardInterrupt:
        continue
    break
  assert most > 3
  assert open_corpus(output).fingerprint == expected.fingerprint
  assert join_shards(output).fingerprint == expected.fingerprint
  names = lambda folder: {path.name for path in folder.iterdir()}
  assert names(output) == names(tmp_path / 'one' / 'x')


def test_a_wrong_set_of_shards_gets_one_sentence(texts, tmp_path):
  output = tmp_path / 'x'
  partial = output / 'partial'
  arguments = dict(output=output, max_faults=0.1, **ARGUMENTS)
  refuse('holds no shards of a corpus; prepare', join_shards, output)
  for text in ('0/3', '4/3', '1', 'a/b', '1/0'):
    with pytest.raises(ValueError, match='is not i/n with i from 1 to n'):
      prepare_shard(texts, text, **arguments)
  assert not output.exists()
  assert prepare_shard(texts, '1/3', **arguments) == [(2, 3), (3, 3)]
  refuse('has no shard 2/3, 3/3; prepare what', join_shards, output)
  with pytest.raises(ValueError, match='holds shard 1/3 of a corpus; prepare'):
    prepare_files(texts, **arguments)
  with pytest.raises(ValueError, match='holds shard 1/3 of a corpus; prepare'):
    prepare_shard(texts, '2/4', **arguments)
  with pytest.raises(ValueError, match=r'differently \(other shares\); give'):
    prepare_shard(texts, '1/3', **arguments | {'test': 0.1})
  prepare_shard(texts, '3/3', **arguments)
  shutil.copytree(partial / '1-of-3', partial / '2-of-3')
  refuse('2-of-3 holds shard 1/3, not shard 2/3', join_shards, output)
  shutil.rmtree(partial / '2-of-3')
  prepare_shard(texts, '2/3', **arguments | {'test': 0.1})
  refuse('differently than shard 1/3', join_shards, output)
  shutil.rmtree(partial / '2-of-3')
  assert prepare_shard(texts, '2/3', **arguments) == []
  ids = partial / '2-of-3' / 'train.ids'
  flip_bit(ids, 7)
  refuse('other bytes than were written; delete', join_shards, output)
  flip_bit(ids, 7)
  shutil.copytree(partial / '1-of-3', partial / '1-of-4')
  refuse('into 3 and into 4; delete', join_shards, output)
  shutil.rmtree(partial / '1-of-4')
  assert join_shards(output).fingerprint == whole(texts, tmp_path / 'y' / 'x'
      ).fingerprint


def test_an_unfinished_corpus_is_not_mixed_with_shards(texts, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    whole(texts, tmp_path / 'x', report=stop_after(1))
  state = tmp_path / 'x' / 'partial' / 'state.json'
  state.write_text('{}')
  with pytest.raises(ValueError, match='not divided into shards; finish it'):
    prepare_shard(texts, '1/2', output=tmp_path / 'x', **ARGUMENTS)


def test_faults_are_counted_over_all_shards(texts, tmp_path):
  output = tmp_path / 'x'
  prepare_all(texts, output, 2, max_faults=0.01)
  other = shutil.copytree(output, tmp_path / 'other')
  refuse('2 of 87 documents are faulty', join_shards, output)
  assert not list((output / 'partial').glob('*.ids'))  # Nothing is copied.
  prepare_shard(texts, '1/2', output=output, max_faults=0.1, **ARGUMENTS)
  joined = join_shards(output)
  allowed = join_shards(other, max_faults=0.1)
  assert allowed.train.tokens.tolist() == joined.train.tokens.tolist()
