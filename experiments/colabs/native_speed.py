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
# # Native speed: when zeros save time on a CPU
#
# XLA multiplies zeros like any other number. The library has C++ kernels that
# skip them; they are compiled on first use and chosen by `lowering='native'`.
# You will
#
# 1. see which kernels are available, and what happens without a compiler;
# 2. time a layer, dense against native, over the sparsity;
# 3. time a whole training step;
# 4. find the sparsity from which the kernels are faster.
#
# It takes about a minute on two CPU cores. **The numbers depend on the machine
# that runs this**; other programs on it disturb them.

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
import functools
import os
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax import accelerator
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.data import Batch
from spdf_jax.runs import style

# %% [markdown]
# ## 1. Available kernels
#
# There are kernels for AVX-512, for AVX2 and for any other processor; the
# fastest that this processor supports are used.

# %%
available = native.is_available()
name = native.kernels() if available else 'none: XLA multiplies the zeros'
print(f'kernels: {name}')

# %% [markdown]
# Without a compiler, the same call falls back to XLA's masked dense product,
# and a line in the log gives the reason. The separate process below shows this
# with a compiler that does not exist and an empty cache. `SPDF_NATIVE=require`
# raises an error instead; `SPDF_NATIVE=0` disables the kernels.

# %%
PROGRAM = """
import jax.numpy as jnp
from spdf_jax.accelerator import sparse_matmul
x, mask = jnp.ones((2, 3)), jnp.eye(3, dtype=bool)
print(sparse_matmul(x, jnp.ones((3, 3)), mask, lowering='native'))
"""
with tempfile.TemporaryDirectory() as empty:
  changes = {'CXX': 'no-such-compiler', 'XDG_CACHE_HOME': empty}
  done = subprocess.run(
      [sys.executable, '-c', PROGRAM], env=os.environ | changes,
      capture_output=True, text=True, check=True,
  )
print(done.stderr.strip())
print(done.stdout.strip())

# %% [markdown]
# ## 2. A layer
#
# Dense and native calls are timed alternately, A B A B …, so that disturbances
# affect both, and compared in pairs. A point is the median of the pairs'
# ratios, a bar their quartiles.

# %%
REPEATS = 7


def compare(dense, sparse):
  """Returns the quartiles of dense time over sparse time."""
  ratios = []
  for i in range(REPEATS + 1):
    seconds = []
    for call in (dense, sparse):
      started = time.perf_counter()
      jax.block_until_ready(call())
      seconds.append(time.perf_counter() - started)
    if i:  # The first round compiles.
      ratios.append(seconds[0] / seconds[1])
  return np.quantile(ratios, [0.25, 0.5, 0.75])


def forward_and_gradients(multiply, dy, x, w, *mask):
  y, pullback = jax.vjp(lambda x, w: multiply(x, w, *mask), x, w)
  return y, pullback(dy)


SPARSITIES = (0.25, 0.5, 0.75, 0.9, 0.95)
INPUTS, OUTPUTS = 512, 2048
native_product = functools.partial(
    accelerator.sparse_matmul, lowering=accelerator.NATIVE
)
dense_layer = jax.jit(functools.partial(forward_and_gradients, jnp.dot))
native_layer = jax.jit(
    functools.partial(forward_and_gradients, native_product)
)
draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
w = draw(0, INPUTS, OUTPUTS)
masks = {s: spdf.init.random(jax.random.key(1), w, s) for s in SPARSITIES}

# Both give the same numbers.
x, dy = draw(2, 64, INPUTS), draw(3, 64, OUTPUTS)
mask = masks[0.75]
reference = jax.jit(
    functools.partial(forward_and_gradients, accelerator.sparse_matmul)
)
jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3),
    native_layer(dy, x, w, mask), reference(dy, x, w, mask),
)

layer_ratios = {}
for tokens in (32, 1024):
  operands = draw(3, tokens, OUTPUTS), draw(2, tokens, INPUTS), w
  for sparsity, mask in masks.items():
    layer_ratios[tokens, sparsity] = compare(
        functools.partial(dense_layer, *operands),
        functools.partial(native_layer, *operands, mask),
    )

