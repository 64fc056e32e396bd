# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Skip zeros in a model of Flax's own layers
#
# `spdf.skip_zeros` transforms a function, as `jax.grad` does, so that its
# matrix products skip the zeros of masked weights, whatever model they are in.
# You will
#
# 1. write a transformer with the layers of Flax, unaware of sparsity;
# 2. train it sparsely, with and without `skip_zeros`, to the same losses;
# 3. see which weights reach kernels, and how long a step takes.
#
# It takes about a minute on two CPU cores and downloads no data. Kernels skip
# zeros on CPUs only.

# %%
# Installs the library if it is missing: from its repository, or else from the
# clone that this notebook is in.
import importlib.util
from pathlib import Path
import subprocess
import sys

if importlib.util.find_spec('spdf_jax') is None:
  repository = ''
  clone = Path.cwd().parent.parent
  if not repository and not (clone / 'setup.py').is_file():
    sys.exit('Start this notebook in experiments/colabs of a clone.')
  source = f'git+{repository}' if repository else clone.as_uri()
  command = [sys.executable, '-m', 'pip', 'install', '--quiet']
  subprocess.run([*command, f'spdf_jax[notebooks] @ {source}'], check=True)

# %%
import argparse
import inspect
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax import accelerator

# %% [markdown]
# ## 1. A model
#
# It is a decoder of two layers, as in Flax's examples of language models, for
# the bytes of Python's `argparse`.

# %%
WIDTH, LENGTH, BATCH = 256, 128, 8


class Decoder(nn.Module):

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(256, WIDTH, name='embed')
    x = embed(tokens)
    mask = nn.make_causal_mask(tokens)
    for _ in range(2):
      attention = nn.MultiHeadDotProductAttention(4)
      x += attention(nn.LayerNorm()(x), mask=mask)
      h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
      x += nn.Dense(WIDTH)(h)
    return embed.attend(nn.LayerNorm()(x))


model = Decoder()
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)


def batch(step):
  rows = np.random.default_rng(step).integers(len(windows), size=BATCH)
  return jnp.asarray(windows[rows], jnp.int32)


def loss_fn(params, tokens):
  logits = model.apply({'params': params}, tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
  ).mean()


# %% [markdown]
# ## 2. Sparse training
#
# The optimizer holds 75 % of the hidden weights at zero. The two loops differ
# in one thing: the loss, and the masks that it takes.

# %%
tx = spdf.sparsify(
    optax.adamw(1e-3), spdf.static(0.75), where=spdf.where.per_head, key=0
)
initial = model.init(jax.random.key(0), batch(0)[:, :-1])['params']


def train(loss_fn, steps=20):
  """Returns losses, seconds of a step, and the state."""
  opt_state = tx.init(initial)
  params = spdf.apply_mask(initial, spdf.get_mask(opt_state))

  @jax.jit
  def step(params, opt_state, tokens):
    masks = spdf.get_masks(opt_state)
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, masks)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  losses, seconds = [], []
  for i in range(steps):
    start = time.perf_counter()
    params, opt_state, loss = step(params, opt_state, batch(i))
    losses.append(float(loss))
    seconds.append(time.perf_counter() - start)
  spdf.check_zeros(params, opt_state)
  return losses, float(np.median(seconds[2:])), params, opt_state


fast_loss = spdf.skip_zeros(loss_fn)
dense, dense_seconds, *_ = train(lambda p, x, masks: loss_fn(p, x))
fast, fast_seconds, params, opt_state = train(
    lambda p, x, masks: fast_loss(p, x, **masks)
)
print(f'losses: {dense[-1]:.4f} without, {fast[-1]:.4f} with skip_zeros')
print(f'a step: {dense_seconds * 1e3:.0f} ms without, '
      f'{fast_seconds * 1e3:.0f} ms with skip_zeros')
assert np.allclose(dense, fast, rtol=1e-3)

# %% [markdown]
# ## 3. What was replaced
#
# Every weight with a mask has a row for each of its uses. What stays dense is
# named with its reason, also by a warning in the log.

# %%
print(accelerator.explain(loss_fn)(
    params, batch(0), mask=spdf.get_mask(opt_state)
))

# %% [markdown]
# More: the guide "Skip zeros in any model",
# `experiments/guides/skip_zeros.md`.
