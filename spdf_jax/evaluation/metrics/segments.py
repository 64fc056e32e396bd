"""Segments: each hypothesis beside the references it is compared with."""

from collections.abc import Sequence

References = Sequence[str | Sequence[str]]


def group_references(
    hypotheses: Sequence[str], references: References
) -> list[list[str]]:
  """Lists the references of each hypothesis, after checking that they pair.

  Args:
    hypotheses: One generation for each input.
    references: For each hypothesis one reference or several of them.

  Returns:
    For each hypothesis a list of at least one reference.

  Raises:
    ValueError: Lengths differ, there is nothing to score, or a hypothesis
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
  """Turns references per hypothesis into sacrebleu's aligned streams.

  Args:
    references: For each hypothesis its references.
    empty: Whether a missing reference counts as one of length 0, as in
      multi-bleu; otherwise it is left out.

  Returns:
    Streams of one reference for each hypothesis.

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
  """Leaves out references without a word, where another one remains.

  Args:
    references: For each hypothesis its references.

  Returns:
    For each hypothesis at least one reference.

  Example:
    >>> without_empty([['a', ' '], ['']])
    [['a'], ['']]
  """
  kept = ([r for r in group if r.strip()] for group in references)
  return [group or [''] for group in kept]
