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
# # A model on the emulated wafer
#
# The notebook `wafer` models the time of programs that never run. Here a small
# GPT runs on the modeled device: an emulated grid of cores computes its masked
# products with the arithmetic of the device, and counts the events of each. You
# will
#
# 1. train 50 steps, sparse and then dense, on the grid, beside XLA;
# 2. read out the events of a step, by layer;
# 3. see how masks load the columns of cores, and what that costs;
# 4. compare the executed cycles with those of the cost model.
#
# The emulation counts cycles; none is measured on a wafer. It takes a minute on
# two CPU cores.

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
# The comparison with costs is part of a clone and not of the installed package.
if importlib.util.find_spec('experiments') is None:
  clone = Path.cwd().parent.parent
  if not (clone / 'experiments').is_dir():
    sys.exit('Start this notebook in experiments/colabs of a clone.')
  sys.path.append(str(clone))

# %%
import argparse
import functools
import inspect
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from experiments.wafer.executions import compare
from experiments.wafer.executions import executed_table
import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator import wafer
from spdf_jax.runs import style
from spdf_jax.training.step.losses import create_loss_scale

# %% [markdown]
# ## 1. Training
#
# The device is a corner of a CS-2 with 1,024 cores. `lowering` returns the name
# of a lowering of the sparse matmul to it, which any model takes. A core adds
# products of fp16 numbers in float32; partial sums travel from core to core as
# fp16. So the model computes in fp16, with a loss scale. It learns the source
# code of Python's `argparse`. The latency of a product, 20 microseconds, is not
# included, since it would be most of the time at this size.

# %%
device = wafer.create_device('cs2', cores=1024, latency=0)
SPARSE_STEPS, DENSE_STEPS, BATCH, LENGTH = 30, 20, 16, 64
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8) % 128
windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)


def batch_at(step):
  chosen = np.random.default_rng(step).integers(len(windows), size=BATCH)
  rows = windows[chosen].astype(np.int32)
  ones = np.ones((BATCH, LENGTH), np.float32)
  return data.Batch(rows[:, :-1], rows[:, 1:], ones)


def create_model(dtype, lowering):
  return models.create_model(
      'gpt-mini', vocab_size=128, n_layers=2, n_heads=2, d_model=64, d_ff=256,
      max_length=LENGTH, dtype=dtype, lowering=lowering,
  )


algorithm = spdf.join([spdf.static(0.75), spdf.dense()], [SPARSE_STEPS])
optimizer = spdf.sparsify(
    optax.adam(3e-3), algorithm, where=models.sparsifiable, key=0
)


def train(dtype, lowering):
  model = create_model(dtype, lowering)
  step = functools.partial(
      training.train_step, apply_fn=model.apply, optimizer=optimizer,
      learning_rate=optax.constant_schedule(3e-3),
  )
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = model.init(jax.random.key(0), tokens)['params']
  state = training.create_state(params, optimizer, create_loss_scale(dtype))
  jitted, losses, states, events = jax.jit(step), [], [], []
  for i in range(SPARSE_STEPS + DENSE_STEPS):
    states.append(state)
    with wafer.record() as counted:
      state, metrics = jax.block_until_ready(jitted(state, batch_at(i)))
    losses.append(float(metrics['train/loss']))
    events.append(counted)
  return np.array(losses), events, states, step


runs = {}
for name, setting in {
    'XLA, float32': ('float32', 'reference'),
    'XLA, fp16': ('float16', 'reference'),
    'wafer': ('float16', wafer.lowering(device)),
}.items():
  start = time.perf_counter()
  runs[name] = train(*setting)
  print(
      f'{name:<14}{time.perf_counter() - start:6.1f} s, loss after the sparse '
      f'steps {runs[name][0][SPARSE_STEPS - 1]:.4f}, at the end '
      f'{runs[name][0][-1]:.4f}'
  )

# %% [markdown]
# The curves coincide, so the right plot shows their differences from XLA in
# float32. Those of the wafer are like those of XLA in fp16, which sums in
# float32: at this size, rounding partial sums to fp16 has no visible effect on
# the loss.

# %%
exact = runs['XLA, float32'][0]
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout='constrained')
for (name, (losses, *_)), color in zip(runs.items(), style.COLORS):
  left.plot(losses, color=color, label=name)
  if name != 'XLA, float32':
    right.plot(np.abs(losses - exact), color=color, label=name)
    print(f'{name}: largest difference {np.abs(losses - exact).max():.5f}')
