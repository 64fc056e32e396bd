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
# # The wafer: modeled time of a training run
#
# A wafer-scale system streams weights past activations and skips those that are
# zero, so that unstructured sparsity saves time there. This is a model of such
# systems, the Cerebras CS-2 and CS-3, calibrated on published numbers. You will
#
# 1. estimate the time of a function of your own;
# 2. estimate SPDF's pre-training of GPT-3 XL, by phase and against GPUs;
# 3. view a training step as a trace;
# 4. sweep over the sparsity and over the number of systems.
#
# **All times are modeled, none is measured.** It takes less than a minute on
# two CPU cores: programs are traced from shapes and never run.

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
# Sweeps, plots and GPUs are part of a clone and not of the installed package.
if importlib.util.find_spec('experiments') is None:
  clone = Path.cwd().parent.parent
  if not (clone / 'experiments').is_dir():
    sys.exit('Start this notebook in experiments/colabs of a clone.')
  sys.path.append(str(clone))

# %%
import json
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from configs import spdf as spdf_config
from experiments.wafer import run_costs
from experiments.wafer.gpus import GPUS
from experiments.wafer.gpus import roofline_seconds
from experiments.wafer.plots import plot_roofline
from experiments.wafer.report import format_estimate
from experiments.wafer.sweeps import sensitivities
from experiments.wafer.sweeps import sensitivity_table
from experiments.wafer.sweeps import strong_scaling
from experiments.wafer.sweeps import sweep_sparsities
import spdf_jax as spdf
from spdf_jax import accelerator
from spdf_jax import training
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer.views import format_report
from spdf_jax.accelerator.wafer.views import write_trace
from spdf_jax.runs import style

# %% [markdown]
# ## 1. A function of your own
#
# `simulate` traces any JAX function. If a mask is an array, its zeros are
# counted; if it is only a shape, `sparsity=` gives the fraction of zeros.

# %%
devices = {name: wafer.create_device(name) for name in ('cs2', 'cs3')}
x = jnp.ones((8192, 1024), jnp.float16)
w = jnp.ones((1024, 4096), jnp.float16)
mask = spdf.init.random(jax.random.key(0), w, 0.75)


def layer(x, w, mask):
  return jax.nn.relu(accelerator.sparse_matmul(x, w, mask))


print(format_report(wafer.simulate(layer, devices['cs2'])(x, w, mask)))

# %% [markdown]
# ## 2. A run
#
# The config is that of SPDF's GPT-3 XL at 75 % sparsity (Thangarasa et al.,
# 2023, appendix, table 1). The Pile itself is not needed: a planned corpus has
# a size and no text.

# %%
config = spdf_config.get_config('model=gpt3-xl,sparsity=0.75')
run = training.Run.create(config, planning=True)
estimates = {
    name: run_costs.simulate_run(run, device)
    for name, device in devices.items()
}
for estimate in estimates.values():
  print(format_estimate(estimate, run), end='\n\n')

# %% [markdown]
# GPUs multiply unstructured zeros, so sparsity saves no time there. Their bars
# are rooflines from data sheets, with full peak and full bandwidth and no
# overhead, for as many GPUs as draw the power of one CS-2. These are lower
# bounds; the comparable bar of the wafer is "at best", which uses the band
# `'ideal'` without losses. The default band is calibrated on published
# measurements.

# %%
DAY = 24 * 3600
program = estimates['cs2'].report.program
bars = {}
for name, estimate in estimates.items():
  ideal = run_costs.simulate_run(run, wafer.create_device(name, 'ideal'))
  label = f'1 CS-{name[-1]}'
  bars[f'{label}, dense'] = estimate.dense_seconds / DAY, 'dense'
  bars[f'{label}, 75 % zeros'] = estimate.seconds / DAY, 'zeros'
  bars[f'{label}, 75 % zeros, at best'] = ideal.seconds / DAY, 'best'