# %% [markdown]
# ## 3. A training step
#
# The step of a GPT includes its head, attention and AdamW, which are dense at
# any sparsity. `sparse_steps` is what `config.matmul` chooses: the step has one
# `cond` between the model with kernels and the model without. The dense
# baseline is the same step of the same model without masks.

# %%
model = models.create_model(
    'gpt-mini', vocab_size=257, n_layers=2, d_model=256, d_ff=1024,
    max_length=128,
)
tokens = jax.random.randint(jax.random.key(4), (8, 129), 0, 257)
batch = Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((8, 128)))
rate = optax.constant_schedule(1e-3)
params = jax.jit(model.init)(jax.random.key(0), tokens[:, :2])['params']


def unmasked(variables, tokens):
  return model.apply({'params': variables['params']}, tokens)


def make_step(sparsity):
  """Returns a call that takes a training step, native at a sparsity above 0."""
  algorithm = spdf.static(sparsity) if sparsity else spdf.dense()
  tx = spdf.sparsify(
      optax.adamw(rate), algorithm, where=models.sparsifiable, key=0
  )
  step = jax.jit(functools.partial(
      training.train_step,
      apply_fn=model.apply if sparsity else unmasked,
      optimizer=tx,
      learning_rate=rate,
      sparse_steps=(
          training.sparse_steps('native', model, batch.inputs.size) if sparsity
          else None
      ),
  ))
  state = jax.jit(lambda params: training.create_state(params, tx))(params)
  return lambda: step(state, batch)


dense_step = make_step(0.0)
step_ratios = {s: compare(dense_step, make_step(s)) for s in SPARSITIES}

# %% [markdown]
# ## 4. When the kernels are faster
#
# Above the line native is faster. Every call builds the index lists of kept
# weights, so a new mask needs no compilation, but with few tokens this overhead
# outweighs the gain.


# %%
def crossover(ratios):
  """Returns the sparsity at which a rising ratio crosses 1, or `None`."""
  sparsities, medians = list(ratios), [q[1] for q in ratios.values()]
  if medians[-1] < 1:
    return None
  if medians[0] >= 1:
    return sparsities[0]
  last = max(i for i, ratio in enumerate(medians) if ratio < 1)
  return float(np.interp(1, medians[last:last + 2], sparsities[last:last + 2]))


lines = {
    f'layer, {tokens} tokens': {
        s: ratio for (t, s), ratio in layer_ratios.items() if t == tokens
    }
    for tokens in (32, 1024)
} | {'training step': step_ratios}

fig, ax = plt.subplots(figsize=(7, 4), layout='constrained')
for (label, ratios), color in zip(lines.items(), style.COLORS):
  low, median, high = np.array(list(ratios.values())).T
  ax.errorbar(
      [100 * s for s in ratios], median, [median - low, high - median],
      fmt='o-', color=color, label=label, capsize=3, markersize=4,
  )
ax.axhline(1, color=style.GREY, linewidth=1)
ax.set(xlabel='% zeros', ylabel='times faster than dense', ylim=(0, None))
ax.set_title(f'Native kernels ({name}), {os.cpu_count()} CPUs', loc='left')
style.polish(ax)
ax.legend(frameon=False)
plt.show()

for label, ratios in lines.items():
  start = crossover(ratios)
  faster = 'never faster' if start is None else f'faster from {start:.0%} zeros'
  if start == SPARSITIES[0]:
    faster += ' or fewer'
  print(f'{label:<20} {faster}; {ratios[0.75][1]:.2f} times at 75 %')

# %% [markdown]
# ## Next steps
#
# * `config.matmul='auto'` uses the kernels where they are faster, in
#   `experiments.train` too, on one CPU.
# * `python -m experiments.benchmark --suite=matmul` measures more layers, with
#   intervals and targets.
