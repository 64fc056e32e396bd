"""The report's numbers are those of the runs' metrics, computed by hand."""

import json
import math
import re

import hypothesis
from hypothesis import strategies as st
import pytest

from spdf_jax.runs import read
from spdf_jax.runs.curves import dense_flops_at
from spdf_jax.runs.curves import flops_at
from spdf_jax.runs.curves import pretraining_curve
from spdf_jax.runs.curves import seconds_at
from spdf_jax.runs.curves import spent_before
from spdf_jax.runs.curves import tokens_at
from spdf_jax.runs.equal_cost import losses_at_equal
from spdf_jax.runs.markdown import escape
from spdf_jax.runs.read import SpentBefore
from spdf_jax.runs.report import generations_table
from spdf_jax.runs.report import runs_table
from spdf_jax.runs.report import write_report
from tests import command


def phase(name, start, steps, sparsity, source='text', dense=10.0):
  return {
      'name': name,
      'start': start,
      'steps': steps,
      'batch_size': 2,
      'length': 8,
      'source': source,
      'sparsity': sparsity,
      'tokens': steps * 16,
      'flops_per_step': dense * (1 - 0.8 * sparsity),
      'dense_flops_per_step': dense,
      'mask_updates': [],
      'spans': [],
      'overall_sparsity': None,
      'notes': [],
  }


def evaluation(step, validation, target, **values):
  return {
      'step': step,
      'validation/loss': math.log(validation),
      'validation/perplexity': validation,
      'target/perplexity': target,
      **values,
  }


DATA = {'corpus': 'text', 'tokenizer': 'bytes', 'task': ''}


def make_run(
    workdir, phases, rows, bigram=None, generations=(), totals=(), data=DATA,
    before=None,
):
  workdir.mkdir()
  plan = {
      'name': workdir.name,
      'model': {'preset': 'tiny'},
      'parameters': 12345,
      'sparsified_parameters': 6789,
      'phases': phases,
      'bigram': bigram,
      'totals': totals,
      'compute': 'Computed by hand.',
      'data': data,
      'before': before and before._asdict(),
  }
  (workdir / 'plan.json').write_text(json.dumps(plan))
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (workdir / 'metrics.jsonl').write_text(text)
  (workdir / 'generations').mkdir()
  for step, records in generations:
    path = workdir / 'generations' / f'step_{step:08d}.jsonl'
    path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return read.read_run(workdir)


def short_run(workdir, evaluated, **fields):
  """A dense run whose last evaluation is given."""
  steps = evaluated['step']
  return make_run(workdir, [phase('pre', 0, steps, 0.0)], [evaluated], **fields)


def records(name, count=25):
  return [
      {
          'context': f'f{i}(a | b)',
          'reference': f'reference {i}',
          'generation': f'{name} {i}',
      }
      for i in range(count)
  ]


@pytest.fixture
def runs(tmp_path):
  """A dense run of 100 + 20 steps, and one of 80 sparse + 20 + 20."""
  dense = make_run(
      tmp_path / 'dense',
      [phase('pre', 0, 100, 0.0), phase('tune', 100, 20, 0.0, 'task', 4.0)],
      [
          evaluation(0, 1000.0, 2000.0),
          {'step': 40, 'train/loss': 3.0, 'time/seconds': 4.0},
          evaluation(40, math.exp(4), 90.0),
          {'step': 100, 'train/loss': 2.0, 'time/seconds': 6.5},
          evaluation(100, math.exp(2), 20.0),
          {'step': 120, 'train/loss': 2.0, 'time/seconds': 1.25},
          evaluation(120, 60.0, 5.0, **{'task/chrf': 33.25}),
      ],
      bigram={'validation/perplexity': 50.0, 'validation/tokens': 4096.0},
      generations=[(60, records('early')), (120, records('dense'))],
  )
  sparse = make_run(
      tmp_path / 'sparse',
      [
          phase('sparse', 0, 80, 0.75) | {'overall_sparsity': 0.4125},
          phase('grown', 80, 20, 0.0) | {'overall_sparsity': 0.0},
          phase('tune', 100, 20, 0.0, 'task', 4.0),
      ],
      [
          evaluation(20, math.exp(5), 100.0),
          evaluation(80, 9.0, 30.0, **{'sparsity/sparsified': 0.75}),
          evaluation(100, math.exp(2.5), 24.0),
          evaluation(110, 9.5, 6.0, **{'task/chrf': 20.0}),
          evaluation(120, 10.0, 12.0),
      ],
      bigram={'validation/perplexity': 50.0},
      generations=[(120, records('sparse'))],
      totals=[
          {'phases': ['sparse', 'grown'], 'against': names, 'of_dense': share,
           'of_dense_with_embedding': share + 0.1, 'effective_sparsity': 0.3}
          for names, share in ((['sparse', 'grown'], 0.5), (['sparse'], 0.625))
      ],
  )
  return {'dense': dense, 'sparse|75': sparse}


