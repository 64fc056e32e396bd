"""Tests of spdf_jax.data.tokenizers and spdf_jax.data.tokenizers."""

import json
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.preparation import encoding
from experiments.preparation.documents import Piece
from spdf_jax.data import tokenizer_files
from spdf_jax.data.tokenizers import bpe_from_parts
from spdf_jax.data.tokenizers import ByteTokenizer
from spdf_jax.data.tokenizers import LibraryTokenizer
from spdf_jax.data.tokenizers import train_bpe
from spdf_jax.data.tokenizers import with_special_tokens
from tests import text_files
from tests.child import run_python
from tests.real_data import data_path
from tests.refusals import refuse

library = pytest.importorskip('tokenizers')

TEXTS = [
    'def add(first, second):\n  """Returns the sum."""\n',
    'def subtract(first, second):\n  return first - second\n',
    'class Stack:\n  def push(self, item):\n    self.items.append(item)\n',
] * 3
TOKENIZERS = [ByteTokenizer(), train_bpe(TEXTS, 300)]
KINDS = ['bytes', 'bpe']
# Everything but lone surrogates, which no UTF-8 file can hold.
any_text = st.text(st.characters(exclude_categories=['Cs']))


@pytest.mark.parametrize('tokenizer', TOKENIZERS, ids=KINDS)
@settings(deadline=None, max_examples=100)
@given(text=any_text)
def test_decoding_gives_back_any_text(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize('tokenizer', TOKENIZERS, ids=KINDS)
def test_text_that_spells_the_special_token_stays_text(tokenizer):
  for text in ('<|endoftext|>', 'a<|endoftext|>b', ' <|endoftext|>\n'):
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text]) == [ids]


def check_special_tokens(path, texts):
  """Compares ids with those of the library on the same file."""
  direct = library.Tokenizer.from_file(str(path))
  plain = tokenizer_files.open_tokenizer(path)
  tokenizer = with_special_tokens(plain)
  expected = [direct.encode(text, add_special_tokens=False).ids
              for text in texts]
  assert [tokenizer.encode(text) for text in texts] == expected
  assert tokenizer.encode_batch(texts) == expected
  assert all(plain.end_of_text in ids for ids in expected)
  assert not any(plain.end_of_text in plain.encode(text) for text in texts)
  again = tokenizer_files.load_tokenizer(save(tokenizer, path.parent))
  assert again.encode_batch(texts) == expected
  assert again.fingerprint == tokenizer.fingerprint != plain.fingerprint
  assert with_special_tokens(again).fingerprint == tokenizer.fingerprint
  assert 'special_tokens' not in json.loads(plain.to_json())
  return plain, tokenizer


def save(tokenizer, folder):
  path = folder / 'saved.json'
  tokenizer_files.save_tokenizer(path, tokenizer)
  return path


@pytest.mark.parametrize('kind', ['gpt2', 'words'])
def test_special_tokens_are_encoded_as_the_library_does(tmp_path, kind):
  path = tmp_path / 'tokenizer.json'
  if kind == 'gpt2':
    path.write_text(TOKENIZERS[1].model.to_str())
    end = '<|endoftext|>'
  else:
    model = library.Tokenizer(library.models.WordLevel(
        {'a': 0, 'b': 1, '[UNK]': 2}, unk_token='[UNK]'
    ))
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    model.add_special_tokens(['</s>'])
    path.write_text(model.to_str())
    end = '</s>'
  plain, tokenizer = check_special_tokens(
      path, [end, f'a{end}b', f' {end}\n', f'a {end}{end} b']
  )
  batch = encoding.DocumentBatch([('train', Piece(f'a{end}b'))], None)
  data = encoding.Encoder(tokenizer)(batch)['train'].data
  assert np.frombuffer(data, '<u2').tolist() == [
      *tokenizer.encode(f'a{end}b'), plain.end_of_text
  ]


@pytest.mark.slow
def test_special_tokens_of_gpt2_are_encoded_as_the_library_does(tmp_path):
  text = data_path('gpt2_bpe', 'tokenizer.json').read_text()
  (tmp_path / 'tokenizer.json').write_text(text)
  _, tokenizer = check_special_tokens(
      tmp_path / 'tokenizer.json', ['a<|endoftext|> b', '<|endoftext|>\n\n']
  )
  assert tokenizer.encode('a<|endoftext|> b') == [64, 50256, 275]


