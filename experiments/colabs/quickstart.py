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
# # Sparse pre-training in JAX: a quick start
#
# Training starts with most hidden weights held at zero and ends with all of
# them, which takes fewer FLOPs than dense training. This notebook shows
#
# 1. `spdf.sparsify` around an optimizer, in a plain optax loop;
# 2. a picture of the masks;
# 3. phases, and a tiny GPT pre-trained densely and sparsely;
# 4. loss over FLOPs.
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
import functools
import time

import jax
import jax.numpy as jnp
from matplotlib import colormaps
from matplotlib import colors
import matplotlib.pyplot as plt
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax import costs
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import models
from spdf_jax import training
from spdf_jax.training.step import optimizers

BLUE, ORANGE, GREY = '#0072B2', '#D55E00', '#666666'
plt.rcParams |= {
    'figure.dpi': 120,
    'figure.constrained_layout.use': True,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'axes.titlelocation': 'left',
    'grid.color': '#E4E4E4',
    'lines.linewidth': 1.8,
}

# %% [markdown]
# ## 1. A plain optax loop
#
# Sparsity works with any loop, parameters and optimizer. The mask is part of
# the optimizer state; parameters are ordinary arrays that are exactly zero
# where it is `False`. `join` runs one algorithm after another: 75 % sparsity
# for the first 300 of 600 steps, then dense. Regrown weights have no moments
# yet, and Adam changes such weights by several times the learning rate, so the
# learning rate is warmed up again.

# %%
GROW_AT, STEPS = 300, 600


def init_mlp(key):
  """Initializes an MLP of 2 inputs and 1 output with two hidden matrices."""
  sizes = {'embed': (2, 64), 'mlp_1': (64, 64), 'mlp_2': (64, 64),
           'head': (64, 1)}
  keys = jax.random.split(key, len(sizes))
  return {
      name: {'w': jax.random.normal(k, size) * size[0] ** -0.5,
             'b': jnp.zeros(size[1])}
      for (name, size), k in zip(sizes.items(), keys)
  }


def mlp_loss(params, x, y):
  for name in ('embed', 'mlp_1', 'mlp_2'):
    x = jax.nn.gelu(x @ params[name]['w'] + params[name]['b'])
  return jnp.mean((x @ params['head']['w'] + params['head']['b'] - y) ** 2)


x = jax.random.uniform(jax.random.key(1), (1024, 2), minval=-1)
y = jnp.sin(5 * x[:, :1]) * jnp.cos(4 * x[:, 1:])

mlp_rate = optax.join_schedules(
    [
        optax.constant_schedule(3e-3),
        optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, STEPS - GROW_AT),
    ],
    [GROW_AT],
)
tx = spdf.sparsify(
    optax.adamw(mlp_rate, b2=0.95),
    spdf.join([spdf.static(0.75), spdf.dense()], [GROW_AT]),
    key=0,
)


@jax.jit
def mlp_step(params, opt_state):
  loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


params = init_mlp(jax.random.key(0))
opt_state = tx.init(params)
params = spdf.apply_mask(params, spdf.get_mask(opt_state))  # once
mlp_losses, snapshots = [], {}
for step in range(1, STEPS + 1):
  params, opt_state, loss = mlp_step(params, opt_state)
  mlp_losses.append(float(loss))
  if step in (GROW_AT, STEPS):
    snapshots[step] = params, spdf.get_mask(opt_state)

# %% [markdown]
# By default the matrices of hidden layers are sparsified, chosen by shape and
# path; `where=` takes another rule. `embed` and `head` stay dense here.

# %%
for step, (saved, mask) in snapshots.items():
  print(f'after {step} steps, loss {mlp_losses[step - 1]:.4f}')
  print(spdf.summarize(mask, saved), end='\n\n')
  # Exactly zero, not nearly: masking once more changes nothing.
  jax.tree.map(
      np.testing.assert_array_equal, saved, spdf.apply_mask(saved, mask)
  )

pruned = ~snapshots[GROW_AT][1]['mlp_1']['w']
assert int(pruned.sum()) == 0.75 * pruned.size
assert not snapshots[GROW_AT][0]['mlp_1']['w'][pruned].any()
assert snapshots[STEPS][0]['mlp_1']['w'][pruned].any()

