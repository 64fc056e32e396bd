"""Console of the commands: output, logging, errors and exit status."""

from collections.abc import Callable, Iterable, Sequence
import io
import logging as standard_logging
import os
import sys
import tempfile
import traceback
from typing import Any

from absl import app
from absl import flags
from absl import logging

from experiments.launch import config_file
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.training.loop import processes


def start(
    main: Callable[[list[str]], int], command_flags: flags.FlagValues
) -> None:
  """Parses the flags, runs `main` and exits with the status it returns.

  Args:
    main: Body of the command, which receives the remaining arguments.
    command_flags: Flags of the command, see `register`.
  """
  register(command_flags)
  app.define_help_flags()
  for help_flag in (_Help(), _HelpShort(), _HelpFull()):
    help_flag.allow_override = True
    flags.DEFINE_flag(help_flag)

  def run_main(argv: list[str]) -> int:
    try:
      return main(argv)
    except app.UsageError:
      raise
    except (Exception, KeyboardInterrupt) as error:  # Raised outside of `run`.
      return _end(error, begun=True)

  app.run(run_main, flags_parser=_parse_flags)


def register(command_flags: flags.FlagValues) -> None:
  """Adds the flags of a command to those that absl parses and describes.

  A command defines its flags in a `FlagValues` of its own, so that commands
  with flags of the same names can be imported together.

  Args:
    command_flags: Flags of the command that this process runs.
  """
  for name in command_flags:
    flags.DEFINE_flag(command_flags[name], module_name=sys.argv[0])
  # Also with `flags.FLAGS`, which contains them.
  command_flags.mark_as_parsed()


class _EndsWith0(flags.BooleanFlag):
  """A flag that prints help, with exit status 0 where absl has 1."""

  def parse(self, arg: Any) -> None:
    """Prints the help and exits, unless the flag is given as false."""
    try:
      super().parse(arg)
    except SystemExit:
      sys.exit(0)


class _Help(_EndsWith0, app.HelpFlag):
  """The flag --help."""


class _HelpShort(_EndsWith0, app.HelpshortFlag):
  """The flag --helpshort."""


class _HelpFull(_EndsWith0, app.HelpfullFlag):
  """The flag --helpfull."""


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses flags; a config field that does not exist is one sentence."""
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, LookupError, TypeError):  # Errors of a ConfigDict.
    config_file.check_fields(argv)
    raise


def run(
    argv: Sequence[str],
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> int:
  """Runs the body of a command, prints its texts and returns its exit status.

  Every error is logged as one sentence, with status 1. Bad input is the only
  cause of most; the traceback of any other one is kept in a temporary file that
  the sentence names, and `--verbosity=1` logs all tracebacks. A run stopped by
  a signal has the status that shells use, 128 and the signal's number.

  Args:
    argv: Name of the program and arguments left after parsing flags; there
      must be none of these.
    call: Body of the command; returns a text, an iterator of texts, an exit
      status or `None`, or a function that returns one of these: the rest of the
      work. Its errors are not caused by bad input, so their tracebacks are
      kept, but for those of disks.
    *args: Arguments of `call`.
    **kwargs: Further arguments of `call`.

  Returns:
    The exit status: 0 unless `call` or its function returned another.

  Raises:
    app.UsageError: arguments are left after parsing flags.
  """
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  prepare()
  begun = False
  try:
    result = call(*args, **kwargs)
    if callable(result):
      begun = True
      result = result()
    return _show(result)
  except (Exception, KeyboardInterrupt) as error:
    return _end(error, begun)


_EXPECTED = (
    ValueError, OSError, ImportError, training.NotFinite, native.Unavailable
)


def _end(error: BaseException, begun: bool) -> int:
  """Logs an error as one sentence; returns the exit status of the command.

  Args:
    error: The error.
    begun: Whether all input was checked before.
  """
  text = ' '.join(str(error).split())
  if isinstance(error, training.Interrupted):
    logging.warning('%s', error)
    return 128 + error.signal
  if isinstance(error, (InterruptedError, KeyboardInterrupt)):
    logging.warning('stopped; the same command continues from what is saved.')
    return 130
  # Orbax and tensorstore raise ValueError for a full disk.
  if begun and (
      isinstance(error, OSError) or 'No space left on device' in text
  ):
    text = (
        f'{text:.300}; what is saved is whole: free some space or restore the '
        'disk, and the same command continues from there.'
    )
  elif isinstance(error, Exception) and processes.is_lost_process(error):
    text = (
        f'another process of this run has ended ({str(error).splitlines()[0]});'
        ' start all processes again, and they continue from the last '
        'checkpoint.'
    )
  elif 'Unable to initialize backend' not in text and (
      begun and isinstance(error, ValueError)
      or not isinstance(error, _EXPECTED)
  ):
    text = f'{type(error).__name__}: {text:.300}'.rstrip('.')
    text += f'; {_keep_traceback(error)}'
  logging.error('%s', text)
  logging.debug('This was raised:', exc_info=error)
  return 1


def _keep_traceback(error: BaseException) -> str:
  """Writes a traceback to a temporary file; returns where it is."""
  lines = ''.join(traceback.format_exception(error))
  try:
    descriptor, path = tempfile.mkstemp('.txt', 'spdf_jax-')
    with os.fdopen(descriptor, 'w', errors='backslashreplace') as file:
      file.write(lines)
  except OSError:  # The disk of temporary files may be full, too.
    sys.stderr.write(lines)
    return 'its traceback is above.'
  return f'its traceback is in {path}.'


def _show(result: str | Iterable[str] | int | None) -> int:
  """Prints texts as they are produced; returns an exit status."""
  if result is None or isinstance(result, int):
    return result or 0
  for text in [result] if isinstance(result, str) else result:
    print(text, flush=True)
  return 0


def prepare() -> None:
  """Configures logging and the memory allocator of a command's process.

  Other libraries log warnings and errors only, unless `--verbosity` is given;
  `--verbosity=0` shows all their messages.
  """
  processes.keep_freed_memory()
  # Under an ASCII locale a table or a text would end the command.
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors='replace')
  logging.get_absl_handler().setFormatter(standard_logging.Formatter(
      '%(levelname).1s %(asctime)s %(message)s', '%H:%M:%S'
  ))
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)
    # Orbax and tensorstore print a failed save many times, before it is raised.
    sys.unraisablehook = _print_unraisable
    standard_logging.getLogger('asyncio').setLevel(standard_logging.CRITICAL)
    logging.get_absl_handler().addFilter(
        lambda record: f'{os.sep}orbax{os.sep}' not in record.pathname
        or record.levelno < standard_logging.ERROR
    )
    for name in ('jax', 'orbax'):
      standard_logging.getLogger(name).setLevel(standard_logging.WARNING)
  standard_logging.getLogger('spdf_jax').setLevel(standard_logging.INFO)


def _print_unraisable(unraisable: Any) -> None:
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)
