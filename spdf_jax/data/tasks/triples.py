"""Triples of subject, property and object as text."""

from collections.abc import Iterable
from collections.abc import Sequence


def linearize_triples(triples: Iterable[Sequence[str]]) -> str:
  """Writes triples as the contexts of Hu et al.

  Args:
    triples: Subject, property and object of each.

  Returns:
    `subject : property : object`, joined by ` | `.

  Source: Hu et al. 2021, "LoRA".

  Example:
    >>> linearize_triples([('Ada', 'born_in', 'Lund'), ('Lund', 'in', 'X')])
    'Ada : born_in : Lund | Lund : in : X'
  """
  return ' | '.join(' : '.join(triple) for triple in triples)