# %% [markdown]
# ## 2. The masks
#
# Regrown weights start from exactly zero. At step 600 they are still smaller
# than the others, so that the structure of the mask remains visible.

# %%
cmap = colormaps['RdBu_r'].with_extremes(bad='#E4E4E4')
norm = colors.SymLogNorm(0.03, vmin=-1, vmax=1)
fig, axes = plt.subplots(2, 4, figsize=(9.5, 5.1))
for row, name in zip(axes, ('mlp_1', 'mlp_2')):
  for i, (step, (saved, mask)) in enumerate(snapshots.items()):
    kept = np.asarray(mask[name]['w'])
    weights = np.ma.array(saved[name]['w'], mask=~kept)
    row[2 * i].imshow(kept, cmap='Blues', vmin=-0.1, vmax=1.4)
    image = row[2 * i + 1].imshow(weights, cmap=cmap, norm=norm)
    row[2 * i].set_title(f'mask, step {step}', fontsize=9)
    row[2 * i + 1].set_title(f'weights, step {step}', fontsize=9)
  row[0].set_ylabel(name)
for ax in axes.flat:
  ax.set(xticks=[], yticks=[])
  ax.grid(False)
  ax.spines[:].set_visible(False)
label = 'weight, logarithmic beyond 0.03 (grey: pruned)'
fig.colorbar(image, ax=axes, shrink=0.8, label=label, format='%g')
fig.suptitle('75 % zeros, then all weights')
plt.show()

# %% [markdown]
# ## 3. Phases
#
# Sparse pre-training, dense continuation and dense fine-tuning are the same
# jitted step with other data, sparsity and learning rate. A `Phase` defines
# these, and a `Plan` turns phases into functions of the step. Fine-tuning would
# be another phase with `data='task'` and `reset_moments=True`, as in
# `configs/quickstart.py`.

# %%
SPARSE_STEPS, DENSE_STEPS = 240, 60
rate = optax.warmup_cosine_decay_schedule(
    1e-4, 4e-3, 40, SPARSE_STEPS + DENSE_STEPS, end_value=4e-4
)


def make_plan(sparsity):
  """Returns a plan: pre-training at `sparsity`, then dense, with one cosine."""
  common = dict(
      data='corpus', batch_size=16, length=64, weight_decay=0.1,
      reset_moments=False,
  )
  return training.Plan((
      training.Phase(
          name='pretrain',
          steps=SPARSE_STEPS,
          algorithm=dict(name='static', sparsity=sparsity),
          learning_rate=rate,
          **common,
      ),
      training.Phase(
          name='continuation',
          steps=DENSE_STEPS,
          algorithm=dict(name='dense'),
          learning_rate=lambda step: rate(step + SPARSE_STEPS),
          **common,
      ),
  ))


def sparsity_of(phase):
  return 0.0 if phase.is_dense else phase.algorithm['sparsity']


plans = {'dense': make_plan(0.0), 'variable SPDF': make_plan(0.75)}
color_of = dict(zip(plans, (BLUE, ORANGE)))

# %%
steps = np.arange(SPARSE_STEPS + DENSE_STEPS)
fig, (top, bottom) = plt.subplots(2, figsize=(7, 4), sharex=True)
for label, plan in plans.items():
  sparsities = [sparsity_of(plan.phase_at(step)) for step in steps]
  bottom.step(
      steps, sparsities, where='post', color=color_of[label], label=label
  )
top.plot(steps, plan.learning_rate(steps), color=GREY)  # the same for both
for phase, start in zip(plan.phases, plan.starts):
  bottom.text(start + 5, 0.95, phase.name, color=GREY, fontsize=9)
for ax in (top, bottom):
  ax.axvline(SPARSE_STEPS, color=GREY, linewidth=1, linestyle='--')
top.set(ylabel='learning rate', ylim=(0, None), title='The plans')
bottom.set(xlabel='step', ylabel='sparsity', ylim=(-0.06, 1.1))
bottom.legend(loc='center left', frameon=False)
plt.show()

# %% [markdown]
# The corpus is the source code of Python's standard library, as bytes. It is
# prepared once and cached.