for name, gpu in GPUS.items():
  count = int(devices['cs2'].power // gpu.power)
  seconds = roofline_seconds(program, name, count=count)
  days = seconds * run.plan.total_steps / DAY
  bars[f'{count} {gpu.name}, at best'] = days, 'gpu'
kinds = 'dense', 'zeros', 'best'
colors = dict(zip(kinds, style.COLORS), gpu=style.PALE)

fig, ax = plt.subplots(figsize=(7.5, 3.4), layout='constrained')
days, kinds = zip(*bars.values())
drawn = ax.barh(list(bars), days, color=[colors[kind] for kind in kinds])
ax.bar_label(drawn, fmt='%.3g', padding=3, fontsize=8)
ax.invert_yaxis()
ax.set(xlabel='days, modeled')
tokens = run.plan.phases[0].tokens
ax.set_title(f'GPT-3 XL on {tokens / 1e9:.0f}B tokens', loc='left')
style.polish(ax)
ax.grid(False, axis='y')
ax.margins(x=0.1)
plt.show()

# %% [markdown]
# ## 3. A step as a trace
#
# `write_trace` writes a file for ui.perfetto.dev and chrome://tracing: when
# each operation runs, and how long it uses cores, links and I/O. The plot shows
# its first track, the sequence of operations, by the resource that bounds them.

# %%
report = estimates['cs2'].report
with tempfile.TemporaryDirectory() as folder:
  path = write_trace(report, Path(folder, 'trace.json'))
  events = json.loads(path.read_text())['traceEvents']
operations = [e for e in events if e['ph'] == 'X' and e['tid'] == 0]
print(f'{len(operations)} operations take {float(report.seconds):.3g} s')

lanes = sorted({e['cat'] for e in operations})
bounds = sorted({e['args']['bound'] for e in operations})
fig, ax = plt.subplots(figsize=(10, 2.6), layout='constrained')
for bound, color in zip(bounds, style.COLORS):
  for i, lane in enumerate(lanes):
    spans = [
        (e['ts'] / 1e6, e['dur'] / 1e6) for e in operations
        if (e['cat'], e['args']['bound']) == (lane, bound)
    ]
    ax.broken_barh(spans, (i - 0.4, 0.8), color=color, linewidth=0)
  ax.barh([0], [0], color=color, label=f'bound by {bound}')
ax.set_yticks(range(len(lanes)), lanes)
ax.set(xlabel='seconds, modeled')
ax.set_title('A step on 1 CS-2, 75 % zeros', loc='left')
style.polish(ax)
ax.legend(frameon=False, fontsize=8, ncols=len(bounds), loc='lower right',
          bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# The table shows how the time depends on each number of the device; the plot
# shows the products of weights in the device's roofline.

# %%
print(sensitivity_table(sensitivities(report.program, report.device)))
plot_roofline(report)

# %% [markdown]
# ## 4. Sweeps
#
# A device is a pytree of numbers and a program is traced once, so a sweep is
# one jitted `vmap`. The grey line is the speed-up if time fell as FLOPs do:
# embeddings, the head and attention scores stay dense. With several systems,
# each takes a part of every micro-batch; the micro-batches are those of one
# system.

# %%
sparsities = np.linspace(0, 0.95, 96)
planned = run.plan.phases[0].algorithm['sparsity']
masked = report.skipped_flops / planned / (report.flops + report.skipped_flops)
systems = [1, 2, 4, 8, 16, 32]

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
ideal = 1 / (1 - float(masked) * sparsities)
left.plot(100 * sparsities, ideal, color=style.GREY, label='FLOPs')
right.plot(systems, systems, color=style.GREY, label='linear')
for (name, device), color in zip(devices.items(), style.COLORS):
  traced = estimates[name].report.program
  seconds = sweep_sparsities(traced, device, sparsities)
  label = f'CS-{name[-1]}'
  left.plot(100 * sparsities, seconds[0] / seconds, color=color, label=label)
  right.plot(
      systems, strong_scaling(traced, device, systems), 'o-', color=color,
      label=label,
  )
left.set(xlabel='% zeros', ylabel='times faster than dense')
left.set_title('A step of GPT-3 XL on one system', loc='left')
right.set(xlabel='systems', ylabel='times faster than one')
right.set(xscale='log', yscale='log', xticks=systems, yticks=systems)
right.set(xticklabels=systems, yticklabels=systems)
right.minorticks_off()
right.set_title(f'{planned:.0%} zeros, one batch split', loc='left')
for ax in (left, right):
  style.polish(ax)
  ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Next steps
#
# * `python -m experiments.simulate --config=…` prints all of this for a config,
#   `--validate` the model's errors, `--audit` every constant and its source.
# * `wafer.register_cost` adds the cost of a primitive of your own.
