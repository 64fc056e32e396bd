"""Attacks on corpora: unlocked writers, kills, flipped bits, other names."""

import json
import os
import re

import pytest

from experiments.preparation import files as preparation
from experiments.preparation import inputs
from experiments.preparation import prepare_files
from spdf_jax.data import corpora
from spdf_jax.data import open_corpus
from spdf_jax.data import token_files
from spdf_jax.data.corpora import verify_corpus
from spdf_jax.data.token_files import open_token_file
from tests.refusals import refuse
from tests.text_files import flip_bit
from tests.text_files import stop_after

SHARES = dict(validation=0.2, test=0.2)


@pytest.fixture
def lines(tmp_path, monkeypatch):
  """A file of 60 documents, which are batches of their own."""
  monkeypatch.setattr(preparation, '_BATCH', 1000)
  monkeypatch.setattr(preparation, '_SAVE_EVERY', 200_000)
  path = tmp_path / 'in.jsonl'
  path.write_text(''.join(
      json.dumps({'text': f'Text {i}: ' + f'word{i} ' * 2000}) + '\n'
      for i in range(60)
  ))
  return path


def prepare(lines, output, tokenizer='bytes', **kwargs):
  return prepare_files(
      lines, tokenizer=tokenizer, output=output, **SHARES, **kwargs
  )


@pytest.fixture
def killed(lines, tmp_path):
  """A folder in which a preparation was interrupted after a saved state."""
  with pytest.raises(KeyboardInterrupt):
    prepare(lines, tmp_path / 'out', report=stop_after(40))
  assert (tmp_path / 'out' / 'partial' / 'state.json').exists()
  return tmp_path / 'out'


def test_two_preparations_without_locks_leave_no_incomplete_corpus(
    lines, tmp_path
):
  calls = []

  def start_another(progress):
    calls.append(progress)
    if len(calls) == 40:
      # The same process may lock a folder twice: this simulates a file system
      # without locks.
      with pytest.raises(KeyboardInterrupt):
        prepare(lines, tmp_path / 'out', report=stop_after(4))

  with pytest.raises(
      ValueError, match=r'out/partial/(\w+).ids holds .* delete .* again\.$'
  ) as caught:
    prepare(lines, tmp_path / 'out', report=start_another)
  split = re.search(r'(\w+).ids', str(caught.value))[1]
  assert not (tmp_path / 'out' / f'{split}.bin').exists()
  refuse('is not finished', open_corpus, tmp_path / 'out')


def test_a_bit_flipped_before_the_relaunch_is_found(lines, killed):
  flip_bit(killed / 'partial' / 'train.ids', 1000)
  refuse(r'train.ids holds .* damaged: delete', prepare, lines, killed)
  assert not list(killed.glob('*.bin'))


@pytest.mark.parametrize('change', [
    lambda data: data[:100],
    lambda data: data.replace(b'"documents": ', b'"documents": 1'),
])
def test_a_damaged_state_is_refused_with_its_name(lines, killed, change):
  path = killed / 'partial' / 'state.json'
  path.write_bytes(change(path.read_bytes()))
  refuse(r'state.json .*again\.$', prepare, lines, killed)


def test_an_input_that_changed_is_not_continued(lines, killed):
  time = lines.stat().st_mtime_ns
  sound = lines.read_bytes()
  flip_bit(lines, len(sound) // 2)
  os.utime(lines, ns=(time, time))
  refuse('prepared differently .other inputs.', prepare, lines, killed)
  lines.write_bytes(sound)
  os.utime(lines, ns=(time, time + 1))
  refuse('an input was modified since .*delete', prepare, lines, killed)
  os.utime(lines, ns=(time, time))
  assert prepare(lines, killed).train.tokens.size


def test_samples_of_large_inputs_are_spread_over_the_whole(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(inputs, '_SAMPLES', 8)
  monkeypatch.setattr(inputs, '_SAMPLE', 4)
  path = tmp_path / 'a.jsonl'
  path.write_bytes(bytes(203))
  describe = lambda: inputs.describe_inputs([path], path)
  sound, seen = describe(), []
  for place in range(203):
    flip_bit(path, place)
    seen.append(describe() != sound)
    flip_bit(path, place)
  sampled = [start + i for start in range(0, 200, 25) for i in range(4)]
  assert [i for i, differs in enumerate(seen) if differs] == sorted(
      {*sampled, *range(199, 203)})


def test_another_tokenizer_does_not_continue_the_tokens(lines, tmp_path):
  pytest.importorskip('tokenizers')
  with pytest.raises(KeyboardInterrupt):
    prepare(lines, tmp_path / 'out', 'bpe-300', report=stop_after(40))
  path = tmp_path / 'out' / 'partial' / 'tokenizer.json'
  fields = json.loads(path.read_text())
  fields['merges'][0], fields['merges'][1] = fields['merges'][1::-1]
  path.write_text(json.dumps(fields))
  with pytest.raises(ValueError, match='is not the tokenizer of the tokens'):
    prepare(lines, tmp_path / 'out', 'bpe-300')


def test_a_kill_between_the_tokens_and_their_description_is_mended(
    lines, tmp_path, monkeypatch
):
  expected = prepare(lines, tmp_path / 'a' / 'x')
  real, calls = token_files._describe, []

  def describe(*args):
    calls.append(args)
    if len(calls) == 2:
      raise KeyboardInterrupt
    real(*args)

  monkeypatch.setattr(token_files, '_describe', describe)
  with pytest.raises(KeyboardInterrupt):
    prepare(lines, tmp_path / 'b' / 'x')
  monkeypatch.setattr(token_files, '_describe', real)
  assert prepare(lines, tmp_path / 'b' / 'x').fingerprint == (
      expected.fingerprint
  )


def flip_bits(path, read, name, every=1):
  """Asserts that a flipped bit is refused by name, or changes nothing read."""
  expected = read()
  for offset in range(0, path.stat().st_size, every):
    flip_bit(path, offset, offset % 8)
    try:
      assert read() == expected
    except ValueError as error:
      assert re.search(name, str(error))
    flip_bit(path, offset, offset % 8)


def test_flipped_bits_of_a_description_are_found_or_change_nothing(
    lines, tmp_path
):
  keys = sorted(prepare(lines, tmp_path / 'out').train.description)
  read = lambda: [
      open_token_file(tmp_path / 'out' / 'train').description[key]
      for key in keys
  ]
  flip_bits(tmp_path / 'out' / 'train.json', read, r'train\.(json|bin)')


def test_flipped_bits_of_a_tokenizer_are_found_or_change_nothing(
    lines, tmp_path
):
  pytest.importorskip('tokenizers')
  prepare(lines, tmp_path / 'out', 'bpe-300')
  read = lambda: open_corpus(tmp_path / 'out').fingerprint
  flip_bits(tmp_path / 'out' / 'tokenizer.json', read, 'tokenizer', every=23)


def test_flipped_bits_of_large_files_are_found_by_verifying(
    lines, tmp_path, monkeypatch
):
  prepare(lines, tmp_path / 'out')
  verify_corpus(tmp_path / 'out')
  monkeypatch.setattr(corpora, '_LARGEST_VERIFIED', 0)
  flip_bit(tmp_path / 'out' / 'test.bin', 100)
  open_corpus(tmp_path / 'out')
  refuse(r'test.bin holds other tokens', verify_corpus, tmp_path / 'out')
