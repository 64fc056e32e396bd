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
# # An algorithm of your own: GraNet from RigL
#
# RigL moves the connections of a network at one level of sparsity. GraNet (Liu
# et al., 2021) does so while the level rises. You will
#
# 1. make one from the other by an argument, as Cerebras' post on its library
#    does with a configuration ("Sparsity Made Easy", figures 6 and 7);
# 2. write the paper's own update, some 30 lines of JAX;
# 3. hold it against the library's, mask by mask;
# 4. train a tiny GPT by all, and see what happens to their masks.
#
# It takes about a minute on two CPU cores and downloads no data.

# %%
# On Colab this installs the library; elsewhere it does nothing.
import subprocess
import sys

if 'google.colab' in sys.modules:
  command = [sys.executable, '-m', 'pip', 'install', '--quiet']
  subprocess.run([*command, 'spdf_jax[quickstart]'], check=True)

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import models
from spdf_jax.runs import plot_style

# %% [markdown]
# ## 1. By an argument
#
# A sparsity is a number or a function of the step. With a cubic one, RigL drops
# and grows as before and ends each update at the level of that step. That is
# all that the post changes.

# %%
STEPS = 240
TIMES = dict(update_every=12, update_until=3 * STEPS // 4)
LEVEL = spdf.cubic(0.5, 0.8, steps=STEPS // 2)
rigl = spdf.rigl(0.8, **TIMES)
by_argument = spdf.rigl(LEVEL, **TIMES)

# %% [markdown]
# ## 2. By hand
#
# In the paper an update first prunes the smallest magnitudes down to the level,
# then drops a fraction of what remains and grows as many by gradient. An
# `Algorithm` is a tuple of pure functions: what level a step has, the first
# mask, the next mask, and at which steps masks change and gradients of pruned
# weights are needed. All but the next mask are RigL's, so we replace that one.
#
# Leaves have the form [layers, inputs, outputs]. What is kept must be an exact
# integer, so we count on the host and look it up in the compiled step.


# %%
def largest(scores, number):
  """Marks so many of the largest scores of each layer; of equals the first."""
  flat = scores.reshape(len(scores), -1)
  order = jnp.argsort(flat, axis=1, descending=True, stable=True)
  ranks = jnp.argsort(order, axis=1)
  return (ranks < number).reshape(scores.shape)


def granet(level, fraction, *, update_every, update_until):
  rigl = spdf.rigl(level, update_every=update_every, update_until=update_until)
  updates = range(0, update_until + 1, update_every)
  fractions = spdf.cosine(fraction, update_until)

  def update(key, count, mask, params, grads):
    del key  # Nothing is random.

    def next_mask(m, w, g):
      size = w.shape[1] * w.shape[2]
      kept = [size - round(level(step) * size) for step in updates]
      drops = [int(fractions(s) * n) for s, n in zip(updates, kept)]
      row = count // update_every
      kept, drop = jnp.array(kept)[row], jnp.array(drops)[row]
      magnitudes = jnp.where(m, jnp.abs(w), -1)
      survivors = largest(magnitudes, kept - drop)
      return survivors | largest(jnp.where(survivors, -1, jnp.abs(g)), drop)

    none = lambda x: x is None
    return jax.tree.map(
        lambda m, w, g: None if m is None else next_mask(m, w, g),
        mask, params, grads, is_leaf=none,
    )

  return rigl._replace(update=update)


by_hand = granet(LEVEL, 0.3, **TIMES)

# %% [markdown]
# ## 3. Against the library
#
# `spdf.granet` selects without sorting, per layer or over the whole model, also
# for blocks of weights. On the same weights and gradients its masks are ours.

# %%
library = spdf.granet(LEVEL, drop_fraction=0.3, **TIMES)
draw = lambda i: {'w': jax.random.normal(jax.random.key(i), (2, 48, 64))}
weights = draw(0)
masks = {
    name: algorithm.init(jax.random.key(0), weights)
    for name, algorithm in {'by hand': by_hand, 'library': library}.items()
}
update_ours, update_theirs = jax.jit(by_hand.update), jax.jit(library.update)
for count in range(STEPS):
  if not bool(library.update_at(count)):
    continue
  args = weights, draw(count)
  key = jax.random.key(count)
  masks['by hand'] = update_ours(key, count, masks['by hand'], *args)
  masks['library'] = update_theirs(key, count, masks['library'], *args)
  np.testing.assert_array_equal(masks['by hand']['w'], masks['library']['w'])
  weights = spdf.apply_mask(draw(count + STEPS), masks['by hand'])
print(f'equal at every update; at the end {masks["by hand"]["w"].mean():.1%} '
      'of the weights are kept')

# %% [markdown]
# ## 4. On text
#
# A tiny GPT reads the source of Python's standard library, as bytes.
# `track_masks` around the optimizer counts what changes; `mask_statistics`
# reads it.

# %%
corpus = data.prepare_corpus(
    'python-stdlib',
    tokenizer='bytes',
    cache_dir=Path('~/.cache/spdf_jax').expanduser(),
)
model = models.create_model(
    'gpt-mini', vocab_size=257, n_layers=2, d_model=48, d_ff=192, max_length=64
)
batch_at = data.schedule_batches(
    {'corpus': data.Windows(corpus.train)},
    [data.Allotment('corpus', 16, 64, STEPS)],
    seed=0,
    max_epochs={'corpus': 1},
)
validation = list(data.evaluation_batches(
    data.Windows(corpus.validation), batch_size=32, length=64, max_batches=8
))
rate = optax.warmup_cosine_decay_schedule(1e-4, 4e-3, 40, STEPS, 4e-4)


def predict(params, tokens):
  return model.apply({'params': params}, tokens)


def train(algorithm):
  """Trains; returns rows of the level and what became of the masks."""
  where = models.sparsifiable
  tx = spdf.sparsify(optax.adamw(rate), algorithm, where=where, key=0)
  tx = spdf.track_masks(tx, algorithm)

  def loss_fn(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(params, batch.inputs), batch.targets
    ).mean()

  @jax.jit
  def step(params, opt_state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, spdf.mask_statistics(opt_state)

  @jax.jit
  def init(key):
    params = model.init(key, jnp.zeros((1, 2), jnp.int32))['params']
    opt_state = tx.init(params)
    return spdf.apply_mask(params, spdf.get_mask(opt_state)), opt_state

  params, opt_state = init(jax.random.key(0))
  rows = []
  for count in range(STEPS):
    params, opt_state, found = step(params, opt_state, batch_at(count))
    if bool(algorithm.update_at(count)):
      mask = spdf.get_mask(opt_state)
      level = spdf.summarize(mask, params, where=where).sparsity
      survived = found['surviving'] / (found['surviving'] + found['dropped'])
      loss = evaluation.evaluate_loss(predict, params, validation).loss
      rows.append((count, level, survived, found['exploration'], loss))
  loss = evaluation.evaluate_loss(predict, params, validation).loss
  return np.array([*rows, (STEPS, *rows[-1][1:-1], loss)], float).T


runs = {
    'RigL': train(rigl),
    'GraNet, by argument': train(by_argument),
    'GraNet, by hand': train(by_hand),
}

# %% [markdown]
# **Survival** is the share of active connections that outlived an update: by
# hand it is lower, because what the level takes comes on top of what is
# dropped. **Exploration** is the share of all weights that were ever active; it
# starts higher for GraNet, which starts with fewer zeros.

# %%
names = ('zeros', 'survived', 'explored')
fig, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout='constrained')
for (label, run), color in zip(runs.items(), plot_style.COLORS):
  steps, losses = run[0], run[-1]
  for ax, name, share in zip(axes, names, run[1:-1]):
    # Nothing changes after the last update.
    ax.plot(steps[:-1], 100 * share[:-1], 'o-', color=color, markersize=3)
    ax.set_title(f'{name}, % of weights', loc='left', fontsize=10)
  axes[-1].plot(steps, losses, color=color, label=label)
axes[1].set_title('survived, % of active weights', loc='left', fontsize=10)
axes[-1].set_title('validation loss, nats per byte', loc='left', fontsize=10)
axes[-1].legend(frameon=False, fontsize=8)
for ax in axes:
  plot_style.polish(ax)
  ax.set_xlabel('step')
plt.show()

# %% [markdown]
# One seed of a tiny model tells little about which is better. Mind also that
# GraNet spends more FLOPs: it is denser until the level has risen. The post
# compares them at equal tokens, too.

# %%
for label, run in runs.items():
  print(f'{label:<20} loss {run[-1][-1]:.3f}, {run[1][-1]:.1%} zeros at the '
        f'end, {np.mean(run[1][:-1]):.1%} over the updates')