@pytest.mark.parametrize('tokenizer', TOKENIZERS, ids=KINDS)
def test_a_saved_tokenizer_loads_as_the_same(tokenizer, tmp_path):
  tokenizer_files.save_tokenizer(tmp_path / 'tokenizer.json', tokenizer)
  loaded = tokenizer_files.load_tokenizer(tmp_path / 'tokenizer.json')
  assert type(loaded) is type(tokenizer)
  assert loaded.fingerprint == tokenizer.fingerprint
  assert loaded.vocab_size == tokenizer.vocab_size
  assert loaded.end_of_text == tokenizer.end_of_text
  text = 'class Stack<|endoftext|> é'
  assert loaded.encode(text) == tokenizer.encode(text)
  assert os.listdir(tmp_path) == ['tokenizer.json']


def test_no_space_is_put_before_the_text():
  tokenizer = TOKENIZERS[1]
  assert tokenizer.encode('first') != tokenizer.encode(' first')


@pytest.mark.process
def test_training_in_another_process_gives_the_same_fingerprint():
  script = (
      'from spdf_jax.data.tokenizers import train_bpe;'
      f'print(train_bpe({TEXTS!r}, 300).fingerprint)'
  )
  printed = run_python(script, PYTHONHASHSEED='7')
  assert printed.strip() == TOKENIZERS[1].fingerprint


@pytest.mark.process
def test_one_thread_encodes_unless_the_user_requests_more(monkeypatch):
  # Threads and a fork, as of a data loader, do not go together.
  script = (
      'import os; from spdf_jax.data.tokenizers import train_bpe;'
      't = train_bpe(["to be or not to be"] * 20, 260);'
      't.encode_batch(["to be"] * 20); pid = os.fork();'
      'os.waitpid(pid, 0) if pid else os._exit(0);'
      'print(os.environ["TOKENIZERS_PARALLELISM"])'
  )
  environment = dict(os.environ)
  environment.pop('TOKENIZERS_PARALLELISM', None)
  result = subprocess.run(
      [sys.executable, '-W', 'ignore', '-c', script],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
      timeout=60,
  )
  assert result.stdout.strip() == 'false' and result.stderr == ''
  monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'true')
  train_bpe(TEXTS, 260)
  assert os.environ['TOKENIZERS_PARALLELISM'] == 'true'


def test_long_words_are_learned_in_parts():
  halves = 'a' * 511 + 'x', 'y' + 'a' * 511
  whole = train_bpe([''.join(halves)] * 20, 266)
  assert whole.fingerprint == train_bpe([*halves] * 20, 266).fingerprint
  assert whole.decode(whole.encode(''.join(halves))) == ''.join(halves)
  # Never ends if the time is quadratic in the length of a word.
  assert train_bpe(['ab' * 2**21], 266).vocab_size == 266


def test_fingerprints_differ_between_tokenizers():
  other = train_bpe(TEXTS, 301)
  assert isinstance(other, LibraryTokenizer)
  fingerprints = {t.fingerprint for t in (*TOKENIZERS, other)}
  assert len(fingerprints) == 3


def test_without_the_library_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  refuse(r'\[data\]', train_bpe, TEXTS, 300, error=ImportError)


def test_tokenizers_neither_truncate_nor_pad(tmp_path):
  known = train_bpe(TEXTS, 300)
  model = library.Tokenizer.from_str(known.model.to_str())
  model.enable_truncation(4)
  model.enable_padding(length=8)
  model.add_special_tokens(['<end>'])  # Read by the library.
  (tmp_path / 'tokenizer.json').write_text(model.to_str())
  tokenizer = tokenizer_files.open_tokenizer(tmp_path / 'tokenizer.json')
  for text in ('a', 'one of many words'):
    assert tokenizer.encode(text) == known.encode(text)


TEXT = st.one_of(
    st.text(max_size=30),
    st.text("ab1_ '.,\n\t  \r\xa0\u3000é漢²s\x1c\x85½\u0301—“", max_size=30),
)


WORDS = train_bpe([*TEXTS, "It isn't, he's; they'll... 1 22 333"], 320)


