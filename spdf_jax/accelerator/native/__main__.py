"""Builds and tests the native kernels: python -m spdf_jax.accelerator.native.

Prints where the library lies, which kernels this processor runs, and how far
their results are from a float64 reference. Exit status 1 where they do not
work, with the reason.
"""

import os
import sys

import jax
import numpy as np

from spdf_jax.accelerator.native import library
from spdf_jax.accelerator.native.lowering import NATIVE
from spdf_jax.accelerator.primitives import sparse_matmul

_LARGEST_ERROR = 2e-6
_SHAPES = ((1, 1, 1), (33, 65, 17), (300, 257, 513), (128, 600, 64))
_SPARSITIES = (0.0, 0.5, 0.9, 1.0)


def main() -> int:
  """Runs the command; returns its exit status."""
  try:
    path = library.build()
    name = library.kernels()
  except library.Unavailable as error:
    print(error)
    return 1
  print(f'library  {path}')
  print(f'kernels  {name}, of {", ".join(library.KERNELS)}')
  print(f'threads  {len(os.sched_getaffinity(0))}')
  error = largest_error()
  works = error <= _LARGEST_ERROR
  print(f'error    {error:.1e} of the largest result, at most {_LARGEST_ERROR}')
  print('works' if works else 'DOES NOT WORK')
  return 0 if works else 1


def largest_error() -> float:
  """Returns how far products and gradients are from float64, relative."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  errors = []
  for tokens, inputs, outputs in _SHAPES:
    for sparsity in _SPARSITIES:
      x, w, dy = draw(tokens, inputs), draw(inputs, outputs), draw(
          tokens, outputs
      )
      mask = rng.random(w.shape) >= sparsity
      f = lambda x, w, mask=mask: sparse_matmul(x, w, mask, lowering=NATIVE)
      y, pullback = jax.vjp(f, x, np.where(mask, w, np.nan))
      kept = np.where(mask, w, 0).astype(np.float64)
      wide = x.astype(np.float64), dy.astype(np.float64)
      wanted = wide[0] @ kept, wide[1] @ kept.T, mask * (wide[0].T @ wide[1])
      for a, b in zip((y, *pullback(dy)), wanted):
        # A NaN is no small error.
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        errors.append(error if np.isfinite(error) else np.inf)
  return float(max(errors))


if __name__ == '__main__':
  sys.exit(main())