def cells(table):
  lines = table.splitlines()[2:]
  return [
      [c.strip(' *') for c in re.split(r'(?<!\\)\|', x)[1:-1]] for x in lines
  ]


def test_flops_add_up_over_phases(runs):
  run = runs['sparse|75']
  assert flops_at(run, 0) == 0
  assert flops_at(run, 80) == pytest.approx(320)
  assert flops_at(run, 90) == pytest.approx(320 + 100)
  assert flops_at(run, 500) == pytest.approx(320 + 200 + 80)
  assert dense_flops_at(run, 110) == pytest.approx(1000 + 40)


def test_losses_of_several_runs_are_one_table_without_a_verdict(tmp_path):
  five = {
      name: make_run(
          tmp_path / name, [phase('pre', 0, 100, 0.0)],
          [evaluation(steps, math.exp(loss), 20.0) for steps in (50, 100)],
      ) for name, loss in zip('abcde', (4.923, 4.924, 4.93, 4.5, 4.6))
  }
  text = write_report(tmp_path / 'report', five).read_text()
  start = text.index('| run | after ')
  table = text[start:text.index('\n\n', start)]
  assert table.splitlines()[0] == (
      '| run | after 1,600 tokens | after 1,000 FLOPs |'
  )
  assert [row[:2] for row in cells(table)] == [
      ['a', '4.923'], ['b', '4.924'], ['c', '4.930'], ['d', '4.500'],
      ['e', '4.600'],
  ]
  assert 'so compare means over seeds' in text
  for word in ('better', 'level', 'lower loss', '†', ' – |'):
    assert word not in text[start:text.index('## Plots')]


def test_a_workdir_with_a_slash_is_named_by_its_folder(runs, tmp_path):
  pytest.importorskip('experiments')  # Only in a checkout.
  done = command.run(
      'report', f'--runs={tmp_path}/dense/', f'--output={tmp_path}/report'
  )
  assert not done.status, done.log
  text = (tmp_path / 'report' / 'report.md').read_text()
  assert '| dense |' in text and '| . |' not in text


def test_the_report_states_the_tokens_of_the_validation(runs, tmp_path):
  text = write_report(tmp_path / 'report', runs).read_text()
  assert '\n* Validation losses and perplexities are means over 4,096 ' in text


def test_table_holds_the_values_at_the_ends_of_phases(runs):
  dash = '–'
  e2, e25 = f'{math.exp(2):.2f}', f'{math.exp(2.5):.2f}'
  assert cells(runs_table(runs)) == [
      ['dense', 'pre', '100', '1,600', '0%', e2, '20.00', dash, '1.000',
       '10.5'],
      ['dense', 'tune', '20', '320', '0%', '60.00', '5.00', '33.25', '1.000',
       '1.2'],
      ['dense', 'total', '120', '1,920', *[dash] * 4, '1.000', '11.8'],
      ['sparse\\|75', 'sparse', '80', '1,280', '75%', '9.00', '30.00', dash,
       '0.400', dash],
      ['sparse\\|75', 'grown', '20', '320', '0%', e25, '24.00', dash, '0.520',
       dash],
      ['sparse\\|75', 'all pre-training', '100', '1,600', *[dash] * 4, '0.520',
       dash],
      ['sparse\\|75', 'tune', '20', '320', '0%', '10.00', '12.00',
       '20.00 (step 110)', '0.556', dash],
      ['sparse\\|75', 'total', '120', '1,920', *[dash] * 4, '0.556', dash],
      ['bigram baseline', *[dash] * 4, '50.00', *[dash] * 4],
  ]


