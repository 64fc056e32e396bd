"""experiments.race: equal budgets, choice of rates, and refusals."""

import concurrent.futures
import json
import math

import ml_collections
import pytest

from tests.quickstart_runs import ROOT
from tests.refusals import refuse

pytestmark = [
    pytest.mark.papers,
    pytest.mark.skipif(
        not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
    ),
]

from configs import quickstart  # noqa: E402
from experiments import race  # noqa: E402
from experiments.launch import config_file  # noqa: E402
from experiments.pool import worker as pool_worker  # noqa: E402
from spdf_jax import training  # noqa: E402

NAMES = 'dense.py,sparse.py:x=1,y=2'
BEST = 2e-3


def small_config(sparsity):
  config = quickstart.get_config(f'sparsity={sparsity}')
  config.model.update(
      n_layers=1, n_heads=2, d_model=32, d_ff=64, max_length=16, vocab_size=257
  )
  config.data.tokenizer = 'bytes'
  for name in config.phases.order:
    config.phases[name].update(length=16, batch_size=2)
  return config


@pytest.fixture
def made_up(monkeypatch):
  """Replaces training by outcomes, and processes by threads."""
  configs = {'dense.py': small_config(0.5), 'sparse.py:x=1,y=2': (
      small_config(0.9))}
  steps = []

  def train(run, workdir):
    steps.append((workdir.parent.name, run.plan.total_steps))
    rate = run.config.phases[0].learning_rate.peak
    sparse = workdir.parent.name.startswith('sparse')
    loss = 2 + 0.1 * (rate != BEST) + 0.01 * run.config.seed - 0.05 * sparse
    return {
        'validation/loss': loss, 'flops': 1e9, 'steps': steps[-1][1],
        'curve': [[steps[-1][1] // 2, 1.0, 2.5], [steps[-1][1], 2.0, loss]],
    }

  monkeypatch.setattr(pool_worker, 'train', train)
  monkeypatch.setattr(
      config_file.Parser, 'parse', lambda self, name: configs[name]
  )
  monkeypatch.setattr(
      concurrent.futures, 'ProcessPoolExecutor',
      lambda workers, *_: concurrent.futures.ThreadPoolExecutor(1),
  )
  configs['steps'] = steps
  return configs


def run(
    folder, names=NAMES, budget='1e10FLOPs', seeds=5, rates=(), spread=0.03
):
  return race.race(names, budget, seeds, rates, spread, str(folder))


def test_every_config_takes_the_budget_and_differences_are_paired(
    made_up, tmp_path
):
  report = run(tmp_path)
  assert '| sparse-x=1,y=2 |' in report
  assert '-0.0500 (-0.0500 to -0.0500)' in report
  taken = dict(made_up['steps'])
  assert len(made_up['steps']) == 10
  assert taken['sparse-x=1,y=2'] > taken['dense']
  rows = [r.split(' | ') for r in report.splitlines() if r.startswith('| ')][2:]
  spent = [float(row[4]) for row in rows]
  assert spent == pytest.approx([1e10] * 2, rel=1e-2)
  if (tmp_path / 'race.png').exists():
    assert (tmp_path / 'race.png').stat().st_size


def test_a_killed_race_ends_with_the_same_table(made_up, tmp_path, monkeypatch):
  whole = run(tmp_path / 'whole', rates=['1e-3', '2e-3', '4e-3'])
  train, count = pool_worker.train, len(made_up['steps'])

  def killed(run, workdir):
    if len(made_up['steps']) == count + 7:
      raise OSError('killed')
    return train(run, workdir)

  monkeypatch.setattr(pool_worker, 'train', killed)
  with pytest.raises(OSError, match='killed'):
    run(tmp_path / 'cut', rates=['1e-3', '2e-3', '4e-3'])
  monkeypatch.setattr(pool_worker, 'train', train)
  again = run(tmp_path / 'cut', rates=['1e-3', '2e-3', '4e-3'])
  assert again.splitlines()[:-1] == whole.splitlines()[:-1]
  assert len(made_up['steps']) == 2 * count
  # Three rates on three tuning seeds, the best of them on seeds 1 to 5.
  assert count == 2 * (3 * 3 + 5) and '| 0.002 | 5 |' in whole


def test_rates_are_tuned_on_seeds_that_are_not_judged(made_up, tmp_path):
  report = run(tmp_path, rates=['1e-3', '2e-3'])
  runs = json.loads((tmp_path / 'results.json').read_text())['runs']
  seeds = lambda rate: {
      int(name.rpartition('=')[2]) for name in runs if f'rate={rate},' in name
  }
  tuning = seeds(1e-3)
  judged = seeds(BEST) - tuning
  assert tuning == {101, 102, 103} and judged == {1, 2, 3, 4, 5}
  # The mean over judged runs alone: losses rise by 0.01 with each seed.
  assert '| 2.0300 ± ' in report and '| 1.9800 ± ' in report


def test_durations_warm_ups_and_update_times_are_scaled_to_the_budget():
  config = quickstart.get_config('algorithm=rigl')
  config.phases.pretrain.learning_rate.warmup = '50 steps'
  config.phases.pretrain.algorithm.update_every = '30 steps'
  half = race.scaled(config, 0.5)
  before, after = config.phases.pretrain, half.phases.pretrain
  assert half.phases.order == ('pretrain', 'continuation')
  assert after.duration == '500 steps' and before.duration == '1000 steps'
  assert after.learning_rate.warmup == '25 steps'
  assert half.phases.continuation.learning_rate.warmup == '5%'
  assert after.algorithm.update_every == '15 steps'
  assert after.algorithm.update_until == '75%'
  assert race.scaled(config, 1.0).phases.pretrain.to_dict() == before.to_dict()


def test_every_config_field_that_is_a_time_is_scaled():
  config = quickstart.get_config()
  config.revival_warmup = 20
  config.phases.pretrain.duration = '1.5k steps'
  config.phases.pretrain.learning_rate.warmup = '0 steps'
  config.phases.pretrain.algorithm = dict(name='gmp', sparsity=dict(
      schedule='cubic', initial=0.5, final=0.75, start=20, steps='200'
  ))
  config.phases.continuation.rewind_weights_to = '100 steps'
  config.phases.continuation.learning_rate.to = '50'
  scaled = race.scaled(config, 0.1)
  phase = scaled.phases.pretrain
  assert phase.duration == '0.15k steps' and phase.learning_rate.warmup == (
      '0 steps'
  )
  assert phase.algorithm.sparsity.to_dict() == dict(
      schedule='cubic', initial=0.5, final=0.75, start=2, steps='20'
  )
  assert scaled.phases.continuation.rewind_weights_to == '10 steps'
  assert scaled.phases.continuation.learning_rate.to == '5'
  assert scaled.revival_warmup == 2


@pytest.mark.parametrize('changes, message', [
    (dict(names='a.py'), "configs is 'a.py'; give two or more"),
    (dict(names='a.py,a.py'), "configs is 'a.py,a.py'; give two or more"),
    (dict(names='a/x.py:y=1,b/x.py:y=1'),
     "has 'a/x.py:y=1' and 'b/x.py:y=1', which would both be named 'x-y=1'; r"),
    (dict(budget='30 minutes'), "budget is '30 minutes'; give seconds as 90s"),
    (dict(budget='1.2.3s'), "budget is '1.2.3s'; give seconds as 90s"),
    (dict(budget='1e7FLOPs'), "'1e7FLOPs', .* fewer than its 20 evaluations"),
    (dict(rates=['1e-3', 'fast']), "rates is '1e-3,fast'; give positive"),
    (dict(rates=['1e-3', '0.001']), "rates is '1e-3,0.001'; .* each once"),
    (dict(rates=['1e-3', '2e-3'], spread=0.001),
     'best of its rates, 0.002, the losses of dense spread over 0.020 nats'),
])
def test_a_race_that_cannot_be_decided_is_refused(
    made_up, tmp_path, changes, message
):
  refuse(message, run, tmp_path, **changes)
  assert not (tmp_path / 'table.md').exists()


@pytest.mark.parametrize('changes, message', [
    ({'data.tokenizer': 'bpe-512'}, "data.tokenizer is 'bytes' in dense an"),
    ({'phases.pretrain.algorithm.sparsity': 0.5},
     "'dense' and 'sparse-x=1,y=2', which"),
    ({f'phases.{name}.length': 8 for name in ('pretrain', 'continuation')},
     "'dense': 16, 'sparse-x=1,y=2': 8}, so"),
], ids=['other data', 'train alike', 'other windows'])
def test_configs_that_cannot_be_compared_are_refused(
    made_up, tmp_path, changes, message
):
  made_up['sparse.py:x=1,y=2'].update_from_flattened_dict(changes)
  refuse(message, run, tmp_path)
  assert made_up['steps'] == []


def test_a_run_that_diverges_is_reported(made_up, tmp_path, monkeypatch):
  train = pool_worker.train

  def diverging(run, workdir):
    outcome = train(run, workdir)
    if workdir.parent.name == 'dense' and run.config.seed == 5:
      outcome |= {'validation/loss': math.nan, 'steps': 3}
      del outcome['curve']
    return outcome

  monkeypatch.setattr(pool_worker, 'train', diverging)
  row, = (r for r in run(tmp_path).splitlines() if r.startswith('| dense '))
  cells = row.split(' | ')
  assert cells[6] == 'nan ± nan'
  assert float(cells[4]) == pytest.approx(1e10, rel=1e-2)
  assert '| nan |' not in row

  monkeypatch.setattr(pool_worker, 'train', lambda run, workdir: (
      train(run, workdir) | {'validation/loss': math.nan}
  ))
  with pytest.raises(ValueError, match='all of the rates a loss of dense is n'):
    run(tmp_path / 'rates', rates=['1e-3', '2e-3'])


def test_another_race_in_the_same_folder_is_refused(made_up, tmp_path):
  run(tmp_path, seeds=1)
  record = (tmp_path / 'race.json').read_bytes()
  refuse('another .*budget', run, tmp_path, seeds=1, budget='2e10FLOPs')
  made_up['sparse.py:x=1,y=2'].model.d_ff = 32
  refuse('another .*configs', run, tmp_path, seeds=1)
  assert (tmp_path / 'race.json').read_bytes() == record


def test_a_race_whose_record_or_data_changed_is_refused(
    made_up, tmp_path, monkeypatch
):
  run(tmp_path, seeds=1)
  path = tmp_path / 'race.json'
  text = path.read_text()
  fingerprints = training.Run.fingerprints
  with monkeypatch.context() as patch:
    patch.setattr(training.Run, 'fingerprints', property(
        lambda self: fingerprints.fget(self) | {'text': 'other'}
    ))
    refuse('another .*: data differ', run, tmp_path, seeds=2)
  record = json.loads(text)
  record['phases']['dense'][0][1] *= 2
  path.write_text(json.dumps(record))
  refuse('race.json is damaged', run, tmp_path, seeds=2)
  path.unlink()
  refuse('has runs and no race.json', run, tmp_path, seeds=2)
  path.write_text(text)
  run(tmp_path, seeds=2)


def test_a_later_phase_keeps_its_share_of_the_rate():
  config = ml_collections.ConfigDict(dict(phases=dict(
      order=('a', 'b'), a=dict(learning_rate=dict(peak=1e-2)),
      b=dict(learning_rate=dict(peak=3e-3)),
  )))
  phases = race.with_rate(config, 2e-2).phases
  assert phases.a.learning_rate.peak == 2e-2
  assert phases.b.learning_rate.peak == pytest.approx(6e-3)
  assert config.phases.a.learning_rate.peak == 1e-2
