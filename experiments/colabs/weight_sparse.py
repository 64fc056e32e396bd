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
# # A weight-sparse GPT that one can read
#
# Gao et al., "Weight-sparse transformers have interpretable circuits" (2025),
# train GPTs of which few weights are not zero, so that what solves a small task
# is a circuit that a person can follow. You will
#
# 1. make a language of strings, which end with the quote that they begin with;
# 2. train a tiny GPT on it, densely and with one weight in 16 kept;
# 3. find the circuit that closes the quote, in each;
# 4. draw and read the sparse one.
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
# Model, circuits and figures are part of a clone, not of the installed package.
if importlib.util.find_spec('experiments') is None:
  clone = Path.cwd().parent.parent
  if not (clone / 'experiments').is_dir():
    sys.exit('Start this notebook in experiments/colabs of a clone.')
  sys.path.append(str(clone))

# %%
import jax
import numpy as np
import optax

from experiments.weight_sparse import circuits
from experiments.weight_sparse import figures
from experiments.weight_sparse import model as models
from experiments.weight_sparse import optimizer
from experiments.weight_sparse import tasks
import spdf_jax as spdf

# %% [markdown]
# ## 1. A language
#
# A text is a string of one to four words, after newlines that fill it up. The
# quote before the words and that after them are the same. Only attention can
# carry it past the words.

# %%
SYMBOLS = ['\n', "'", '"', *'abcdefgh']
LENGTH = 8


def draw(rng, quote):
  """Returns a text of `LENGTH` tokens, and the place of its last quote."""
  words = rng.integers(3, len(SYMBOLS), rng.integers(1, 5))
  text = [quote, *words, quote, 0]
  return [0] * (LENGTH - len(text)) + text


def batch_at(step):
  rng = np.random.default_rng(step)
  return np.array([draw(rng, rng.integers(1, 3)) for _ in range(64)])


for text in batch_at(0)[:3].tolist():
  print(repr(''.join(SYMBOLS[token] for token in text).strip()))

# %% [markdown]
# ## 2. Two models
#
# One layer, two heads of 16, and at each location only a quarter of the
# activations. `hard_threshold` wraps the optimizer: after each step, every
# matrix and bias keeps its largest weights, a fraction that falls to 1/16 over
# the first half of training. Gradients and moments stay dense, so that a pruned
# weight may return.

# %%
STEPS = 600


def train(sparsity):
  """Trains a model; returns it, its parameters and its last losses."""
  model, where = models.make_model(
      vocab_size=len(SYMBOLS), d_model=32, max_length=LENGTH, n_layers=1
  )
  rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, STEPS)
  tx = spdf.hard_threshold(
      optimizer.adamw(rate), optax.linear_schedule(0.0, sparsity, STEPS // 2),
      update_until=STEPS // 2, where=where,
  )

  @jax.jit
  def step(params, state, texts):
    def loss_of(params):
      logits = model.apply({'params': params}, texts[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(
          logits, texts[:, 1:]
      ).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = model.init(jax.random.key(0), batch_at(0))['params']
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  losses = []
  for i in range(STEPS):
    params, state, loss = step(params, state, batch_at(i))
    losses.append(float(loss))
  kept = sum(int(m.sum()) for m in jax.tree.leaves(spdf.get_mask(state)))
  print(f'sparsity {sparsity:.1%}: loss {np.mean(losses[-50:]):.3f}, '
        f'{kept:,} weights kept')
  return model, params


trained = {'dense': train(0.0), 'sparse': train(15 / 16)}

# %% [markdown]
# ## 3. Circuits
#
# Prompts come in pairs that differ in the first quote only. Nodes are channels
# of activations; those outside of the circuit have their mean over the texts.
# A mask of the nodes is learned, whose price follows the loss; then the fewest
# nodes are kept that reach the loss `TARGET`, where a guess has 0.69.

# %%
TARGET = 0.1


def prompts_of(seed):
  rng = np.random.default_rng(seed)
  tokens, answers = [], []
  for _ in range(48):
    words = rng.integers(3, len(SYMBOLS), 3).tolist()
    for right, wrong in ((1, 2), (2, 1)):
      tokens.append([0, 0, right, *words])
      answers.append([right, wrong])
  return tasks.Prompts(np.array(tokens), np.array(answers))


found = {}
for name, (model, params) in trained.items():
  loss, right = circuits.solved(model, params, prompts_of(1))
  found[name] = circuits.find(
      model, params, batch_at(0), prompts_of(0), prompts_of(1), TARGET
  )
  print(f'{name}: all nodes have the loss {loss:.3f}, {right:.0%} right; '
        f'{found[name].size} nodes and {found[name].edges} weights between '
        f'them reach {found[name].loss:.3f}')

# %% [markdown]
# ## 4. The picture
#
# Read it from the bottom: the quotes write different values into channels
# that attention reads; values carry these past the words; what attention writes
# makes one quote likelier and the other less so. Blue weights are positive, red
# ones negative, and a dotted line joins the nodes of one residual channel.

# %%
model, params = trained['sparse']
figures.plot_circuit(
    model, params, found['sparse'], prompts_of(1),
    lambda tokens: ''.join(SYMBOLS[token] for token in tokens),
)
