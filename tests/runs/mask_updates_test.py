"""The report's statements about masks agree with the run's log."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from spdf_jax.costs.plan_costs import Span
from spdf_jax.runs import read
from spdf_jax.runs import report
from spdf_jax.runs import statements
from tests.runs import workdirs_test


def phase(name, start, steps, zeros, updates=(), source='text', spans=()):
  return read.PhaseRecord(
      name, start, steps, 2, 8, source, zeros, 16 * steps, 5.0, 10.0, updates,
      spans,
  )


def row(step, grown, dropped, surviving, explored, **values):
  return {
      'step': step, 'train/loss': 4.0 - step / 100, 'sparsity/grown': grown,
      'sparsity/dropped': dropped, 'sparsity/surviving': surviving,
      'sparsity/overlap': 0.5, 'sparsity/exploration': explored,
      'sparsity/cut_off': 0.125, 'sparsity/row_variation': 1.2,
      'sparsity/column_variation': 14.0, **values,
  }


RISING = (Span(0, 20, 0.25, 6.0), Span(20, 30, 0.5, 5.0))
UPDATES = range(20, 40, 10), range(35, 36)
# Rows every ten steps; an update at a row's own step shows in the next one.
DYNAMIC = read.RunRecord(
    'moving',
    (
        phase('sparse', 0, 50, 0.5, UPDATES, spans=RISING),
        phase('dense', 50, 20, 0.0, (range(50, 51),)),
    ),
    (
        row(10, 0.0, 0.0, 75.0, 0.75),
        row(20, 0.0, 0.0, 75.0, 0.75),
        row(30, 5.0, 30.0, 45.0, 0.8),
        row(40, 10.0, 10.0, 40.0, 0.85),
        row(50, 10.0, 10.0, 40.0, 0.85, **{'sparsity/sparsified': 0.5,
                                           'validation/loss': 3.0}),
        row(60, 50.0, 0.0, 50.0, 1.0),
        row(70, 50.0, 0.0, 50.0, 1.0, **{'sparsity/sparsified': 0.0}),
    ),
)
STILL = read.RunRecord(
    'still', (phase('sparse', 0, 50, 0.5),), ({'step': 50, 'train/loss': 3.0},)
)


def test_a_row_has_the_last_mask_update_before_it():
  updates = read.mask_updates_in(DYNAMIC, DYNAMIC.phases[0])
  # The updates at 30 and 35 fall between two rows: only the last one is logged.
  assert [change.step for change in updates] == [20, 35]
  assert [change.survival for change in updates] == [0.6, 0.8]
  (dense,) = read.mask_updates_in(DYNAMIC, DYNAMIC.phases[1])
  assert dense == (50, 50.0, 0.0, 50.0) and dense.survival == 1.0


@given(st.lists(st.tuples(
    st.integers(0, 30), st.integers(0, 30), st.integers(1, 7)
), max_size=3), st.integers(0, 40))
def test_updates_stored_as_ranges_equal_those_stored_as_steps(parts, step):
  ranges, start = [], 0
  for first, length, every in parts:
    ranges.append(range(start + first, start + first + length + 1, every))
    start = ranges[-1][-1] + 1
  steps = [x for part in ranges for x in part]
  one = phase('sparse', 2, 500, 0.5, tuple(ranges))
  run = read.RunRecord('toy', (one,), ())
  before = [x for x in steps if x < step]
  assert read.last_update(run, step) == (before[-1] if before else None)
  assert one.updates_until(step) == sum(2 < x <= step for x in steps)
  if step > 2:
    kept = one.until(step).mask_updates
    assert [x for part in kept for x in part] == [x for x in steps if x <= step]


def test_a_plan_of_very_many_updates_is_read_in_little_memory(tmp_path):
  workdirs_test.write(
      tmp_path, [{'step': 7}], workdirs_test.PLAN | {'phases': [
          workdirs_test.PHASE | {'mask_updates': [[5, 10**15, 1]]}
      ]},
  )
  run = read.read_run(tmp_path)
  assert read.last_update(run, 7) == 6
  assert run.phases[0].updates_until(100) == 96


def test_the_table_has_a_row_for_each_phase_of_a_tracked_run():
  table = report.mask_updates_table({'a|b': DYNAMIC, 'still': STILL})
  assert table.splitlines()[2:] == [
      '| a\\|b | sparse | 25% to 50% | 50% | 3 | 60% to 80% | 85% | 12.5% | '
      '1.2 | 14.0 |',
      '| a\\|b | dense | 0% | 0% | 1 | 100% | 100% | 12.5% | 1.2 | 14.0 |',
  ]
  assert report.mask_updates_table({'still': STILL}) is None


def test_exploration_is_stated_from_the_updates_within_phases():
  assert statements.describe_updates('toy', DYNAMIC) == (
      "toy's masks are updated 3 times within sparse, where 70% of the kept "
      'weights survive an update on average, of the 2 that are logged. By then '
      '85% of the sparsified weights have been kept at some step.'
  )
  assert statements.describe_updates('toy', STILL) is None


def test_a_report_has_a_section_on_masks_that_were_updated(tmp_path):
  text = report.write_report(tmp_path / 'a', {'toy': DYNAMIC}).read_text()
  assert '## Masks' in text and '![Masks](mask_updates.png)' in text
  assert "* toy's masks are updated 3 times within sparse" in text
  assert '| toy | sparse | 50 | 800 | 25% to 50% |' in text
  assert (tmp_path / 'a' / 'mask_updates.png').is_file()
  assert 'kept_per_unit.png' not in text
  masks = {
      'step': 50, 'layers': {'wi': {'inputs': [0, 2], 'outputs': [1, 1]}},
      'picture': {'layer': 'wi', 'densities': [[0.0, 0.0], [1.0, 1.0]]},
  }
  shown = dataclasses.replace(DYNAMIC, masks=masks)
  text = report.write_report(tmp_path / 'c', {'toy': shown}).read_text()
  for name in ('kept_per_unit', 'masks'):
    assert f']({name}.png)' in text
    assert (tmp_path / 'c' / f'{name}.png').is_file()
  text = report.write_report(tmp_path / 'b', {'toy': STILL}).read_text()
  assert '## Masks' not in text
  assert not (tmp_path / 'b' / 'mask_updates.png').exists()
