"""Results tables are filled by the runs that belong there, and by no others."""

import json
import os
import pathlib
import shutil
import statistics

import pytest

from configs import quickstart
from experiments.papers import paper_tables
from experiments.papers.paper_tables import report
from experiments.papers.published_results import RESULTS
from experiments.scores.ancestry import read_ancestry
from experiments.scores.lambada import LAMBADA_PROTOCOLS
from experiments.scores.protocols import PROTOCOLS
from experiments.scores.scored_runs import find_runs
from experiments.scores.suites import SUITES
from experiments.scores.task_scores import TEXT_PROTOCOLS
from spdf_jax.models import PRESETS
from spdf_jax.training.configs.fields import plain
from tests.refusals import refuse
from tests.tiny_run import static

pytestmark = pytest.mark.papers

RIGL = dict(name='rigl', sparsity=0.8, update_every=10, update_until=80)
RISING = RIGL | dict(
    sparsity=dict(schedule='cubic', initial=0.5, final=0.8, steps=80)
)


def make_run(
    workdir, phases, *, preset='gpt2-small', task='', seed=0, init_from='',
    done=None, **model,
):
  """Writes a workdir; a phase is (name, source, spec, sparsity, steps).

  A number is the spec of a static mask.
  """
  workdir.mkdir(parents=True)
  records, start = [], 0
  for name, source, _, sparsity, steps in phases:
    records.append(dict(
        name=name, start=start, steps=steps, batch_size=4, length=8,
        source=source, sparsity=sparsity, tokens=32 * steps, flops_per_step=1.0,
        dense_flops_per_step=2.0, mask_updates=[], spans=[],
        overall_sparsity=None, notes=[],
    ))
    start += steps
  config = plain(quickstart.get_config())
  config |= dict(
      seed=seed, model=dict(preset=preset, **model), init_from=init_from,
      phases=dict(
          order=[name for name, *_ in phases],
          **{
              name: config['phases']['pretrain'] | dict(
                  algorithm=spec if isinstance(spec, dict) else static(spec),
                  duration=f'{steps} steps', data=source,
              )
              for name, source, spec, _, steps in phases
          },
      ),
  )
  config['data'] |= dict(task=task, corpus='pile')
  (workdir / 'checkpoints').mkdir()
  (workdir / 'config.json').write_text(json.dumps(config))
  (workdir / 'plan.json').write_text(json.dumps(dict(
      name=workdir.name, phases=records, model={}, parameters=0,
      sparsified_parameters=0, bigram=None, compute='', totals=[],
      data=dict(corpus='pile', tokenizer='bytes', task=task),
  )))
  row = {'step': start if done is None else done, 'train/loss': 1.0}
  (workdir / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  return workdir


def pretrain(workdir, sparsity=0.75, steps=100, **fields):
  return make_run(
      workdir, [('pretrain', 'corpus', sparsity, sparsity, steps)], **fields
  )


def tune(workdir, start, task='e2e', sparsity=0.0, **fields):
  return make_run(
      workdir, [('finetune', 'task', sparsity, sparsity, 20)], task=task,
      init_from=str(start), **fields,
  )


def score(
    path, model, value, task='e2e', protocol='lora_e2e', metric='bleu',
    **settings,
):
  entry = dict(task=task, protocol=protocol, metric=metric, value=value)
  path.write_text(json.dumps({
      'model': str(model), 'settings': settings,
      'scores': [entry | {'note': ''}],
  }))


def cells_of(table, folder):
  filled = paper_tables.fill_results(RESULTS[table], find_runs([folder]).runs)
  return {(c.result.row, c.result.column): c for c in filled}


def test_a_run_fills_the_cell_of_its_config(tmp_path):
  start = pretrain(tmp_path / 'runs' / 'small-75')
  values = (66.0, 67.5, 66.9)
  for seed, value in enumerate(values):
    run = tune(tmp_path / 'sweep' / str(seed), start, seed=seed)
    score(run / 'scores.json', run, value)
  cells = cells_of('spdf', tmp_path)
  cell = cells['GPT-2 Small 75%', 'E2E BLEU']
  assert cell.values == values and cell.tokens == (3200,) * 3
  assert sum(bool(c.values) for c in cells.values()) == 1
  assert cells['GPT-2 Small 75%', 'DART BLEU'].reason == 'no run'
  text = report('spdf', [tmp_path])
  mean, deviation = statistics.fmean(values), statistics.stdev(values)
  assert (
      f'| GPT-2 Small 75% | E2E BLEU | {mean:.2f} ± {deviation:.2f} | 3 | '
      '3.2e+03 | 66.50 ± 0.85 | 0.30 |'
  ) in text
  assert 'SPDF, table 1: 1 of 24 cells filled' in text
  assert f'{start}: gpt2-small static 75% on 3.2e+03 tokens' in (
      text.replace('\\', '')
  )


def test_sparse_and_dense_fine_tuning_are_told_apart(tmp_path):
  start = pretrain(tmp_path / 'start')
  for name, sparsity in (('kept', 0.75), ('freed', 0.0)):
    run = tune(tmp_path / name, start, sparsity=sparsity)
    score(run / 's.json', run, 60 + sparsity)
  cells = cells_of('spdf_tuning', tmp_path)
  row = 'GPT-2 Small 75%, fine-tuned'
  assert cells[f'{row} sparsely', 'E2E BLEU'].values == (60.75,)
  assert cells[f'{row} densely', 'E2E BLEU'].values == (60.0,)


def test_split_and_extended_variable_spdf_fill_the_same_row(tmp_path):
  # Split and extended: 5/6 and 1/6 of a budget; all of it and 15 % more.
  for name, steps in (('split', (500, 100)), ('extended', (600, 90))):
    run = make_run(
        tmp_path / name,
        [('pretrain', 'corpus', 0.9, 0.9, steps[0]),
         ('continuation', 'corpus', 0.0, 0.0, steps[1]),
         ('finetune', 'task', 0.0, 0.0, 20)],
        preset='cerebras-gpt-6.7b', task='dart',
    )
    score(run / 's.json', run, 49.0, task='dart', protocol='dart')
    assert cells_of('variable', run)['6.7B variable', 'DART BLEU'].values == (
        49.0,
    )
  cell = cells_of('variable', tmp_path)['6.7B variable', 'DART BLEU']
  assert not cell.values and cell.reason.startswith('several configs: ')


def test_the_cell_of_a_scored_phase_follows_from_the_phases_before_it(tmp_path):
  run = make_run(
      tmp_path / 'life',
      [('pretrain', 'corpus', 0.75, 0.75, 100),
       ('finetune', 'task', 0.0, 0.0, 20)],
      preset='cerebras-gpt-256m', task='dart',
  )
  scores = dict(protocol='cerebras_gpt', metric='accuracy')
  score(tmp_path / 'a.json', f'{run}@pretrain', 0.385, 'arc_easy', **scores)
  score(tmp_path / 'b.json', run, 0.9, 'arc_easy', **scores)
  cell = cells_of('variable_accuracy', tmp_path)['256M static 75%', 'arc_easy']
  assert cell.values == (38.5,)
  assert read_ancestry(f'{run}@pretrain').task == ''


@pytest.mark.parametrize('spec, tokens, table, row', [
    (0.0, 112e9, 'llama', 'dense'),
    (0.8, 112e9, 'llama', 'static 80%'),
    (RIGL | dict(name='set'), 112e9, 'llama', 'SET 80%'),
    (RIGL, 112e9, 'llama', 'RigL 80%'),
    (RIGL, 2.6e9, 'granet', 'RigL 80%'),
    (RISING, 2.6e9, 'granet', 'GraNet 50 to 80%'),
])
def test_runs_of_llama_are_told_apart(tmp_path, spec, tokens, table, row):
  run = make_run(
      tmp_path / 'run',
      [('pretrain', 'corpus', spec, 0.8 if spec else 0.0, int(tokens / 32))],
      preset='llama-1.3b',
  )
  for metric in ('loss', 'perplexity'):
    score(run / f'{metric}.json', run, 2.5, 'validation', 'mean over tokens',
          metric)
  for name in ('llama', 'granet'):
    rows = {r for (r, _), c in cells_of(name, tmp_path).items() if c.values}
    assert rows == ({row} if name == table else set())


ROUNDS = [
    (f'round{i}', 'corpus', sparsity, sparsity, 100)
    for i, sparsity in enumerate((0.0, 0.305, 0.517, 0.664, 0.838))
]


def test_every_scored_round_of_a_workdir_fills_the_row_of_that_round(tmp_path):
  folder = tmp_path / 'scores'
  folder.mkdir()
  for seed in (0, 1):
    run = make_run(
        tmp_path / 'runs' / str(seed), ROUNDS, preset='gpt3-1.3b', seed=seed
    )
    for i in (0, 1, 3, 4):
      score(
          folder / f'{seed}-round{i}.json', f'{run}@round{i}', 2 + i + seed / 2,
          'validation', 'mean over tokens', 'loss',
      )
  cells = cells_of('iterative', tmp_path)
  rows = [row for row, column in cells if column == 'Pile loss']
  assert rows[:4] == ['dense', '30.5%, round 1', '66.4%, round 3', '83.8%']
  losses = {
      row: sorted(cells[row, 'Pile loss'].values) for row in rows[:4]
  }
  assert losses == {
      'dense': [2, 2.5], '30.5%, round 1': [3, 3.5],
      '66.4%, round 3': [5, 5.5], '83.8%': [6, 6.5],
  }
  assert cells['66.4%, round 3', 'Pile loss'].tokens == (4 * 3200,) * 2
  assert cells['66.4%, round 3', 'LAMBADA accuracy'].reason.startswith(
      'not scored: '
  )
  text = report('iterative', [tmp_path])
  assert '| 66.4%, round 3 | Pile loss | 5.25 ± 0.35 | 2 | 1.28e+04 |' in text
  assert 'belong in no row' not in text


def test_a_run_given_by_two_paths_counts_once(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run = make_run(tmp_path / 'runs' / 'a', ROUNDS, preset='gpt3-1.3b')
  score(tmp_path / 'runs' / 'a.json', 'runs/a', 2.5)
  for folder in (tmp_path / 'runs', 'runs', f'../{tmp_path.name}/runs'):
    (record,) = find_runs([folder]).runs
    assert len(record.scores) == 1 and os.path.samefile(record.source, run)


def test_scores_of_the_last_round_count_for_the_whole_run(tmp_path):
  run = make_run(tmp_path / 'run', ROUNDS, preset='gpt3-1.3b')
  measure = 'validation', 'mean over tokens', 'loss'
  score(tmp_path / 'run.json', run, 2.5, *measure)
  score(tmp_path / 'last.json', f'{run}@round4', 2.5, *measure)
  cell = cells_of('iterative', tmp_path)['83.8%', 'Pile loss']
  assert cell.values == (2.5,)
  score(tmp_path / 'last.json', f'{run}@round4', 2.6, *measure)
  refuse('loss 2.5 for .* file 2.6', find_runs, [tmp_path])


def test_rounds_that_start_from_a_dense_run_are_counted_from_it(tmp_path):
  dense = make_run(tmp_path / 'dense', ROUNDS[:1], preset='gpt3-1.3b')
  pruned = make_run(
      tmp_path / 'pruned', ROUNDS[1:], preset='gpt3-1.3b', init_from=str(dense)
  )
  score(tmp_path / 'one.json', f'{pruned}@round1', 0.4, 'lambada',
        'lambada_last_word', 'accuracy')
  cells = cells_of('iterative', tmp_path)
  assert cells['30.5%, round 1', 'LAMBADA accuracy'].values == (40.0,)


def test_rows_of_published_models_are_not_filled_by_runs(tmp_path):
  make_run(tmp_path / 'run', ROUNDS, preset='gpt3-1.3b')
  text = report('iterative', [tmp_path])
  lines = [x for x in text.splitlines() if '| a published model |' in x]
  assert len(lines) == 4 and all(x.startswith('| GPT-') for x in lines)
  assert text.count('published models\n') == 1


def test_configs_other_than_the_papers_fill_no_cell(tmp_path):
  start = pretrain(tmp_path / 'start')
  odd = {
      'other sparsity': tune(tmp_path / 'a', pretrain(tmp_path / 'a0', 0.6)),
      'other sizes': tune(
          tmp_path / 'b', pretrain(tmp_path / 'b0', d_model=384), d_model=384
      ),
      'other task': tune(tmp_path / 'c', start, task='jsonl'),
  }
  for run in odd.values():
    score(run / 's.json', run, 66.0)
  assert not any(c.values for c in cells_of('spdf', tmp_path).values())
  text = report('spdf', [tmp_path]).replace('\\', '')
  assert 'gpt2-small resized static 75%' in text
  assert 'gpt2-small static 60% on 3.2e+03 tokens fine-tuned on e2e' in text
  text = report('spdf', [tmp_path], 'gpt2-small resized')
  assert (
      '| GPT-2 Small 75%, here gpt2-small resized | E2E BLEU | 66.00 | 1 |'
  ) in text
  assert 'GPT-3 XL' not in text


def test_an_imported_model_fills_no_row(tmp_path):
  (tmp_path / 'gpt2' / 'checkpoints').mkdir(parents=True)
  run = tune(tmp_path / 'tuned', tmp_path / 'gpt2')
  score(run / 's.json', run, 68.0)
  assert not any(c.values for c in cells_of('spdf', tmp_path).values())
  assert 'gpt2-small unknown' in report('spdf', [tmp_path])


def test_empty_cells_show_why(tmp_path):
  start = pretrain(tmp_path / 'start', 0.0)
  unscored = tune(tmp_path / 'unscored', start, task='dart')
  twice = [tune(tmp_path / name, start, seed=3) for name in ('x', 'y')]
  for run in twice:
    score(run / 's.json', run, 67.0)
  cells = cells_of('spdf', tmp_path)
  assert cells['GPT-2 Small 0%', 'DART BLEU'].reason == (
      f'not scored: {unscored}'
  )
  assert cells['GPT-2 Small 0%', 'E2E BLEU'].reason == (
      f'same seed: {twice[0]}, {twice[1]}'
  )


def test_unfinished_and_lost_runs_are_named(tmp_path):
  make_run(tmp_path / 'half', [('pretrain', 'corpus', 0.75, 0.75, 100)],
           done=40)
  tune(tmp_path / 'lost', 'runs/nowhere')
  score(tmp_path / 'hf.json', 'hub/gpt2', 50.0)
  collected = find_runs([tmp_path])
  assert not collected.runs
  text = '\n'.join(collected.problems)
  assert 'half is at step 40 of 100; train it to the end.' in text
  assert 'lost starts from runs/nowhere, which is not found' in text
  assert 'scores hub/gpt2, which is no run here' in text


def test_the_miniature_table_is_what_its_records_give(tmp_path, monkeypatch):
  experiments = pathlib.Path(__file__).parents[2] / 'experiments'
  folder = experiments / 'results' / 'spdf-miniature'
  shutil.unpack_archive(folder / 'records.zip', tmp_path / 'records')
  monkeypatch.chdir(tmp_path)
  runs = ['records/sweeps/', 'records/runs/']
  text = report('spdf', runs, 'gpt-mini resized')
  assert (folder / 'table.md').read_text().rstrip() == text


def test_scores_are_matched_by_the_folder_of_their_run(tmp_path, monkeypatch):
  start = pretrain(tmp_path / 'runs' / 'small-75')
  run = tune(tmp_path / 'sweeps' / 'e2e' / 'seed=0', 'runs/small-75')
  for workdir in (start, run):  # Tables do not need the weights.
    shutil.rmtree(workdir / 'checkpoints')
  path = tmp_path / 'sweeps' / 'e2e' / 'test.json'
  score(path, 'sweeps/e2e/seed=0', 66.0)
  # The format of sweeps.
  path.write_text(json.dumps([json.loads(path.read_text())]))
  # The current folder is not that of the training.
  monkeypatch.chdir(tmp_path.parent)
  cell = cells_of('spdf', run.parent)['GPT-2 Small 75%', 'E2E BLEU']
  assert cell.values == (66.0,)


def test_scores_of_a_limited_evaluation_are_not_used(tmp_path):
  run = tune(tmp_path / 'a', pretrain(tmp_path / 'parent'))
  score(tmp_path / 'trial.json', run, 12.3, limit=2, search='hu2021')
  collected = find_runs([tmp_path])
  assert all(run.scores == {} for run in collected.runs)
  assert collected.problems == (
      f'{tmp_path}/trial.json has no official scores, since limit is 2',
  )


@pytest.mark.parametrize('foreign', [
    {'model': 'gpt', 'scores': [{'task': 'e2e', 'value': 1.0}]}, [1],
])
def test_other_json_files_are_not_read_as_scores(tmp_path, foreign):
  run = pretrain(tmp_path / 'a')
  (run / 'foreign.json').write_text(json.dumps(foreign))
  assert find_runs([tmp_path]).problems == ()


@pytest.mark.parametrize('table, folder, message', [
    ('spdf', 'nowhere', "nowhere' is no folder"), ('spdf', '', 'holds no run'),
    ('spdf_e2', '', "'spdf_e2' is unknown; .*'spdf_e2e'"),
])
def test_tables_and_folders_that_do_not_exist_are_refused(
    tmp_path, table, folder, message
):
  refuse(message, report, table, [tmp_path / folder])


def test_every_cell_names_a_metric_that_experiments_evaluate_has():
  known = {
      'validation': {'mean over tokens'}, 'curation': {'target_tokens'},
      'lambada': set(LAMBADA_PROTOCOLS), 'wikitext': {'wikitext_megatron'},
      **TEXT_PROTOCOLS,
      **{m.task: {'cerebras_gpt'} for m in SUITES['cerebras_gpt']},
      'mean': set(SUITES),
  }
  for cell in (cell for table in RESULTS.values() for cell in table):
    task, protocol, metric, _ = cell.measure
    assert protocol in known[task.partition(' ')[0]]
    if protocol in PROTOCOLS:
      assert metric in PROTOCOLS[protocol].metrics
    assert cell.arm is None or cell.arm.model in PRESETS


def test_published_tables_have_all_their_cells():
  assert {name: len(table) for name, table in RESULTS.items()} == dict(
      spdf=24, spdf_tuning=12, spdf_e2e=30, spdf_webnlg=18, spdf_dart=18,
      variable=4, variable_accuracy=16, iterative=10, llama=8, granet=2,
  )
  # Seven tasks and their mean, as printed.
  for row in ('256M static 75%', '256M variable'):
    *tasks, mean = (
        float(c.printed) for c in RESULTS['variable_accuracy'] if c.row == row
    )
    assert statistics.fmean(tasks) == pytest.approx(mean, abs=0.06)
