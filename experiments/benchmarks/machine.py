"""Description of the machine that takes measurements."""

import importlib.metadata
import os
import pathlib
import platform

import jax

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
      'cores': cores(),
      'device': jax.devices()[0].device_kind,
      'python': platform.python_version(),
      'system': platform.platform(),
  } | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def _processor() -> str:
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    for line in cpuinfo.read_text().splitlines():
      name, _, value = line.partition(':')
      if name.strip() == 'model name':
        return value.strip()
  return platform.processor() or platform.machine()


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
