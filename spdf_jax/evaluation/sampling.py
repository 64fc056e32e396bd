"""How the next token is chosen from logits."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

Choose = Callable[[jax.Array, jax.Array], jax.Array]
"""`(key, logits_V) -> token`, of one sequence."""


def greedy(key: jax.Array, logits_V: jax.Array) -> jax.Array:
  """Chooses the most likely token, of equals the one with the lowest id."""
  del key
  return jnp.argmax(logits_V).astype(jnp.int32)


def sampler(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Choose:
  """Draws tokens by their probability, of the likeliest only if asked.

  Args:
    temperature: Divides the logits; small ones prefer likely tokens.
    top_k: Only so many of the most likely tokens may be drawn.
    top_p: Only the fewest of the most likely tokens that together have this
      probability; applied after `top_k`.

  Returns:
    A function `(key, logits_V) -> token`; equal arguments give equal ones, so
    that generation compiles once.

  Raises:
    ValueError: an argument is out of its range.

  References:
    Holtzman et al., `The Curious Case of Neural Text Degeneration
    <https://arxiv.org/abs/1904.09751>`_, 2020, section 3.1

  Example:
    >>> choose = sampler(top_k=1)
    >>> int(choose(jax.random.key(0), jnp.array([0.0, 2.0, 1.0])))
    1
  """
  if not temperature > 0:
    raise ValueError(
        f'temperature is {temperature}; give more than 0, or use greedy.'
    )
  if top_k is not None and top_k < 1:
    raise ValueError(f'top_k is {top_k}; give at least 1, or None.')
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f'top_p is {top_p}; give a number in (0, 1], or None.')
  return _sampler(float(temperature), top_k, top_p)


@functools.cache
def _sampler(
    temperature: float, top_k: int | None, top_p: float | None
) -> Choose:
  def choose(key, logits_V):
    logits_V = logits_V.astype(jnp.float32) / temperature
    if top_k is not None and top_k < logits_V.size:
      logits_V = _keep_first(logits_V, jnp.arange(logits_V.size) < top_k)
    if top_p is not None:
      sorted_V = jnp.sort(jax.nn.softmax(logits_V), descending=True)
      before_V = jnp.cumsum(sorted_V) - sorted_V
      logits_V = _keep_first(logits_V, before_V < top_p)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)

  return choose


def _keep_first(logits_V: jax.Array, kept_V: jax.Array) -> jax.Array:
  """Keeps logits whose place in falling order is kept; equals by their id."""
  order_V = jnp.argsort(logits_V, descending=True, stable=True)
  kept_V = jnp.zeros_like(kept_V).at[order_V].set(kept_V)
  return jnp.where(kept_V, logits_V, -jnp.inf)