def test_the_cost_of_the_run_it_started_from_is_counted(runs, tmp_path):
  dash = '–'
  dense = runs['dense']
  tuned = make_run(
      tmp_path / 'tuned', [phase('sparse', 0, 50, 0.75)],
      [evaluation(25, 9.0, 9.0), evaluation(50, 8.0, 8.0),
       {'step': 50, 'time/seconds': 2.0}],
      before=spent_before('dense@pre', dense, 100, resumed=False),
  )
  # 1000 FLOPs, dense, and 50 steps of 4 FLOPs instead of 10.
  assert cells(runs_table({'tuned': tuned})) == [
      ['tuned', 'from dense@pre', '100', '1,600', *[dash] * 4, '1.000', '10.5'],
      ['tuned', 'sparse', '50', '800', '75%', '8.00', '8.00', dash, '0.800',
       '2.0'],
      ['tuned', 'total', '150', '2,400', '75%', '8.00', '8.00', dash, '0.800',
       '12.5'],
  ]
  amounts = {'FLOPs': flops_at, 'tokens': tokens_at, 'seconds': seconds_at}
  assert {k: pretraining_curve(tuned, spent=v)[0].tolist()
          for k, v in amounts.items()} == {
      'FLOPs': [1100, 1200], 'tokens': [2000, 2400], 'seconds': [11.5, 12.5],
  }
  text = write_report(tmp_path / 'report', {'tuned': tuned}).read_text()
  assert (
      'Pre-training of tuned, with that of dense@pre before it, took 1.2e+03 '
      'FLOPs (0.800 of those of the same steps dense) and 12.5 seconds.'
  ) in text
  again = spent_before('tuned', tuned, 50, resumed=False)
  assert again == ('tuned', True, 150, 2400, 1200, 1500, 12.5)


def test_the_past_phases_of_a_resumed_run_are_counted_once(runs, tmp_path):
  resumed = make_run(
      tmp_path / 'resumed',
      [phase('pre', 0, 100, 0.0), phase('longer', 100, 50, 0.0)],
      [evaluation(150, 8.0, 8.0), {'step': 150, 'time/seconds': 2.0}],
      before=spent_before('dense@pre', runs['dense'], 100, resumed=True),
  )
  rows = cells(runs_table({'resumed': resumed}))
  assert rows[0] == ['resumed', 'from dense@pre', *'–––––––', '10.5']
  assert rows[1][:4] + rows[1][-1:] == ['resumed', 'pre', '100', '1,600', '–']
  assert rows[-1][2:4] + rows[-1][-1:] == ['150', '2,400', '12.5']
  assert flops_at(resumed, 150) == 1500


def test_the_report_names_a_start_whose_cost_is_not_recorded(tmp_path):
  imported = short_run(
      tmp_path / 'imported', evaluation(50, 8.0, 8.0),
      before=SpentBefore('runs/hf', is_recorded=False),
  )
  text = write_report(tmp_path / 'report', {'imported': imported}).read_text()
  assert '\n* imported starts from runs/hf; its cost is not reco' in text
  assert 'from runs/hf |' not in text and 'before it, took' not in text


def test_a_run_that_was_stopped_shows_what_it_did(tmp_path):
  run = make_run(
      tmp_path / 'stopped',
      [phase('sparse', 0, 80, 0.5), phase('grown', 80, 20, 0.0)],
      [evaluation(60, 9.0, 30.0, **{'sparsity/sparsified': 0.25})],
      bigram={'validation/perplexity': 50.0},
  )
  first, second, total, _ = cells(runs_table({'stopped': run}))
  assert first[2:6] == ['60 of 80', '960', '50% (25% at the end)', '9.00']
  assert first[8] == '0.600'
  assert second[2:9] == ['0 of 20', '0', '0%', *['–'] * 4]
  assert total[2:4] + total[8:9] == ['60 of 100', '960', '0.600']
  text = write_report(tmp_path / 'report', {'stopped': run}).read_text()
  assert 'stopped (unfinished, 60 of 100 steps) took' in text
  assert (
      '* stopped is, 60 of 100 pre-training steps done, at validation '
      "perplexity 9.00, below the bigram baseline's 50.00.\n"
  ) in text


def test_curves_leave_out_step_zero_and_fine_tuning(runs):
  flops, losses = pretraining_curve(runs['dense'])
  assert flops.tolist() == [400, 1000]
  assert losses == pytest.approx([4, 2])


