# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (RoPE)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALINGS = ('none', 'linear', 'llama3')
"""Names of the ways to scale positions."""


@dataclasses.dataclass(frozen=True)
class Rotary:
  """The frequencies of rotary positions.

  Attributes:
    theta: Base of the wavelengths.
    scaling: `none`; `linear`, which divides all frequencies by `factor`; or
      `llama3`, which divides only low frequencies.
    factor: Divisor of the scaled frequencies.
    low_freq_factor: Number of rotations over `original_length` below which a
      frequency is divided by the whole factor (llama3).
    high_freq_factor: Number of rotations above which a frequency is not scaled;
      the scaling is interpolated in between (llama3).
    original_length: Number of positions before the scaling (llama3).

  Raises:
    ValueError: the scaling is unknown, or a number is not positive.

  References:
    Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021, eq. 34
    Grattafiori et al., `The Llama 3 Herd of Models
    <https://arxiv.org/abs/2407.21783>`_, 2024
  """

  theta: float = 10000.0
  scaling: str = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self):
    if self.scaling not in SCALINGS:
      raise ValueError(
          f'rotary scaling is {self.scaling!r}; use one of '
          f'{", ".join(SCALINGS)}.'
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type in (int, float) and not value > 0:
        raise ValueError(f'rotary {field.name} is {value}; give more than 0.')
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
          f'rotary low_freq_factor is {self.low_freq_factor}; give less than '
          f'high_freq_factor, {self.high_freq_factor}.'
      )


def frequencies(rotary: Rotary, head_size: int) -> np.ndarray:
  """Returns the rotation of each pair of features per position.

  Args:
    rotary: The rotary positions.
    head_size: Features of a head; must be even.

  Returns:
    Radians per position, float32 `[head_size / 2]`.

  Raises:
    ValueError: `head_size` is odd.

  Example:
    >>> frequencies(Rotary(), 4).round(3).tolist()
    [1.0, 0.009999999776482582]
  """
  if head_size % 2:
    raise ValueError(
        f'the size of a head is {head_size}, and rotary positions need an even '
        'one; change head_dim, or d_model or n_heads, whose quotient it is.'
    )
  turns = 1 / rotary.theta ** (np.arange(0, head_size, 2) / head_size)
  if rotary.scaling == 'linear':
    turns = turns / rotary.factor
  if rotary.scaling == 'llama3':
    # The scaling depends on the number of rotations over the original length.
    rounds = rotary.original_length * turns / (2 * math.pi)
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    kept = np.clip((rounds - low) / (high - low), 0, 1)
    turns = turns * (kept + (1 - kept) / rotary.factor)
  return turns.astype(np.float32)


def rotations(
    rotary: Rotary, head_size: int, positions_BxL: np.ndarray | jax.Array
) -> tuple[Any, Any]:
  """Returns the cosine and sine of each pair's rotation at each position.

  Args:
    rotary: The rotary positions.
    head_size: Features of a head; must be even.
    positions_BxL: Position of each token, from 0; B may be 1 to broadcast.

  Returns:
    Cosines and sines, float32 `[B, L, 1, head_size / 2]`, of NumPy if the
    positions are.

  Raises:
    ValueError: `head_size` is odd.

  Example:
    >>> cos, sin = rotations(Rotary(), 2, np.array([[0, 5]]))
    >>> cos.shape, sin[0, 0].tolist()
    ((1, 2, 1, 1), [[0.0]])
  """
  library = np if isinstance(positions_BxL, np.ndarray) else jnp
  turns = frequencies(rotary, head_size)
  angles_BxLx1xK = library.float32(positions_BxL)[:, :, None, None] * turns
  return library.cos(angles_BxLx1xK), library.sin(angles_BxLx1xK)


@functools.lru_cache
def first_rotations(
    rotary: Rotary, head_size: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rotations of the first positions as constants.

  XLA's CPU fusions would compute cosines again for every head and sequence.
  Equal arguments give the same arrays, so that a program holds them once.

  Args:
    rotary: The rotary positions.
    head_size: Features of a head; must be even.
    length: Number of positions, L.

  Returns:
    Cosines and sines, float32 `[1, L, 1, head_size / 2]`.

  Raises:
    ValueError: `head_size` is odd.

  Example:
    >>> first_rotations(Rotary(), 8, 3)[0].shape
    (1, 3, 1, 4)
  """
  return rotations(rotary, head_size, np.arange(length)[None])


def rotate(
    x_BxLxHxK: jax.Array, cos: jax.typing.ArrayLike, sin: jax.typing.ArrayLike
) -> jax.Array:
  """Rotates pairs of features, i and i + K / 2, by position.

  Args:
    x_BxLxHxK: Queries or keys.
    cos: Cosines of the rotations, `[B, L, 1, K / 2]`; B may be 1 to broadcast.
    sin: Their sines.

  Returns:
    The rotated features, of the same shape and dtype, computed in float32.

  Example:
    >>> x = jnp.array([[[[1.0, 0.0]]]])
    >>> rotate(x, jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1))).tolist()
    [[[[0.0, 1.0]]]]
  """
  first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x_BxLxHxK.dtype)
