"""Identity of a pool: only runs with the same identity may be compared."""

from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import subprocess
from typing import Any

from experiments.papers.scale import Scale
from experiments.papers.scale import Size
from spdf_jax import files

RESULTS = pathlib.Path(__file__).parents[1] / 'results'
"""Folder of the results, each with its protocol, registered before the runs."""


def identify(
    scale: Scale, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
  """Returns the values that must be equal for runs to belong to one pool.

  Args:
    scale: Scale of the runs; its blocks and claims do not count.
    fingerprints: Fingerprints of the data.

  Returns:
    Sizes, data and a digest of the protocol, which can be written as JSON.
  """
  names = (
      'layers', 'length', 'batch_size', 'micro_batches', 'tokens_per_parameter',
      'rounds', 'round_share', 'tune_batch', 'tune_steps', 'batches',
  )
  plain = lambda size: Size(size.width, size.rates)
  others = {
      name: dataclasses.asdict(size)
      for name, size in scale.sizes.items() if size != plain(size)
  }
  return json.loads(json.dumps({
      **{name: getattr(scale, name) for name in names},
      **({'sizes': others} if others else {}),
      **({'tune_length': scale.tune_length} if scale.tune_length else {}),
      'widths': {name: size.width for name, size in scale.sizes.items()},
      'data': fingerprints,
      'protocol': hashlib.sha256(
          (RESULTS / scale.protocol).read_bytes()
      ).hexdigest(),
  }))


def differences(
    identity: Mapping[str, Any], other: Mapping[str, Any]
) -> list[str]:
  """Returns the names of the values of an identity that another lacks."""
  return [name for name in identity if identity[name] != other.get(name)]


def check_same(path: pathlib.Path, identity: Mapping[str, Any]) -> None:
  """Writes the identity of a folder's runs, or checks it if it exists.

  Args:
    path: File of the identity in the folder of the runs.
    identity: Result of `identify`, or a part of it.

  Raises:
    ValueError: the folder has runs with another identity.
  """
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, json.dumps(identity, indent=2) + '\n')
    return
  stored = files.read_object(path, 'give another workdir.')
  different = differences(identity, stored)
  if different:
    raise ValueError(
        f'workdir {str(path.parent)!r} has runs of another scale, protocol or '
        f'other data: {", ".join(different)} differ; give another workdir.'
    )


def protocol_commit(name: str) -> str:
  """Returns the commit that last changed a protocol, `'unknown'` without git.

  Commits that move or rename the file do not count.

  Args:
    name: File of the protocol, `Scale.protocol`.
  """
  process = None
  with contextlib.suppress(OSError):
    process = subprocess.run(
        [
            'git', 'log', '-1', '--follow', '--diff-filter=AM', '--format=%H',
            '--', name,
        ],
        cwd=RESULTS, capture_output=True, text=True, check=False,
    )
  return (process.stdout.strip() if process else '') or 'unknown'
