"""Files become token files: every format, any number of processes, kills."""

import gc
import os

import numpy as np
import pytest

from experiments.preparation import files as preparation
from experiments.preparation.documents import read_tokens
from spdf_jax import data
from spdf_jax.data.corpora import SPLITS
from tests.refusals import refuse
from tests.text_files import make_dataset
from tests.text_files import make_gz
from tests.text_files import make_parquet
from tests.text_files import make_txt
from tests.text_files import make_txt_gz
from tests.text_files import make_zst
from tests.text_files import TEXTS
from tests.text_files import write_json_lines

TOKENIZER = data.train_bpe(TEXTS, 300)
SHARES = dict(validation=0.2, test=0.2)


def documents(corpus):
  """Texts of every split, as the tokens spell them."""
  end = corpus.tokenizer.end_of_text
  texts = {}
  for split in SPLITS:
    tokens = getattr(corpus, split).tokens
    assert tokens[-1] == end
    parts = np.split(tokens, np.nonzero(tokens == end)[0] + 1)[:-1]
    texts[split] = [corpus.tokenizer.decode(part) for part in parts]
  return texts


def prepare(source, folder, tokenizer='bytes', **changes):
  return preparation.prepare_files(
      source, tokenizer=tokenizer, output=folder, **{**SHARES, **changes}
  )


@pytest.fixture
def lines(tmp_path):
  return write_json_lines(tmp_path / 'in.jsonl')


def test_every_document_is_in_one_split_with_an_end_token(lines, tmp_path):
  corpus = prepare(lines, tmp_path / 'out')
  texts = documents(corpus)
  assert sorted(sum(texts.values(), [])) == sorted(TEXTS)
  assert all(texts.values())
  for split in SPLITS:
    about = getattr(corpus, split).description
    assert about['documents'] == len(texts[split])
    assert about['bytes'] == sum(len(t.encode()) for t in texts[split])


@pytest.mark.parametrize('make', [
    make_txt, make_txt_gz, make_gz, make_zst, make_parquet, make_dataset
])
def test_every_format_gives_the_same_tokens(lines, tmp_path, make):
  folder = tmp_path / 'in'
  folder.mkdir()
  make(folder)
  expected = prepare(lines, tmp_path / 'a')
  corpus = prepare(folder, tmp_path / 'b')
  for split in SPLITS:
    assert getattr(corpus, split).fingerprint == (
        getattr(expected, split).fingerprint
    )


def test_tokens_of_nanogpt_are_taken_over(lines, tmp_path):
  tokenizer = data.train_bpe(TEXTS, 300)
  folder = tmp_path / 'tokenizer'
  folder.mkdir()
  (folder / 'tokenizer.json').write_text(tokenizer.to_json())
  ids = []
  for text in TEXTS:
    ids += [*tokenizer.encode(text), tokenizer.end_of_text]
  (tmp_path / 'train.bin').write_bytes(np.array(ids, '<u2').tobytes())
  expected = prepare(lines, tmp_path / 'a', folder)
  corpus = prepare(tmp_path / 'train.bin', tmp_path / 'b', folder)
  # Hashes are over ids there, so splits differ; documents and bytes do not.
  assert sorted(sum(documents(corpus).values(), [])) == sorted(TEXTS)
  total = lambda c: sum(getattr(c, s).description['bytes'] for s in SPLITS)
  assert total(corpus) == total(expected)


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path):
  path = tmp_path / 'train.bin'
  path.write_bytes(np.array([5, 256, 999, 256], '<u2').tobytes())
  refuse(r'token id 999, outside .*\[0, 257\)', prepare, path, tmp_path / 'out')
  path.write_bytes(b'abc')
  refuse('does not hold whole ids of uint16', prepare, path, tmp_path / 'other')


def test_the_number_of_processes_changes_no_token(lines, tmp_path, monkeypatch):
  monkeypatch.setattr(preparation, '_BATCH', 100)
  one = prepare(lines, tmp_path / 'a', 'bpe-300')
  two = prepare(lines, tmp_path / 'b' / 'a', 'bpe-300', workers=2)
  assert one.fingerprint == two.fingerprint
  assert one.train.tokens.tolist() == two.train.tokens.tolist()


