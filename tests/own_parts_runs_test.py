"""Runs with other optimizers or models that are killed end as whole ones."""

from guides_test import GUIDES
from guides_test import scripts
from kill_test import kill_after
from kill_test import restore
from kill_test import SECONDS
import pytest
import quickstart_runs
from quickstart_runs import CACHE
from quickstart_runs import start_command
from tiny_run import assert_same_arrays
from tiny_run import without_times

from spdf_jax.data import prepare_corpus
from spdf_jax.training.metrics import read_rows

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
    config.phases.pretrain.sparsity = dict(
        name='rigl', sparsity=0.5, update_every=5, update_until=12
    )
  config.phases.continuation.reset_moments = True
  return config
'''
OWN_MODEL = '''config.model = dict(
      preset='my_model:make_model', vocab_size=257, d_model=64, n_layers=1,
      max_length=48,
  )'''


@pytest.mark.filterwarnings('ignore:Sharding info not provided')
@pytest.mark.parametrize('optimizer, model', [
    pytest.param(
        "name='muon', clip_norm=1.0, consistent_rms=0.2", '', id='muon',
    ),
    pytest.param(
        "name='lion', clip_norm=1.0, b1=0.9, b2=0.95", '', id='lion',
    ),
    pytest.param(
        "name='muon', clip_norm=1.0, consistent_rms=0.2", OWN_MODEL,
        id='own model',
    ),
])
def test_a_killed_run_ends_bit_for_bit_the_same(
    tmp_path, monkeypatch, optimizer, model
):
  guide, = (path for path in GUIDES if path.stem == 'own_model')
  (tmp_path / 'my_model.py').write_text(dict(scripts(guide))['my_model.py'])
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  if model:
    small = quickstart_runs.SMALL.items()
    monkeypatch.setattr(quickstart_runs, 'SMALL', {
        k: v for k, v in small if not k.startswith('model.')
    })
  prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=CACHE)
  path = tmp_path / 'mine.py'
  path.write_text(CONFIG.format(optimizer=optimizer, model=model))

  def start(workdir):
    return start_command(
        'experiments.train', f'--config={path}', f'--workdir={workdir}'
    )

  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  uninterrupted = start(whole)
  for step in (6, 20):
    kill_after(start(killed), killed, step, delay=0.02)
  for child in (start(killed), uninterrupted):
    output, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 0, output
  for step in (15, 30):
    assert_same_arrays(*(
        restore(run / 'checkpoints' / str(step)) for run in (whole, killed)
    ))
  rows = [
      without_times(read_rows(run / 'metrics.jsonl')) for run in (whole, killed)
  ]
  assert rows[0] == rows[1]
  losses = [row['train/loss'] for row in rows[0] if 'train/loss' in row]
  assert len(losses) == 30 and losses[-1] < losses[0]
