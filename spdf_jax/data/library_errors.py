# SPDX-License-Identifier: Apache-2.0
"""Errors of other libraries, as one sentence."""

from collections.abc import Iterator
import contextlib


@contextlib.contextmanager
def one_sentence(problem: str, fix: str) -> Iterator[None]:
  """Turns all errors of a library and its backends into one sentence.

  Args:
    problem: Beginning of the sentence, such as `"corpus='a' cannot be read"`.
    fix: End of the sentence.

  Raises:
    ValueError: The library raised an error.

  Example:
    >>> with one_sentence("input='a' cannot be read", 'give a file.'):
    ...   raise KeyError('b')
    Traceback (most recent call last):
    ValueError: input='a' cannot be read (KeyError: 'b'); give a file.
  """
  try:
    yield
  except Exception as error:  # Libraries and their backends raise any.
    text = ' '.join(str(error).split())[:300]
    raise ValueError(
        f'{problem} ({type(error).__name__}: {text}); {fix}'
    ) from error