@pytest.mark.parametrize('stop_after', [1, 9])
def test_a_killed_preparation_continues_and_gives_the_same(
    tmp_path, monkeypatch, stop_after
):
  folder = tmp_path / 'in'
  folder.mkdir()
  for i in range(3):
    write_json_lines(folder / f'{i}.jsonl', TEXTS[20 * i:20 * i + 20] + [''])
  (folder / 'long.txt').write_text('many words ' * 500)
  monkeypatch.setattr(preparation, '_BATCH', 200)
  monkeypatch.setattr('experiments.preparation.documents._PIECE', 300)
  expected = prepare(folder, tmp_path / 'a' / 'x', 'bpe-300')
  monkeypatch.setattr(preparation, '_SAVE_EVERY', 500)
  reports = []

  def stop(progress):
    reports.append(progress)
    if len(reports) == stop_after:
      raise KeyboardInterrupt

  output = tmp_path / 'b' / 'x'
  with pytest.raises(KeyboardInterrupt):
    prepare(folder, output, 'bpe-300', report=stop)
  refuse('is not finished', data.open_corpus, output)
  read = []
  corpus = prepare(folder, output, 'bpe-300', report=read.append)
  assert corpus.fingerprint == expected.fingerprint
  if stop_after > 4:
    assert read[0].tokens > reports[2].tokens  # It continued.
  assert corpus.train.description['source']['skipped'] == {'empty': 3}
  assert sorted(os.listdir(output)) == sorted(os.listdir(tmp_path / 'a' / 'x'))


def test_a_finished_preparation_does_no_work_the_second_time(tmp_path):
  make_txt(tmp_path)
  first = prepare(tmp_path, tmp_path / 'out')
  reports = []
  again = prepare(tmp_path, tmp_path / 'out', report=reports.append)
  assert again.fingerprint == first.fingerprint and not reports


def test_another_corpus_in_the_same_folder_is_refused(lines, tmp_path):
  prepare(lines, tmp_path / 'out')
  with pytest.raises(ValueError, match=r'differently \(other tokenizer\);'):
    prepare(lines, tmp_path / 'out', 'bpe-300')
  write_json_lines(lines, [*TEXTS[:-1], TEXTS[-1].replace('Its', 'The')])
  refuse(r'differently \(other inputs\);', prepare, lines, tmp_path / 'out')


def test_special_tokens_in_texts_are_part_of_a_corpus(tmp_path):
  lines = write_json_lines(
      tmp_path / 'in.jsonl', [f'a<|endoftext|>b {i}' for i in range(40)]
  )
  path = tmp_path / 'tokenizer.json'
  path.write_text(TOKENIZER.model.to_str())
  ends = lambda corpus: sum(
      int((getattr(corpus, split).tokens == TOKENIZER.end_of_text).sum())
      for split in ('train', 'validation', 'test')
  )
  for name, tokenizer in (('path', path), ('bpe', 'bpe-260')):
    corpus = prepare(lines, tmp_path / name, tokenizer, special_tokens=True)
    again = prepare(lines, tmp_path / name, tokenizer, special_tokens=True)
    assert again.fingerprint == corpus.fingerprint
    assert ends(corpus) == 80
    assert corpus.train.description['documents'] < 40
    with pytest.raises(ValueError, match=r'differently \(other tokenizer\);'):
      prepare(lines, tmp_path / name, tokenizer)
  assert ends(prepare(lines, tmp_path / 'plain', path)) == 40
  with pytest.raises(ValueError, match='the tokenizer is a ByteTokenizer, wh'):
    prepare(lines, tmp_path / 'bytes', 'bytes', special_tokens=True)
  assert not (tmp_path / 'bytes').exists()


def test_another_tokenizer_beside_the_tokens_is_refused(lines, tmp_path):
  corpus = prepare(lines, tmp_path / 'out')
  path = tmp_path / 'out' / 'tokenizer.json'
  path.write_text(data.train_bpe(TEXTS, 300).to_json())
  assert corpus.tokenizer.vocab_size == 257
  refuse('made with the tokenizer.json', data.open_corpus, tmp_path / 'out')


def test_a_prepared_folder_is_a_corpus_by_its_path(lines, tmp_path):
  corpus = prepare(lines, tmp_path / 'out')
  name = str(tmp_path / 'out')
  again = data.prepare_corpus(name, tokenizer='', cache_dir=tmp_path)
  assert again.fingerprint == corpus.fingerprint
  with pytest.raises(ValueError, match="set tokenizer to ''"):
    data.prepare_corpus(name, tokenizer='bytes', cache_dir=tmp_path)
  with pytest.raises(ValueError, match='is not a folder; prepare it'):
    data.prepare_corpus(name + 'x', tokenizer='', cache_dir=tmp_path)


def test_faulty_lines_are_counted_up_to_a_share(tmp_path):
  path = write_json_lines(tmp_path / 'a.jsonl', TEXTS * 20)
  with path.open('ab') as file:
    file.write(b'{"text": "\xff"}\n[1]\n{"text": 3}\n{"t": "x"}\n{"te\n'
               b'{"text": "\\ud800"}\n{"text": " "}\n\n')
  corpus = prepare(path, tmp_path / 'out', max_faults=0.01)
  assert corpus.train.description['source']['skipped'] == {
      'broken UTF-8': 2, 'not a JSON object': 1, 'text is missing': 1,
      'text is an int': 1, 'not JSON': 1, 'empty': 1,
  }
  with pytest.raises(ValueError, match=r'6 of 1206 documents are faulty \(2'):
    prepare(path, tmp_path / 'strict', max_faults=0.0045)