def test_losses_at_equal_flops_are_interpolated_where_the_shorter_ends(runs):
  both = [runs['dense'], runs['sparse|75']]
  comparison = losses_at_equal(flops_at, both)
  assert comparison.spent == pytest.approx(520)
  share = math.log(520 / 400) / math.log(1000 / 400)
  assert comparison.losses == pytest.approx((4 - 2 * share, 2.5))
  assert comparison.longer == (True, False)
  swapped = losses_at_equal(flops_at, both[::-1])
  assert swapped == (
      comparison.spent, comparison.losses[::-1], (False, True)
  )


def test_curves_that_do_not_overlap_are_not_compared(tmp_path, runs):
  short = make_run(
      tmp_path / 'short',
      [phase('sparse', 0, 80, 0.75)],
      [evaluation(10, 9.0, 9.0)],
  )
  assert losses_at_equal(flops_at, [runs['dense'], short]) is None
  text = write_report(
      tmp_path / 'report', {'dense': runs['dense'], 'short': short}
  ).read_text()
  assert '| run | after equal tokens | after equal FLOPs |\n' in text
  assert '| short | – | – |' in text
  assert 'all evaluations of the run come before those of another; a l' in text
  # The others are compared without the run that is too short.
  comparison = losses_at_equal(
      flops_at, [short, runs['dense'], runs['sparse|75']]
  )
  assert comparison.spent == 520 and comparison.losses[0] is None


def test_losses_on_different_corpora_are_not_compared(tmp_path, runs):
  other = make_run(
      tmp_path / 'other', [phase('pre', 0, 100, 0.0)],
      [evaluation(50, 9.0, 9.0), evaluation(100, 2.0, 2.0)],
      bigram={'validation/perplexity': 10.0},
      data={'corpus': 'text', 'tokenizer': 'bpe-300', 'task': 'e2e'},
  )
  tuned = short_run(
      tmp_path / 'tuned', evaluation(100, 8.0, 2.0),
      data=DATA | {'task': 'dart'},
  )
  reported = {'dense': runs['dense'], 'other': other, 'tuned': tuned}
  text = write_report(tmp_path / 'report', reported).read_text()
  assert (
      "Losses of other tokens are not compared: dense, tuned have corpus "
      "'text' in tokens of 'bytes' in sequences of 8; other has corpus 'text' "
      "in tokens of 'bpe-300' in sequences of 8."
  ) in text
  table = text[text.index('| run | after 1,600 tokens |'):].split('\n\n')[0]
  assert [row[0] for row in cells(table)] == ['dense', 'tuned']
  assert '| bigram baseline of other |' in text
  assert 'The tasks differ (other: e2e, tuned: dart), so target perpl' in text


def test_statements_are_computed_from_the_runs(tmp_path, runs):
  text = write_report(tmp_path / 'report', runs).read_text()
  for statement in (
      '* dense ends pre-training at validation perplexity 7.39, below the '
      "bigram baseline's 50.00.\n",
      '* sparse\\|75 ends pre-training at validation perplexity 12.18, below '
      "the bigram baseline's 50.00.\n",
      'takes dense from target perplexity 20.00 to 5.00, 0.250 of it.',
      'takes sparse\\|75 from target perplexity 24.00 to 12.00, 0.500 of it.',
      '* Pre-training of dense took 1e+03 FLOPs and 10.5 seconds; all training '
      'took 1.08e+03 FLOPs and 11.8 seconds.\n',
      '* Pre-training of sparse\\|75 took 520 FLOPs (0.520 of those of the '
      'same steps dense); all training took 600 FLOPs (0.556 of those of the '
      'same steps dense).\n',
      '| run | after 1,600 tokens | after 520 FLOPs |\n| --- | ---: | ---: |'
      '\n| dense | 2.000 | 3.427† |\n| sparse\\|75 | 2.500 | 2.500 |\n\n',
      '† The run takes more in all and is there in the middle of its learning-',
      '* dense: 12,345 parameters (preset tiny). Computed by hand.',
      '75: 12,345 parameters (preset tiny), 6,789 of them in sparsified',
      'matrices. Zeros over all parameters: 41.2% after sparse. Computed',
      '* Against dense training for the steps of sparse alone, pre-training of '
      'sparse\\|75 is planned at 0.625 of the FLOPs, 0.725 if the lookup of '
      'inputs is counted as a product; it saves 30% of the FLOPs of the '
      'sparsified matrices, its effective sparsity.',
      'Computed by hand.',
  ):
    assert statement in text


