"""Rotary positions: pairs of features turned by an angle that grows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

SCALINGS = ('none', 'linear', 'llama3')
"""Known ways to stretch positions."""


@dataclasses.dataclass(frozen=True)
class Rotary:
  """How fast which pair of features turns.

  Attributes:
    theta: Base of the wavelengths.
    scaling: `none`; `linear`, which slows all pairs down by `factor`; or
      `llama3`, which slows only those of long wavelengths down.
    factor: By how much.
    low_freq_factor: Pairs that turn less often than this over
      `original_length` are slowed down (llama3).
    high_freq_factor: Pairs that turn more often are not (llama3).
    original_length: Positions of the model that was stretched (llama3).

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
  """Returns by how much each pair turns from token to token.

  Args:
    rotary: The kind of positions.
    head_size: Features of a head; even.

  Returns:
    Radians, float32 `[head_size / 2]`.

  Raises:
    ValueError: the head is of odd size.

  Example:
    >>> frequencies(Rotary(), 4).round(3).tolist()
    [1.0, 0.009999999776482582]
  """
  if head_size % 2:
    raise ValueError(
        f'a head has {head_size} features; rotary positions need an even '
        'number.'
    )
  turns = 1 / rotary.theta ** (np.arange(0, head_size, 2) / head_size)
  if rotary.scaling == 'linear':
    turns = turns / rotary.factor
  if rotary.scaling == 'llama3':
    # How often a pair comes round over the original length decides.
    rounds = rotary.original_length * turns / (2 * math.pi)
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    kept = np.clip((rounds - low) / (high - low), 0, 1)
    turns = turns * (kept + (1 - kept) / rotary.factor)
  return turns.astype(np.float32)


def rotate(
    x_BxLxHxK: jax.Array, positions_BxL: jax.Array, turns: np.ndarray
) -> jax.Array:
  """Turns feature i of every head with feature i + K / 2.

  Args:
    x_BxLxHxK: Queries or keys.
    positions_BxL: Where each token stands, from 0; B may be 1.
    turns: From `frequencies`.

  Returns:
    The same shape and type; computed in float32.

  Example:
    >>> x = jnp.array([[[[1.0, 0.0]]]])
    >>> rotate(x, jnp.array([[1]]), np.array([np.pi / 2])).round(3).tolist()
    [[[[-0.0, 1.0]]]]
  """
  angles_BxLx1xK = positions_BxL[:, :, None, None] * turns
  cos, sin = jnp.cos(angles_BxLx1xK), jnp.sin(angles_BxLx1xK)
  first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x_BxLxHxK.dtype)
