"""The flag --config: a file that returns a config, checked as it is loaded."""

from collections.abc import Iterator, Sequence
import difflib
import functools
import operator
import re
import runpy
import shlex
import traceback
from typing import Any

from absl import flags
from ml_collections import config_dict
from ml_collections import config_flags


def define(command_flags: flags.FlagValues) -> flags.FlagHolder:
  """Defines --config, and --config.field for any field of the config.

  Any error of the file, or of its argument, is an error of the flag.

  Args:
    command_flags: Flags of the command.

  Returns:
    The holder of the flag, whose value is the config.
  """
  holder = config_flags.DEFINE_config_file(
      'config', None,
      'Config file, with its argument: path.py:argument. Any field can be set: '
      '--config.FIELD=VALUE; experiments.train --fields lists them.',
      flag_values=command_flags,
  )
  command_flags['config'].parser = Parser()
  adopt(command_flags)
  return holder


def adopt(command_flags: flags.FlagValues) -> None:
  """Makes --config define the flags --config.FIELD when flags are parsed.

  Also hides the default of --config in --help, since it would fill a screen.

  Args:
    command_flags: Flags of the command, with that of its config.
  """
  flag = command_flags['config']
  flag.flag_values = flags.FLAGS
  flag.default_as_str = None


class Parser(flags.ArgumentParser):
  """A parser of config files whose errors are one sentence."""

  def parse(self, path: str) -> config_dict.ConfigDict:
    """Loads the config of `path.py:argument`; raises ValueError otherwise."""
    name, *argument = path.split(':', 1)
    try:
      self.config = _get_config(name)(*argument)
      if not isinstance(self.config, config_dict.ConfigDict):
        raise ValueError(
            f'get_config returns {self.config!r:.60}; let it return a '
            'ConfigDict.'
        )
      return self.config.lock()
    except Exception as error:  # A config file may raise any exception.
      raise ValueError(_describe(error, name)) from error


def _get_config(name: str) -> Any:
  namespace = runpy.run_path(name)
  if 'get_config' not in namespace:
    raise ValueError('it has no function get_config; define one.')
  return namespace['get_config']


def _describe(error: Exception, name: str) -> str:
  """Describes an error of a config file, with its line if it is a mistake."""
  text = one_line(error)
  if isinstance(error, (ValueError, OSError)):
    return text
  lines = [
      frame.lineno for frame in traceback.extract_tb(error.__traceback__)
      if frame.filename == name
  ]
  where = f' in line {lines[-1]}' if lines else ''
  return f'{type(error).__name__}{where}: {text}; correct the config file.'


def one_line(error: Exception) -> str:
  """Returns the text of an error without line breaks, shortened.

  Example:
    >>> one_line(KeyError('a\\nb'))
    'a. b'
  """
  detail: Any = error
  while isinstance(detail, (AttributeError, KeyError)) and detail.args:
    detail = detail.args[0]
  return '. '.join(str(detail).splitlines())[:300]


def format_fields(config: config_dict.ConfigDict) -> str:
  """Returns a line --config.FIELD=VALUE for each field of a config.

  Example:
    >>> print(format_fields(config_dict.create(seed=0, data={'task': ''})))
    --config.data.task=''
    --config.seed=0
  """
  return '\n'.join(
      f'--config.{path}={shlex.quote(str(value))}'
      for path, value in sorted(_fields(config))
  )


def check_fields(argv: Sequence[str]) -> None:
  """Raises SystemExit with a sentence if a --config.field does not exist.

  Args:
    argv: Words of the command line.
  """
  flag = flags.FLAGS['config']
  config = getattr(flag.parser, 'config', flag.default)
  given = re.findall(r'^--?(?:no)?config\.([^=\n]+)', '\n'.join(argv), re.M)
  for path in given:
    if not _has(config, path.split('.')):
      near = difflib.get_close_matches(path, dict(_fields(config)))
      raise SystemExit(f'config field {path!r} is unknown; ' + (
          f'did you mean {" or ".join(map(repr, near))}?' if near
          else 'configs/base.py documents all fields.'
      )) from None


def _fields(config: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yields the paths and values of all fields of a config."""
  for name, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      yield from _fields(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value


def _has(config: Any, path: Sequence[str]) -> bool:
  try:
    functools.reduce(operator.getitem, path, config)
  except (LookupError, TypeError):
    return False
  return True
