# SPDX-License-Identifier: Apache-2.0
"""Pseudo-random permutations, evaluated without storing them."""

import hashlib
import math

import numpy as np

_ROUNDS = 6


def permute(
    index: np.ndarray | int, size: int, key: tuple[int, ...]
) -> np.ndarray:
  """Evaluates a pseudo-random permutation of `range(size)`.

  The permutation is a bijection on `range(size)` for every key, and the same on
  every platform. It is never stored: a position is written as a pair (row,
  column) of a table of at least `size` cells, and a generalized Feistel network
  is applied to the pair until the result is below `size` (cycle walking).

  Args:
    index: Positions in [0, size), of any shape.
    size: Size of the permuted range, below 2^62.
    key: Integers that choose the permutation, e.g. (seed, epoch).

  Returns:
    The images of the positions, int64 of the shape of `index`.

  References:
    Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains".

  Example:
    >>> permute(np.arange(8), 8, key=(0, 1)).tolist()
    [0, 5, 6, 4, 2, 7, 3, 1]
  """
  index = np.asarray(index, np.int64)
  digest = hashlib.blake2b(repr(tuple(map(int, key))).encode()).digest()
  round_keys = np.frombuffer(digest, '<u8')[:_ROUNDS].astype(np.uint64)
  rows = math.isqrt(size - 1) + 1
  columns = -(-size // rows)
  result = _encipher(index.reshape(-1).astype(np.uint64),
                     np.uint64(rows), np.uint64(columns), round_keys)
  beyond = np.flatnonzero(result >= size)
  while beyond.size:
    result[beyond] = _encipher(result[beyond], np.uint64(rows),
                               np.uint64(columns), round_keys)
    beyond = beyond[result[beyond] >= size]
  return result.astype(np.int64).reshape(index.shape)


def _encipher(
    x: np.ndarray, rows: np.uint64, columns: np.uint64, keys: np.ndarray
) -> np.ndarray:
  a: np.ndarray = x // columns
  b: np.ndarray = x % columns
  for i, key in enumerate(keys):
    if i % 2:
      b = (b + _mix(a + key) % columns) % columns
    else:
      a = (a + _mix(b + key) % rows) % rows
  return a * columns + b


def _mix(x: np.ndarray) -> np.ndarray:
  """Applies the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
