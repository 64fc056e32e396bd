"""What makes two runs the same: config, data, shapes and dtypes."""

from collections.abc import Mapping
import pathlib
from typing import Any

import jax

from spdf_jax.sparsity.selection import path_name

PyTree = Any


class MismatchError(ValueError):
  """A checkpoint was made with another config, data or model."""


def describe_arrays(tree: PyTree) -> dict[str, str]:
  """Lists dtype and shape of every array in a tree, by path.

  Example:
    >>> import numpy as np
    >>> describe_arrays({'w': np.zeros((2, 3), np.float32)})
    {'w': 'float32[2,3]'}
  """
  return {
      path_name(path): f'{x.dtype}[{",".join(map(str, x.shape))}]'
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def run_identity(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what makes two configs the same run, flat: all but places.

  Neither does the storage of the state: checkpoints are dense.
  """
  places = ('resume', 'init_from', 'data.cache_dir', 'storage')
  return {
      k: v for k, v in flatten(config).items()
      if k not in places and not k.startswith('mesh.')
  }


def past_identity(config: Mapping[str, Any], phases: int) -> dict[str, Any]:
  """Returns what makes two configs the same run for their first phases.

  Phases that continue the learning rate of the last one belong to it: their
  lengths decide how fast it falls.

  Args:
    config: Resolved.
    phases: How many phases are past.

  Returns:
    The config, flat: all but places and what comes after.

  Example:
    >>> rate = {'learning_rate': {'schedule': 'constant'}}
    >>> phases = {'order': ['a', 'b'], 'a': rate, 'b': rate}
    >>> list(past_identity({'seed': 0, 'phases': phases}, 1))
    ['seed', 'phases.order', 'phases.a.learning_rate.schedule']
  """
  specs, order = config['phases'], config['phases']['order']
  while phases < len(order) and (
      specs[order[phases]]['learning_rate']['schedule'] == 'continue'
  ):
    phases += 1
  past = {name: specs[name] for name in order[:phases]}
  return run_identity({**config, 'phases': {'order': order[:phases], **past}})


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flattens nested mappings to dotted names.

  Example:
    >>> flatten({'model': {'preset': 'gpt-mini'}})
    {'model.preset': 'gpt-mini'}
  """
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping):
      flat.update(flatten(value, f'{prefix}{key}.'))
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def differences(
    found: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[str]:
  """Says where two flat mappings differ, each as `name was … and is …`."""
  return [
      f'{key} was {found.get(key, "absent")!r} and is '
      f'{asked.get(key, "absent")!r}'
      for key in sorted(found.keys() | asked.keys())
      if found.get(key) != asked.get(key)
  ]


def refuse_difference(
    checkpoint: pathlib.Path,
    what: str,
    found: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> None:
  """Raises MismatchError where a checkpoint is not of what is asked for.

  Args:
    checkpoint: Its directory, for the message.
    what: What is compared, for the message.
    found: What the checkpoint says of itself.
    asked: What it should be.

  Raises:
    MismatchError: they differ; the message names the first places.
  """
  different = differences(found, asked)
  if different:
    more = f' (and {len(different) - 3} more)' if len(different) > 3 else ''
    raise MismatchError(
        f'checkpoint {checkpoint} is of another {what}: '
        f'{"; ".join(different[:3])}{more}; use what it was made with, or '
        'another workdir.'
    )
