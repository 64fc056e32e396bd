# SPDX-License-Identifier: Apache-2.0
"""The processor of this machine, as the operating system describes it."""

import functools
import hashlib
import os
import pathlib
import platform
import re

# Lines of `/proc/cpuinfo` that name a kind of processor, on x86 and on ARM.
_NAMES = (
    'vendor_id', 'cpu family', 'model', 'flags', 'CPU implementer', 'CPU part',
    'Features',
)
_AMD = 'AuthenticAMD'
_ZEN_5 = 26  # The family; Zen 3 and 4 are of family 25.


@functools.cache
def cpuinfo() -> str:
  """Returns the text of `/proc/cpuinfo`, empty on systems without it."""
  path = pathlib.Path('/proc/cpuinfo')
  return path.read_text('utf-8') if path.exists() else ''


def vendor() -> str:
  """Returns the vendor and the features that decide the speed of products.

  The features are AMX tiles, and for AMD whether it is a Zen 5 or later, which
  multiplies dense matrices by vectors of 512 bits at twice the rate.

  Returns:
    For example `'AuthenticAMD'`, `'AuthenticAMD from Zen 5 on'` or
    `'GenuineIntel with AMX'`; `'unknown'` where there is no `/proc/cpuinfo`, or
    it names no vendor.
  """
  name = re.search(r'vendor_id\s*:\s*(\w+)', cpuinfo())
  family = re.search(r'cpu family\s*:\s*(\d+)', cpuinfo())
  if name is None:
    return 'unknown'
  if 'amx_bf16' in cpuinfo():
    return f'{name[1]} with AMX'
  if name[1] == _AMD and family and int(family[1]) >= _ZEN_5:
    return f'{name[1]} from Zen 5 on'
  return name[1]


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def identity() -> str:
  """Returns a name of the processor, for caches of code and measurements.

  It has the architecture, the kind of processor with its extensions, and the
  number of cores.
  """
  kind = sorted({
      line for line in cpuinfo().splitlines()
      if line.partition(':')[0].strip() in _NAMES
  }) or [platform.processor()]
  digest = hashlib.sha256('\n'.join(kind).encode()).hexdigest()
  return f'{platform.machine()}-{cores()}-{digest[:12]}'
