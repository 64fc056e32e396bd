"""Checks of a config that no single part of a recipe can do."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax

from spdf_jax import data
from spdf_jax.training.identity import flatten
from spdf_jax.training.mesh import check_batches

_COUNTS = (
    'checkpoints.every',
    'checkpoints.keep',
    'eval_every',
    'evaluation.batch_size',
    'evaluation.corpus_batches',
    'evaluation.max_new_tokens',
    'evaluation.task_batches',
    'log_every',
    'micro_batches',
)


def check_counts(config: Mapping[str, Any]) -> None:
  """Raises ValueError where a number of things is below 1."""
  flat = flatten(config)
  for name in _COUNTS:
    if name in flat and flat[name] < 1:
      raise ValueError(f'{name} is {flat[name]}; it must be at least 1.')


def check_lengths(
    specs: Mapping[str, Any], order: Sequence[str], max_length: int
) -> None:
  """Raises ValueError where a phase's sequences do not fit the model."""
  for name in order:
    length = specs.get(name, {}).get('length', 0)
    if length > max_length:
      raise ValueError(
          f'phase {name!r} has length {length} and the model {max_length} '
          'positions; shorten the phase or raise model.max_length.'
      )


def check_micro_batches(
    specs: Mapping[str, Any],
    order: Sequence[str],
    micro_batches: int,
    mesh: jax.sharding.Mesh,
) -> None:
  """Raises ValueError where a phase's batches do not divide."""
  for name in order:
    batch_size = specs.get(name, {}).get('batch_size', 0)
    if batch_size % micro_batches:
      raise ValueError(
          f'micro_batches is {micro_batches}, which does not divide the '
          f'batch_size of phase {name!r}, {batch_size}; choose a divisor.'
      )
    try:
      check_batches(mesh, batch_size, micro_batches)
    except ValueError as error:
      raise ValueError(f'phase {name!r}: {error}') from error


def check_vocabulary(corpus: data.Corpus, vocab_size: int) -> None:
  """Raises ValueError where the tokenizer has more tokens than the model."""
  if corpus.tokenizer.vocab_size > vocab_size:
    raise ValueError(
        f'corpus {corpus.name!r} has token ids up to '
        f'{corpus.tokenizer.vocab_size - 1} and the model a vocabulary of '
        f'{vocab_size}; set model.vocab_size to '
        f'{corpus.tokenizer.vocab_size} or use another tokenizer.'
    )


def check_early_stops(config: Mapping[str, Any], phases: Sequence[Any]) -> None:
  """Raises ValueError where a phase stops by what is not measured."""
  for phase in phases:
    stop = phase.early_stop
    if stop is None:
      continue
    if not config['data']['task'] and not stop.metric.startswith('validation/'):
      raise ValueError(
          f'phase {phase.name!r} stops by {stop.metric!r} and the config has '
          'no task; set data.task or stop by validation/loss.'
      )
    if stop.generates and not config['evaluation']['generations']:
      raise ValueError(
          f'phase {phase.name!r} stops by {stop.metric!r} and '
          'evaluation.generations is 0; raise it.'
      )
