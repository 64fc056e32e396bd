"""Damage to files, and commands that read them."""

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from spdf_jax import files
from tests import command

KEPT = 'its traceback is in'
"""Words of a command that ended in an error without a sentence of its own."""


class Refused(ValueError):
  """An error that a command has logged."""


class Raw(Exception):
  """An error that a command has logged with the file of its traceback."""


def copy_anew(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Replaces a folder by a copy of another one; returns its path."""
  shutil.rmtree(target, ignore_errors=True)
  return shutil.copytree(source, target)


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


def any_value(rng: np.random.Generator) -> Any:
  """Returns a random value of a random JSON type."""
  values = [
      None, True, -1, 0, 3, 2.5, 1e30, 2**31, '', 'x', 'static', [], [1, 'a'],
      {}, {'a': 1}, [[]], {'order': ['x']}, 'ü' * 50,
  ]
  return values[rng.integers(len(values))]


def change_field(
    path: pathlib.Path, rng: np.random.Generator, resealed: float = 0.5
) -> None:
  """Replaces or deletes a field of a JSON file, at any depth.

  A share of the files with a digest gets the new one, as files of somebody else
  may have.
  """
  fields = json.loads(path.read_bytes())
  is_sealed = isinstance(fields, dict) and fields.pop('sha256', None)
  place = fields
  while True:
    keys = sorted(place) if isinstance(place, dict) else range(len(place))
    key = keys[rng.integers(len(keys))]
    inner = place[key]
    if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.2:
      break
    place = inner
  if rng.random() < 0.2:
    del place[key]
  else:
    place[key] = any_value(rng)
  if is_sealed and isinstance(fields, dict):
    fields = files.seal(fields) if rng.random() < resealed else (
        fields | {'sha256': is_sealed}
    )
  path.write_text(json.dumps(fields))


def damage(path: pathlib.Path, rng: np.random.Generator) -> None:
  """Flips a bit of a file, cuts it off, empties or deletes it."""
  content = path.read_bytes()
  kind = rng.integers(6)
  if kind == 0:
    path.unlink()
  elif kind == 1 or not content:
    path.write_bytes(b'')
  elif kind == 2:
    path.write_bytes(content[:rng.integers(len(content))])
  else:
    flip_bit(path, rng)


def run_command(name: str, *flags: str) -> str:
  """Runs a command in this process; returns what it printed.

  Raises:
    Refused: it ended in a sentence.
    Raw: it ended in an error that it did not expect.
  """
  done = command.run(name, *flags)
  if done.status:
    lines = done.log.strip().splitlines() or ['']
    raise (Raw if KEPT in done.log else Refused)(lines[-1])
  return done.output
