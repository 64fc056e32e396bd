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


def stop_after(count):
  """Returns a report function that interrupts at its `count`-th call."""
  calls = []

  def report(progress):
    calls.append(progress)
    if len(calls) == count:
      raise KeyboardInterrupt

  return report


@pytest.fixture
def killed(lines, tmp_path):
  """A folder in which a preparation was interrupted after a saved state."""
  with pytest.raises(KeyboardInterrupt):
    prepare(lines, tmp_path / 'out', report=stop_after(40))
  assert (tmp_path / 'out' / 'partial' / 'state.json').exists()
  return tmp_path / 'out'


def flip(path, offset, bit=0):
  data = bytearray(path.read_bytes())
  data[offset] ^= 1 << bit
  path.write_bytes(data)


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
  with pytest.raises(ValueError, match='is not finished'):
    open_corpus(tmp_path / 'out')


def test_a_bit_flipped_before_the_relaunch_is_found(lines, killed):
  flip(killed / 'partial' / 'train.ids', 1000)
  with pytest.raises(ValueError, match=r'train.ids holds .* damaged: delete'):
    prepare(lines, killed)
  assert not list(killed.glob('*.bin'))


@pytest.mark.parametrize('change', [
    lambda data: data[:100],
    lambda data: data.replace(b'"documents": ', b'"documents": 1'),
])
def test_a_damaged_state_is_refused_with_its_name(lines, killed, change):
  path = killed / 'partial' / 'state.json'
  path.write_bytes(change(path.read_bytes()))
  with pytest.raises(ValueError, match=r'state.json .*again\.$'):
    prepare(lines, killed)


def test_an_input_that_changed_is_not_continued(lines, killed):
  time = lines.stat().st_mtime_ns
  sound = lines.read_bytes()
  flip(lines, len(sound) // 2)
  os.utime(lines, ns=(time, time))
  with pytest.raises(ValueError, match='prepared differently .other inputs.'):
    prepare(lines, killed)
  lines.write_bytes(sound)
  os.utime(lines, ns=(time, time + 1))
  with pytest.raises(ValueError, match='an input was modified since .*delete'):
    prepare(lines, killed)
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
    flip(path, place)
    seen.append(describe() != sound)
    flip(path, place)
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


def test_flipped_bits_of_a_description_are_found_or_change_nothing(
    lines, tmp_path
):
  expected = prepare(lines, tmp_path / 'out').train.description
  path = tmp_path / 'out' / 'train.json'
  for offset in range(path.stat().st_size):
    flip(path, offset, offset % 8)
    try:
      description = open_token_file(tmp_path / 'out' / 'train').description
    except ValueError as error:
      assert 'train.json' in str(error) or 'train.bin' in str(error)
    else:
      assert {key: description[key] for key in expected} == expected
    flip(path, offset, offset % 8)


def test_flipped_bits_of_a_tokenizer_are_found_or_change_nothing(
    lines, tmp_path
):
  pytest.importorskip('tokenizers')
  expected = prepare(lines, tmp_path / 'out', 'bpe-300').fingerprint
  path = tmp_path / 'out' / 'tokenizer.json'
  for offset in range(0, path.stat().st_size, 23):
    flip(path, offset, offset % 8)
    try:
      assert open_corpus(tmp_path / 'out').fingerprint == expected
    except ValueError as error:
      assert 'tokenizer' in str(error)
    flip(path, offset, offset % 8)


def test_flipped_bits_of_large_files_are_found_by_verifying(
    lines, tmp_path, monkeypatch
):
  prepare(lines, tmp_path / 'out')
  verify_corpus(tmp_path / 'out')
  monkeypatch.setattr(corpora, '_LARGEST_VERIFIED', 0)
  flip(tmp_path / 'out' / 'test.bin', 100)
  open_corpus(tmp_path / 'out')
  with pytest.raises(ValueError, match=r'test.bin holds other tokens'):
    verify_corpus(tmp_path / 'out')
