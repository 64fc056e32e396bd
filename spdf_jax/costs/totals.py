# SPDX-License-Identifier: Apache-2.0
"""Totals of a plan: FLOPs against dense training, and effective sparsity."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from spdf_jax.costs.flops import effective_sparsity

Record = Mapping[str, Any]


def totals_of(phases: Sequence[Record]) -> list[dict[str, Any]]:
  """Sums the phases of a plan, each sum against dense training.

  Args:
    phases: Phases as in `plan.json`.

  Returns:
    The total of all phases; that of pre-training, the phases on a corpus, if
    there are others; and, if pre-training has several phases, its total against
    dense training for the steps of the first one alone. In the last one, phases
    that follow a standard budget of training count as additional cost.

  Example:
    >>> sparse = dict(
    ...     name='sparse', source='corpus', steps=100, tokens=6400,
    ...     flops_per_step=2.5, dense_flops_per_step=10.0,
    ...     embedding_flops_per_step=2.5, spans=[
    ...         dict(start=0, steps=100, sparsity=0.9, flops_per_step=2.5)])
    >>> dense = sparse | dict(
    ...     name='dense', steps=15, tokens=960, flops_per_step=10.0, spans=[
    ...         dict(start=0, steps=15, sparsity=0.0, flops_per_step=10.0)])
    >>> total = totals_of([sparse, dense])[-1]
    >>> total['against'], total['of_dense'], total['of_dense_with_embedding']
    (['sparse'], 0.4, 0.55)
    >>> round(total['effective_sparsity'], 6)
    0.75
  """
  corpus = [phase for phase in phases if phase['source'] == 'corpus']
  found = [{'name': 'all phases'} | total_of(phases, phases)]
  pretraining = {'name': 'pre-training'}
  if 0 < len(corpus) < len(phases):
    found.append(pretraining | total_of(corpus, corpus))
  if len(corpus) > 1:
    found.append(pretraining | total_of(corpus, corpus[:1]))
  return found


def total_of(
    phases: Sequence[Record], against: Sequence[Record]
) -> dict[str, Any]:
  """Sums phases, against dense training for the steps of some phases.

  Args:
    phases: Phases as in `plan.json`.
    against: Phases with the steps of the dense training.

  Returns:
    JSON-serializable data: names of the phases, names of those they are
    compared with, FLOPs, their ratio to those of the dense training, the same
    ratio if the input embedding is counted as a product, and the effective
    sparsity.
  """
  names = lambda records: [record['name'] for record in records]
  flops = _sum(phases, 'flops_per_step')
  dense = _sum(against, 'dense_flops_per_step')
  embedding, dense_embedding = (
      _sum(records, 'embedding_flops_per_step') for records in (phases, against)
  )
  tokens, sparsities = zip(*_tokens(phases))
  return {
      'phases': names(phases),
      'against': names(against),
      'flops': flops,
      'of_dense': flops / dense,
      'of_dense_with_embedding': (
          (flops + embedding) / (dense + dense_embedding)
      ),
      'effective_sparsity': effective_sparsity(
          tokens, sparsities, sum(record['tokens'] for record in against)
      ),
  }


def _sum(phases: Sequence[Record], key: str) -> float:
  return sum(phase['steps'] * phase[key] for phase in phases)


def _tokens(phases: Sequence[Record]) -> Iterator[tuple[int, float]]:
  """Yields the tokens and the sparsity of all spans."""
  for phase in phases:
    per_step = phase['tokens'] // phase['steps']
    for span in phase['spans']:
      yield span['steps'] * per_step, span['sparsity']