def test_a_run_that_loses_to_the_bigram_is_reported(tmp_path):
  run = short_run(
      tmp_path / 'bad', evaluation(10, 51.0, 9.0),
      bigram={'validation/perplexity': 50.0},
  )
  text = write_report(tmp_path / 'report', {'bad': run}).read_text()
  assert (
      '* bad ends pre-training at validation perplexity 51.00, above the '
      "bigram baseline's 50.00.\n"
  ) in text
  assert 'Fine-tuning' not in text and 'Generations' not in text


def test_a_report_shows_plots_that_exist(tmp_path, runs):
  path = write_report(tmp_path / 'new' / 'report', runs)
  shown = re.findall(r'!\[.*?\]\((.*?)\)', path.read_text())
  assert len(shown) == 4
  for name in shown:
    assert (path.parent / name).read_bytes().startswith(b'\x89PNG')


def test_the_last_ten_generations_are_shown_with_their_references(runs):
  table = generations_table(runs)
  assert table.splitlines()[0] == (
      '| context | reference | dense, step 120 | sparse\\|75, step 120 |'
  )
  rows = cells(table)
  picked = [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]
  assert rows == [
      [f'f{i}(a \\| b)', f'reference {i}', f'dense {i}', f'sparse {i}']
      for i in picked
  ]


def test_generations_are_cut_to_the_width_of_a_cell(tmp_path):
  long = ''.join(chr(ord('a') + i % 26) for i in range(500))
  record = {'context': 'f()', 'reference': [long], 'generation': '  Go.\n'}
  run = short_run(
      tmp_path / 'long', evaluation(10, 51.0, 9.0),
      generations=[(10, [record])],
  )
  (row,) = cells(generations_table({'long': run}))
  assert row[:3] == ['f()', long[:79] + '…', 'Go.']
  line = generations_table({'long': run}).splitlines()[2]
  assert line.endswith('… | Go. |')


def test_a_generation_is_matched_by_its_context(tmp_path, runs):
  other = short_run(
      tmp_path / 'other', evaluation(10, 51.0, 9.0),
      generations=[(10, records('other', 3)[::-1])],
  )
  rows = cells(generations_table({'dense': runs['dense'], 'other': other}))
  assert [row[3] for row in rows[:3]] == ['other 0', 'other 2', '–']


@hypothesis.given(st.text())
def test_cells_hold_printable_characters_only(text):
  assert escape(text).isprintable()


def test_cells_show_any_text_as_it_is_on_one_line():
  for text, shown in (
      ('a|b', 'a\\|b'),
      ('__init__ <x> `y`\nz & w',
       '\\_\\_init\\_\\_ \\<x\\> \\`y\\`<br>z &amp; w'),
      ('a\r# b', 'a\\\\r# b'), ('\x1b[2J', '\\\\x1b\\[2J'),
      ('\u202ea', '\\\\u202ea'), ('\ud800', '\\\\ud800'),
  ):
    assert escape(text) == shown


def test_fine_tuning_of_another_run_is_not_called_pre_training(
    runs, tmp_path
):
  tune = read.PhaseRecord('tune', 0, 8, 2, 8, 'task', 0.75, 64, 9.0, 18.0)
  rows = tuple(
      {'step': s, 'validation/loss': 2.0, 'validation/perplexity': 7.4,
       'target/perplexity': 9.0 - s, 'time/seconds': 1.0} for s in (4, 8)
  )
  tuned = read.RunRecord(
      'tuned', (tune,), rows, bigram={'validation/perplexity': 40.0}
  )
  text = write_report(tmp_path / 'one', {'tuned': tuned}).read_text()
  assert 're-training' not in text and 'loss_over_flops' not in text
  assert '* Fine-tuning takes tuned to target perplexity 1.00.' in text
  assert '* Fine-tuning of tuned took 72 FLOPs (0.500 of those of' in text
  both = {'dense': runs['dense'], 'tuned': tuned}
  text = write_report(tmp_path / 'two', both).read_text()
  assert '| run | after' not in text


def test_a_report_without_runs_is_refused(tmp_path):
  with pytest.raises(ValueError, match='runs is empty'):
    write_report(tmp_path / 'report', {})
  assert not (tmp_path / 'report').exists()
