r"""Studies learning rates of sparse models: --study=NAME --output=DIR.

  python -m experiments.rates --study=coordinates --output=rates/ \
    --config=configs/quickstart.py --parameterizations=standard,sparse-mup
  python -m experiments.rates --study=densities --output=rates/
  python -m experiments.rates --study=transition --output=rates/

coordinates: trains the model of --config for ten steps on one batch, at the
peak rate of its first phase and at several widths and densities, and measures
the root mean square of the change of each layer's output after 1, 5 and 10
steps, and of the logits of the targets. Under a parameterization that transfers
learning rates it does not depend on width and density, as far as layers add up
many inputs. d_ff and the number of heads follow the width; the smallest width
and the largest density are the base. Prints the extremes of the changes over
those at the base.

densities: trains a small GPT on the quickstart's text at every density, rate
and seed, with the standard parameterization and with the sparse one (sparse
muP), in which rates and initial weights of hidden layers follow their number of
kept inputs; measures the validation loss. If stopped, the same command
continues.

transition: trains the quickstart's GPT at 90 % sparsity and continues densely
at the peak rate, in four ways: as it is; with the learning rate warmed up
again; with the moments of revived weights corrected from their own revival
(`config.revival_warmup=0`); and with a warm-up of revived weights, too.
Measures the training losses of the steps around the transition.

--output gets coordinates.json, rates.json or transition.json, and its figure.
"""

from collections.abc import Callable, Iterator
import functools
import itertools
import pathlib
import statistics
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import optax

from configs import quickstart
from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from experiments.papers import coordinates
from experiments.papers import json_files
from experiments.papers import rate_plots
from experiments.papers.rate_plots import AFTER
from experiments.papers.rate_plots import BEFORE
import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import style
from spdf_jax.training import initial_state

FLAGS = flags.FlagValues()
_STUDY = flags.DEFINE_enum(
    'study', None, ['coordinates', 'densities', 'transition'], 'The study.',
    required=True, flag_values=FLAGS,
)
_CONFIG = config_file.define(FLAGS)
_WIDTHS = flags.DEFINE_list(
    'widths', ['64', '128', '256', '512'], 'd_model of coordinates.',
    flag_values=FLAGS,
)
_NAMES = flags.DEFINE_list(
    'parameterizations', [],
    'standard, mup, sparse-mup for coordinates; by default that of the config.',
    flag_values=FLAGS,
)
_DENSITIES = flags.DEFINE_list(
    'densities', None,
    'Shares of kept weights; by default 1,.25,.0625 for coordinates and '
    '1,.5,.25,.1 for densities.',
    flag_values=FLAGS,
)
_RATES = flags.DEFINE_list(
    'rates', [f'{1e-3 * 2**k:g}' for k in range(7)],
    'Peak learning rates of densities.',
    flag_values=FLAGS,
)
_STEPS = flags.DEFINE_integer(
    'steps', 300, 'Sparse steps of densities and transition.', lower_bound=20,
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 3, 'Runs of each.', lower_bound=1, flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder of table and figure.',
    required=True, flag_values=FLAGS,
)

_WIDTH = 64
_WARMUP = 20
WAYS: dict[str, dict[str, Any]] = {
    'As it is': {},
    'Learning rate warmed up': {'warmup': f'{_WARMUP} steps'},
    'Age of weights': {'revival_warmup': 0},
    'Age and warm-up of revived weights': {'revival_warmup': _WARMUP},
}
"""Changes of the dense phase, or of the optimizer, by their names."""


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if (_STUDY.value == 'coordinates') != (_CONFIG.value is not None):
    raise app.UsageError(
        'give --config with --study=coordinates, and with no other.'
    )
  compilation_cache.prepare()
  studies = dict(
      coordinates=_coordinates, densities=_densities, transition=_transition
  )
  return console.run(argv, studies[_STUDY.value], pathlib.Path(_OUTPUT.value))


def _coordinates(output: pathlib.Path) -> Iterator[str]:
  config = _CONFIG.value
  widths = sorted(map(int, _WIDTHS.value))
  densities = sorted(
      map(float, _DENSITIES.value or ('1', '.25', '.0625')), reverse=True
  )
  base = dict(base_width=widths[0], base_density=densities[0])
  rows = []
  for name in _NAMES.value or [config.parameterization.name]:
    for width in widths:
      measured = coordinates.measure(
          config, name, width, densities, base, _SEEDS.value
      )
      for density, changes in measured.items():
        rows.append(dict(
            parameterization=name, width=width, density=density,
            changes=dict(zip(map(str, coordinates.STEPS), changes)),
        ))
      yield f'{name}, width {width}: measured'
  _write(output / 'coordinates.json', rows, rate_plots.plot_coordinates)
  yield from coordinates.describe(rows)