# %%
corpus = data.prepare_corpus(
    'python-stdlib',
    tokenizer='bytes',
    cache_dir=Path('~/.cache/spdf_jax').expanduser(),
)
model = models.create_model(
    'gpt-mini', vocab_size=257, n_layers=2, d_model=48, d_ff=192, max_length=64
)
validation = data.evaluation_batches(
    data.Windows(corpus.validation), batch_size=32, length=64, max_batches=8
)


def apply_dense(params, tokens):
  return model.apply({'params': params}, tokens)


print(f'{len(corpus.train.tokens):,} tokens to train on')

# %% [markdown]
# `training.train_step` is compiled once per run and has no branch on phase or
# sparsity. Both runs start from the same weights and read the same batches.


# %%
def train(plan):
  """Trains by a plan; returns steps, FLOPs and validation losses."""
  optimizer = optimizers.adamw(
      plan,
      where=models.sparsifiable,
      key=jax.random.key(1),
      b1=0.9,
      b2=0.95,
      eps=1e-8,
      clip_norm=1.0,
  )
  batch_at = data.schedule_batches(
      {'corpus': data.Windows(corpus.train)},
      [
          data.Allotment(p.data, p.batch_size, p.length, p.steps)
          for p in plan.phases
      ],
      seed=0,
      max_epochs={'corpus': 1},
  )
  train_step = jax.jit(
      functools.partial(
          training.train_step,
          apply_fn=model.apply,
          optimizer=optimizer,
          learning_rate=plan.learning_rate,
      ),
      donate_argnums=0,
  )

  @jax.jit
  def init(key):
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = model.init(key, tokens)['params']
    return training.create_state(params, optimizer)

  state, flops, curve = init(jax.random.key(0)), 0.0, []
  for step in range(plan.total_steps):
    phase = plan.phase_at(step)
    state, _ = train_step(state, batch_at(step))
    flops += phase.batch_size * costs.training_flops(
        model.config, phase.length, sparsity_of(phase)
    )
    if (step + 1) % 20 == 0:
      loss = evaluation.evaluate_loss(apply_dense, state.params, validation)
      curve.append((step + 1, flops, loss.loss))
    if step + 1 in plan.ends.values():
      mask = spdf.get_mask(state.opt_state)
      jax.tree.map(
          np.testing.assert_array_equal,
          state.params,
          spdf.apply_mask(state.params, mask),
      )
      summary = spdf.summarize(mask, state.params, where=models.sparsifiable)
      print(
          f'  {phase.name} ends at step {step + 1}: loss {curve[-1][2]:.3f}, '
          f'{flops:.2e} FLOPs, {summary.sparsity:.0%} zeros'
      )
  return np.array(curve).T


curves = {}
for label, plan in plans.items():
  started = time.monotonic()
  print(label)
  curves[label] = train(plan)
  print(f'  {time.monotonic() - started:.0f} seconds')

# %% [markdown]
# ## 4. Loss over FLOPs
#
# After equal steps the sparse run has a higher loss than the dense one; the
# right plot compares them at equal FLOPs, if zeros are skipped. There, the
# sparse run has finished its schedule where the dense one is in the middle of
# its own. FLOPs are not seconds either: XLA multiplies the zeros, so both runs
# take equal time here. Saving time needs hardware or kernels that skip zeros.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True)
for label, (steps, flops, losses) in curves.items():
  grown = np.searchsorted(steps, SPARSE_STEPS)
  for ax, spent in ((left, steps), (right, flops / 1e9)):
    (line,) = ax.plot(spent, losses, color=color_of[label], label=label)
    ax.plot(
        spent[grown], losses[grown], 'o', color=line.get_color(), mfc='white'
    )
left.set(
    xlabel='step', ylabel='validation loss (nats per byte)', ylim=(None, 3)
)
left.set_title('Over steps')
right.set(xlabel='training GFLOPs')
right.set_title('Over FLOPs (ring: end of the first phase)')
right.legend(frameon=False)
plt.show()

(_, dense_flops, dense_losses), (_, flops, losses) = curves.values()
equal = np.interp(flops[-1], dense_flops, dense_losses)
print(
    f'variable SPDF ends at {losses[-1]:.3f} with '
    f'{flops[-1] / dense_flops[-1]:.0%} of the FLOPs of the dense run, which '
    f'is at {equal:.3f} after equal FLOPs and ends at {dense_losses[-1]:.3f}'
)
