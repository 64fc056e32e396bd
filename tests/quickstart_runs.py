"""The quickstart's config with few steps, shared by tests of commands."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_collections

ROOT = pathlib.Path(__file__).parents[1]
# Prepared once for all workers and sessions, as compiled programs are.
CACHE = pathlib.Path(
    tempfile.gettempdir(), f'spdf_jax_test_corpora_{os.getuid()}'
)
SMALL = {
    'model.vocab_size': 257,
    'model.n_layers': 1,
    'model.n_heads': 2,
    'model.d_model': 16,
    'model.d_ff': 32,
    'model.max_length': 48,
    'data.tokenizer': 'bytes',
    'data.cache_dir': str(CACHE),
    'phases.pretrain.duration': '15 steps',
    'phases.pretrain.length': 32,
    'phases.pretrain.batch_size': 4,
    'phases.pretrain.learning_rate.warmup': '3 steps',
    'phases.continuation.duration': '15 steps',
    'phases.continuation.length': 32,
    'phases.continuation.batch_size': 4,
    'phases.finetune.duration': '15 steps',
    'phases.finetune.length': 40,
    'phases.finetune.batch_size': 4,
    'phases.finetune.learning_rate.warmup': '3 steps',
    'evaluation.batch_size': 4,
    'evaluation.corpus_batches': 2,
    'evaluation.task_batches': 2,
    'evaluation.generations': 4,
    'evaluation.max_new_tokens': 4,
    'eval_every': 6,
    'log_every': 1,
    'checkpoints.every': 4,
    'checkpoints.keep': 1,
}


def small_config(arg='', **changes) -> ml_collections.ConfigDict:
  """Returns the small config; names of `changes` have `__` for dots."""
  from configs import quickstart  # A checkout has configs, a wheel does not.

  config = quickstart.get_config(arg)
  dotted = {name.replace('__', '.'): v for name, v in changes.items()}
  config.update_from_flattened_dict(SMALL | dotted)
  return config


def wait_for(condition, child, seconds=1500) -> None:
  """Waits until a condition holds, while a process is running."""
  end = time.monotonic() + seconds
  while not condition():
    assert child.poll() is None, child.communicate()[0]
    assert time.monotonic() < end
    time.sleep(0.05)


def finish(child, status=0, seconds=1500) -> str:
  """Waits for the end of a process; returns what it printed."""
  output, _ = child.communicate(timeout=seconds)
  assert child.returncode == status, output
  return output


def start_command(module, *args, **overrides) -> subprocess.Popen:
  """Starts `python -m module` with the small config, as a user would."""
  dotted = {name.replace('__', '.'): v for name, v in overrides.items()}
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  return subprocess.Popen(
      [
          sys.executable, '-m', module, *map(str, args),
          *(f'--config.{k}={v}' for k, v in (SMALL | dotted).items()),
      ],
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, path))},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )
