# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: config, data, shapes, dtypes and digests."""

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import names
from spdf_jax.data.corpora import CACHE_DIR
from spdf_jax.data.corpora import is_cached
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.configs.config import parse
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.phases import Phase

PyTree = Any

class MismatchError(ValueError):
  """An error for a checkpoint made with another config, data or model."""


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


def read_config(stored: Mapping[str, Any], place: Any) -> RunConfig:
  """Reads the stored config of a run.

  Nothing named in it is imported. Its cache of corpora is read, if it has the
  corpus, but not written: otherwise the config returned has our own cache.

  Args:
    stored: The config, as `RunConfig.as_dict` returned it.
    place: Description of its file, for the error message.

  Returns:
    The config.

  Raises:
    MismatchError: the config has fields that this version does not know, or
      lacks some.
  """
  try:
    with names.received(str(place), 'name it in your own config'):
      config = parse(stored)
  except ValueError as error:
    raise MismatchError(
        f'{place} is of another config, which this version cannot read: '
        f'{str(error).rstrip(".")}; use the version that wrote it, or start '
        'from its parameters in another workdir, by config.init_from.'
    ) from error
  if is_cached(
      config.data.corpus, config.data.tokenizer, config.data.cache_dir
  ):
    return config
  return dataclasses.replace(
      config, data=dataclasses.replace(config.data, cache_dir=CACHE_DIR)
  )


def run_identity(config: RunConfig) -> dict[str, Any]:
  """Returns the flattened fields that two configs of one run must share.

  These are all fields except paths, the mesh, the planned sizes of data, the
  storage of the state, since checkpoints are dense, and the number of steps
  that may be skipped, so that it can be raised for a run that stopped.
  """
  excluded = (
      'resume', 'init_from', 'data.cache_dir', 'storage', 'max_skipped_steps'
  )
  return {
      k: v for k, v in flatten(config.as_dict()).items()
      if k not in excluded and not k.startswith(('mesh.', 'data.planned.'))
  }


def state_identity(config: RunConfig) -> dict[str, Any]:
  """Returns the fields that two runs must share to share their states.

  These are those of `run_identity` without what is logged, saved and, unless a
  phase ends or is chosen by its evaluations, evaluated.
  """
  observing: tuple[str, ...] = ('log_every', 'checkpoints.')
  if not any(phase.early_stop for phase in config.phases):
    observing += ('eval_every', 'evaluation.')
  return {
      k: v for k, v in run_identity(config).items()
      if not k.startswith(observing)
  }


def past_identity(config: RunConfig, phases: int) -> dict[str, Any]:
  """Returns the fields that must be equal for runs to have equal first phases.

  Later phases that continue the learning rate of the last past phase, or share
  its mask updates at percentages of their steps, are included, since their
  lengths determine how fast it decays, and when masks were updated.

  Args:
    config: The config.
    phases: Number of phases that are past.

  Returns:
    The fields of `state_identity`, without the later phases and the number of
    epochs that they may need.
  """
  while phases < len(config.phases) and (
      config.phases[phases].continues
      or _share_updates(*config.phases[phases - 1:phases + 1])
  ):
    phases += 1
  past = dataclasses.replace(config, phases=config.phases[:phases])
  return {
      k: v for k, v in state_identity(past).items()
      if not k.startswith('data.max_epochs.')
  }


def _share_updates(before: Phase, after: Phase) -> bool:
  """Returns whether two phases share mask updates given in per cent of both."""
  used = after.resolved_algorithm(None)
  return before.algorithm == after.algorithm and any(
      '%' in str(after.algorithm[name]) for name in used
  )


def refuse_other_past(
    checkpoint: pathlib.Path, meta: Mapping[str, Any], config: RunConfig
) -> tuple[RunConfig, tuple[str, ...]]:
  """Raises MismatchError unless a run can resume from a checkpoint.

  From the end of a phase, it may have other phases than those that were to
  come; within a phase, it has the same ones. Evaluations may differ unless a
  phase depends on them.

  Args:
    checkpoint: Directory of the checkpoint.
    meta: Metadata of the checkpoint.
    config: Config of the run that resumes from it.

  Returns:
    The config of the checkpoint, and the names of the phases that have ended,
    if others may follow.
  """
  stored = read_config(meta['config'], f'checkpoint {checkpoint}')
  step, ends = int(checkpoint.name), meta['phase_ends']
  past = tuple(name for name, end in ends.items() if end <= step)
  if step not in ends.values():
    past = ()
  past = tuple(meta.get('densified') or past)
  identity_of = functools.partial(
      past_identity, phases=len(past)
  ) if past else state_identity
  with names.received(f'checkpoint {checkpoint}', 'name it in your own config'):
    saved = identity_of(stored)
  expected = identity_of(config)
  if saved == expected:
    _refuse_other_blocks(checkpoint, stored, config, len(past))
    return stored, past
  phases = [phase.name for phase in stored.phases]
  changed = {
      key.split('.')[1] for key in saved.keys() | expected.keys()
      if saved.get(key) != expected.get(key) and key.startswith('phases.')
  } - {'order'}
  first = min(
      (phases.index(name) for name in changed if name in phases),
      default=len(phases),
  )
  fix = ''
  if changed and first >= len(past) > 0:
    fix = (
        f'phases after {past[-1]!r} may differ, but for a learning rate of '
        "schedule 'continue' and shared mask updates in per cent, which its "
        'own steps depend on'
    )
  elif changed and not past:
    fix = (
        'other phases follow from the end of one, WORKDIR@PHASE; within one, '
        f'config.init_from={checkpoint.parents[1]} goes on from the parameters '
        'alone'
    )
  refuse_difference(checkpoint, 'config', saved, expected, fix)
  return stored, past


def _refuse_other_blocks(
    checkpoint: pathlib.Path, stored: RunConfig, config: RunConfig, past: int
) -> None:
  """Raises MismatchError if later phases would read text of an epoch again.

  The corpus is permuted in blocks of the longest length of its phases.
  """
  on_corpus = lambda phases: [p for p in phases if p.data == 'corpus']
  later = on_corpus(config.phases[past:])
  if not on_corpus(config.phases[:past]) or not later or later[0].new_epoch:
    return
  before, after = (
      max(phase.length for phase in on_corpus(c.phases))
      for c in (stored, config)
  )
  if before != after:
    raise MismatchError(
        f'checkpoint {checkpoint} has read the corpus in blocks of {before} '
        f'tokens, the longest length of its phases, and with blocks of {after} '
        f'{later[0].name!r} would read parts of the epoch again; set its '
        f'new_epoch to True, or give a phase the length {before} and none a '
        'larger one.'
    )


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
    saved: Mapping[str, Any], expected: Mapping[str, Any]
) -> list[str]:
  """Lists the differences of two flat mappings, as `name was … and is …`.

  Names with fewer dots come first, so that the order of the phases precedes
  their fields.
  """
  return [
      f'{key} was {saved.get(key, "absent")!r} and is '
      f'{expected.get(key, "absent")!r}'
      for key in sorted(
          saved.keys() | expected.keys(), key=lambda key: (key.count('.'), key)
      )
      if saved.get(key) != expected.get(key)
  ]


def refuse_difference(
    checkpoint: pathlib.Path,
    what: str,
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    fix: str = '',
) -> None:
  """Raises MismatchError if a checkpoint differs from what is expected.

  Args:
    checkpoint: Directory of the checkpoint, for the error message.
    what: Name of the compared values, for the error message.
    saved: Values stored in the checkpoint.
    expected: Expected values.
    fix: Further advice for the error message.

  Raises:
    MismatchError: the values differ; the message names the first three.
  """
  different = differences(saved, expected)
  if different:
    more = f' (and {len(different) - 3} more)' if len(different) > 3 else ''
    raise MismatchError(
        f'checkpoint {checkpoint} is of another {what}: '
        f'{"; ".join(different[:3])}{more}; restore these values, or use '
        f'another workdir or checkpoint{fix and f"; {fix}"}.'
    )


def digest_arrays(tree: PyTree) -> dict[str, str]:
  """Computes a digest of every array in a tree, by path.

  A digest is a sum, modulo 2^32, of hashes of each element's bits and index.
  It is therefore the same for every sharding of the array, and computed where
  the shards are. A change of one element always changes it; other changes go
  unnoticed with a probability of 2^-32.

  Args:
    tree: Arrays; with several processes each may have a part of them.

  Returns:
    Digests in hexadecimal.

  Example:
    >>> digest_arrays({'w': jnp.zeros(2), 'b': jnp.ones(2)})
    {'b': 'f3a9199a', 'w': '11fd02eb'}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  # Waits for each sum before the next starts: XLA:CPU runs few programs at
  # once, and sums over devices that wait for one another would never end.
  return {
      path_name(path): f'{int(_digest(jnp.asarray(x))):08x}'
      for path, x in leaves
  }


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
  bits = _words(x)
  index = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    index = index * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(
        jnp.uint32, bits.shape, axis
    )
  # The final mix of MurmurHash3, which maps different words to different ones.
  word = bits ^ (index * np.uint32(0x9E3779B1))
  word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
  word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
  return (word ^ (word >> 16)).sum(dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32, two words per 64-bit element."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  bits = min(8 * x.dtype.itemsize, 32)
  return jax.lax.bitcast_convert_type(x, f'uint{bits}').astype(jnp.uint32)
