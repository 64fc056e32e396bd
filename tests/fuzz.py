r"""Damages files and inputs at random, and counts what passes unnoticed.

  python -m tests.fuzz --minutes=10

Targets: bits of checkpoints and corpora, files of models, runs and documents,
configs, and sparse products. A case is `same` if the result is that of the
sound input, `refused` if it ends in an error that names the cause, `accepted`
if another input is valid too (only models, configs and documents can be) or a
warning is logged, `raw` if it ends in another error, and `silent` if the result
is wrong. The exit status is 1 if any case is raw or silent; the seed and number
of a case reproduce it.
"""

import collections
from collections.abc import Callable
import functools
import gzip
import json
import logging as standard_logging
import pathlib
import shutil
import tempfile
import time
from typing import Any
from unittest import mock

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from experiments import preparation
from experiments.preparation import inputs
from spdf_jax import data
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.accelerator.primitives import sparse_matmul
from spdf_jax.costs import plan_costs
from spdf_jax.files import seal
from spdf_jax.runs.read import read_run
from spdf_jax.training import train
from spdf_jax.training.configs.config import parse
from spdf_jax.training.loop import metrics
from tests.tiny_run import CONFIG
from tests.tiny_run import make_run

_MINUTES = flags.DEFINE_float('minutes', 10, 'Time to spend.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the cases.')
_TARGETS = flags.DEFINE_list('targets', None, 'Targets; by default all.')

Target = Callable[[np.random.Generator], str]

REFUSED = (ValueError, OSError)


def flip_bit(path: pathlib.Path, rng: np.random.Generator) -> None:
  """Flips one random bit of a file."""
  content = bytearray(path.read_bytes())
  content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
  path.write_bytes(content)


def flip_any_bit(folder: pathlib.Path, rng: np.random.Generator) -> None:
  """Flips one random bit of a random file, each file being as likely."""
  paths = sorted(p for p in folder.rglob('*') if p.is_file())
  flip_bit(rng.choice([p for p in paths if p.stat().st_size]), rng)


