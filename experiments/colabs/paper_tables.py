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
# # Reproducing the papers' tables
#
# The FLOPs that a paper prints can be recomputed; reproducing its results takes
# runs. You will
#
# 1. compare every printed number of FLOPs with a computed one;
# 2. train four tiny models, two dense and two of 75 % sparsity, and fine-tune
#    them densely;
# 3. draw how far fine-tuning rotates each matrix, as in SPDF's figure 3;
# 4. fill a results table, of your own and of a paper.
#
# It takes one or two minutes on two CPU cores and downloads no data. The tiny
# models demonstrate the tools; they do not reproduce the papers' claims.

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
# The papers' tables are part of a clone and not of the installed package.
if importlib.util.find_spec('experiments') is None:
  clone = Path.cwd().parent.parent
  if not (clone / 'experiments').is_dir():
    sys.exit('Start this notebook in experiments/colabs of a clone.')
  sys.path.append(str(clone))

# %%
import contextlib
import io
import json
import tempfile

import matplotlib.pyplot as plt

from configs import quickstart
from experiments.papers import flops_tables
from experiments.papers import paper_tables
from experiments.papers.published_results import Arm
from experiments.papers.published_results import Measure
from experiments.papers.published_results import Result
from experiments.papers.subspace_plots import plot_distances
from experiments.papers.subspaces import format_distances
from experiments.papers.subspaces import measure_pairs
from experiments.scores.language_models import open_run
from experiments.scores.scored_runs import find_runs
from experiments.scores.sheets import Settings
from experiments.scores.sheets import to_json
from experiments.scores.task_scores import score_task
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import style

# %% [markdown]
# ## 1. FLOPs
#
# `compare` recomputes each printed number. Its verdict is that the printed
# digits follow, follow under another reading (another way of counting), are a
# misprint, or do not follow.

# %%
tables = {name: flops_tables.compare(name) for name in flops_tables.TABLES}
for name, cells in tables.items():
  print(f'{name}: {flops_tables.summarize(cells)}')

pretraining = [c for c in tables['spdf'] if 'appendix, table 2' in c.source]
print('\n' + flops_tables.format_cells(pretraining))

# %%
verdicts = (
    flops_tables.FOLLOWS, flops_tables.OTHERWISE, flops_tables.MISPRINT,
    flops_tables.FAILS,
)
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout='constrained')
before = dict.fromkeys(tables, 0)
for verdict, color in zip(verdicts, style.COLORS):
  counts = {
      name: sum(cell.verdict == verdict for cell in cells)
      for name, cells in tables.items()
  }
  shares = [100 * counts[name] / len(tables[name]) for name in tables]
  left.barh(list(tables), shares, left=list(before.values()), color=color)
  before = {n: before[n] + share for n, share in zip(tables, shares)}
  chosen = [cell for cell in tables['spdf'] if cell.verdict == verdict]
  right.plot(
      [flops_tables.value_of(cell.printed) for cell in chosen],
      [100 * cell.difference for cell in chosen],
      'o', color=color, markersize=4, alpha=0.7, label=verdict,
  )
left.invert_yaxis()
left.set(xlabel='% of the printed numbers')
left.set_title('Verdicts by table', loc='left')
right.set(xscale='log', xlabel='printed number')
right.set_yscale('symlog', linthresh=1)
right.set_title('SPDF: computed against printed, %', loc='left')
right.legend(frameon=False, fontsize=8, loc='lower right')
for ax in (left, right):
  style.polish(ax)
left.grid(False, axis='y')
plt.show()

# %% [markdown]
# ## 2. Tiny runs
#
# The config is that of the quickstart, with a smaller model and fewer steps. A
# workdir has all that the tables need: the config, the plan, the metrics and
# the checkpoints of both phases.


# %%
def make_config(seed, sparsity):
  config = quickstart.get_config(f'sparsity={sparsity}')
  config.seed = seed
  config.model.update(vocab_size=257, n_layers=2, d_model=64, d_ff=256)
  config.data.tokenizer = 'bytes'
  config.phases.order = ('pretrain', 'finetune')
  for name, steps, peak in (('pretrain', 100, 3e-3), ('finetune', 40, 1e-3)):
    phase = config.phases[name]
    phase.update(duration=f'{steps} steps', batch_size=16, length=64)
    phase.learning_rate.update(peak=peak, warmup='10 steps')
  config.evaluation.generations = 0
  return config


folder = Path(tempfile.mkdtemp())
sparsities = {'dense': 0.0, '75 % zeros': 0.75}
workdirs = {}
for name, sparsity in sparsities.items():
  for seed in (0, 1):
    run = training.Run.create(make_config(seed, sparsity))
    workdir = folder / f'{sparsity:g}-{seed}'
    run.open(workdir)
    with contextlib.redirect_stderr(io.StringIO()):  # Hides the progress bar.
      training.train(run, **lifecycle.begin(run, name))
    workdirs[name, seed] = workdir
    print(f'{name}, seed {seed}: {run.plan.total_steps} steps in {workdir}')

# %% [markdown]
# ## 3. Parameter subspaces
#
# The cosine distance between a matrix before and after fine-tuning is 0 for
# equal directions and 1 for orthogonal ones. `WORKDIR@pretrain` is the
# checkpoint at the end of the phase `pretrain`.

# %%
pairs = measure_pairs(
    [f'{workdirs[name, 0]}@pretrain' for name in sparsities],
    [str(workdirs[name, 0]) for name in sparsities],
    list(sparsities),
)
print(format_distances(list(pairs), list(pairs.values())))
plot_distances(list(pairs), list(pairs.values()))

# %% [markdown]
# ## 4. Results
#
# As `experiments.evaluate` does, this scores the checkpoint of each run on a
# task by its protocol, and writes the scores beside the run.

# %%
settings = Settings()
for workdir in workdirs.values():
  model = open_run(f'{workdir}@pretrain')
  scores = list(score_task(model, 'validation', '', settings))
  (workdir / 'scores.json').write_text(
      json.dumps(to_json(model.name, scores, settings))
  )
scored = find_runs([folder])
print('\n'.join(scored.problems) or f'{len(scored.runs)} runs and phases found')

# %% [markdown]
# A cell states which runs belong in it and which score it shows. It averages
# over seeds, but never over different configs.

# %%
columns = {
    metric: Measure('validation', 'mean over tokens', metric)
    for metric in ('loss', 'bits_per_byte')
}
mine = [
    Result('Tiny models, Python\'s library', name, column, arm, measure)
    for name, sparsity in sparsities.items()
    for arm in [
        Arm('gpt-mini resized', 'static' if sparsity else 'dense', sparsity)
    ]
    for column, measure in columns.items()
]
print(paper_tables.format_filled(paper_tables.fill_results(mine, scored.runs)))

# %% [markdown]
# The papers' tables are filled in the same way. Runs that belong in no row are
# listed below.

# %%
print(paper_tables.report('granet', [folder]))

# %% [markdown]
# ## Next steps
#
# * `python -m experiments.flops --table=spdf` prints all cells, with notes.
# * `configs/` has the papers' experiments; `experiments.reproduce --table=…`
#   fills the tables from finished runs.
