# SPDX-License-Identifier: Apache-2.0
"""Text of triples of subject, property and object."""

from collections.abc import Iterable
from collections.abc import Sequence


def linearize_triples(triples: Iterable[Sequence[str]]) -> str:
  """Formats triples as a context of Hu et al.

  Args:
    triples: Triples of subject, property and object.

  Returns:
    `subject : property : object`, joined by ` | `.

  Source: Hu et al. 2021, "LoRA".

  Example:
    >>> linearize_triples([('Ada', 'born_in', 'Lund'), ('Lund', 'in', 'X')])
    'Ada : born_in : Lund | Lund : in : X'
  """
  return ' | '.join(' : '.join(triple) for triple in triples)