def bits_of(tree: Any) -> list[bytes]:
  """Returns the bytes of all arrays."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def fuzz_checkpoints(folder: pathlib.Path) -> Target:
  """Damages the latest of three checkpoints, and opens the run again."""
  train(make_run().open(folder / 'sound'))
  sound = {}
  for step in (14, 12):
    run = make_run().open(folder / 'sound')
    sound[step] = bits_of(run.state)
    run.close()
    shutil.copytree(folder / 'sound', folder / f'copy{step}')
    shutil.rmtree(folder / 'sound/checkpoints/14', ignore_errors=True)

  def attack(rng):
    shutil.rmtree(folder / 'run', ignore_errors=True)
    shutil.copytree(folder / 'copy14', folder / 'run')
    flip_any_bit(folder / 'run/checkpoints/14', rng)
    run = make_run().open(folder / 'run')
    run.close()
    step = int(run.state.step)
    if bits_of(run.state) != sound.get(step):
      return 'silent'
    return 'same' if step == 14 else 'refused'

  return attack


def fuzz_corpora(folder: pathlib.Path) -> Target:
  """Damages a file of a prepared corpus, and opens it."""
  text = folder / 'text'
  text.mkdir()
  for i in range(60):
    (text / f'{i}.txt').write_text(f'This is text {i}. ' * (i + 1))
  output = folder / 'corpus'
  preparation.prepare_files(
      text, tokenizer='bytes', output=output, validation=0.1
  )

  # Keys that nobody reads are ignored: a bit of 'sha256' itself may be flipped.
  keys = sorted(data.open_corpus(output).train.description)

  def contents(directory):
    corpus = data.open_corpus(directory)
    files = corpus.train, corpus.validation, corpus.test
    return (
        corpus.tokenizer.encode('This is text.'),
        [(f.tokens.tobytes(), *map(f.description.get, keys)) for f in files],
    )

  sound = contents(output)

  def attack(rng):
    shutil.rmtree(folder / 'run', ignore_errors=True)
    # Of the same name, which is part of the fingerprint.
    copy = shutil.copytree(output, folder / 'run' / 'corpus')
    flip_any_bit(copy, rng)
    return 'same' if contents(copy) == sound else 'silent'

  return attack


def fuzz_models(folder: pathlib.Path) -> Target:
  """Damages the config or the header of the weights of an exported model."""
  config = models.GPTConfig(
      vocab_size=32, n_layers=2, n_heads=2, d_model=16, d_ff=32, max_length=16
  )
  model = models.GPT(config)
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = model.init(jax.random.key(0), tokens)['params']
  interop.save_hf(folder / 'sound', config, params, None)
  names = sorted(p.name for p in (folder / 'sound').iterdir())

  def attack(rng):
    shutil.rmtree(folder / 'run', ignore_errors=True)
    shutil.copytree(folder / 'sound', folder / 'run')
    path = folder / 'run' / rng.choice(names)
    content = bytearray(path.read_bytes())
    kind = rng.integers(3)
    if path.suffix == '.json' and kind == 0:
      fields = json.loads(content)
      fields[rng.choice(sorted(fields))] = any_value(rng)
      path.write_text(json.dumps(fields))
    elif kind == 1:
      path.write_bytes(content[:rng.integers(len(content))])
    else:
      # Weights themselves have no digest, so only the header is changed.
      size = len(content)
      if path.suffix == '.safetensors':
        size = 8 + int.from_bytes(content[:8], 'little')
      content[rng.integers(size)] ^= 1 << int(rng.integers(8))
      path.write_bytes(content)
    interop.load_hf(folder / 'run')
    return 'accepted'

  return attack


def any_value(rng: np.random.Generator) -> Any:
  """Returns a random value of a random JSON type."""
  values = [
      None, True, -1, 0, 3, 2.5, 1e30, 2**31, '', 'x', 'static', [], [1, 'a'],
      {}, {'a': 1}, [[]], {'order': ['x']}, 'ü' * 50,
  ]
  return values[rng.integers(len(values))]


def fuzz_configs(folder: pathlib.Path) -> Target:
  """Replaces a random field of a config, at any depth."""
  del folder

  def attack(rng):
    config = json.loads(json.dumps(CONFIG))
    place = config
    while True:
      name = rng.choice(sorted(place))
      if not isinstance(place[name], dict) or rng.random() < 0.2:
        break
      if not place[name]:
        break
      place = place[name]
    if rng.random() < 0.1:
      del place[name]
    else:
      place[name] = any_value(rng)
    parse(config)
    return 'accepted'

  return attack


def fuzz_runs(folder: pathlib.Path) -> Target:
  """Damages the plan or metrics of a finished run, and reads it."""
  run = make_run().open(folder / 'sound')
  plan = plan_costs.describe_plan(run, 'sound') | {'bigram': None}
  (folder / 'sound' / 'plan.json').write_text(json.dumps(seal(plan), indent=2))
  train(run)
  sound = read_run(folder / 'sound')
  names = 'plan.json', 'metrics.jsonl'

  def attack(rng):
    shutil.rmtree(folder / 'run', ignore_errors=True)
    shutil.copytree(
        folder / 'sound', folder / 'run',
        ignore=shutil.ignore_patterns('checkpoints'),
    )
    path = folder / 'run' / rng.choice(names)
    if rng.random() < 0.5:
      flip_bit(path, rng)
    else:
      lines = path.read_text().split('\n')
      line = json.dumps({str(any_value(rng)): any_value(rng), 'step': 3})
      lines[rng.integers(len(lines))] = rng.choice([line, '[' * 10**5, ''])
      path.write_text('\n'.join(lines))
    with mock.patch.object(metrics.logger, 'warning') as warned:
      record = read_run(folder / 'run')
    if record == sound:
      return 'same'
    return 'accepted' if warned.called else 'silent'

  return attack


def fuzz_documents(folder: pathlib.Path) -> Target:
  """Damages files of documents, and reads them."""
  texts = [f'This is text {i}. ' * i for i in range(50)]
  lines = ''.join(json.dumps({'text': t}) + '\n' for t in texts).encode()
  table = pyarrow.table({'text': texts})
  pyarrow.parquet.write_table(table, folder / 'a.parquet', compression='zstd')
  with pyarrow.ipc.new_stream(folder / 'a.arrow', table.schema) as writer:
    writer.write_table(table)
  (folder / 'a.jsonl').write_bytes(lines)
  (folder / 'a.jsonl.gz').write_bytes(gzip.compress(lines))
  packed = pyarrow.compress(lines, 'zstd', asbytes=True)
  (folder / 'a.jsonl.zst').write_bytes(packed)
  names = sorted(p.name for p in folder.iterdir())

  def attack(rng):
    name = rng.choice(names)
    content = bytearray((folder / name).read_bytes())
    for _ in range(rng.integers(1, 9)):
      content[rng.integers(len(content))] = rng.integers(256)
    (folder / 'run').mkdir(exist_ok=True)
    (folder / 'run' / name).write_bytes(content)
    for _ in inputs.read_documents(folder / 'run' / name):
      pass
    return 'accepted'  # Files of other people have no digest.

  return attack


def fuzz_kernels(folder: pathlib.Path) -> Target:
  """Compares sparse products of random shapes and masks with NumPy."""
  del folder
  product = jax.jit(functools.partial(sparse_matmul, lowering='native'))

  def attack(rng):
    rows, inputs, outputs = (int(2 ** rng.uniform(0, 7)) for _ in range(3))
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    w = rng.standard_normal((inputs, outputs)).astype(np.float32)
    mask = rng.random((inputs, outputs)) < rng.choice([0, 0.05, 0.25, 0.5, 1])
    # Weights off the mask are ignored.
    y = np.asarray(product(x, np.where(mask, w, np.nan), mask))
    exact = x.astype(np.float64) @ (w * mask)
    bound = np.abs(x).astype(np.float64) @ np.abs(w * mask)
    close = np.abs(y - exact) <= 1e-5 * bound
    return 'same' if close.all() else 'silent'

  return attack


TARGETS = dict(
    checkpoints=fuzz_checkpoints, corpora=fuzz_corpora, models=fuzz_models,
    configs=fuzz_configs, runs=fuzz_runs, documents=fuzz_documents,
    kernels=fuzz_kernels,
)


def outcome_of(attack: Target, rng: np.random.Generator) -> tuple[str, str]:
  """Returns the outcome of one case, and its error."""
  try:
    return attack(rng), ''
  except REFUSED as error:
    return 'refused', str(error)
  except Exception as error:  # Whatever it is, it is counted.
    return 'raw', f'{type(error).__name__}: {error}'


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  del argv
  standard_logging.disable(standard_logging.CRITICAL)
  names = _TARGETS.value or list(TARGETS)
  counts = {name: collections.Counter() for name in names}
  with tempfile.TemporaryDirectory() as folder:
    for name in names:
      path = pathlib.Path(folder, name)
      path.mkdir()
      attack = TARGETS[name](path)
      end = time.monotonic() + 60 * _MINUTES.value / len(names)
      number = 0
      while time.monotonic() < end:
        rng = np.random.default_rng([_SEED.value, number])
        outcome, error = outcome_of(attack, rng)
        counts[name][outcome] += 1
        if outcome in ('raw', 'silent'):
          print(f'{name} case {number}: {outcome} {error[:200]}', flush=True)
        number += 1
  kinds = ('same', 'refused', 'accepted', 'raw', 'silent')
  print(f'{"target":12}{"cases":>8}' + ''.join(f'{k:>10}' for k in kinds))
  for name, outcomes in counts.items():
    cases = ''.join(f'{outcomes[kind]:>10}' for kind in kinds)
    print(f'{name:12}{outcomes.total():>8}{cases}')
  return int(any(c['raw'] or c['silent'] for c in counts.values()))


if __name__ == '__main__':
  app.run(main)
