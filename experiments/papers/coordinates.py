"""Changes of layers' outputs in a few steps, by width and density."""

from collections.abc import Iterator, Mapping
import functools
import re
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from spdf_jax import models
from spdf_jax import training
from spdf_jax.training import initial_state

STEPS = (1, 5, 10)
"""Steps after which changes are measured."""

_LOGITS = 'logits'

Changes = list[dict[str, float]]
"""The change of each kind of layer, by its name, after each of `STEPS`."""


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
  step = None  # All runs share the step of the first, so that it compiles once.
  changes = {}
  for density in densities:
    runs = []
    for seed in range(seeds):
      run = training.Run.create(
          scaled(config, name, width, density, base, seed)
      )
      step = step or run.programs.step
      runs.append(_changes(run, step))
    mean = lambda *values: statistics.fmean(values)
    changes[density] = jax.tree.map(mean, *runs)
  return changes


def _changes(run: training.Run, train_step: Any) -> Changes:
  state = initial_state.create(run.programs)
  batch = run.programs.device_batch_at(0)
  outputs = _outputs_of(run.model)
  before = outputs(state.params, batch)
  changes = []
  for step in range(STEPS[-1]):
    state, _ = train_step(state, batch)
    if step + 1 in STEPS:
      after = outputs(state.params, batch)
      changes.append(_rms_by_kind(jax.tree.map(jnp.subtract, after, before)))
  return changes


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
  changes: dict[tuple[str, str], list[float]] = {}
  for row in relative(rows):
    for step, layers in row['changes'].items():
      changes.setdefault((row['parameterization'], step), []).extend(
          layers.values()
      )
  for (name, step), values in changes.items():
    yield (
        f'{name}, step {step}: changes are {min(values):.2f} to '
        f'{max(values):.2f} of those at the base'
    )
