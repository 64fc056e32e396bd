"""What the commands show: our own log lines, not those of every library."""

import logging as standard_logging

from absl import flags
from absl import logging

from spdf_jax.training.processes import keep_freed_memory


def prepare() -> None:
  """Readies a command's process: quiet libraries, kept memory.

  Libraries below spdf_jax log from warnings on, unless `--verbosity` is given;
  `--verbosity=0` shows all they have to say.
  """
  keep_freed_memory()
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)
    for name in ('jax', 'orbax'):
      standard_logging.getLogger(name).setLevel(standard_logging.WARNING)
  standard_logging.getLogger('spdf_jax').setLevel(standard_logging.INFO)
