"""Imports of optional dependencies, with an error that names the extra."""

import importlib
import types


def require(module: str, extra: str) -> types.ModuleType:
  """Imports an optional library, or raises with the extra that installs it.

  Args:
    module: Name of the module to import, e.g. `'matplotlib.pyplot'`.
    extra: Extra of `setup.py` that lists the module's distribution.

  Returns:
    The imported module.

  Raises:
    ImportError: `module` is not installed; the message names the extra.

  Example:
    >>> require('json', 'viz').dumps([1])
    '[1]'
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ImportError(
        f'{module} is not installed; install it with '
        f'`pip install "spdf_jax[{extra}]"`.'
    ) from error
