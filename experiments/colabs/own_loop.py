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
# # Sparsity in your own training loop: Linen, NNX, Equinox
#
# In this library sparsity is a transformation around your optimizer. It needs
# no trainer, no special layers and no particular model library. You will
#
# 1. write a loop of some twenty lines;
# 2. train a Linen, an NNX and an Equinox model with it, unchanged;
# 3. check that pruned weights are exactly zero, and count them;
# 4. choose another algorithm by changing one argument.
#
# It takes less than a minute on two CPU cores and downloads no data.

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

import equinox as eqx
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax.runs import style

# %% [markdown]
# The text is the source code of Python's `argparse`. The models predict each
# byte from the eight before it. The end of the text is for validation.

# %%
CONTEXT = 8
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
windows = jnp.asarray(windows, jnp.int32)
train_set, validation = windows[:-2048], windows[-2048:]
print(f'{len(train_set):,} windows to train on')

# %% [markdown]
# ## 1. The loop
#
# The loop takes a model's parameters, any pytree, and a function
# `predict(params, contexts)`. Two lines concern sparsity: `sparsify` around the
# optimizer, and `apply_mask` once, before the first step. The mask is part of
# the optimizer state.

# %%
STEPS, BATCH = 300, 256


def train(params, predict, algorithm):
  tx = spdf.sparsify(optax.adamw(3e-3), algorithm, key=0)
  opt_state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(opt_state))

  def loss_fn(params, batch):
    logits = predict(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch[:, -1]
    ).mean()

  @jax.jit
  def step(params, opt_state, i):
    key = jax.random.fold_in(jax.random.key(1), i)
    batch = jax.random.choice(key, train_set, (BATCH,))
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  evaluate, curve = jax.jit(loss_fn), []
  for i in range(1, STEPS + 1):
    params, opt_state = step(params, opt_state, i)
    if i % 25 == 0:
      curve.append((i, float(evaluate(params, validation))))
  return params, spdf.get_mask(opt_state), np.array(curve).T

# %% [markdown]
# ## 2. The same network three times
#
# Each function returns parameters and a `predict` function. By default the
# matrices named `embed` and `head` stay dense; `where=` takes another rule.

# %%
VOCABULARY, WIDTH, HIDDEN = 256, 32, 256


def linen_model():
  class Network(nn.Module):

    @nn.compact
    def __call__(self, contexts):
      x = nn.Embed(VOCABULARY, WIDTH, name='embed')(contexts)
      x = x.reshape(len(x), -1)
      x = nn.relu(nn.Dense(HIDDEN, name='first')(x))
      x = nn.relu(nn.Dense(HIDDEN, name='second')(x))
      return nn.Dense(VOCABULARY, name='head')(x)

  return Network().init(jax.random.key(0), train_set[:1, :-1]), Network().apply


# %%
def nnx_model():
  class Network(nnx.Module):

    def __init__(self, rngs):
      self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
      self.first = nnx.Linear(CONTEXT * WIDTH, HIDDEN, rngs=rngs)
      self.second = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
      self.head = nnx.Linear(HIDDEN, VOCABULARY, rngs=rngs)

    def __call__(self, contexts):
      x = self.embed(contexts).reshape(len(contexts), -1)
      return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))

  graph, params = nnx.split(Network(nnx.Rngs(0)))
  return params, lambda params, contexts: nnx.merge(graph, params)(contexts)


# %%
def equinox_model():
  class Network(eqx.Module):
    embed: eqx.nn.Embedding
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
      keys = jax.random.split(key, 4)
      self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
      self.first = eqx.nn.Linear(CONTEXT * WIDTH, HIDDEN, key=keys[1])
      self.second = eqx.nn.Linear(HIDDEN, HIDDEN, key=keys[2])
      self.head = eqx.nn.Linear(HIDDEN, VOCABULARY, key=keys[3])

    def __call__(self, context):
      x = jax.vmap(self.embed)(context).reshape(-1)
      return self.head(jax.nn.relu(self.second(jax.nn.relu(self.first(x)))))

  params, rest = eqx.partition(Network(jax.random.key(0)), eqx.is_inexact_array)
  return params, lambda params, x: jax.vmap(eqx.combine(params, rest))(x)

# %% [markdown]
# ## 3. Train them
#
# Each model is trained densely, with a static mask of 90 % sparsity, and with
# RigL at 90 %. The summary below is that of the last run, in Equinox; its
# matrices are transposed, and the numbers of kept weights agree in all three.

# %%
makers = {'Linen': linen_model, 'NNX': nnx_model, 'Equinox': equinox_model}
algorithms = {
    'dense': spdf.dense(),
    'static': spdf.static(0.9),
    'RigL': spdf.rigl(0.9, update_every=25, update_until=3 * STEPS // 4),
}
curves, kept = {}, {}
for library, make in makers.items():
  for name, algorithm in algorithms.items():
    params, mask, curves[library, name] = train(*make(), algorithm)
    # Exactly zero, not nearly: masking once more changes nothing.
    jax.tree.map(
        np.testing.assert_array_equal, params, spdf.apply_mask(params, mask)
    )
    summary = spdf.summarize(mask, params)
    kept.setdefault(name, set()).add(summary.kept)
print(f'{library}, {name}:\n{summary}')
assert all(len(counts) == 1 for counts in kept.values())

# %%
styles = dict(zip(makers, ('-', '--', ':')))
fig, ax = plt.subplots(figsize=(7, 4), layout='constrained')
for (library, name), (steps, losses) in curves.items():
  color = style.COLORS[list(algorithms).index(name)]
  label = f'{name}, {library}'
  ax.plot(steps, losses, styles[library], color=color, label=label)
ax.set(xlabel='step', ylabel='validation loss (nats per byte)')
ax.set_title('One loop, three libraries', loc='left')
style.polish(ax)
ax.legend(frameon=False, ncols=3, fontsize=8)
plt.show()

# %% [markdown]
# The libraries differ only in the initial weights, which have other
# distributions. Below are the final losses of all nine runs: differences
# between the rows show the effect of the initialization.

# %%
print(f'{"":<9}' + ''.join(f'{name:>8}' for name in algorithms))
for library in makers:
  ends = [curves[library, name][1][-1] for name in algorithms]
  print(f'{library:<9}' + ''.join(f'{loss:>8.3f}' for loss in ends))

# %% [markdown]
# ## Next steps
#
# * `spdf.join([spdf.static(0.75), spdf.dense()], [300])` is Variable SPDF;
#   `gmp`, `granet`, `sparse_evolution` and `partition` are passed in the same
#   way.
# * `own_algorithm.ipynb` writes a new algorithm.
# * `native_speed.ipynb` trains faster with kernels that skip zeros.
