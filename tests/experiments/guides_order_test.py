"""The commands of README's guides, shortened, run in order in one folder."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from spdf_jax import interop
from spdf_jax import models
from tests.experiments.guides_test import commands
from tests.experiments.guides_test import scripts
from tests.real_data import data_path

ROOT = pathlib.Path(__file__).parents[2]
ORDER = (
    'first_run', 'own_config', 'algorithms', 'schedules', 'phases',
    'own_algorithm', 'data', 'scale', 'accelerator', 'wafer', 'models',
    'papers',
)
# Shortens each phase; later flags override those of a guide.
SHORT = {
    'pretrain': ('6 steps', {'learning_rate.warmup': '1 steps'}),
    'continuation': ('2 steps', {}),
    'finetune': ('4 steps', {'learning_rate.warmup': '1 steps'}),
}
FIELDS = {
    'eval_every': 3, 'evaluation.corpus_batches': 1,
    'evaluation.task_batches': 1, 'evaluation.generations': 2,
    'evaluation.max_new_tokens': 2,
}
# Commands that take hours, install packages or need files that tests do not
# have.
LEFT_OUT = (
    'experiments.reproduce --scale', 'experiments.race --configs',
    'experiments.benchmark', 'configs/books.py', '-m pytest',
    '-m venv', 'experiments.evaluate', 'experiments.subspaces', '=hf:',
    '--executor=ray', 'configs/finetune.py:model=gpt2-small',
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
  """A folder as the readers of all guides have it."""
  folder = tmp_path_factory.mktemp('clone')
  for name in ('configs', 'experiments', 'spdf_jax'):
    (folder / name).symlink_to(ROOT / name)
  text = data_path('books', 'validation.jsonl').read_text()
  (folder / 'books').mkdir()
  (folder / 'books' / 'some.jsonl').write_text(text)
  (folder / 'e2e').symlink_to(data_path('e2e'))
  for guide in ORDER:
    path = ROOT / 'experiments' / 'guides' / f'{guide}.md'
    for name, script in scripts(path):
      if name:
        (folder / name).write_text(script)
  gpt2 = models.create_model(
      'gpt2-small', n_layers=1, n_heads=2, d_model=16, d_ff=64, vocab_size=257,
      max_length=64,
  )
  params = gpt2.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
  interop.save_hf(folder / 'gpt2', gpt2.config, params)
  zeros = jax.tree.map(lambda x: x * (x > 0) if x.ndim == 2 else x, params)
  interop.save_hf(folder / 'masked', gpt2.config, zeros)
  return folder


def shortened(words):
  """Appends flags that leave a few steps of every phase."""
  line = ' '.join(words)
  trains = any(f'experiments.{name}' in line
               for name in ('train', 'sweep', 'quickstart'))
  if not trains or '--dry_run' in words:
    return words
  fields = dict(FIELDS)
  for name, (duration, others) in SHORT.items():
    if name == 'finetune' and 'mine.py' in line:
      continue
    fields[f'phases.{name}.duration'] = duration
    fields |= {f'phases.{name}.{key}': value for key, value in others.items()}
  algorithm = 'phases.pretrain.algorithm.'
  if 'rigl' in line or ('mine.py' in line and ':set' not in line):
    fields[f'{algorithm}update_every'] = 2
    fields[f'{algorithm}update_until'] = 4
  return [*words, *(f'--config.{k}={v}' for k, v in fields.items())]


def test_the_commands_run_in_order(clone):
  failed = []
  given = [('README', ['python', '-m', 'experiments.quickstart'])]
  for guide in ORDER:
    path = ROOT / 'experiments' / 'guides' / f'{guide}.md'
    given += [(guide, words) for words in commands(path)]
  # Commands that start others find the same Python.
  search = os.pathsep.join(
      [os.path.dirname(sys.executable), os.environ['PATH']]
  )
  env = os.environ | {'PYTHONPATH': str(clone), 'PATH': search}
  for guide, words in given:
    line = ' '.join(words)
    if words[0] != 'python' or any(part in line for part in LEFT_OUT):
      continue
    done = subprocess.run(
        [sys.executable, *shortened(words)[1:]], cwd=clone, check=False,
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=600,
    )
    if done.returncode:
      failed.append(f'{guide}: {line}\n{done.stdout[-2000:]}')
  assert not failed, '\n\n'.join(failed)
