"""The machine that a measurement was taken on."""

import os
import pathlib
import platform

import jax


def describe_machine() -> dict[str, str | int]:
  """Names the processor, its usable cores, and the versions that matter.

  Example:
    >>> sorted(describe_machine())
    ['cores', 'device', 'jax', 'processor', 'python', 'system']
  """
  return {
      'processor': _processor(),
      'cores': cores(),
      'device': jax.devices()[0].device_kind,
      'jax': jax.__version__,
      'python': platform.python_version(),
      'system': platform.platform(),
  }


def _processor() -> str:
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    for line in cpuinfo.read_text().splitlines():
      name, _, value = line.partition(':')
      if name.strip() == 'model name':
        return value.strip()
  return platform.processor() or platform.machine()


def cores() -> int:
  """Returns how many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
