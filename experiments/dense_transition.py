r"""Plots the loss after the step at which a sparse model becomes dense.

  python -m experiments.dense_transition --output=transition/

Trains the quickstart's small GPT sparsely and continues densely at the peak
rate, in four ways: as it is; with the learning rate warmed up again; with the
moments of revived weights corrected from their own revival
(`config.revival_warmup=0`); and with a warm-up of revived weights, too.
transition.json in --output has the training losses of the steps around the
transition, transition.png the figure.
"""

from collections.abc import Iterator
import pathlib
import statistics
from typing import Any

from absl import flags

from configs import quickstart
from experiments.launch import console
from experiments.papers import json_files
from spdf_jax import training
from spdf_jax.runs import style
from spdf_jax.training import initial_state

_SPARSITY = flags.DEFINE_float(
    'sparsity', 0.9, 'Fraction of zeros.', lower_bound=0, upper_bound=1
)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 300, 'Sparse steps.', lower_bound=20)
_B2 = flags.DEFINE_float('b2', 0.999, "Adam's decay of second moments.")
_OUTPUT = flags.DEFINE_string('output', None, 'Folder of the results.')

BEFORE, AFTER = 10, 50
"""Steps before and after the transition of which losses are kept."""

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
  return console.run(argv, _measure)


def _measure() -> Iterator[str]:
  output = pathlib.Path(_OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  found = []
  for way, changes in WAYS.items():
    step = None  # That of the first seed, which is compiled once for all.
    for seed in range(_SEEDS.value):
      run = training.Run.create(_config(seed, **changes))
      step = step or run.programs.step
      found.append(dict(
          way=way, seed=seed, losses=_losses(run, step, _STEPS.value)
      ))
    yield f'{way}: {describe(found, way)}'
  json_files.write_json(output / 'transition.json', found, 1)
  style.save(plot(found), output / 'transition.png')


def _config(
    seed: int, warmup: str = '', revival_warmup: int | None = None
) -> Any:
  """Returns the config of a run of `_STEPS` sparse and `AFTER` dense steps."""
  config = quickstart.get_config(f'sparsity={_SPARSITY.value}')
  config.update(
      seed=seed, matmul='dense', storage='dense', revival_warmup=revival_warmup
  )
  config.data.task = ''
  config.phases.order = ('pretrain', 'continuation')
  config.optimizer.b2 = _B2.value
  for name, steps in ('pretrain', _STEPS.value), ('continuation', AFTER):
    config.phases[name].update(duration=f'{steps} steps', length=64)
    config.phases[name].learning_rate.schedule = 'constant'
  config.phases.continuation.learning_rate.warmup = warmup
  return config


def _losses(run: training.Run, train_step: Any, sparse: int) -> list[float]:
  """Trains, and returns the losses around the transition."""
  state = initial_state.create(run.programs)
  losses = []
  for step in range(sparse + AFTER):
    state, metrics = train_step(state, run.programs.device_batch_at(step))
    if step >= sparse - BEFORE:
      losses.append(float(metrics['train/loss']))
  return losses


def describe(results: list[dict[str, Any]], way: str) -> str:
  """Returns the highest loss after the transition over the mean before it."""
  spikes = [
      max(r['losses'][BEFORE:]) - statistics.fmean(r['losses'][:BEFORE])
      for r in results if r['way'] == way
  ]
  return (
      f'the loss rises by {statistics.fmean(spikes):.2f} '
      f'({min(spikes):.2f} to {max(spikes):.2f} over seeds)'
  )


def plot(results: list[dict[str, Any]]) -> Any:
  """Plots mean losses over steps from the transition, with bands of seeds."""
  figure = style.new_figure(7.2, 3.8)
  ax = figure.subplots()
  steps = range(-BEFORE, AFTER)
  for i, way in enumerate(dict.fromkeys(r['way'] for r in results)):
    columns = list(zip(*(r['losses'] for r in results if r['way'] == way)))
    color = style.COLORS[i]
    ax.plot(steps, [*map(statistics.fmean, columns)], label=way, color=color)
    ax.fill_between(
        steps, [*map(min, columns)], [*map(max, columns)], color=color,
        alpha=0.2, linewidth=0,
    )
  ax.axvline(0, color='#888888', linewidth=0.8)
  ax.set(
      xlabel='Steps after the transition',
      ylabel='Training loss (nats per token)',
  )
  ax.legend(frameon=False, fontsize=8)
  style.polish(ax)
  return figure


if __name__ == '__main__':
  flags.mark_flags_as_required(['output'])
  console.start(main)
