"""Tasks of Gao et al., 2025: pairs of prompts that have two answers.

The prompts of a pair differ in one mark, and so does what follows them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Prompts(NamedTuple):
  """Prompts with two answers, those of a pair one after the other."""

  tokens: np.ndarray
  """Tokens [N, L], shorter prompts after newlines; the last is that before the
  answer."""

  answers: np.ndarray
  """Right and wrong answer [N, 2]."""


class Task(NamedTuple):
  """What is before the word of a prompt, and the answer after it."""

  openings: tuple[str, ...]
  """Texts with `{}` for the mark; each word has the next one."""

  marks: tuple[str, str]

  answers: tuple[str, str]


_CALLS = 'x.get({}', 'print({}', 'self.add({}', 'open({}'

TASKS = {
    'quote': Task(
        ('x = {}', 'name = {}', 'print({}', 'return {}'),
        ("'", '"'), ("'", '"'),
    ),
    'call': Task(_CALLS, ("'", '"'), ("')", '")')),
    'bracket': Task(
        ('x = self{}', 'y = get{}', 'return data{}', 'x = line{}'),
        ('(', '['), (')', ']'),
    ),
}
"""By name: which quote closes a string, alone or with the bracket of the call
in one token; which bracket closes."""


def make_prompts(
    task: Task,
    encode: Callable[[str], Sequence[int]],
    words: Sequence[str],
    length: int,
) -> Prompts:
  """Returns pairs of prompts: an opening with a mark, and a word.

  A pair is left out if the tokenizer splits one of its prompts elsewhere than
  before its answer.

  Args:
    task: The task.
    encode: Function from a text to tokens.
    words: Words of the prompts.
    length: Tokens of a prompt.

  Returns:
    The prompts.

  Raises:
    ValueError: an answer or a newline is no single token, or no prompt is left.

  Example:
    >>> made = make_prompts(
    ...     TASKS['quote'], lambda text: list(text.encode()), ['a'], 7)
    >>> [bytes(row) for row in made.tokens.tolist()]
    [b"\\nx = 'a", b'\\nx = "a']
    >>> made.answers.tolist()
    [[39, 34], [34, 39]]
  """
  singles = [list(encode(text)) for text in (*task.answers, '\n')]
  if any(len(tokens) != 1 for tokens in singles):
    raise ValueError(
        f'the tokenizer has no single token for one of {task.answers} and a '
        'newline; give another task, or another tokenizer.'
    )
  (one,), (other,), (newline,) = singles
  tokens, answers = [], []
  for i, word in enumerate(words):
    opening = task.openings[i % len(task.openings)]
    pair = []
    for mark, text, right, wrong in zip(
        task.marks, task.answers, (one, other), (other, one)
    ):
      prompt = list(encode(opening.format(mark) + word))
      whole = list(encode(opening.format(mark) + word + text))
      if whole == [*prompt, right] and len(prompt) <= length:
        pair.append((prompt, (right, wrong)))
    if len(pair) == 2 and len(pair[0][0]) == len(pair[1][0]):
      for prompt, answer in pair:
        tokens.append([newline] * (length - len(prompt)) + prompt)
        answers.append(answer)
  if not tokens:
    raise ValueError(
        'no word gives a pair of prompts that the tokenizer splits before the '
        'answer; give other words, or another tokenizer.'
    )
  return Prompts(np.array(tokens, np.int32), np.array(answers, np.int32))


def marks_of(prompts: Prompts) -> list[int]:
  """Returns the tokens in which the prompts of pairs differ."""
  one, other = prompts.tokens[::2], prompts.tokens[1::2]
  differ = one != other
  return np.unique(np.concatenate([one[differ], other[differ]])).tolist()
