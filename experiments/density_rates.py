r"""Plots the loss over the learning rate at several densities, in two ways.

  python -m experiments.density_rates --output=rates/

Trains the quickstart's small GPT for a few hundred steps at every density, rate
and seed, with the standard parameterization and with the sparse one (sparse
muP), in which rates and initial weights of hidden layers follow their number of
kept inputs. rates.json in --output has the validation loss of each run,
rates.png the figure. If stopped, the same command continues.
"""

import collections
from collections.abc import Callable, Iterator
import functools
import itertools
import pathlib
import statistics
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import optax

from configs import quickstart
from experiments.launch import console
from experiments.papers import json_files
import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import style

_DENSITIES = flags.DEFINE_list('densities', ['1', '.5', '.25', '.1'], 'Shares.')
_RATES = flags.DEFINE_list(
    'rates', [f'{1e-3 * 2**k:g}' for k in range(7)], 'Peak learning rates.'
)
_SEEDS = flags.DEFINE_integer('seeds', 1, 'Runs of each.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 300, 'Steps of a run.', lower_bound=20)
_WIDTH = flags.DEFINE_integer('width', 64, 'd_model.', lower_bound=32)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder of the results.')

NAMES = {'standard': 'Standard', 'sparse-mup': 'Sparse muP'}


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _measure)


def _measure() -> Iterator[str]:
  path = pathlib.Path(_OUTPUT.value, 'rates.json')
  path.parent.mkdir(parents=True, exist_ok=True)
  found = json_files.read_json(path) if path.exists() else []
  done = [{k: v for k, v in row.items() if k != 'loss'} for row in found]
  train_of = functools.cache(_trainer)
  for seed, name, density, rate in itertools.product(
      range(_SEEDS.value), NAMES, map(float, _DENSITIES.value),
      map(float, _RATES.value),
  ):
    row = dict(
        name=name, density=density, rate=rate, seed=seed, width=_WIDTH.value,
        steps=_STEPS.value,
    )
    if row in done:
      continue
    loss = train_of(name, density)(rate, seed)
    found.append(row | dict(loss=loss))
    json_files.write_json(path, found, 1)
    yield f'{name}, density {density:g}, rate {rate:g}: {loss:.4f}'
  style.save(plot(found), path.with_suffix('.png'))
  yield f'{path} and rates.png are written'


def _trainer(name: str, density: float) -> Callable[[float, int], float]:
  """Returns a function that trains and returns the validation loss."""
  config = quickstart.get_config()
  config.data.task = ''
  config.phases.order = ('pretrain',)
  config.phases.pretrain.length = 64
  config.phases.pretrain.duration = f'{_STEPS.value} steps'
  config.model.update(
      n_layers=2, n_heads=_WIDTH.value // 32, d_model=_WIDTH.value,
      d_ff=4 * _WIDTH.value,
  )
  config.parameterization.update(
      name=name, base_width=_WIDTH.value, base_density=1.0
  )
  run = training.Run.create(config)
  follows = name == 'sparse-mup'
  schedule = optax.warmup_cosine_decay_schedule(
      0.0, 1.0, _STEPS.value // 10, _STEPS.value, 0.1
  )

  def optimizer(rate, seed):
    inner = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95),
        spdf.scale_by_density(1.0, where=run.model.where) if follows
        else optax.identity(),
        optax.add_decayed_weights(0.1), optax.scale(-rate),
    )
    return spdf.sparsify(
        inner, spdf.static(1 - density), where=run.model.where, key=seed
    )

  def loss_fn(params, inputs, targets):
    logits = run.model.apply({'params': params}, inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()

  def step(params, opt_state, batch, rate):
    grads = jax.grad(loss_fn)(params, batch.inputs, batch.targets)
    # The key is that of the state.
    updates, opt_state = optimizer(rate, 0).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  step, value = jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss_fn)
  batches = [run.programs.batch_at(i) for i in range(_STEPS.value)]
  held_out = lifecycle.validation_batches(run)

  def train(rate, seed):
    params = run.model.init(
        jax.random.key(seed), jnp.zeros((1, 2), jnp.int32)
    )['params']
    opt_state = optimizer(rate, seed).init(params)
    mask = spdf.get_mask(opt_state)
    params = spdf.apply_mask(params, mask)
    if follows:
      params = spdf.scale_init(params, mask, 1.0, where=run.model.where)
    for i, batch in enumerate(batches):
      params, opt_state = step(params, opt_state, batch, rate * schedule(i + 1))
    losses = [float(value(params, b.inputs, b.targets)) for b in held_out]
    return statistics.fmean(losses)

  return train


def plot(results: list[dict[str, Any]]) -> Any:
  """Plots mean losses over rates, a panel per parameterization.

  A star marks the best rate of each density.
  """
  losses = collections.defaultdict(list)
  for r in results:
    losses[r['name'], r['density'], r['rate']].append(r['loss'])
  means = {key: statistics.fmean(values) for key, values in losses.items()}
  figure = style.new_figure(8.4, 3.6)
  panels = figure.subplots(1, len(NAMES), sharey=True)
  for ax, (name, title) in zip(panels, NAMES.items()):
    densities = sorted({d for n, d, _ in means if n == name}, reverse=True)
    for i, density in enumerate(densities):
      line = sorted(
          (rate, loss) for (n, d, rate), loss in means.items()
          if (n, d) == (name, density)
      )
      look = style.line_style(i)
      ax.plot(*zip(*line), label=f'density {density:g}', markersize=4, **look)
      best = min(line, key=lambda point: point[1])
      ax.plot(*best, '*', color=look['color'], markersize=13)
    ax.set(xscale='log', xlabel='Peak learning rate')
    ax.set_title(title, loc='left', fontweight='bold', fontsize=10)
    style.polish(ax)
  panels[0].set_ylabel('Validation loss (nats per token)')
  panels[0].legend(frameon=False, fontsize=8)
  return figure


if __name__ == '__main__':
  flags.mark_flags_as_required(['output'])
  console.start(main)
