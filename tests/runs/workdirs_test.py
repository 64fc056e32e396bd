"""Working directories are read completely, or refused in one sentence."""

import json
import os

import pytest

from spdf_jax import files
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import read_run
from spdf_jax.training.loop import metrics
from tests.refusals import refuse

PHASE = {
    'name': 'sparse',
    'start': 0,
    'steps': 100,
    'batch_size': 4,
    'length': 16,
    'source': 'text',
    'sparsity': 0.75,
    'tokens': 6400,
    'flops_per_step': 4e6,
    'dense_flops_per_step': 1e7,
    'mask_updates': (),
    'spans': (),
    'overall_sparsity': 0.5,
    'notes': (),
}
PLAN = {
    'name': 'toy',
    'model': {'preset': 'tiny', 'd_model': 8},
    'parameters': 1000,
    'sparsified_parameters': 600,
    'phases': [PHASE, PHASE | {'name': 'tune', 'start': 100, 'steps': 50}],
    'bigram': {'validation/perplexity': 40.0},
    'compute': 'dense products',
    'totals': [],
    'data': {'corpus': 'text', 'tokenizer': 'bytes', 'task': ''},
}


def write(workdir, rows, plan=PLAN):
  text = plan if isinstance(plan, str) else json.dumps(plan)
  (workdir / 'plan.json').write_text(text, errors='surrogateescape')
  if not isinstance(rows, str):
    rows = ''.join(json.dumps(row) + '\n' for row in rows)
  path = workdir / 'metrics.jsonl'
  path.write_text(rows, errors='surrogateescape')
  return workdir


def test_plan_and_generations_are_read_as_written(tmp_path):
  write(tmp_path, [{'step': 1, 'train/loss': 2.0}])
  (tmp_path / 'generations').mkdir()
  record = {'context': 'é |', 'reference': ['a', 'b'], 'generation': 'c'}
  for step in (100, 150):
    path = tmp_path / 'generations' / f'step_{step:08d}.jsonl'
    path.write_text(json.dumps(record | {'generation': str(step)}) + '\n')
  (tmp_path / 'generations' / '.step_00000150.jsonl.77').write_text('{')
  run = read_run(tmp_path)
  assert run.name == 'toy'
  assert run.phases[0] == PhaseRecord(**PHASE)
  assert (run.phases[1].start, run.phases[1].end) == (100, 150)
  assert run.model == PLAN['model']
  assert (run.parameters, run.sparsified_parameters) == (1000, 600)
  assert run.bigram == PLAN['bigram'] and run.compute == PLAN['compute']
  assert run.generations == {
      100: [record | {'generation': '100'}],
      150: [record | {'generation': '150'}],
  }


def test_lines_of_one_step_become_one_row_in_order_of_steps(tmp_path):
  rows = [
      {'step': 20, 'train/loss': 2.0},
      {'step': 10, 'train/loss': 3.0},
      {'step': 20, 'validation/loss': 2.5, 'train/loss': 1.9},
  ]
  run = read_run(write(tmp_path, rows))
  assert run.rows == (
      {'step': 10, 'train/loss': 3.0},
      {'step': 20, 'train/loss': 1.9, 'validation/loss': 2.5},
  )
  assert run.last_step == 20
  assert run.series('validation/loss') == ([20], [2.5])


def test_a_phase_includes_its_last_step_but_not_its_start(tmp_path):
  rows = [{'step': s, 'x': s} for s in (0, 50, 100, 120, 150)]
  rows.append({'step': 140, 'y': 1.0})
  run = read_run(write(tmp_path, rows))
  assert [row['step'] for row in run.within(run.phases[0])] == [50, 100]
  assert run.at_end(run.phases[0], 'x') == (100, 100)
  assert run.at_end(run.phases[1], 'y') == (140, 1.0)
  assert run.at_end(run.phases[0], 'y') is None


@pytest.mark.parametrize('rows, message', [
    ('', 'holds no rows'),
    ('{"step": 1}\n{"st\n', 'line 2 cannot be read'),
])
def test_broken_metrics_are_refused(tmp_path, rows, message):
  refuse(message, read_run, write(tmp_path, rows))


@pytest.mark.parametrize(
    'plan, message',
    [
        ('{"name"', 'plan.json cannot be read'),
        (PLAN | {'phases': []}, 'plan.json cannot be read .ValueError'),
        ({'name': 'toy'}, "plan.json cannot be read .KeyError: 'phases'"),
        (PLAN | {'phases': [{'name': 'sparse'}]}, "KeyError: 'start'"),
        (PLAN | {'phases': 3}, 'plan.json cannot be read .TypeError'),
        (PLAN | {'phases': [PHASE | {'steps': 'many'}]}, 'TypeError'),
        (PLAN | {'phases': [PHASE | {'mask_updates': [1]}]}, 'TypeError'),
        ('', 'plan.json cannot be read'),
        ('[]', 'plan.json holds no JSON object'),
        ('[' * 200_000, 'plan.json cannot be read .*recursion'),
        ('\udcff', 'plan.json cannot be read .*utf-8'),
    ],
)
def test_a_broken_plan_is_refused(tmp_path, plan, message):
  refuse(message, read_run, write(tmp_path, [{'step': 1}], plan))


@pytest.fixture
def finished(tmp_path):
  """A workdir as a run leaves it, with digests."""
  write(tmp_path, [], json.dumps(files.seal(PLAN), indent=2))
  writer = metrics.MetricWriter(tmp_path / 'metrics.jsonl', 0)
  for step in (50, 100, 150):
    writer.write_scalars(step, {'train/loss': 3.0 - step / 100})
  writer.close()
  return tmp_path


@pytest.mark.parametrize('name', ['plan.json', 'metrics.jsonl'])
def test_flipped_bits_are_refused_or_warned_of(finished, name, caplog):
  sound = read_run(finished)
  assert not caplog.messages
  path = finished / name
  data = path.read_bytes()
  for place in range(0, len(data), 7):
    flipped = bytearray(data)
    flipped[place] ^= 1 << place % 8
    path.write_bytes(flipped)
    caplog.clear()
    try:
      run = read_run(finished)
    except ValueError:
      continue
    assert run == sound or any(name in text for text in caplog.messages)


def test_a_pipe_in_the_place_of_generations_is_refused(finished):
  (finished / 'generations').mkdir()
  os.mkfifo(finished / 'generations' / 'step_00000003.jsonl')
  refuse('step_00000003.jsonl is a pipe or a', read_run, finished)


@pytest.mark.parametrize('name', ['plan.json', 'metrics.jsonl'])
def test_a_missing_file_or_a_folder_in_its_place_is_named(finished, name):
  (finished / name).unlink()
  with pytest.raises(FileNotFoundError, match=f'has no {name}; give the'):
    read_run(finished)
  (finished / name).mkdir()
  with pytest.raises(FileNotFoundError, match=f'has no {name}; give the'):
    read_run(finished)
