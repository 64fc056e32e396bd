"""Host memory of CPU training."""

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_KEPT = 2**31 - 1  # mallopt takes an int.
_NEVER = -1
# One arena: the heaps of further ones hold at most 64 MiB.
_SETTINGS = {
    _M_ARENA_MAX: 1,
    _M_MMAP_THRESHOLD: _LARGEST_KEPT,
    _M_TRIM_THRESHOLD: _NEVER,
}


def keep_freed_memory() -> bool:
  """Has the C library keep freed buffers of up to 2 GiB for the next step.

  XLA's CPU client allocates a step's temporary memory anew at every step.
  Above 32 MiB glibc gives such a buffer back to the system when it is freed,
  and faulting its pages in again costs a quarter of a small model's step, and
  more than that of GPT-2 Small's, whose buffer is of 1 to 1.3 GiB. What the
  process held once it keeps. Call it before jax starts threads. Results do not
  change.

  Returns:
    Whether it took effect: with glibc only.

  References:
    mallopt(3): M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD

  Example:
    >>> keep_freed_memory() in (True, False)
    True
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  mallopt = ctypes.CDLL(None).mallopt
  return all(mallopt(key, value) == 1 for key, value in _SETTINGS.items())
