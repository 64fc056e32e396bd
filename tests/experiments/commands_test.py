"""The commands: a dry run trains nothing, bad input gets one sentence."""

import json
import re

import jax
import numpy as np
import pytest

from experiments.launch.dry_run import format_plan
import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import runs
from spdf_jax.accelerator import native
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.data.tasks import task_of_inputs
from spdf_jax.runs import lifecycle
from spdf_jax.training import initial_state
from spdf_jax.training import Run
from tests.quickstart_runs import finish
from tests.quickstart_runs import small_config
from tests.quickstart_runs import start_command
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import DENSE

pytestmark = pytest.mark.ci

WITHOUT_TASK = dict(data__task='', phases__order=('pretrain', 'continuation'))


def make_run(**changes):
  return Run.create(small_config(**WITHOUT_TASK | changes))


def test_a_dry_run_prints_what_a_run_would_be_and_cost():
  # A later schedule of its own is compared with the steps before it, too.
  run = make_run(phases__continuation__learning_rate__schedule='constant')
  text = format_plan(run, 'plan')
  state = initial_state.create(run.programs)
  mask = spdf.get_mask(state.opt_state)
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  sparsified = 4 * 16 * 16 + 2 * 16 * 32
  assert f'parameters: {parameters:,}, of which {sparsified:,} in 6' in text
  assert re.search(r'h_\*/mlp/wi/kernel +1 +512 +75.00% +0.00%', text)
  never = next(x for x in text.splitlines() if x.startswith('never'))
  assert 'wte/embedding' in never and 'ln_f/scale' in never
  assert 'kernel' not in never
  assert re.search(r'pretrain +15 +4 x 32 +1,920', text)
  memory = next(x for x in text.splitlines() if x.startswith('memory:'))
  for word in ('parameters', 'gradients', 'optimizer', 'masks', 'step of'):
    assert re.search(rf'{word}.*[0-9.]+ KiB', memory)
  assert re.search(r'disk: [0-9.]+ KiB per checkpoint', text)
  record = re.search(
      r'^pretrain +(\S+e\S+) +(\S+)% +(\S+)% +75.00% +(\S+)%$', text, re.M
  )
  figures = [float(x) for x in record.groups()]
  # Counts sparsified weights only, since biases are initially zero, too.
  zeros = sum(
      np.count_nonzero(w == 0)
      for w, m in zip(
          jax.tree.leaves(state.params),
          jax.tree.leaves(mask, is_leaf=lambda m: m is None), strict=True,
      ) if m is not None
  )
  assert figures[3] == pytest.approx(100 * zeros / parameters, abs=0.005)
  # By hand, for 15 steps of 4 sequences: 3 passes, 2 FLOPs per multiply-add.
  attention = 4 * 32**2 * 16 + 3 * 2 * 32**2
  sparse, dense = (
      15 * 4 * 3 * (2 * 32 * (kept + 16 * 257) + attention)
      for kept in (sparsified / 4, sparsified)
  )
  lookup = 15 * 4 * 3 * 2 * 32 * 16 * 257
  assert figures[0] == pytest.approx(sparse, rel=1e-3)
  assert figures[1] == pytest.approx(100 * sparse / dense, abs=0.05)
  assert figures[2] == pytest.approx(
      100 * (sparse + lookup) / (dense + lookup), abs=0.05
  )
  total, budget = describe_plan(run, 'plan')['totals']
  # The mask grows after a step, whose gradients of weights are dense.
  first_step = 2 / 3 * (dense - sparse) / 15
  assert total['flops'] == pytest.approx(sparse + dense - first_step)
  assert total['of_dense'] == pytest.approx(total['flops'] / (2 * dense))
  assert total['effective_sparsity'] == pytest.approx(0.375)
  assert budget['of_dense'] == pytest.approx(total['flops'] / dense)
  assert budget['effective_sparsity'] == pytest.approx(-0.25)
  assert (
      f'takes\n{budget["of_dense"]:.1%} of the FLOPs, '
      f'{budget["of_dense_with_embedding"]:.1%} with embedding.\n'
  ) in text


def test_a_dry_run_shows_what_a_compact_state_takes():
  run = make_run(storage='compact')
  text = format_plan(run, 'plan')
  # 12 bytes per kept weight, and a bit per weight.
  assert re.search(
      r"in phase 'pretrain': [0-9.]+ KiB .* masks, 3\.1[23] bytes per weight "
      'of a sparsified layer instead of 13', text,
  )
  assert "in phase 'continuation'" not in text


def test_a_dry_run_names_the_kernels_of_the_model_s_dtype(monkeypatch):
  names = {'float32': 'avx512', 'bfloat16': 'avx512bf16'}
  monkeypatch.setattr(native, 'is_available', lambda dtype='float32': True)
  monkeypatch.setattr(native, 'kernels', lambda dtype='float32': names[dtype])
  for dtype, name in names.items():
    run = make_run(matmul='native', model__dtype=dtype)
    assert f'kernels ({name}) skip' in describe_plan(run, 'plan')['compute']


