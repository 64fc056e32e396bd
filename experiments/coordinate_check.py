r"""Checks that outputs change equally at every width and density.

  python -m experiments.coordinate_check --config=configs/quickstart.py \
    --parameterizations=standard,sparse-mup --output=coordinates/

Trains the model of a config for ten steps on one batch, at the peak rate of its
first phase and at several widths and densities, and measures the root mean
square of the change of each layer's output after 1, 5 and 10 steps, and of the
logits of the targets. Under a parameterization that transfers learning rates it
does not depend on width and density, as far as layers add up many inputs. d_ff
and the number of heads follow the width; the smallest width and the largest
density are the base. Prints the extremes of the changes over those at the base;
coordinates.json and coordinates.png in --output have all of them.
"""

from collections.abc import Iterator, Mapping
import functools
import pathlib
import re
import statistics
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import ml_collections

from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from experiments.papers import json_files
from spdf_jax import models
from spdf_jax import training
from spdf_jax.runs import style
from spdf_jax.training import initial_state

_CONFIG = config_file.define()
_WIDTHS = flags.DEFINE_list('widths', ['64', '128', '256', '512'], 'd_model.')
_DENSITIES = flags.DEFINE_list(
    'densities', ['1', '.25', '.0625'], 'Shares of kept weights.'
)
_NAMES = flags.DEFINE_list(
    'parameterizations', [],
    'standard, mup, sparse-mup; by default that of the config.',
)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Seeds to average.', lower_bound=1)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder of table and figure.')

STEPS = (1, 5, 10)
_TOLERANCE = 0.1
_LOGITS = 'logits'

Changes = list[dict[str, float]]
"""The change of each kind of layer, by its name, after each of `STEPS`."""


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  compilation_cache.prepare()
  return console.run(argv, _check)


