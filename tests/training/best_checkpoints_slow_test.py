"""The best checkpoint in whole runs: kills by the system, and a sweep."""

import json
import random

import numpy as np
import pytest

from experiments.preparation import prepare_files
from experiments.scores import sheets
from experiments.scores import task_scores
from experiments.scores.ancestry import read_ancestry
from experiments.scores.language_models import open_run
from experiments.sweep import run_sweep
from spdf_jax.data import prepare_corpus
from spdf_jax.training import find_checkpoint
from tests.quickstart_runs import CACHE
from tests.quickstart_runs import small_config
from tests.quickstart_runs import start_command
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import DENSE
from tests.tiny_run import rows_in
from tests.training.kill_test import kill_after
from tests.training.kill_test import restore
from tests.training.kill_test import SECONDS

pytestmark = pytest.mark.slow

RATE = 'phases.pretrain.learning_rate.peak'
STOP = dict(metric='validation/loss', patience=99)


def start(workdir):
  # The rate stays so large that the loss rises again.
  return start_command(
      'experiments.train', '--config=configs/quickstart.py',
      f'--workdir={workdir}', data__task='', eval_every=2,
      phases__order="('pretrain','continuation')",
      phases__pretrain__learning_rate__peak=0.3,
      phases__pretrain__learning_rate__final_fraction=1.0,
      phases__pretrain__early_stop__metric=STOP['metric'],
      phases__pretrain__early_stop__patience=STOP['patience'],
  )


@pytest.mark.filterwarnings('ignore:Sharding info not provided')
def test_a_run_killed_ten_times_keeps_the_same_best_bit_for_bit(tmp_path):
  prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=CACHE)
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  output, _ = start(whole).communicate(timeout=SECONDS)
  best = int(find_checkpoint(f'{whole}@pretrain:best').name)
  assert 2 <= best < 15, output
  rng = random.Random(1)
  around = [best - 2, best - 1, best, best, best, best + 1, best + 2, best + 3]
  reached = [
      kill_after(start(killed), killed, max(step, 0), rng.uniform(0.0, 0.1))
      for step in sorted([*around, 14, 15])
  ]
  print(f'best at step {best}; killed when the log held steps {reached}')
  output, _ = start(killed).communicate(timeout=SECONDS)
  for phase in ('@pretrain:best', '@pretrain', ''):
    checkpoints = [find_checkpoint(f'{run}{phase}') for run in (whole, killed)]
    assert checkpoints[0].name == checkpoints[1].name, output
    assert_same_arrays(*map(restore, checkpoints))
  assert rows_in(whole) == rows_in(killed)


def test_the_choice_of_a_sweep_follows_the_best_checkpoint(tmp_path):
  rng = np.random.default_rng(0)
  (tmp_path / 'texts').mkdir()
  for i in range(16):
    text = ''.join(rng.choice([*'abcdefgh'], size=100))
    (tmp_path / 'texts' / f'{i}.txt').write_text(text)
  prepare_files(
      tmp_path / 'texts', tokenizer='bytes', output=tmp_path / 'corpus',
      validation=0.2, test=0.2,
  )
  config = small_config(
      data__task='', data__corpus=str(tmp_path / 'corpus'), data__tokenizer='',
      data__max_epochs__corpus=1000, model__d_model=64, model__d_ff=256,
      phases__order=('pretrain',), phases__pretrain__duration='200 steps',
      phases__pretrain__algorithm=DENSE, phases__pretrain__batch_size=16,
      phases__pretrain__learning_rate__final_fraction=1.0,
      phases__pretrain__early_stop=STOP, eval_every=10,
      evaluation__corpus_batches=8,
  )
  runs, settings = tmp_path / 'runs', sheets.Settings()
  list(run_sweep(
      config, runs, [f'{RATE}=1e-2,5e-4'], seeds=1, metric='validation/loss',
      settings=settings, test_tasks=['validation'],
  ))
  chosen, other = (runs / f'{RATE}={x},seed=0' for x in (0.01, 0.0005))
  losses = {}
  for run in (chosen, other):
    rows = [row for row in rows_in(run) if 'validation/loss' in row]
    values = [row['validation/loss'] for row in rows]
    assert values[-1] == min(values)
    losses[run] = values[-1]
    # The last weights, which would have made the other rate the choice.
    last = next(row for row in rows if row['step'] == 200)
    losses[run, 'last'] = last['validation/loss']
  assert losses[chosen, 'last'] > losses[other, 'last']
  assert losses[chosen] < losses[other]
  scored, = json.loads((runs / 'test.json').read_text())
  assert scored['model'] == str(chosen)
  best = open_run(f'{chosen}@pretrain:best')
  assert_same_arrays(open_run(str(chosen)).params, best.params)
  again = list(task_scores.score_task(best, 'validation', '', settings))
  entry = sheets.to_json(best.name, again, settings)
  assert scored['scores'] == entry['scores']
  stage, = read_ancestry(f'{chosen}@pretrain:best').stages
  step = int(find_checkpoint(f'{chosen}@pretrain:best').name)
  assert stage.steps == step < 200 and stage.tokens == step * 16 * 32
  stage, = read_ancestry(chosen).stages
  # Includes the steps after the best one, which were needed to find it.
  assert stage.steps == 200
