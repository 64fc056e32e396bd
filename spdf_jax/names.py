# SPDX-License-Identifier: Apache-2.0
"""Functions by the names and arguments that users give."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import contextvars
import difflib
import functools
import importlib
import inspect
import re
from typing import Any, cast, TypeVar

T = TypeVar('T')
F = TypeVar('F', bound=Callable[..., Any])

_MOST_SHOWN = 200  # Characters of an argument.
_received: contextvars.ContextVar[tuple[str, str] | None] = (
    contextvars.ContextVar('received', default=None)
)


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
  """Returns `table[name]`, or raises an error with the closest known names.

  Args:
    kind: Kind of the table's entries for the error message, e.g. `'preset'`.
    name: Name to look up.
    table: Known names and their values.

  Returns:
    The value under `name`.

  Raises:
    ValueError: `name` is unknown.

  Example:
    >>> lookup('preset', 'gpt2-small', {'gpt2-small': 12})
    12
  """
  if isinstance(name, str) and name in table:
    return table[name]
  near = difflib.get_close_matches(str(name), table, n=3, cutoff=0.4)
  hint = f'did you mean {" or ".join(map(repr, near))}?' if near else (
      f'known are {", ".join(map(repr, sorted(table)))}.'
  )
  raise ValueError(f'{kind} {name!r} is unknown; {hint}')


@contextlib.contextmanager
def received(place: str, fix: str) -> Iterator[None]:
  """Refuses to import functions inside the context.

  Code that a received file names, such as the config of a checkpoint, does not
  run while the file is read.

  Args:
    place: Description of the file, for the error message.
    fix: What a user does to run the code, for the error message.

  Example:
    >>> with received("config of workdir 'a'", 'name it in your own config'):
    ...   import_function('model', 'my_models:small')
    Traceback (most recent call last):
    ValueError: config of workdir 'a' names code to run, model 'my_models:sm...
  """
  token = _received.set((place, fix))
  try:
    yield
  finally:
    _received.reset(token)


def is_function(name: str) -> bool:
  """Returns whether a name in a config names a function to import.

  Example:
    >>> [is_function(x) for x in ('my_models:small', 'rigl', '2:4')]
    [True, False, False]
  """
  return ':' in name and not re.fullmatch(r'\d+:\d+', name)


def import_function(kind: str, name: str) -> Callable[..., Any]:
  """Imports the function named by `'package.module:function'`.

  Args:
    kind: Kind of the function for error messages, e.g. `'algorithm'`.
    name: Name of the module and the function.

  Returns:
    The function.

  Raises:
    ValueError: the name has another form, there is no such module or function,
      or a received file that is being read has the name, see `received`.

  Example:
    >>> import_function('algorithm', 'spdf_jax.sparsity:static').__name__
    'static'
  """
  if received_from := _received.get():
    place, fix = received_from
    raise ValueError(
        f'{place} names code to run, {kind} {name!r}; read the code, and {fix} '
        'to run it.'
    )
  module_name, _, attribute = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    # An existing module may fail on its own imports; that error propagates.
    if error.name and (module_name + '.').startswith(error.name + '.'):
      raise ValueError(
          f'{kind} {name!r} cannot be imported ({error}); give '
          "'package.module:function' of a module on the Python path."
      ) from error
    raise
  except ValueError as error:
    raise ValueError(
        f"{kind} {name!r} names no module; write 'package.module:function'."
    ) from error
  return lookup(f'{kind} {name!r}: name', attribute, vars(module))


def bind(
    what: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    missing: int = 0,
) -> Callable[..., Any]:
  """Binds keyword arguments to a function after checking its signature.

  Args:
    what: Name of the function for error messages.
    function: The function.
    arguments: Keyword arguments of the function.
    missing: Number of positional arguments of the later call.

  Returns:
    A function of the missing arguments.

  Raises:
    ValueError: an argument is missing or unexpected.
  """
  signature = inspect.signature(function)
  try:
    signature.bind(*[None] * missing, **arguments)
  except TypeError as error:
    names = list(signature.parameters)[missing:]
    raise ValueError(
        f'{what}: {error}; its arguments are {", ".join(names) or "none"}.'
    ) from error
  return functools.partial(function, **arguments) if arguments else function


def by_entry(
    kind: str, value: Any, table: Mapping[str, Any], missing: int = 0
) -> Any:
  """Looks up a name, or a mapping of a name and arguments, in a table.

  Args:
    kind: Kind of the table's entries, the key of the name in a mapping.
    value: `name` or `{kind: name, …arguments}`, where a name with a colon,
      `'package.module:function'`, is imported; others are returned unchanged.
    table: Functions by their names.
    missing: Number of positional arguments of the later call.

  Returns:
    The function, with the arguments bound.

  Raises:
    ValueError: the name is unknown, or an argument is.
  """
  if isinstance(value, str):
    value = {kind: value}
  if not isinstance(value, Mapping):
    return value
  name = value.get(kind, '')
  if isinstance(name, str) and is_function(name):
    function = import_function(kind, name)
  else:
    function = lookup(kind, name, table)
  arguments = {k: v for k, v in value.items() if k != kind}
  return bind(f'{kind} {name!r}', function, arguments, missing)


def printed_as_call(make: F) -> F:
  """Makes the tuples of a function print as the call that created them.

  Args:
    make: A function that returns a NamedTuple with a field `name`.

  Returns:
    The function, whose results have the text of the call as their name.

  Example:
    >>> import spdf_jax as spdf
    >>> spdf.join([spdf.static(0.9, init='magnitude'), spdf.dense()], [300])
    join([static(0.9, init='magnitude'), dense()], [300])
  """
  @functools.wraps(make)
  def made(*args, **kwargs):
    shown = [show(x) for x in args]
    shown += [f'{name}={show(x)}' for name, x in kwargs.items()]
    return make(*args, **kwargs)._replace(
        name=f'{make.__name__}({", ".join(shown)})'
    )

  return cast(F, made)


def show(value: Any) -> str:
  """Returns the name of a function, or the start of another value's `repr`."""
  if isinstance(value, functools.partial):
    given = [*map(show, value.args), '…']
    given += [f'{name}={show(x)}' for name, x in value.keywords.items()]
    return f'{show(value.func)}({", ".join(given)})'
  if callable(value) and hasattr(value, '__name__'):
    return value.__name__
  text = repr(value)
  return text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}…'
