"""The metrics file has every step once, however often a run was killed."""

import json

import pytest

from spdf_jax.training.loop import metrics
from tests.refusals import refuse


def write_steps(path, resume_step, steps):
  writer = metrics.MetricWriter(path, resume_step)
  for step in steps:
    writer.write_scalars(step, {'train/loss': step / 10})
  writer.close()


def steps_of(path):
  return [row['step'] for row in metrics.read_rows(path)]


def test_rows_are_restored_as_they_were_written(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = metrics.MetricWriter(path, 0)
  writer.write_scalars(1, {'phase': 'sparse', 'train/loss': 0.1 + 0.2})
  writer.write_scalars(1, {'validation/loss': 1e-30})
  writer.close()
  assert metrics.read_rows(path) == [
      {'step': 1, 'phase': 'sparse', 'train/loss': 0.1 + 0.2},
      {'step': 1, 'validation/loss': 1e-30},
  ]


def test_opening_drops_the_rows_after_the_step_resumed_from(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  write_steps(path, 0, [1, 2, 3, 4, 4, 5])
  write_steps(path, 4, [5, 6])
  assert steps_of(path) == [1, 2, 3, 4, 4, 5, 6]
  write_steps(path, 0, [])
  assert path.read_text() == ''


def test_an_unfinished_last_line_is_left_out_and_written_over(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  write_steps(path, 0, [1, 2, 3])
  text = path.read_text()
  for cut in range(2, len(text.splitlines()[-1]) + 2):
    path.write_text(text[:-cut])
    assert steps_of(path) == [1, 2]
  write_steps(path, 3, [4])
  assert steps_of(path) == [1, 2, 4]


def test_a_whole_last_line_counts_without_its_newline(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  write_steps(path, 0, [1, 2])
  path.write_text(path.read_text()[:-1])
  assert steps_of(path) == [1, 2]
  write_steps(path, 2, [3])
  assert steps_of(path) == [1, 2, 3]


BROKEN = [
    '{"st', '[1]', '{"train/loss": 1.0}', '{"step": "3"}', '[' * 200_000,
    '{"step": 1.5}', '{"step": true}', '{"step": 1, "train/loss": "low"}',
    '{"step": 1' + '0' * 30 + '}', '\udcff',
    '{"step": 1, "a": ' + '9' * 9999 + '}',
]


@pytest.mark.parametrize('line', BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_named(tmp_path, line):
  path = tmp_path / 'metrics.jsonl'
  text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
  path.write_text(text, errors='surrogateescape')
  refuse('metrics.jsonl line 2 cannot be read', metrics.read_rows, path)
  refuse('metrics.jsonl before byte .* cannot', metrics.MetricWriter, path, 1)
  assert path.read_text(errors='surrogateescape') == text


def rows_by_lines(path, after, until):
  """The oracle of rows read from the end: all lines from the beginning."""
  rows = map(json.loads, path.read_text().splitlines())
  return [row for row in rows if after < row['step'] <= until]


@pytest.mark.parametrize('width', [0, 1000, 70_000])
def test_the_last_rows_are_those_of_a_reading_from_the_beginning(
    tmp_path, width
):
  path = tmp_path / 'metrics.jsonl'
  write_steps(path, 0, sorted([*range(1, 40), 7, 30]))
  text = path.read_text().replace('}', f', "x": "{"é" * width}"}}')
  for cut in (0, 1, 9):
    path.write_text(text[:-cut] if cut else text)
    if cut == 9:  # The last line is incomplete.
      text = text[:text.rstrip().rindex('\n') + 1]
    for after, until in ((0, 99), (29, 38), (38, 39), (39, 99), (5, 5)):
      rows = metrics.read_last_rows(path, after, until)
      path.write_text(text)
      assert rows == rows_by_lines(path, after, until)


def test_a_resume_keeps_earlier_rows_and_moves_later_ones_to_a_file(
    tmp_path
):
  path = tmp_path / 'metrics.jsonl'
  write_steps(path, 0, range(1, 9))
  before = path.read_bytes()
  metrics.MetricWriter(path, 8).close()
  assert path.read_bytes() == before
  metrics.MetricWriter(path, 5).close()
  kept = path.read_bytes()
  cut = (tmp_path / 'metrics_cut.jsonl').read_bytes()
  assert kept + cut == before and steps_of(path) == [1, 2, 3, 4, 5]


def test_flushed_rows_can_be_read_while_the_file_is_open(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = metrics.MetricWriter(path, 0)
  writer.write_scalars(1, {'a': 1.0})
  writer.flush()
  assert steps_of(path) == [1]
  writer.close()
