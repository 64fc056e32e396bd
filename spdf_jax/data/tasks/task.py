"""A fine-tuning task: pairs of context and target in three splits."""

import dataclasses
import hashlib
import json
from typing import final
from typing import NamedTuple


class Pair(NamedTuple):
  """One example of a task.

  Attributes:
    context: The text that is given.
    target: The text that is to be produced.
  """

  context: str
  target: str


@final
@dataclasses.dataclass(frozen=True)
class Task:
  """Pairs to fine-tune on, to choose by and to report on.

  Attributes:
    name: The name it is known by.
    train: Pairs to fine-tune on.
    validation: Pairs to choose by.
    test: Pairs to report on.

  Example:
    >>> task = Task('toy', (Pair('2 + 2', '4'),), (), ())
    >>> task.train[0].target, len(task.fingerprint)
    ('4', 64)
  """

  name: str
  train: tuple[Pair, ...]
  validation: tuple[Pair, ...]
  test: tuple[Pair, ...]

  @property
  def fingerprint(self) -> str:
    """SHA-256 over name and pairs, in hexadecimal."""
    facts = [self.name, self.train, self.validation, self.test]
    return hashlib.sha256(json.dumps(facts).encode('utf-8')).hexdigest()