def dry_run(*flags, **changes):
  child = start_command(
      'experiments.train', '--config=configs/quickstart.py', '--dry_run',
      *flags, **WITHOUT_TASK, **changes,
  )
  return finish(child)


@pytest.mark.process
def test_a_dry_run_shows_what_each_device_of_a_mesh_holds(tmp_path):
  d = 1024
  output = dry_run(
      f'--workdir={tmp_path / "run"}', mesh__data=1, mesh__fsdp=4,
      model__d_model=d, model__d_ff=d,
  )
  assert not (tmp_path / 'run').exists()
  split = (257 + 48) * d + 6 * d**2  # Embeddings and kernels.
  whole = 6 * d + 3 * 2 * d  # Biases and norms.
  share = 4 * (split / 4 + whole) / 2**20
  masks = 6 * d**2 / 4 / 2**20
  assert (
      f': parameters {share:.1f} MiB, optimizer {2 * share:.1f} MiB, masks '
      f'{masks:.1f} MiB, and with gradients of {share:.1f} MiB among them, '
      'temporaries of a step of 4 x 32: '
  ) in output
  total, temporaries = (
      float(re.search(f'{what}([0-9.]+) MiB', output)[1]) for what in (
          r'memory on each of 4 devices \(data 1, fsdp 4, tensor 1\): ',
          'a step of 4 x 32: ',
      )
  )
  assert total == pytest.approx(3 * share + masks + temporaries, abs=0.2)


@pytest.mark.slow
def test_a_dry_run_plans_13_billion_parameters_on_16_devices():
  output = dry_run(
      model__preset='cerebras-gpt-13b', model__vocab_size=50257,
      model__n_layers=40, model__n_heads=40, model__d_model=5120,
      model__d_ff=20480, model__max_length=2048,
      model__scan_layers=True, model__remat='full',
      loss__chunk=128, mesh__data=1, mesh__fsdp=16,
      phases__pretrain__batch_size=16, phases__continuation__batch_size=16,
  )
  assert 'parameters: 12,85' in output
  share = 12.85e9 * 4 / 16 / 2**30
  match = re.search(r'16 devices .*: parameters ([0-9.]+) GiB', output)
  assert abs(float(match[1]) / share - 1) < 0.05


@pytest.mark.slow
def test_sparsities_that_change_are_shown_from_first_to_last():
  run = make_run(
      arg='algorithm=granet',
      phases__pretrain__algorithm__update_every='2 steps',
      phases__pretrain__algorithm__update_until='10 steps',
  )
  plan = describe_plan(run, 'plan')
  assert re.search(
      r'h_\*/mlp/wi/kernel +1 +512 +0.00% to 75.00% +0.00%\n',
      format_plan(run, 'plan'),
  )
  first, second = plan['phases']
  assert first['mask_updates'] == [[2, 10, 2]]
  assert second['mask_updates'] == [[15, 15, 1]]
  assert first['sparsity'] == 0.75 and len(first['spans']) == 6
  total = sum(s['steps'] * s['flops_per_step'] for s in first['spans'])
  assert total == pytest.approx(15 * first['flops_per_step'])


@pytest.mark.process
@pytest.mark.parametrize('flags, changes, message', [
    ((), dict(data__corpus='python-stdlb'), "'python-stdlb' is unknown; did y"),
    (('--dry_run',), dict(init_from='none@pretrain'),
     "'none@pretrain' names no checkpoint"),
])
def test_bad_input_is_one_sentence_and_exit_status_one(
    flags, changes, message, tmp_path
):
  child = start_command(
      'experiments.train', '--config=configs/quickstart.py',
      f'--workdir={tmp_path / "run"}', *flags, **WITHOUT_TASK | changes,
  )
  output = finish(child, status=1)
  assert 'Traceback' not in output and message in output
  assert len(output.splitlines()) == 1
  assert not (tmp_path / 'run').exists()


@pytest.mark.process
def test_the_quickstart_reports_on_both_runs(tmp_path):
  child = start_command(
      'experiments.quickstart', f'--workdir={tmp_path}', **WITHOUT_TASK
  )
  output = finish(child)
  report = (tmp_path / 'report.md').read_text()
  assert f'{tmp_path / "report.md"} is written' in output
  assert '| dense | ' in report and '| variable-spdf | ' in report


def test_the_dense_baseline_shares_weights_and_data_with_the_sparse_run():
  sparse = make_run()
  dense = make_run(phases__pretrain__algorithm=DENSE)
  weights = [run.programs.init_params() for run in (sparse, dense)]
  assert_same_arrays(*weights)
  state = initial_state.create(sparse.programs)
  mask = spdf.get_mask(state.opt_state)
  assert_same_arrays(state.params, spdf.apply_mask(weights[0], mask))
  assert_same_arrays(initial_state.create(dense.programs).params, weights[0])
  for step in range(sparse.plan.total_steps):
    batches = (run.programs.batch_at(step) for run in (sparse, dense))
    for one, other in zip(*batches):
      np.testing.assert_array_equal(one, other)


