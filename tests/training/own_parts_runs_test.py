"""Runs with parts of a user that are killed end as whole ones."""

import pytest

from spdf_jax.data import prepare_corpus
from tests import quickstart_runs
from tests.experiments.guides_test import GUIDES
from tests.experiments.guides_test import scripts
from tests.quickstart_runs import CACHE
from tests.quickstart_runs import finish
from tests.quickstart_runs import start_command
from tests.tiny_run import rows_in
from tests.training.kill_test import assert_same_runs
from tests.training.kill_test import kill_after

pytestmark = pytest.mark.slow

CONFIG = '''
from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.optimizer = dict({optimizer})
  {model}
  config.data.task = ''
  config.phases.order = ('pretrain', 'continuation')
  with config.phases.ignore_type():
    config.phases.pretrain.algorithm = dict({algorithm})
  config.phases.continuation.reset_moments = True
  return config
'''
OWN_MODEL = '''config.model = dict(
      preset='my_model:make_model', vocab_size=257, d_model=64, n_layers=1,
      max_length=48,
  )'''


ADAMW = "name='adamw', clip_norm=1.0, b1=0.9, b2=0.95, eps=1e-8"
MUON = "name='muon', clip_norm=1.0, consistent_rms=0.2"
TIMES = 'sparsity=0.5, update_every=5, update_until=12'
RIGL = f"name='rigl', {TIMES}"
TOP_KAST = "name='two_masks:top_kast', forward=0.9"


@pytest.mark.filterwarnings('ignore:Sharding info not provided')
@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('optimizer, model, algorithm', [
    pytest.param(MUON, '', RIGL, id='muon'),
    pytest.param(
        "name='lion', clip_norm=1.0, b1=0.9, b2=0.95", '', RIGL, id='lion',
    ),
    pytest.param(MUON, OWN_MODEL, RIGL, id='own model'),
    pytest.param(
        ADAMW, '', f"name='sparse_momentum:snfs', {TIMES}", id='SNFS',
    ),
    pytest.param(
        ADAMW, '', f"name='importance_pruning:importance_pruning', {TIMES}",
        id='importance',
    ),
    pytest.param(ADAMW, '', f'{TOP_KAST}, backward=0.5', id='Top-KAST'),
    pytest.param(ADAMW, '', TOP_KAST, id='straight-through'),
])
def test_a_killed_run_ends_bit_for_bit_the_same(
    tmp_path, monkeypatch, optimizer, model, algorithm, devices
):
  for guide in GUIDES:
    if guide.stem in ('own_model', 'algorithm_state'):
      for name, script in scripts(guide):
        if name:
          (tmp_path / name).write_text(script)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', str(devices))
  if model:
    small = quickstart_runs.SMALL.items()
    monkeypatch.setattr(quickstart_runs, 'SMALL', {
        k: v for k, v in small if not k.startswith('model.')
    })
  mesh = [
      f'--config.mesh.{axis}={2 if devices == 8 else 1}'
      for axis in ('data', 'fsdp', 'tensor')
  ]
  prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=CACHE)
  path = tmp_path / 'mine.py'
  path.write_text(CONFIG.format(
      optimizer=optimizer, model=model, algorithm=algorithm
  ))

  def start(workdir):
    return start_command(
        'experiments.train', f'--config={path}', f'--workdir={workdir}', *mesh
    )

  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  uninterrupted = start(whole)
  for step in (6, 20):
    kill_after(start(killed), killed, step, delay=0.02)
  for child in (start(killed), uninterrupted):
    finish(child)
  assert_same_runs(whole, killed, (15, 30))
  losses = [row['train/loss'] for row in rows_in(whole) if 'train/loss' in row]
  assert len(losses) == 30 and losses[-1] < losses[0]
