"""Host memory of CPU training."""

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT = 1 << 30


def keep_freed_memory() -> bool:
  """Has the C library keep freed buffers of up to 1 GiB for the next step.

  XLA's CPU client allocates a step's temporary memory anew at every step.
  Above 32 MiB glibc gives such a buffer back to the system when it is freed,
  and faulting its pages in again costs more than a quarter of a small model's
  step. Results do not change.

  Returns:
    Whether it took effect: with glibc only.

  References:
    mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD

  Example:
    >>> keep_freed_memory() in (True, False)
    True
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  mallopt = ctypes.CDLL(None).mallopt
  return all(
      mallopt(parameter, _LARGEST_KEPT) == 1
      for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
  )