left.set(xlabel='step', ylabel='loss')
left.set_title('75 % zeros, then dense', loc='left')
right.set(xlabel='step', ylabel='difference of the loss', yscale='log')
right.set_title('from XLA in float32', loc='left')
for ax in (left, right):
  ax.axvline(SPARSE_STEPS, color=style.GREY, linewidth=0.8)
  style.polish(ax)
  ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 2. Events
#
# Each execution of a masked product is one event: the non-zeros that were
# streamed, the multiply-adds, the hops of wavelets between cores, bytes and
# cycles. Masks are data, so the dense steps run the same compiled program with
# more non-zeros.

# %%
_, events, states, step = runs['wafer']


def total(counted, field):
  return sum(getattr(event, field) for event in counted)


for label, counted in (('sparse', events[0]), ('dense', events[-1])):
  print(f'a {label} step with {len(counted)} masked products')
  for field in (
      'nonzeros', 'multiply_adds', 'hops', 'streamed_bytes', 'cycles'
  ):
    print(f'  {field:<16}{total(counted, field):>14,.0f}')

cycles = np.array([total(counted, 'cycles') for counted in events])
fig, ax = plt.subplots(figsize=(7.5, 2.8), layout='constrained')
ax.bar(range(len(cycles)), cycles / 1e6, color=style.COLORS[0])
ax.set(xlabel='step', ylabel='million cycles', ylim=(0, None))
ax.set_title('Cycles of the masked products of a step', loc='left')
style.polish(ax)
plt.show()

# %% [markdown]
# ## 3. The columns of a mask
#
# A column of cores stores some inputs and multiplies the weights that leave
# them. Columns wait for the busiest one, so a mask that loads them unevenly
# costs time that its sparsity does not show. The masks below have 75 % zeros:
# at random, by the magnitude of weights that were trained, and by the magnitude
# of blocks.

# %%
layer = 'h_1', 'mlp', 'wi', 'kernel'
w = functools.reduce(lambda tree, key: tree[key], layer, states[-1].params)
key = jax.random.key(1)
masks = {
    'random': spdf.init.random(key, w, 0.75),
    'magnitude': spdf.init.magnitude(key, w, 0.75),
    'blocks of 16 x 16': spdf.init.magnitude(
        key, w, 0.75, structure=spdf.structures.block(16, 16)
    ),
}
product = jax.jit(functools.partial(
    sparse_matmul, lowering=wafer.lowering(device)
))
x = jax.random.normal(key, (BATCH * LENGTH, w.shape[0]))
fig, axes = plt.subplots(2, 3, figsize=(10, 4.2), layout='constrained')
for (name, mask), (top, bottom) in zip(masks.items(), axes.T):
  with wafer.record() as counted:
    product(x, w, mask).block_until_ready()
  (event,) = counted
  loads = event.loads.sum(1)
  top.imshow(mask, aspect='auto', cmap='Greys', interpolation='nearest')
  top.set(xlabel='outputs', ylabel='inputs')
  top.set_title(name, loc='left')
  bottom.bar(range(len(loads)), loads, width=1, color=style.COLORS[0])
  bottom.axhline(loads.mean(), color=style.GREY, label='mean')
  bottom.axhline(loads.max(), color=style.COLORS[1], label='busiest')
  bottom.set(xlabel='column of cores', ylabel='non-zeros')
  bottom.set(ylim=(0, 1.3 * loads.max()))
  bottom.legend(frameon=False, ncols=2, fontsize=8)
  style.polish(bottom)
  print(
      f'{name:<18} busiest column {loads.max() / loads.mean():.2f} x the mean, '
      f'{event.core:,.0f} cycles of cores'
  )
plt.show()

# %% [markdown]
# ## 4. Executed and costed
#
# `simulate` costs the same step by equations, without running it. On the grid
# that was executed, its non-zeros, bytes and hops are those that were counted.
# Its cycles leave out how long the last wavelet takes to cross the grid. The
# last column is the error of `simulate` itself, on the grid that it chooses.

# %%
report = wafer.simulate(step, device)(states[0], batch_at(0))
compared = compare(events[0], report)
print(executed_table(compared))

# %% [markdown]
# ## Next steps
#
# * `python -m experiments.simulate --executed` compares more masks.
# * `--config.matmul=wafer --config.model.dtype=float16` trains a config on the
#   emulated wafer.
# * `wafer.create_device('cs2', cores=…, window=…)` emulates other grids.
