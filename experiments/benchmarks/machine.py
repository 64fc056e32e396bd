"""Description of the machine that takes measurements."""

import importlib.metadata
import platform

import jax

from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor

_LIBRARIES = 'jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy'


def describe_machine() -> dict[str, str | int]:
  """Returns the processor, its usable cores, and versions of the software.

  Example:
    >>> machine = describe_machine()
    >>> {'processor', 'cores', 'device', 'jax', 'flax'} <= machine.keys()
    True
  """
  return {
      'processor': _processor(),
      'cores': processor.cores(),
      'device': jax.devices()[0].device_kind,
      'python': platform.python_version(),
      'system': platform.platform(),
  } | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def dtypes() -> tuple[str, ...]:
  """Returns the dtypes to measure: bfloat16 where there are kernels of it.

  Example:
    >>> 'float32' in dtypes()
    True
  """
  if native.is_available('bfloat16'):
    return 'float32', 'bfloat16'
  return ('float32',)


def _processor() -> str:
  lines = (line.partition(':') for line in processor.cpuinfo().splitlines())
  fields = {name.strip(): value.strip() for name, _, value in lines}
  name = fields.get('model name') or platform.processor() or platform.machine()
  if 'cpu family' in fields:
    # Virtual machines give all generations one name, such as "AMD EPYC".
    name += f' (family {fields["cpu family"]}, model {fields["model"]})'
  return name
