# SPDX-License-Identifier: Apache-2.0
"""Executed against costed: a training step on the emulated wafer, by mask."""

import argparse
from collections.abc import Iterator
import inspect
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import models
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.executed import compare
from spdf_jax.accelerator.wafer.executed import executed_table
from spdf_jax.accelerator.wafer.executed import largest_errors
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.simulate import Report
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import structures
from spdf_jax.sparsity.paths import path_name

PyTree = Any
_CORES = 1024
_BATCH, _LENGTH = 16, 128
_DENSE_STEPS = 20
_BLOCK = 16


class _Case(NamedTuple):
  """A mask to execute.

  Attributes:
    name: Name of the mask.
    sparsity: Fraction of zeros.
    mask: The mask.
  """

  name: str
  sparsity: float
  mask: PyTree


def describe_executions(band: str) -> Iterator[str]:
  """Executes a small GPT's gradients under several masks, and compares costs.

  The weights whose magnitudes are ranked were trained on the source code of
  Python's argparse, for some dense steps by the signs of gradients.

  Args:
    band: A key of `BANDS`, the overhead of the emulated cores.

  Yields:
    A table for each mask, and a summary.
  """
  # The latency would be most of the time of products this small.
  device = create_device('cs2', band, cores=_CORES, latency=0)
  params, tokens = _train()
  summary = [
      f'{"mask":<20}{"non-zeros":>11}{"cycles":>12}{"largest error":>25}'
      f'{"own grid":>10}{"from sparsity":>15}'
  ]
  for case in _cases(params):
    gradients = jax.grad(_loss(device, case.sparsity))
    with wafer.record() as events:
      jax.block_until_ready(jax.jit(gradients)(params, case.mask, tokens))
    report = wafer.simulate(gradients, device)(params, case.mask, tokens)
    found = compare(events, report)
    unknown = jax.tree.map(_shape, case.mask)
    formula = wafer.simulate(gradients, device, sparsity=case.sparsity)(
        params, unknown, tokens
    )
    yield f'{case.name}\n{executed_table(found)}\n'
    cycles = sum(entry.total('cycles') for entry in found)
    nonzeros = sum(entry.total('nonzeros') for entry in found)
    errors = largest_errors(found)
    own = errors.pop('own grid')
    name = max(errors, key=lambda key: abs(errors[key]))
    worst = f'{errors[name]:+.2%} ({name})'
    ratio = _masked(formula).cycles / cycles - 1
    summary.append(
        f'{case.name:<20}{nonzeros:>11,.0f}{cycles:>12,.0f}{worst:>25}'
        f'{own:>+10.2%}{ratio:>+15.1%}'
    )
  yield '\n'.join(summary)


def _train() -> tuple[PyTree, jax.Array]:
  """Returns parameters after some dense steps, and the tokens of a batch."""
  text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
  size = _BATCH * (_LENGTH + 1)
  batches = text[: len(text) // size * size].reshape(-1, _BATCH, _LENGTH + 1)
  tokens = jnp.asarray(batches % 128, jnp.int32)
  model = _model()
  params = model.init(jax.random.key(0), tokens[0, :, :-1])['params']

  @jax.jit
  def step(params, tokens):
    grads = jax.grad(_cross_entropy)(params, tokens, model.apply, {})
    return jax.tree.map(lambda p, g: p - 3e-3 * jnp.sign(g), params, grads)

  for i in range(_DENSE_STEPS):
    params = step(params, tokens[i % len(tokens)])
  return params, tokens[0]


def _model(**fields: Any) -> Any:
  return models.create_model(
      'gpt-mini', vocab_size=128, n_layers=1, n_heads=2, d_model=128,
      d_ff=512, max_length=_LENGTH, **fields,
  )


def _cross_entropy(params, tokens, apply, variables):
  logits = apply({'params': params, **variables}, tokens[:, :-1])
  log_likelihood = jax.nn.log_softmax(logits.astype(jnp.float32))
  targets = tokens[:, 1:, None]
  return -jnp.take_along_axis(log_likelihood, targets, axis=-1).mean()


def _loss(device: WaferDevice, sparsity: float) -> Any:
  model = _model(dtype='float16', lowering=wafer.lowering(device, sparsity))
  return lambda params, mask, tokens: _cross_entropy(
      params, tokens, model.apply, {'masks': mask}
  )


def _cases(params: PyTree) -> Iterator[_Case]:
  hidden = jax.tree_util.tree_map_with_path(
      lambda path, leaf: (
          leaf if models.sparsifiable(path_name(path), leaf) else None
      ),
      params,
  )
  key = jax.random.key(1)
  for sparsity in (0.0, 0.75, 0.9):
    name = f'random, {sparsity:.0%} zeros' if sparsity else 'dense'
    yield _Case(name, sparsity, masks.random_mask(key, hidden, sparsity))
  yield _Case(
      'magnitude, 75% zeros', 0.75, masks.magnitude_mask(key, hidden, 0.75)
  )
  blocks = structures.block(_BLOCK, _BLOCK)
  yield _Case(
      'blocks, 75% zeros', 0.75,
      masks.magnitude_mask(key, hidden, 0.75, structure=blocks),
  )


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _masked(report: Report) -> Cost:
  """Returns the cost of the products with masks."""
  rows = [
      row.cost for row in report.rows
      if isinstance(row.operation.work, Product)
      and row.operation.name.startswith('sparse_matmul')
  ]
  return sum(rows, Cost())
