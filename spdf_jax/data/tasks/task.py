# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning tasks: pairs of context and target in three splits."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import logging
from typing import Any, final, NamedTuple

_logger = logging.getLogger(__name__)

SPLITS = ('train', 'validation', 'test')


class Pair(NamedTuple):
  """An example of a task.

  Attributes:
    context: Given text.
    target: Text to generate.
  """

  context: str
  target: str


class Input(NamedTuple):
  """An input of a task, with all its references.

  Attributes:
    context: Given text.
    references: Texts to compare a generated text with.
    part: Name of its part of the split, e.g. `'seen'`; `''` for none.
  """

  context: str
  references: tuple[str, ...]
  part: str = ''


class Inputs(NamedTuple):
  """The inputs of each split."""

  train: tuple[Input, ...] = ()
  validation: tuple[Input, ...] = ()
  test: tuple[Input, ...] = ()


@final
@dataclasses.dataclass(frozen=True)
class Task:
  """A task for fine-tuning, in three splits.

  Attributes:
    name: Name of the task.
    train: Pairs for fine-tuning.
    validation: Pairs for model selection.
    test: Pairs for reported results.
    inputs: Inputs of the pairs, which may have several references; `None` if
      every pair is an input of its own.

  Example:
    >>> task = Task('toy', (Pair('2 + 2', '4'),), (), ())
    >>> task.train[0].target, len(task.fingerprint)
    ('4', 64)
    >>> task.inputs_of('train')
    (Input(context='2 + 2', references=('4',), part=''),)
  """

  name: str
  train: tuple[Pair, ...]
  validation: tuple[Pair, ...]
  test: tuple[Pair, ...]
  inputs: Inputs | None = None

  def inputs_of(self, split: str) -> tuple[Input, ...]:
    """Returns the inputs of `'train'`, `'validation'` or `'test'`."""
    if self.inputs is not None:
      return getattr(self.inputs, split)
    return tuple(Input(p.context, (p.target,)) for p in getattr(self, split))

  @property
  def fingerprint(self) -> str:
    """SHA-256 over name, pairs and inputs, in hexadecimal."""
    facts: list[Any] = [self.name, self.train, self.validation, self.test]
    if self.inputs is not None:
      facts.append(self.inputs)
    return hashlib.sha256(json.dumps(facts).encode('utf-8')).hexdigest()


def task_of_inputs(name: str, inputs: Mapping[str, Sequence[Input]]) -> Task:
  """Creates a task with one pair for each reference of each input.

  Args:
    name: Name of the task.
    inputs: Inputs by split (`'train'`, `'validation'`, `'test'`); a missing
      split is empty. Inputs without a reference are skipped, with a warning.

  Returns:
    The task.

  Raises:
    ValueError: all splits are empty, or no input of a split has a reference.

  Example:
    >>> task = task_of_inputs('toy', {'train': [Input('2', ('two', 'II'))]})
    >>> task.train
    (Pair(context='2', target='two'), Pair(context='2', target='II'))
  """
  splits = Inputs(*(
      tuple(entry for entry in inputs.get(split, ()) if entry.references)
      for split in SPLITS
  ))
  for split, held in zip(SPLITS, splits):
    bare = len(inputs.get(split, ())) - len(held)
    if bare and not held:
      raise ValueError(
          f'none of the {bare} inputs of the {split} split of task {name!r} has'
          ' a reference; use the files of the task that contain references.'
      )
    if bare:
      _logger.warning(
          'Skipped %d inputs of the %s split of task %s: they have no'
          ' reference.', bare, split, name,
      )
  if not any(splits):
    raise ValueError(
        f'task {name!r} holds no input in any split; give at least one input'
        ' with a reference.'
    )
  train, validation, test = (
      tuple(Pair(i.context, text) for i in held for text in i.references)
      for held in splits
  )
  return Task(name, train, validation, test, splits)


def merge_equal_contexts(inputs: Sequence[Input]) -> tuple[Input, ...]:
  """Merges all inputs with the same context, as in "LoRA" (Hu et al., 2021).

  DART's 5,097 test inputs become 4,159.

  Args:
    inputs: Inputs to merge.

  Returns:
    One input per context, with the references of all; order and `part` are
    those of the first input with the context.

  Example:
    >>> merge_equal_contexts([Input('a', ('x',)), Input('a', ('y', 'z'))])
    (Input(context='a', references=('x', 'y', 'z'), part=''),)
  """
  merged: dict[str, Input] = {}
  for entry in inputs:
    first = merged.setdefault(entry.context, entry._replace(references=()))
    merged[entry.context] = first._replace(
        references=first.references + entry.references
    )
  return tuple(merged.values())


def format_sizes(task: Task) -> str:
  """Formats a table of the numbers of references and inputs of each split.

  Args:
    task: The task.

  Returns:
    A header, and one line for each split and each of its parts.

  Example:
    >>> print(format_sizes(task_of_inputs('toy', {
    ...     'test': [Input('2', ('two', 'II'), 'seen')]})))
    toy         references  inputs
    train                0       0
    validation           0       0
    test                 2       1
      seen               2       1
  """
  lines = [f'{task.name:<10}  references  inputs']
  for split in SPLITS:
    held = task.inputs_of(split)
    parts = sorted({entry.part for entry in held} - {''})
    for part in (None, *parts):
      chosen = [e for e in held if part is None or e.part == part]
      references = sum(len(entry.references) for entry in chosen)
      label = split if part is None else f'  {part}'
      lines.append(f'{label:<10}  {references:>10,}  {len(chosen):>6,}')
  return '\n'.join(lines)