def _check() -> Iterator[str]:
  config = _CONFIG.value
  widths = sorted(map(int, _WIDTHS.value))
  densities = sorted(map(float, _DENSITIES.value), reverse=True)
  names = _NAMES.value or [config.parameterization.name]
  rows = []
  for name in names:
    for width in widths:
      base = dict(base_width=widths[0], base_density=densities[0])
      measured = measure(config, name, width, densities, base, _SEEDS.value)
      for density, changes in measured.items():
        rows.append(dict(
            parameterization=name, width=width, density=density,
            changes=dict(zip(map(str, STEPS), changes)),
        ))
      yield f'{name}, width {width}: measured'
  output = pathlib.Path(_OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  json_files.write_json(output / 'coordinates.json', rows, 1)
  style.save(plot(rows), output / 'coordinates.png')
  yield from describe(rows)


def scaled(
    config: ml_collections.ConfigDict,
    name: str,
    width: int,
    density: float,
    base: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
  """Returns a config with another width, density and parameterization."""
  sizes = training.parse(config).model.sizes
  if not isinstance(sizes, models.DecoderConfig):
    raise ValueError(
        f'model.preset is {config.model.preset!r}, your own, whose width this '
        'command cannot change; use a preset of spdf_jax.models.'
    )
  if width % sizes.head_size:
    raise ValueError(
        f'widths has {width}, which is no multiple of the size of a head, '
        f'{sizes.head_size}; give multiples.'
    )
  changed = config.to_dict()
  changed |= dict(
      seed=seed, matmul='dense', storage='dense', resume='', init_from='',
      parameterization=changed['parameterization'] | dict(name=name, **base),
  )
  if name == 'mup':
    changed['parameterization']['base_density'] = None
  changed['model'] |= dict(
      d_model=width, d_ff=width * sizes.d_ff // sizes.d_model,
      n_heads=width // sizes.head_size, scan_layers=False, remat='none',
  )
  name = changed['phases']['order'][0]
  phase = changed['phases'][name]
  changed['phases'] = {'order': (name,), name: phase | dict(
      duration=f'{STEPS[-1]} steps', early_stop=None, initial_mask='',
      algorithm=dict(name='static', sparsity=1 - density),
      learning_rate=dict(
          schedule='constant', peak=phase['learning_rate']['peak'], warmup='',
          final_fraction=1.0,
      ),
  )}
  return changed


def measure(
    config: ml_collections.ConfigDict,
    name: str,
    width: int,
    densities: list[float],
    base: Mapping[str, Any],
    seeds: int,
) -> dict[float, Changes]:
  """Trains at one width; returns the mean changes over seeds, by density."""
  step = None  # That of the first run, which is compiled once for all.
  found = {}
  for density in densities:
    runs = []
    for seed in range(seeds):
      run = training.Run.create(
          scaled(config, name, width, density, base, seed)
      )
      step = step or run.programs.step
      runs.append(_changes(run, step))
    mean = lambda *values: statistics.fmean(values)
    found[density] = jax.tree.map(mean, *runs)
  return found


def _changes(run: training.Run, train_step: Any) -> Changes:
  state = initial_state.create(run.programs)
  batch = run.programs.device_batch_at(0)
  outputs = _outputs_of(run.model)
  before = outputs(state.params, batch)
  found = []
  for step in range(STEPS[-1]):
    state, _ = train_step(state, batch)
    if step + 1 in STEPS:
      after = outputs(state.params, batch)
      found.append(_rms_by_kind(jax.tree.map(jnp.subtract, after, before)))
  return found


@functools.cache
def _outputs_of(model: Any) -> Any:
  """Returns a function to the outputs of all layers, by path.

  Of the logits it returns those of the targets. Others change less in wider
  models, where embeddings are closer to orthogonal.
  """

  def outputs(params, batch):
    logits_BxLxV, collected = model.apply(
        {'params': params}, batch.inputs, capture_intermediates=True,
        mutable=['intermediates'],
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator='/'): x
        for path, x in jax.tree_util.tree_leaves_with_path(
            collected['intermediates']
        )
    } | {_LOGITS: jnp.take_along_axis(
        logits_BxLxV, batch.targets[..., None], axis=-1
    )}

  return jax.jit(outputs)


def _rms_by_kind(outputs: Mapping[str, jax.Array]) -> dict[str, float]:
  """Returns the root mean square over all layers of a kind.

  Kinds are the matrices of layers, embeddings and the logits of the targets;
  norms and containers are left out.
  """
  squares: dict[str, list[float]] = {}
  for path, x in outputs.items():
    match = re.fullmatch(
        rf'(?:.*/)?((?:attn|mlp)/w\w|wte)/__call__/0|({_LOGITS})', path
    )
    if match:
      kind = match[1] or match[2]
      squares.setdefault(kind, []).append(float(jnp.mean(x**2)))
  return {kind: statistics.fmean(v) ** 0.5 for kind, v in squares.items()}


def relative(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns rows with changes over those at the base, which come first."""
  base: dict[str, Any] = {}
  for row in rows:
    base.setdefault(row['parameterization'], row['changes'])
  over = lambda layers, base: {k: x / base[k] for k, x in layers.items()}
  return [
      row | dict(changes={
          step: over(layers, base[row['parameterization']][step])
          for step, layers in row['changes'].items()
      })
      for row in rows
  ]


def describe(rows: list[dict[str, Any]]) -> Iterator[str]:
  """Yields the extremes over widths, densities and layers after each step."""
  found: dict[tuple[str, str], list[float]] = {}
  for row in relative(rows):
    for step, layers in row['changes'].items():
      found.setdefault((row['parameterization'], step), []).extend(
          layers.values()
      )
  for (name, step), values in found.items():
    yield (
        f'{name}, step {step}: changes are {min(values):.2f} to '
        f'{max(values):.2f} of those at the base'
    )


def plot(rows: list[dict[str, Any]]) -> Any:
  """Plots changes over those at the base, over the width.

  A row of panels for each parameterization and a column for each step; a line
  for each kind of layer in the colour of its density, and a band of 10 %.
  """
  rows = relative(rows)
  names = list(dict.fromkeys(row['parameterization'] for row in rows))
  densities = list(dict.fromkeys(row['density'] for row in rows))
  figure = style.new_figure(8.4, 0.5 + 2.5 * len(names))
  panels = figure.subplots(
      len(names), len(STEPS), sharex=True, sharey=True, squeeze=False
  )
  for (name, step), ax in zip(
      ((n, str(s)) for n in names for s in STEPS), panels.ravel()
  ):
    ax.axhspan(1 - _TOLERANCE, 1 + _TOLERANCE, color='#E4E4E4', zorder=0)
    for i, density in enumerate(densities):
      chosen = [
          row for row in rows
          if (row['parameterization'], row['density']) == (name, density)
      ]
      for j, layer in enumerate(chosen[0]['changes'][step]):
        ax.plot(
            [row['width'] for row in chosen],
            [row['changes'][step][layer] for row in chosen],
            color=style.COLORS[i % len(style.COLORS)], linewidth=1,
            marker='o', markersize=2.5,
            label=None if j else f'density {density:g}',
        )
    widths = sorted({row['width'] for row in rows})
    ax.set(xscale='log', yscale='log')
    ax.set_xticks(widths, map(str, widths))
    ax.minorticks_off()
    ax.set_yticks([1 / 16, 1 / 4, 1, 4, 16], ['1/16', '1/4', '1', '4', '16'])
    style.polish(ax)
    ax.set_title(
        f'{name}, step {step}', loc='left', fontweight='bold', fontsize=9
    )
  for ax in panels[-1]:
    ax.set_xlabel('Width')
  for ax in panels[:, 0]:
    ax.set_ylabel('Change / base')
  panels[0, 0].legend(frameon=False, fontsize=8)
  return figure


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'output'])
  console.start(main)
