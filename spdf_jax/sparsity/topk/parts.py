"""Parts of a whole, in order: where their sum passes a limit."""

import jax
import jax.numpy as jnp


def whole_parts(
    parts: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Counts the leading parts whose sum is at most a limit.

  By halving: the parts may be sharded, and running sums would gather them; and
  in a compiled program every reduction costs time at each call, run or not.

  Args:
    parts: Non-negative, int32 `[..., n]`.
    limit: int32 `[...]`.

  Returns:
    How many parts, what they add up to, and what they and the next one add up
    to; int32 `[...]` each.

  Example:
    >>> [int(x) for x in whole_parts(jnp.array([3, 0, 4, 5]), jnp.int32(6))]
    [2, 3, 7]
  """
  number = parts.shape[-1]
  index = jax.lax.broadcasted_iota(jnp.int32, parts.shape, parts.ndim - 1)
  rounds = number.bit_length()

  def halve(i, found):
    whole, inside, beyond = found
    longer = whole | 1 << (rounds - 1 - i)
    total = jnp.sum(jnp.where(index < longer[..., None], parts, 0), axis=-1)
    fits = (longer <= number) & (total <= limit)
    return (
        jnp.where(fits, longer, whole),
        jnp.where(fits, total, inside),
        jnp.where(fits, beyond, total),
    )

  nothing = jnp.zeros(limit.shape, jnp.int32)
  return jax.lax.fori_loop(0, rounds, halve, (nothing,) * 3)
