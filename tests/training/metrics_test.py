"""The metrics file has every step once, however often a run was killed."""


import pytest

from spdf_jax.training.loop import metrics


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


@pytest.mark.parametrize('line, message', [
    ('{"st', 'line 2 is not JSON'),
    ('[1]', r'line 2 holds \[1\], which is not a JSON object'),
    ('{"train/loss": 1.0}', 'line 2 has no integer "step": {"train/loss"'),
    ('{"step": 1.5}', 'line 2 has no integer "step"'),
    ('{"step": true}', 'line 2 has no integer "step"'),
    ('{"step": 1' + '0' * 30 + '}', 'line 2 has no integer "step"'),
    ('[' * 200_000, 'line 2 is not JSON'),
    ('\udcff', 'line 2 is not JSON .*utf-8'),
    ('{"step": 1, "a": ' + '9' * 9999 + '}', 'line 2 is not JSON'),
], ids=range(9))
def test_a_broken_line_is_named(tmp_path, line, message):
  path = tmp_path / 'metrics.jsonl'
  text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
  path.write_text(text, errors='surrogateescape')
  with pytest.raises(ValueError, match=f'metrics.jsonl {message}'):
    metrics.read_rows(path)
  with pytest.raises(ValueError, match=f'metrics.jsonl {message}'):
    metrics.MetricWriter(path, 3)


def test_flushed_rows_can_be_read_while_the_file_is_open(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = metrics.MetricWriter(path, 0)
  writer.write_scalars(1, {'a': 1.0})
  writer.flush()
  assert steps_of(path) == [1]
  writer.close()
