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
# # One learning rate for every sparsity
#
# The best learning rate of a dense network is not that of a sparse one: an
# output is a sum over the kept inputs only. Two functions make up for it, and a
# third one for weights that are revived. You will
#
# 1. plot the loss over the learning rate at four densities;
# 2. do the same with `scale_by_density` and `scale_init`, the sparse maximal
#    update parameterization (Dey et al., 2024, arXiv 2405.15743);
# 3. look at the loss after a dense transition, with and without `with_age`.
#
# It takes two minutes on two CPU cores and downloads no data.

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
import functools
import inspect

from flax import linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax.runs import style

# %% [markdown]
# The text is the source code of Python's `argparse`. A network of three hidden
# layers predicts each byte from the eight before it.

# %%
CONTEXT, VOCABULARY, WIDTH, HIDDEN, BATCH = 8, 256, 32, 256, 128
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
windows = jnp.asarray(windows, jnp.int32)
train_set, validation = windows[:-2048], windows[-2048:]


class Network(nn.Module):

  @nn.compact
  def __call__(self, contexts):
    x = nn.Embed(VOCABULARY, WIDTH, name='embed')(contexts)
    x = x.reshape(len(x), -1)
    for name in ('first', 'second', 'third'):
      x = nn.LayerNorm(name=f'{name}_norm')(x)
      x = nn.relu(nn.Dense(HIDDEN, name=name)(x))
    return nn.Dense(VOCABULARY, name='head')(x)


network = Network()


def loss_fn(params, batch):
  logits = network.apply(params, batch[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(
      logits, batch[:, -1]
  ).mean()

# %% [markdown]
# ## 1. Rates of the standard parameterization
#
# All rates train at once, under `jax.vmap`, and fall linearly to zero. Only
# hidden matrices are sparse; the embeddings and the head stay dense.

# %%
STEPS = 200
RATES = np.geomspace(3e-4, 0.1, 9)
DENSITIES = 1.0, 0.5, 0.25, 0.1


def final_loss(rate, density, follows_density):
  tx = spdf.sparsify(
      optax.chain(
          optax.scale_by_adam(b2=0.95),
          spdf.scale_by_density(1.0) if follows_density else optax.identity(),
          optax.scale_by_learning_rate(lambda i: rate * (1 - i / STEPS)),
      ),
      spdf.static(1 - density), key=0,
  )
  params = network.init(jax.random.key(0), train_set[:1, :-1])
  opt_state = tx.init(params)
  mask = spdf.get_mask(opt_state)
  params = spdf.apply_mask(params, mask)
  if follows_density:
    params = spdf.scale_init(params, mask, 1.0)

  def step(carry, i):
    params, opt_state = carry
    key = jax.random.fold_in(jax.random.key(1), i)
    batch = jax.random.choice(key, train_set, (BATCH,))
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), None

  carry = params, opt_state
  (params, _), _ = jax.lax.scan(step, carry, jnp.arange(STEPS))
  return loss_fn(params, validation)


def losses_over_rates(follows_density):
  return {
      density: jax.jit(jax.vmap(functools.partial(
          final_loss, density=density, follows_density=follows_density
      )))(RATES)
      for density in DENSITIES
  }


standard = losses_over_rates(False)

# %% [markdown]
# ## 2. Rates that follow the density
#
# With the base density 1 a layer of density 0.1 takes ten times the rate, and
# its initial weights are √10 times as large.

# %%
sparse_mup = losses_over_rates(True)

# %%
fig, panels = plt.subplots(
    1, 2, figsize=(8.4, 3.6), sharey=True, layout='constrained'
)
for ax, title, losses in zip(
    panels, ('Standard', 'Sparse muP'), (standard, sparse_mup)
):
  for density, line, color in zip(DENSITIES, losses.values(), style.COLORS):
    ax.plot(RATES, line, color=color, label=f'density {density:g}')
    best = int(np.argmin(line))
    ax.plot(RATES[best], line[best], '*', color=color, markersize=12)
  ax.set(xscale='log', xlabel='peak learning rate', ylim=(1.4, 3.2))
  ax.set_title(title, loc='left')
  style.polish(ax)
panels[0].set_ylabel('validation loss (nats per byte)')
panels[0].legend(frameon=False, fontsize=8)
plt.show()

# %%
print('best rate at density ' + ''.join(f'{d:>9g}' for d in DENSITIES))
for name, losses in ('standard', standard), ('sparse muP', sparse_mup):
  best = (RATES[int(np.argmin(line))] for line in losses.values())
  print(f'{name:<20} ' + ''.join(f'{rate:>9.1e}' for rate in best))

# %% [markdown]
# ## 3. Weights that return
#
# At a dense transition nine tenths of the weights return with moments of zero.
# Adam corrects the bias of moments by the count of all steps, so that their
# first updates are up to `(1 - b1) / sqrt(1 - b2)` times the rate, 3.2 at b2 =
# 0.999. `with_age` counts from the revival of each weight, and with `warmup=`
# lets only the updates of revived weights rise.

# %%
SPARSE, DENSE = 200, 60


def curve(adam):
  tx = spdf.sparsify(
      optax.chain(adam, optax.scale_by_learning_rate(1e-3)),
      spdf.join([spdf.static(0.9), spdf.dense()], [SPARSE]), key=0,
  )
  params = network.init(jax.random.key(0), train_set[:1, :-1])
  opt_state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(opt_state))

  def step(carry, i):
    params, opt_state = carry
    key = jax.random.fold_in(jax.random.key(1), i)
    batch = jax.random.choice(key, train_set, (BATCH,))
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (params, opt_state), loss_fn(params, validation[:512])

  steps = jnp.arange(SPARSE + DENSE)
  return jax.jit(jax.lax.scan, static_argnums=0)(
      step, (params, opt_state), steps
  )[1]


adam = optax.scale_by_adam(b2=0.999)
curves = {
    'Adam': curve(adam),
    'with_age': curve(spdf.with_age(adam)),
    'with_age, warm-up of 20 steps': curve(spdf.with_age(adam, warmup=20)),
}

# %%
fig, ax = plt.subplots(figsize=(7, 3.6), layout='constrained')
for (name, losses), color in zip(curves.items(), style.COLORS):
  around = losses[SPARSE - 20:]
  ax.plot(np.arange(len(around)) - 20, around, color=color, label=name)
ax.axvline(0, color='#888888', linewidth=0.8)
ax.set(
    xlabel='steps after the dense transition',
    ylabel='validation loss (nats per byte)',
)
style.polish(ax)
ax.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Next steps
#
# * In configs these are `parameterization.name='sparse-mup'` and
#   `revival_warmup`; the guide *One learning rate for every width and sparsity*
#   has both, and `experiments.rates` checks a config.
# * `own_loop.ipynb` has the same loop in Linen, NNX and Equinox.
