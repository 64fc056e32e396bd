# SPDX-License-Identifier: Apache-2.0
"""Record of a run's last masks: kept weights per unit, and a picture."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import files
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.statistics import Summary

PyTree = Any

FILE = 'masks.json'
"""Name of the record in the workdir of a run whose masks move."""

_POINTS = 65  # Most points of a curve of kept weights per unit.
_PIXELS = 96  # Most pixels of a side of the picture.


def describe(
    mask: PyTree,
    params: PyTree,
    where: Where,
    summary: Summary,
    replicated: jax.sharding.Sharding,
) -> dict[str, Any]:
  """Describes masks by their kept weights per unit, and by a picture.

  Args:
    mask: Mask of the parameters.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`.
    summary: Counts of the mask, by layer.
    replicated: Sharding of arrays that every device holds whole.

  Returns:
    A dict that JSON can hold. `'layers'` has, by layer, the numbers of kept
    weights of its `'inputs'` and of its `'outputs'`, ascending, at evenly
    spaced units. `'picture'` is that of the layer whose mask varies most: its
    name, and densities of kept weights in bands of inputs and outputs.
  """
  axes = selection.select(where, params)
  stacks = trees.by_name(selection.to_layers(mask, params, axes))
  names = iter(summary.layers)
  sort = jax.jit(_sorted_counts, out_shardings=replicated)
  layers, place = {}, {}
  for path, stack in stacks.items():
    of_stack = (counts.tolist() for counts in jax.device_get(sort(stack)))
    for i, (inputs, outputs) in enumerate(zip(*of_stack)):
      name = next(names)
      layers[name] = {'inputs': inputs, 'outputs': outputs}
      place[name] = path, i
  uneven = max(summary.layers, key=lambda name: max(
      summary.layers[name].row_variation, summary.layers[name].column_variation
  ))
  path, i = place[uneven]
  picture = jax.jit(
      functools.partial(_picture, i), out_shardings=replicated
  )(stacks[path])
  return {'layers': layers, 'picture': {
      'layer': uneven,
      'densities': np.round(jax.device_get(picture).astype(float), 3).tolist(),
  }}


def write(
    workdir: pathlib.Path, step: int, phase: str, description: dict[str, Any]
) -> None:
  """Writes the record of the masks at a step."""
  record = files.seal({'step': step, 'phase': phase, **description})
  files.write_atomically(workdir / FILE, json.dumps(record) + '\n')


def _sorted_counts(stack: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns ascending counts per input and per output, `[layers, points]`."""
  def points(axis):
    counts = jnp.sort(jnp.sum(stack, axis=axis, dtype=jnp.int32))
    return counts[:, _evenly(counts.shape[1], _POINTS)]

  return points(2), points(1)


def _evenly(size: int, most: int) -> np.ndarray:
  """Returns evenly spaced indices, with the first and the last."""
  return np.linspace(0, size - 1, min(size, most)).round().astype(int)


def _picture(i: int, stack: jax.Array) -> jax.Array:
  """Returns the densities of a layer in bands of inputs and outputs."""
  rows, columns = (_bands(size) for size in stack.shape[1:])
  return rows @ stack[i].astype(jnp.float32) @ columns.T


def _bands(size: int) -> np.ndarray:
  """Returns weights that average over bands of units, `[bands, size]`."""
  number = min(size, _PIXELS)
  band = np.arange(size) * number // size
  weights = (band == np.arange(number)[:, None]).astype(np.float32)
  return weights / weights.sum(1, keepdims=True)