def _write(path: pathlib.Path, rows: Any, plot: Callable[..., Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  json_files.write_json(path, rows, 1)
  style.save(plot(rows), path.with_suffix('.png'))


def _densities(output: pathlib.Path) -> Iterator[str]:
  path = output / 'rates.json'
  output.mkdir(parents=True, exist_ok=True)
  rows = json_files.read_json(path) if path.exists() else []
  same = dict(width=_WIDTH, steps=_STEPS.value)
  json_files.check_same('output', output, rows, **same)
  done = [{k: v for k, v in row.items() if k != 'loss'} for row in rows]
  train_of = functools.cache(_trainer)
  for seed, name, density, rate in itertools.product(
      range(_SEEDS.value), rate_plots.NAMES,
      map(float, _DENSITIES.value or ('1', '.5', '.25', '.1')),
      map(float, _RATES.value),
  ):
    row = dict(name=name, density=density, rate=rate, seed=seed) | same
    if row in done:
      continue
    loss = train_of(name, density)(rate, seed)
    rows.append(row | dict(loss=loss))
    json_files.write_json(path, rows, 1)
    yield f'{name}, density {density:g}, rate {rate:g}: {loss:.4f}'
  _write(path, rows, rate_plots.plot_densities)
  yield f'{path} and rates.png are written'


def _trainer(name: str, density: float) -> Callable[[float, int], float]:
  """Returns a function that trains and returns the validation loss."""
  config = quickstart.get_config()
  config.data.task = ''
  config.phases.order = ('pretrain',)
  config.phases.pretrain.length = 64
  config.phases.pretrain.duration = f'{_STEPS.value} steps'
  config.model.update(
      n_layers=2, n_heads=_WIDTH // 32, d_model=_WIDTH,
      d_ff=4 * _WIDTH,
  )
  config.parameterization.update(
      name=name, base_width=_WIDTH, base_density=1.0
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
    # The key is part of the state.
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


def _transition(output: pathlib.Path) -> Iterator[str]:
  rows = []
  for way, changes in WAYS.items():
    step = None  # The first seed's, so that all seeds compile once.
    for seed in range(_SEEDS.value):
      run = training.Run.create(_config(seed, **changes))
      step = step or run.programs.step
      rows.append(dict(
          way=way, seed=seed, losses=_losses(run, step, _STEPS.value)
      ))
    yield f'{way}: {describe_rise(rows, way)}'
  _write(output / 'transition.json', rows, rate_plots.plot_transition)


def _config(
    seed: int, warmup: str = '', revival_warmup: int | None = None
) -> Any:
  """Returns the config of a run of `_STEPS` sparse and `AFTER` dense steps."""
  config = quickstart.get_config('sparsity=0.9')
  config.update(
      seed=seed, matmul='dense', storage='dense', revival_warmup=revival_warmup
  )
  config.data.task = ''
  config.phases.order = ('pretrain', 'continuation')
  config.optimizer.b2 = 0.999
  for name, steps in ('pretrain', _STEPS.value), ('continuation', AFTER):
    config.phases[name].update(duration=f'{steps} steps', length=64)
    config.phases[name].learning_rate.schedule = 'constant'
  config.phases.continuation.learning_rate.warmup = warmup
  return config


def _losses(run: training.Run, train_step: Any, sparse: int) -> list[float]:
  """Trains a run, and returns the losses around its dense transition."""
  state = initial_state.create(run.programs)
  losses = []
  for step in range(sparse + AFTER):
    state, metrics = train_step(state, run.programs.device_batch_at(step))
    if step >= sparse - BEFORE:
      losses.append(float(metrics['train/loss']))
  return losses


def describe_rise(results: list[dict[str, Any]], way: str) -> str:
  """Returns the highest loss after the transition over the mean before it."""
  spikes = [
      max(r['losses'][BEFORE:]) - statistics.fmean(r['losses'][:BEFORE])
      for r in results if r['way'] == way
  ]
  return (
      f'the loss rises by {statistics.fmean(spikes):.2f} '
      f'({min(spikes):.2f} to {max(spikes):.2f} over seeds)'
  )


if __name__ == '__main__':
  console.start(main, FLAGS)
