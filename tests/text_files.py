"""Files of the same documents in every format that is read."""

import gzip
import json

import pytest

TEXTS = [f'Document {i}: élan of "{i * 7}".\nIts end\n' for i in range(60)]


def write_json_lines(path, texts=TEXTS):
  lines = [json.dumps({'text': text, 'id': 3}) + '\n' for text in texts]
  path.write_text(''.join(lines), encoding='utf-8')
  return path


def stop_after(count):
  """Returns a report function that interrupts at its `count`-th call."""
  calls = []

  def report(progress):
    calls.append(progress)
    if len(calls) == count:
      raise KeyboardInterrupt

  return report


def flip_bit(path, offset, bit=0):
  data = bytearray(path.read_bytes())
  data[offset] ^= 1 << bit
  path.write_bytes(data)


def make_txt(folder):
  for i, text in enumerate(TEXTS):
    (folder / f'{i:03d}.txt').write_text(text, encoding='utf-8', newline='')


def two_frames(folder, compress):
  """Returns JSON lines, compressed in two halves."""
  data = write_json_lines(folder / 'a').read_bytes()
  (folder / 'a').unlink()
  half = data.index(b'\n', len(data) // 2) + 1
  return compress(data[:half]) + compress(data[half:])


def make_gz(folder):
  (folder / 'a.jsonl.gz').write_bytes(two_frames(folder, gzip.compress))


def make_zst(folder):
  arrow = pytest.importorskip('pyarrow')
  compress = lambda data: arrow.compress(data, 'zstd', asbytes=True)
  (folder / 'a.jsonl.zst').write_bytes(two_frames(folder, compress))


def make_txt_gz(folder):
  for i, text in enumerate(TEXTS):
    (folder / f'{i:03d}.txt.gz').write_bytes(gzip.compress(text.encode()))


def make_parquet(folder):
  arrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  parquet.write_table(
      arrow.table({'id': list(range(60)), 'text': TEXTS}),
      folder / 'a.parquet', row_group_size=7,
  )


def make_dataset(folder):
  pytest.importorskip('datasets').Dataset.from_dict(
      {'text': TEXTS, 'id': list(range(60))}
  ).save_to_disk(folder)