def test_a_failed_call_cannot_change_what_a_later_one_writes(tmp_path):
  path = write_json_lines(tmp_path / 'a.jsonl', ['An old text.'] * 100)
  with path.open('ab') as file:
    file.write(b'[1]\n')
  with pytest.raises(ValueError, match='1 of .* documents are faulty') as kept:
    prepare(path, tmp_path / 'out', max_faults=0)
  write_json_lines(path, TEXTS * 20)
  fingerprint = prepare(path, tmp_path / 'out', max_faults=0).fingerprint
  del kept  # The error keeps the files of its call open.
  gc.collect()
  assert data.open_corpus(tmp_path / 'out').fingerprint == fingerprint


def test_many_faults_are_refused_early(tmp_path, monkeypatch):
  path = tmp_path / 'a.jsonl'
  path.write_text('[]\n' * 5000)
  refuse(r'1000 of 1000 .*line 1000', prepare, path, tmp_path / 'out')


def test_texts_in_other_encodings_are_faults(tmp_path):
  make_txt(tmp_path)
  (tmp_path / '999.txt').write_bytes('é'.encode('latin-1'))
  with pytest.raises(ValueError, match='1 broken UTF-8, the last at .*999.txt'):
    prepare(tmp_path, tmp_path / 'out')


def test_bad_arguments_get_one_sentence(lines, tmp_path):
  for message, changes in {
      'does not exist': dict(source=tmp_path / 'none'),
      "kind of file '.pdf' is unknown": dict(source=tmp_path / 'a.pdf'),
      'holds no file with text': dict(source=tmp_path / 'empty'),
      'validation=2 is not a share': dict(validation=2),
      'leave nothing to': dict(validation=0, test=0),
      'workers=0 is not positive': dict(workers=0),
      'holds no tokenizer.json': dict(tokenizer=str(tmp_path / 'empty')),
      'cannot be read': dict(tokenizer=str(lines)),
      'is in the train split': dict(validation=0.999, test=1e-9),
  }.items():
    (tmp_path / 'a.pdf').touch()
    (tmp_path / 'empty').mkdir(exist_ok=True)
    arguments = {'source': lines, 'folder': tmp_path / 'out', **changes}
    refuse(message, prepare, **arguments)


def test_a_single_text_file_is_cut_into_splits(tmp_path):
  text = ''.join(f'Line {i} of the play.\n' for i in range(4000))
  (tmp_path / 'input.txt').write_text(text)
  corpus = preparation.prepare_files(
      tmp_path / 'input.txt', tokenizer='bytes', output=tmp_path / 'a',
      validation=0.1, test=0.1,
  )
  parts = {
      split: bytes(i for i in np.asarray(x.tokens).tolist() if i < 256)
      for split, x in (('train', corpus.train),
                       ('validation', corpus.validation), ('test', corpus.test))
  }
  assert sum(map(len, parts.values())) == len(text)
  assert len(parts['train']) > 0.6 * len(text)
  for part in parts.values():
    assert part and part.endswith(b'\n') and part.startswith(b'Line ')


@pytest.mark.parametrize('header, dtype', [
    (None, '<u2'), (20240520, '<u2'), (20240801, '<u4'),
])
def test_token_files_of_nanogpt_and_llm_c_are_read(header, dtype, tmp_path):
  ids = np.tile(np.r_[np.arange(200), 256], 40).astype(dtype)
  start = b'' if header is None else np.r_[
      header, 1, ids.size, np.zeros(253, int)
  ].astype('<i4').tobytes()
  (tmp_path / 'train.bin').write_bytes(start + ids.tobytes())
  pieces = list(read_tokens(tmp_path / 'train.bin', 256, 257))
  assert len(pieces) == 40
  for piece in pieces:
    assert piece.content.tolist() == list(range(200))


def test_ids_of_another_width_are_refused(tmp_path):
  path = tmp_path / 'train.bin'
  path.write_bytes(np.arange(300, dtype='<u4').tobytes())
  refuse('every second uint16 of .* is 0', list, read_tokens(path, 256, 257))
  wide = list(read_tokens(path, 256, 70_000))
  assert sum(piece.content.size for piece in wide) == 299
  path.write_bytes(b'abc')
  refuse('does not hold whole ids of uint16', list, read_tokens(path, 256, 257))
