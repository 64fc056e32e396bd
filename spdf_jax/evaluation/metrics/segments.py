# SPDX-License-Identifier: Apache-2.0
"""Segments: pairs of a hypothesis and its references."""

from collections.abc import Sequence

References = Sequence[str | Sequence[str]]


def group_references(
    hypotheses: Sequence[str], references: References
) -> list[list[str]]:
  """Returns a list of references for each hypothesis, after checking them.

  Args:
    hypotheses: One generation for each input.
    references: One or several references of each hypothesis.

  Returns:
    A list of at least one reference for each hypothesis.

  Raises:
    ValueError: The lengths differ, there is nothing to score, or a hypothesis
      has no reference.

  Example:
    >>> group_references(['a', 'b'], ['x', ('y', 'z')])
    [['x'], ['y', 'z']]
  """
  if len(hypotheses) != len(references):
    raise ValueError(
        f'hypotheses has {len(hypotheses)} entries and references has '
        f'{len(references)}; give the references of each hypothesis.'
    )
  if not len(hypotheses):
    raise ValueError('hypotheses is empty; give at least one to score.')
  groups = [[r] if isinstance(r, str) else list(r) for r in references]
  for index, group in enumerate(groups):
    if not group:
      raise ValueError(
          f'references[{index}] is empty; give at least one reference for '
          'each hypothesis.'
      )
  return groups


def streams(
    references: Sequence[Sequence[str]], *, empty: bool = False
) -> list[list[str | None]]:
  """Converts references per hypothesis to sacrebleu's aligned streams.

  Args:
    references: References of each hypothesis.
    empty: Whether a missing reference counts as one of length 0, as in
      multi-bleu; otherwise it is ignored.

  Returns:
    Streams, each with one reference for each hypothesis.

  Example:
    >>> streams([['x'], ['y', 'z']])
    [['x', 'y'], [None, 'z']]
  """
  count = max(map(len, references))
  missing = '' if empty else None
  return [
      [group[i] if i < len(group) else missing for group in references]
      for i in range(count)
  ]


def without_empty(references: Sequence[Sequence[str]]) -> list[list[str]]:
  """Removes references without a word, keeping at least one per hypothesis.

  Args:
    references: References of each hypothesis.

  Returns:
    The remaining references; `['']` where there is none.

  Example:
    >>> without_empty([['a', ' '], ['']])
    [['a'], ['']]
  """
  kept = ([r for r in group if r.strip()] for group in references)
  return [group or [''] for group in kept]
