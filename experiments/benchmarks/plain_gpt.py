"""A GPT and its training step as a user of Flax and optax writes them.

The model is the baseline of `spdf_jax.models` and does not use it. Its layers
have the same names, so both take the same parameters.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from spdf_jax import models

PyTree = Any


class PlainGPT(nn.Module):
  """GPT-2: learned positions, tied embeddings, LayerNorm before each part."""

  config: models.GPTConfig

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    c = self.config
    wte = nn.Embed(c.vocab_size, c.d_model, name='wte')
    wpe = nn.Embed(c.max_length, c.d_model, name='wpe')
    x_BxLxD = wte(tokens_BxL) + wpe(jnp.arange(tokens_BxL.shape[1]))
    for i in range(c.n_layers):
      x_BxLxD = _Layer(c, name=f'h_{i}')(x_BxLxD)
    return wte.attend(nn.LayerNorm(epsilon=1e-5, name='ln_f')(x_BxLxD))


class _Layer(nn.Module):
  config: models.GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    norm = lambda name: nn.LayerNorm(epsilon=1e-5, name=name)
    x_BxLxD += _Attention(self.config, name='attn')(norm('ln_1')(x_BxLxD))
    return x_BxLxD + _MLP(self.config, name='mlp')(norm('ln_2')(x_BxLxD))


class _Attention(nn.Module):
  config: models.GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    c = self.config
    heads = (*x_BxLxD.shape[:2], c.n_heads, c.d_model // c.n_heads)
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (
        nn.Dense(c.d_model, name=name)(x_BxLxD).reshape(heads)
        for name in ('wq', 'wk', 'wv')
    )
    y_BxLxHxK = jax.nn.dot_product_attention(
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True
    )
    return nn.Dense(c.d_model, name='wd')(y_BxLxHxK.reshape(x_BxLxD.shape))


class _MLP(nn.Module):
  config: models.GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    h_BxLxF = nn.gelu(nn.Dense(self.config.d_ff, name='wi')(x_BxLxD))
    return nn.Dense(self.config.d_model, name='wo')(h_BxLxF)


def adamw(
    learning_rate: optax.Schedule,
    weight_decay: float,
    *,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
) -> optax.GradientTransformation:
  """Returns AdamW with clipping; biases and norms have no weight decay."""
  decays = lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: path[-1].key not in ('bias', 'scale'), params
  )
  return optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.adamw(
          learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decays
      ),
  )


def train_step(
    state: tuple[PyTree, PyTree],
    batch: Any,
    *,
    apply_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
) -> tuple[tuple[PyTree, PyTree], dict[str, jax.Array]]:
  """Takes a step; the state is parameters and the optimizer's state."""
  params, opt_state = state

  def loss_fn(params):
    logits_BxLxV = apply_fn({'params': params}, batch.inputs)
    losses_BxL = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, batch.targets
    )
    return (losses_BxL * batch.weights).sum() / batch.weights.sum()

  loss, grads = jax.value_and_grad(loss_fn)(params)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), {
      'train/loss': loss, 'train/grad_norm': optax.tree.norm(grads)
  }
