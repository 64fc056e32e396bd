# SPDX-License-Identifier: Apache-2.0
"""Optional dependencies: their imports, and their errors as one sentence."""

from collections.abc import Iterator
import contextlib
import importlib
import types

REPOSITORY = ''
"""Address of the repository, set at release; metadata, notebooks, the site and
errors take it from here. Empty: one installs from a clone."""


def install_command(extra: str, address: str = REPOSITORY) -> str:
  """Returns the command that installs an extra, for error messages.

  Args:
    extra: Extra of `setup.py`.
    address: Address of the repository; empty if it has none yet.

  Returns:
    The command, and where it is run if that matters.

  Example:
    >>> print(install_command('viz', ''))
    `pip install ".[viz]"` in a clone of the repository
    >>> print(install_command('viz', 'https://example.org/repository'))
    `pip install "spdf_jax[viz] @ git+https://example.org/repository"`
  """
  if address:
    return f'`pip install "spdf_jax[{extra}] @ git+{address}"`'
  return f'`pip install ".[{extra}]"` in a clone of the repository'


def require(module: str, extra: str | None) -> types.ModuleType:
  """Imports an optional library, or raises an error with what installs it.

  Args:
    module: Name of the module to import, e.g. `'matplotlib.pyplot'`.
    extra: Extra of `setup.py` that lists the module's distribution; `None` for
      libraries that no extra installs, because of their size.

  Returns:
    The imported module.

  Raises:
    ImportError: `module`, or a module that it imports, is not installed; the
      message names the extra.

  Example:
    >>> require('json', 'viz').dumps([1])
    '[1]'
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    problem = 'is not installed'
    if not f'{module}.'.startswith(f'{error.name}.'):
      problem = f'cannot be imported ({error})'
    if extra is None:
      raise ImportError(
          f'{module} {problem}, and no extra of spdf_jax installs it; use '
          f'`pip install {module}`.'
      ) from error
    raise ImportError(
        f'{module} {problem}; install it with {install_command(extra)}.'
    ) from error


@contextlib.contextmanager
def one_sentence(problem: str, fix: str) -> Iterator[None]:
  """Turns all errors of a library and its backends into one sentence.

  Args:
    problem: Beginning of the sentence, such as `"corpus='a' cannot be read"`.
    fix: End of the sentence.

  Raises:
    ValueError: the library raised an error.

  Example:
    >>> with one_sentence("input='a' cannot be read", 'give a file.'):
    ...   raise KeyError('b')
    Traceback (most recent call last):
    ValueError: input='a' cannot be read (KeyError: 'b'); give a file.
  """
  try:
    yield
  # Libraries and their backends may raise any exception.
  except Exception as error:
    text = ' '.join(str(error).split())[:300]
    raise ValueError(
        f'{problem} ({type(error).__name__}: {text}); {fix}'
    ) from error
