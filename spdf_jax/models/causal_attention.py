"""Causal attention in blocks of queries, which skips what none of them sees."""

import jax
import jax.numpy as jnp

_BLOCK = 128  # Queries; where there are more blocks than _BLOCKS they grow.
_BLOCKS = 8


def causal_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    scale: float | None = None,
) -> jax.Array:
  """Attends causally: for each block of queries to the keys up to its end.

  What `jax.nn.dot_product_attention(…, is_causal=True)` computes, laid out such
  that a CPU multiplies matrices, and without most of the upper triangle.

  Args:
    q_BxLxHxK: Queries, `[batch, length, heads, head size]`.
    k_BxLxGxK: Keys of as many heads, or of a number that divides it.
    v_BxLxGxK: Values, likewise.
    scale: Of the scores; `None`: one over the root of the head's size.

  Returns:
    The weighted values, of the queries' shape and type. Scores and sums are in
    float32.

  Example:
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> causal_attention(x, x, x).shape
    (1, 3, 2, 4)
  """
  batch, length, heads, size = q_BxLxHxK.shape
  groups = k_BxLxGxK.shape[2]
  scale = size**-0.5 if scale is None else scale
  q_BxGxQxLxK = q_BxLxHxK.reshape(
      batch, length, groups, heads // groups, size
  ).transpose(0, 2, 3, 1, 4)
  k_BxGx1xKxS = k_BxLxGxK.transpose(0, 2, 3, 1)[:, :, None]
  v_BxGx1xSxK = v_BxLxGxK.transpose(0, 2, 1, 3)[:, :, None]
  step = max(_BLOCK, -(-length // _BLOCKS))
  blocks = []
  for start in range(0, length, step):
    end = min(start + step, length)
    scores = scale * jnp.matmul(
        q_BxGxQxLxK[:, :, :, start:end],
        k_BxGx1xKxS[..., :end],
        preferred_element_type=jnp.float32,
    )
    seen = jnp.arange(end) <= jnp.arange(start, end)[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    shares = jnp.exp(scores - jax.lax.stop_gradient(highest))
    summed = jnp.matmul(
        shares.astype(v_BxLxGxK.dtype),
        v_BxGx1xSxK[..., :end, :],
        preferred_element_type=jnp.float32,
    )
    blocks.append(summed / jnp.sum(shares, axis=-1, keepdims=True))
  y_BxGxQxLxK = jnp.concatenate(blocks, axis=3)
  y_BxLxGxQxK = y_BxGxQxLxK.transpose(0, 3, 1, 2, 4)
  return y_BxLxGxQxK.reshape(q_BxLxHxK.shape).astype(q_BxLxHxK.dtype)
