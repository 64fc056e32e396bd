# SPDX-License-Identifier: Apache-2.0
"""Builds and tests the native kernels: python -m spdf_jax.accelerator.native.

Prints the path of the library, the kernels for this processor, and the error of
their results relative to a float64 reference. Exits with status 1 and the
reason if the kernels do not work.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import lowerings
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.native import library

# Tolerance relative to the largest result, in addition to its rounding.
_LARGEST_ERROR = 2e-6
# Tokens, inputs, outputs, and the side of the mask's blocks.
_SHAPES = (
    (1, 1, 1, 1), (33, 65, 17, 1), (300, 257, 513, 1), (128, 600, 64, 1),
    (65, 320, 96, 32),
)
_SPARSITIES = (0.0, 0.5, 0.9, 1.0)


def main() -> int:
  """Runs the command; returns its exit status."""
  try:
    path = library.build()
    library.load()
  except library.Unavailable as error:
    print(error)
    return 1
  print(f'library  {path}')
  print(f'kernels  {", ".join(library.KERNELS)}')
  print(f'threads  {len(os.sched_getaffinity(0))}')
  print(f'matrix   {"AMX" if library.has_matrix_unit() else "no unit is used"}')
  works = True
  for dtype in library.DTYPES:
    try:
      print(f'{dtype:8} {library.kernels(dtype)}')
    except library.Unavailable as error:
      print(error)
      continue
    largest = largest_error(dtype)
    works &= largest <= _LARGEST_ERROR
    print(
        f'  error  {largest:.1e} relative to the largest result (at most '
        f'{_LARGEST_ERROR})'
    )
  print('works' if works else 'DOES NOT WORK')
  return 0 if works else 1


def largest_error(dtype: str = 'float32') -> float:
  """Returns the largest relative error of products and gradients.

  The reference computes in float64.

  Args:
    dtype: Dtype of operands and results; rounding to it is not an error.

  Returns:
    The largest error of a result, divided by the largest result.
  """
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  rounding = 0 if dtype == 'float32' else float(jnp.finfo(dtype).eps) / 2
  errors = []
  for tokens, inputs, outputs, side in _SHAPES:
    for sparsity in _SPARSITIES:
      x, w, dy = draw(tokens, inputs), draw(inputs, outputs), draw(
          tokens, outputs
      )
      mask = rng.random((inputs // side, outputs // side)) >= sparsity
      mask = np.kron(mask, np.ones((side, side), bool))
      f = lambda x, w, mask=mask: primitives.sparse_matmul(
          x, w, mask, lowering=lowerings.NATIVE
      )
      y, pullback = jax.vjp(f, x, jnp.where(mask, w, jnp.nan))
      kept = np.where(mask, w, 0).astype(np.float64)
      wide = [np.asarray(a).astype(np.float64) for a in (x, dy)]
      wanted = wide[0] @ kept, wide[1] @ kept.T, mask * (wide[0].T @ wide[1])
      for a, b in zip((y, *pullback(dy)), wanted):
        error = np.abs(np.asarray(a).astype(np.float64) - b)
        error = (error - rounding * np.abs(b)).max()
        error /= max(np.abs(b).max(), 1e-30)
        # Python's `max` may ignore a NaN.
        errors.append(error if np.isfinite(error) else np.inf)
  return float(max(errors))


if __name__ == '__main__':
  sys.exit(main())