def test_another_seed_has_other_weights_masks_and_data():
  one, other = make_run(), make_run(seed=1)
  embeddings = [
      r.programs.init_params()['wte']['embedding'] for r in (one, other)
  ]
  assert (embeddings[0] != embeddings[1]).any()
  states = [initial_state.create(r.programs) for r in (one, other)]
  masks = [
      spdf.get_mask(state.opt_state)['h_0']['mlp']['wi']['kernel']
      for state in states
  ]
  assert (masks[0] != masks[1]).any()
  first, second = (run.programs.batch_at(0).inputs for run in (one, other))
  assert (first != second).any()


def test_a_plan_and_a_launch_open_corpus_and_task_once(tmp_path, monkeypatch):
  opened = []

  def counted(name):
    call = getattr(data, name)
    monkeypatch.setattr(
        data, name, lambda *args, **kw: opened.append(name) or call(*args, **kw)
    )

  counted('prepare_corpus')
  counted('load_task')
  config = small_config(
      phases__order=('pretrain',), phases__pretrain__duration='4 steps'
  )
  format_plan(Run.create(config, planning=True), 'plan')
  assert sorted(opened) == ['load_task', 'prepare_corpus']
  lifecycle.finish(Run.create(config, tmp_path).open())
  assert sorted(opened[2:]) == ['load_task', 'prepare_corpus']


def test_a_task_is_validated_all_over_its_split_by_all_references(
    tmp_path, monkeypatch
):
  pytest.importorskip('sacrebleu')
  texts = lambda i: ('red', 'crimson') if i % 2 else (f'text {i}',)
  inputs = [data.Input(f'input {i}', texts(i)) for i in range(41)]
  task = task_of_inputs('toy', {'train': inputs, 'validation': inputs})
  monkeypatch.setattr(data, 'load_task', lambda *_, **__: task)
  monkeypatch.setattr(evaluation, 'generate', lambda decoder, params, prompts,
                      **settings: [[*b' red'] for _ in prompts])
  read = []
  evaluate_loss = evaluation.loss_evaluator

  def reading(apply_fn, batches, **settings):
    read.append(batches)
    return evaluate_loss(apply_fn, batches, **settings)

  monkeypatch.setattr(evaluation, 'loss_evaluator', reading)
  run = Run.create(small_config(), tmp_path)
  _, (generate,) = lifecycle.evaluators(run)
  contexts = [
      bytes(row[:row.tolist().index(256)].astype(np.uint8)).decode()
      for batch in read[1] for row in batch.inputs
  ]
  # Every seventh of 61 pairs, for two batches of four.
  assert contexts == [f'input {i}' for i in (0, 5, 9, 14, 19, 23, 28, 33)]
  scores = dict(generate(3, None))
  (path,) = (tmp_path / 'generations').iterdir()
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert [r['reference'] for r in records] == [
      'text 0', ['red', 'crimson'], 'text 22', ['red', 'crimson']
  ]
  assert scores['task/chrf'] < 100


def test_validation_reads_fixed_batches_of_the_validation_split():
  run = make_run()
  batches = lifecycle.validation_batches(run)
  assert [b.inputs.shape for b in batches] == [(4, 32)] * 2
  tokens = np.asarray(run.corpus.validation.tokens[:32])
  np.testing.assert_array_equal(batches[0].inputs[0], tokens)


def test_a_config_is_launched_from_python_and_reports_its_masks(tmp_path):
  config = small_config(
      arg='algorithm=rigl', **WITHOUT_TASK,
      phases__pretrain__algorithm__update_every='5 steps',
      phases__pretrain__algorithm__update_until='10 steps',
  )
  workdir = tmp_path / 'run'
  finished = runs.launch(config, workdir)
  assert finished.last_step == 30
  text = (workdir / 'report.md').read_text()
  assert 'validation perplexity' in text
  assert "* run's masks are updated twice within pretrain, where" in text
  assert re.search(r'\| run \| pretrain \| 75% \| 75% \| 2 \|', text)
  assert re.search(r'\| run \| continuation \| 0% \| 0% \| 1 \|', text)
  assert (workdir / 'mask_updates.png').is_file()
  again = runs.launch(config, workdir)  # All steps are done.
  assert again.rows == finished.rows


def test_a_run_in_the_current_folder_has_the_name_of_the_folder(
    tmp_path, monkeypatch
):
  (tmp_path / 'run').mkdir()
  monkeypatch.chdir(tmp_path / 'run')
  config = small_config(
      data__task='', phases__order=('pretrain',),
      phases__pretrain__duration='4 steps',
  )
  assert runs.launch(config, '.').name == 'run'
  assert '| run |' in (tmp_path / 'run' / 'report.md').read_text()


@pytest.mark.parametrize('other, compiled', [
    (dict(batch_size=2), ['4 x 32']),
    (dict(batch_size=16, length=16), ['4 x 32', '16 x 16']),
])
def test_a_dry_run_compiles_steps_that_may_take_most_memory(other, compiled):
  run = make_run(**{
      f'phases__continuation__{name}': value for name, value in other.items()
  })
  text = format_plan(run, 'plan')
  assert re.findall(r'temporaries of a step of (\d+ x \d+)', text) == compiled
