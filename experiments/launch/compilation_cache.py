"""Persistent cache of compiled programs, shared by all commands."""

import os
import pathlib

from absl import flags
from absl import logging
import jax

from spdf_jax import files
from spdf_jax.accelerator import processor

_DIRECTORY = flags.DEFINE_string(
    'compilation_cache', None,
    "Folder for compiled programs that took over a second to compile; '' "
    'disables the cache. By default JAX_COMPILATION_CACHE_DIR, or else '
    '~/.cache/spdf_jax/compiled.',
)


def prepare() -> None:
  """Enables the compilation cache in the folder of the flag.

  It affects only programs that are compiled later.

  The same program of the same jaxlib, for the same devices, is compiled once.
  A program compiled for a CPU depends on its instruction set and number of
  cores, so every kind of processor has a directory of its own. If the directory
  cannot be written, or other users can write to it, a warning is logged and
  programs are not cached.
  """
  wished = _DIRECTORY.value
  if wished is None:
    if jax.config.jax_compilation_cache_dir:
      return
    home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    wished = os.path.join(home, 'spdf_jax', 'compiled')
  if not wished:
    jax.config.update('jax_enable_compilation_cache', False)
    return
  directory = pathlib.Path(wished).expanduser() / processor.identity()
  try:
    files.create_private(directory)
  except OSError as error:
    logging.warning(
        'compiled programs are not cached: %s cannot be written (%s).',
        directory, error.strerror,
    )
    return
  except ValueError as error:
    logging.warning('compiled programs are not cached: %s', error)
    return
  jax.config.update('jax_compilation_cache_dir', str(directory))
