"""Fuzzing of inputs: corpora, models, configs, documents, products."""

from collections.abc import Callable
import functools
import gzip
import json
import pathlib
import shutil

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
from spdf_jax.training.configs.config import parse
from tests.fuzz import damage
from tests.quickstart_runs import SMALL
from tests.tiny_run import CONFIG

Target = Callable[[np.random.Generator], str]


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
    # Of the same name, which is part of the fingerprint.
    copy = damage.copy_anew(output, folder / 'run' / 'corpus')
    damage.flip_any_bit(copy, rng)
    if rng.random() < 0.1:
      damage.run_command('verify', f'--folder={copy}')
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
    path = damage.copy_anew(folder / 'sound', folder / 'run')
    path /= rng.choice(names)
    content = bytearray(path.read_bytes())
    kind = rng.integers(3)
    if path.suffix == '.json' and kind == 0:
      fields = json.loads(content)
      fields[rng.choice(sorted(fields))] = damage.any_value(rng)
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
    if rng.random() < 0.1:
      damage.run_command(
          'convert', f'--model={folder / "run"}', f'--to={folder / "run/to"}'
      )
    else:
      interop.load_hf(folder / 'run')
    return 'accepted'

  return attack


def fuzz_configs(folder: pathlib.Path) -> Target:
  """Replaces a random field of a config, at any depth."""
  del folder

  def attack(rng):
    if rng.random() < 0.05:
      fields = SMALL | {rng.choice(sorted(SMALL)): damage.any_value(rng)}
      damage.run_command(
          'train', '--config=configs/quickstart.py', '--dry_run',
          *(f'--config.{name}={value}' for name, value in fields.items()),
      )
      return 'accepted'
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
      place[name] = damage.any_value(rng)
    parse(config)
    return 'accepted'

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
    shutil.rmtree(folder / 'run', ignore_errors=True)
    (folder / 'run').mkdir()
    (folder / 'run' / name).write_bytes(content)
    if rng.random() < 0.1:
      damage.run_command(
          'prepare', f'--input={folder / "run" / name}', '--tokenizer=bytes',
          f'--output={folder / "run/out"}', '--workers=1', '--max_faults=0.9',
      )
    else:
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