@settings(max_examples=400, deadline=None)
@given(TEXT)
def test_cached_words_give_the_ids_of_the_whole_text(text):
  words = encoding.WordCache(WORDS, '<u2')
  for _ in range(2):
    ids = np.frombuffer(words.encode(text), words.dtype).tolist()
    assert ids == WORDS.encode(text)


def test_gpt2_has_one_fingerprint_in_every_format(tmp_path):
  fields = json.loads(TOKENIZERS[1].to_json())
  folders = [tmp_path / name for name in 'abc']
  for folder in folders:
    folder.mkdir()
  (folders[0] / 'encoder.json').write_text(json.dumps(fields['vocab']))
  merges = '\n'.join(' '.join(merge) for merge in fields['merges'])
  (folders[0] / 'vocab.bpe').write_text(f'#version: 0.2\n{merges}\n')
  (folders[1] / 'tokenizer.json').write_text(TOKENIZERS[1].model.to_str())
  (folders[2] / 'tokenizer.json').write_text(TOKENIZERS[1].to_json())
  for folder in folders:
    tokenizer = tokenizer_files.open_tokenizer(folder)
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.fingerprint == TOKENIZERS[1].fingerprint
    for path in folder.iterdir():  # With byte order marks, as Windows writes.
      path.write_text(path.read_text('utf-8'), 'utf-8-sig')
    tokenizer = tokenizer_files.open_tokenizer(folder)
    assert tokenizer.fingerprint == TOKENIZERS[1].fingerprint


def test_sentencepiece_models_are_read(tmp_path):
  library = pytest.importorskip('sentencepiece')
  path = tmp_path / 'tokenizer.model'
  with path.open('wb') as file:
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(text_files.TEXTS), model_writer=file,
        vocab_size=70, minloglevel=2,
    )
  tokenizer = tokenizer_files.open_tokenizer(tmp_path)
  direct = library.SentencePieceProcessor(model_file=str(path))
  text = 'Its end of 7'
  assert tokenizer.encode(text) == direct.encode(text)
  assert tokenizer.encode_batch([text]) == [direct.encode(text)]
  assert tokenizer.decode([*direct.encode(text), tokenizer.end_of_text]) == text
  # Models with a padded embedding can generate ids that no piece has.
  assert tokenizer.decode([*direct.encode(text), 70, 75]) == text


@pytest.mark.parametrize('tokenizer', TOKENIZERS, ids=KINDS)
def test_encode_batch_equals_encode_and_partial_characters_decode(tokenizer):
  texts = [*TEXTS, '', ' leading', 'ümlaut']
  expected = [tokenizer.encode(text) for text in texts]
  assert tokenizer.encode_batch(texts) == expected
  ids = [*tokenizer.encode('ab'), tokenizer.end_of_text]
  assert tokenizer.decode(ids * 2) == 'abab'
  assert tokenizer.decode([*ids, tokenizer.vocab_size + 5]) == 'ab'
  assert '\ufffd' in tokenizer.decode(tokenizer.encode('é')[:1])


@pytest.mark.parametrize('make, message', [
    (lambda: train_bpe(TEXTS, 256), 'vocab_size=256 is out of range.*257'),
    (lambda: train_bpe(TEXTS, 5000), 'vocab_size=5000 is more than'),
    (lambda: with_special_tokens(ByteTokenizer()), 'special_tokens is set and'),
    (lambda: bpe_from_parts({'<|endoftext|>': 0, 'a': 1}, [('a', 'b')]),
     'vocab and merges do not fit'),
])
def test_tokenizers_that_cannot_be_made_are_refused(make, message):
  refuse(message, make)


@pytest.mark.parametrize('content, message', [
    (b'', 'cannot be read'),
    (b'\xff\xfe', 'cannot be read'),
    (b'{"model": 1}', 'cannot be read'),
    (b'{"kind": "byte"}', "'byte' is unknown.*'bytes'"),
    (b'{"kind": "bpe", "vocab": {"a": 0}, "merges": []}', 'no token'),
    (b'{"kind": "bpe", "vocab": {"<|endoftext|>": 1}, "merges": []}',
     'ids are not 0 to 0'),
])
def test_a_file_that_is_no_tokenizer_is_refused(content, message, tmp_path):
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(content)
  refuse(f'tokenizer.json .*{message}', tokenizer_files.load_tokenizer, path)
