"""Runs with muon and lion that are killed end as uninterrupted ones."""

import textwrap

from kill_test import kill_after
from kill_test import restore
from kill_test import SECONDS
import pytest
from quickstart_runs import CACHE
from quickstart_runs import start_command
from tiny_run import assert_same_arrays
from tiny_run import without_times

from spdf_jax.data import prepare_corpus
from spdf_jax.training.metrics import read_rows

pytestmark = pytest.mark.process

CONFIG = '''
from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.optimizer = dict({optimizer})
  config.data.task = ''
  config.phases.order = ('pretrain', 'continuation')
  with config.phases.ignore_type():
    config.phases.pretrain.sparsity = dict(
        algorithm='rigl', sparsity=0.5, update_every=5, update_until=12
    )
  config.phases.continuation.restart = True
  return config
'''


@pytest.mark.filterwarnings('ignore:Sharding info not provided')
@pytest.mark.parametrize('optimizer', [
    "name='muon', clip_norm=1.0, consistent_rms=0.2",
    "name='lion', clip_norm=1.0, b1=0.9, b2=0.95",
])
def test_a_killed_run_ends_bit_for_bit_the_same(tmp_path, optimizer):
  prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=CACHE)
  path = tmp_path / 'mine.py'
  path.write_text(textwrap.dedent(CONFIG.format(optimizer=optimizer)))

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
