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
# RigL drops and grows connections of a network at constant sparsity. GraNet
# (Liu et al., 2021) does so while the sparsity rises. You will
#
# 1. turn one into the other by an argument, as Cerebras' post on its library
#    does with a configuration ("Sparsity Made Easy", figures 6 and 7);
# 2. write the paper's own mask update in some 30 lines of JAX;
# 3. compare it with the library's, mask by mask;
# 4. train a tiny GPT with each, and see how the masks change.
#
# It takes about a minute on two CPU cores and downloads no data.

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

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import models
from spdf_jax.runs import style
from spdf_jax.sparsity import schedules

# %% [markdown]
# ## 1. By an argument
#
# A sparsity is a number or a function of the step. With a cubic schedule, RigL
# drops and grows as before, and each mask update ends at the sparsity of its
# step. The post changes nothing else.

# %%
STEPS = 240
TIMES = dict(update_every=12, update_until=3 * STEPS // 4)
RISING = spdf.cubic(0.5, 0.8, steps=STEPS // 2)
rigl = spdf.rigl(0.8, **TIMES)
by_argument = spdf.rigl(RISING, **TIMES)

# %% [markdown]
# ## 2. By hand
#
# In the paper an update first prunes the smallest magnitudes down to the
# sparsity, then drops a fraction of the remaining weights and grows as many by
# gradient. An `Algorithm` is a tuple of pure functions: the sparsity of a step,
# the first mask, the next mask, whether a step updates masks, and whether it
# needs gradients of pruned weights. Only the next mask differs from RigL, so we
# replace that function.
#
# Leaves have the shape [layers, inputs, outputs]. The number of kept weights
# must be an exact integer, so we count on the host and look the numbers up in
# the compiled step.


# %%
def largest(scores, number):
  """Marks the largest scores of each layer; ties are broken by index."""
  flat = scores.reshape(len(scores), -1)
  order = jnp.argsort(flat, axis=1, descending=True, stable=True)
  ranks = jnp.argsort(order, axis=1)
  return (ranks < number).reshape(scores.shape)


def granet(sparsity, fraction, *, update_every, update_until):
  rigl = spdf.rigl(
      sparsity, update_every=update_every, update_until=update_until
  )
  updates = range(0, update_until + 1, update_every)
  fractions = schedules.cosine(fraction, update_until)

  def update(key, count, mask, params, grads):
    del key  # Nothing is random.

    def next_mask(m, w, g):
      size = w.shape[1] * w.shape[2]
      kept = [size - round(sparsity(step) * size) for step in updates]
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


by_hand = granet(RISING, 0.3, **TIMES)

# %% [markdown]
# ## 3. Against the library
#
# `spdf.granet` selects without sorting, per layer or over the whole model, also
# for blocks of weights. On the same weights and gradients its masks are equal.

# %%
library = spdf.granet(RISING, drop_fraction=0.3, **TIMES)
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
# A tiny GPT learns the source code of Python's standard library, as bytes.
# With `track=True` the optimizer counts changes of the mask;
# `mask_statistics` reads the counts.

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
  """Trains; returns steps, sparsity, survival, exploration and losses."""
  where = models.sparsifiable
  tx = spdf.sparsify(
      optax.adamw(rate), algorithm, where=where, key=0, track=True
  )

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
    params, opt_state, stats = step(params, opt_state, batch_at(count))
    if bool(algorithm.update_at(count)):
      mask = spdf.get_mask(opt_state)
      sparsity = spdf.summarize(mask, params, where=where).sparsity
      survived = stats['surviving'] / (stats['surviving'] + stats['dropped'])
      loss = evaluation.evaluate_loss(predict, params, validation).loss
      rows.append((count, sparsity, survived, stats['exploration'], loss))
  loss = evaluation.evaluate_loss(predict, params, validation).loss
  return np.array([*rows, (STEPS, *rows[-1][1:-1], loss)], float).T


runs = {
    'RigL': train(rigl),
    'GraNet, by argument': train(by_argument),
    'GraNet, by hand': train(by_hand),
}

# %% [markdown]
# **Survival** is the share of kept connections that an update keeps: by hand it
# is lower, because pruning to the rising sparsity adds to the drops.
# **Exploration** is the share of all weights that were ever kept; it starts
# higher for GraNet, which starts at a lower sparsity.

# %%
names = ('sparsity', 'survived', 'explored')
fig, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout='constrained')
for (label, run), color in zip(runs.items(), style.COLORS):
  steps, losses = run[0], run[-1]
  for ax, name, share in zip(axes, names, run[1:-1]):
    # Nothing changes after the last update.
    ax.plot(steps[:-1], 100 * share[:-1], 'o-', color=color, markersize=3)
    ax.set_title(f'{name}, % of weights', loc='left', fontsize=10)
  axes[-1].plot(steps, losses, color=color, label=label)
axes[1].set_title('survived, % of kept weights', loc='left', fontsize=10)
axes[-1].set_title('validation loss, nats per byte', loc='left', fontsize=10)
axes[-1].legend(frameon=False, fontsize=8)
for ax in axes:
  style.polish(ax)
  ax.set_xlabel('step')
plt.show()

# %% [markdown]
# One seed of a tiny model does not show which is better. GraNet also takes more
# FLOPs, since it is denser until the sparsity has risen; the post compares them
# at equal tokens, too.

# %%
for label, run in runs.items():
  print(f'{label:<20} loss {run[-1][-1]:.3f}, {run[1][-1]:.1%} zeros at the '
        f'end, {np.mean(run[1][:-1]):.1%} over the updates')
