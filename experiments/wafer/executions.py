"""Executed against costed: events on the emulated wafer and their costs."""

import argparse
from collections.abc import Iterable, Iterator
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import models
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer import cost as costs
from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.execute import Event
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.simulate import Row
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import trees

PyTree = Any
_CORES = 1024
_BATCH, _LENGTH = 16, 128
_DENSE_STEPS = 20
_BLOCK = 16

Shape = tuple[float, int, int]
Key = tuple[str, str, bool, Shape]
"""Layer, primitive, whether gradients are computed, and (tokens, inputs,
outputs). Events of a key are on one grid."""


class Executed(NamedTuple):
  """The executed and the modeled cost of an operation.

  Attributes:
    layer: Name of the calling layer.
    name: Name of the primitive.
    sampled: Whether the operation is a gradient of weights.
    events: Events of its executions.
    costed: Cost by the equations, on the grid that was executed.
    simulated: Cost in the report, on the grid that is fastest there.
    wavelet_bytes: Bytes of a wavelet of the device.
  """

  layer: str
  name: str
  sampled: bool
  events: tuple[Event, ...]
  costed: Cost
  simulated: Cost
  wavelet_bytes: float

  def total(self, field: str) -> float:
    """Returns the sum of a field of the events."""
    return float(sum(getattr(event, field) for event in self.events))


def compare(events: Iterable[Event], report: wafer.Report) -> list[Executed]:
  """Compares executed products with the operations of a simulation.

  Args:
    events: Recorded events of one run of a program.
    report: Simulation of the same program on the emulated device.

  Returns:
    An entry for each product of the simulation that has executed, in program
    order; products of one layer and shape are added. Layers match if the
    operation's name ends with that of the event.

  Raises:
    ValueError: an event has no operation in the report, for instance because
      the product has no layer name, or the number of its executions differs.
  """
  events_of: dict[Key, list[Event]] = {}
  for event in events:
    shape = event.grid.tokens, event.grid.inputs, event.grid.outputs
    key: Key = event.layer, event.name, event.kind == 'sampled', shape
    events_of.setdefault(key, []).append(event)
  rows: dict[Key, list[Row]] = {}
  for row in report.rows:
    match = _key_of(row.operation, events_of)
    if match is not None:
      rows.setdefault(match, []).append(row)
  for key, given in events_of.items():
    layer, name, *_ = key
    if not layer and key not in rows:
      raise ValueError(
          f'{name} was executed without a layer name; give layer= to '
          'sparse_matmul, the name of the module that calls it.'
      )
    costed = sum(row.operation.count for row in rows.get(key, ()))
    if costed != len(given):
      raise ValueError(
          f'{name} of {layer or "no layer"} was executed {_times(len(given))} '
          f'and simulated {_times(costed)}; give the events and the report of '
          'one run of a program.'
      )
  return [
      _executed(key, events_of[key], rows[key], report.device) for key in rows
  ]


def _times(count: float) -> str:
  return '1 time' if count == 1 else f'{count:.12g} times'


def _key_of(operation: Operation, keys: Iterable[Key]) -> Key | None:
  work = operation.work
  if not isinstance(work, Product):
    return None
  shape = work.tokens, work.inputs, work.outputs
  wanted = operation.name, work.sampled, shape
  for key in keys:
    if key[1:] == wanted and f'/{operation.layer}'.endswith(f'/{key[0]}'):
      return key
  return None


def _executed(
    key: Key, events: list[Event], rows: list[Row], device: wafer.WaferDevice
) -> Executed:
  costed, simulated = Cost(), Cost()
  m, columns = events[0].grid.tokens_per_core, events[0].grid.columns
  for operation, cost in rows:
    work: Product = operation.work  # type: ignore[assignment]
    on_grid = costs.product_on_grid(work, device, float(m), float(columns))
    costed += on_grid * operation.count
    simulated += cost
  return Executed(
      *key[:3], tuple(events), costed, simulated, device.wavelet_bits / 8
  )


def executed_table(executed: Iterable[Executed]) -> str:
  """Formats executed and costed numbers, operation by operation.

  Args:
    executed: Result of `compare`.

  Returns:
    A text with a line for each operation: its non-zeros and streamed bytes,
    then multiply-adds, hops and cycles as executed, with the errors of the cost
    on the same grid, and last the error of the cycles that the simulation has
    for its own grid.
  """
  lines = [
      f'{"operation":<34}{"non-zeros":>10}{"kB":>8}{"MACs":>10}{"hops":>10}'
      f'{"error":>8}{"cycles":>10}{"error":>8}{"own grid":>10}'
  ]
  for entry in executed:
    kind = ' dW' if entry.sampled else ''
    label = f'{entry.layer} {entry.name.removeprefix("sparse_matmul_")}{kind}'
    errors = _errors(entry)
    lines.append(
        f'{label[-34:]:<34}{entry.total("nonzeros"):>10,.0f}'
        f'{entry.total("streamed_bytes") / 1e3:>8,.1f}'
        f'{entry.total("multiply_adds"):>10.3g}{entry.total("hops"):>10.3g}'
        f'{errors["hops"]:>+8.1%}{entry.total("cycles"):>10,.0f}'
        f'{errors["cycles"]:>+8.1%}{errors["own grid"]:>+10.1%}'
    )
  return '\n'.join(lines)


def largest_errors(executed: Iterable[Executed]) -> dict[str, float]:
  """Returns the largest relative error of the costs over all operations.

  Args:
    executed: Result of `compare`.

  Returns:
    Error by the name of the number; `'own grid'` is that of the cycles which
    the simulation has for its own grid.
  """
  errors: dict[str, list[float]] = {}
  for entry in executed:
    for name, error in _errors(entry).items():
      errors.setdefault(name, []).append(error)
  return {n: max(e, key=abs) for n, e in errors.items()}


def _errors(entry: Executed) -> dict[str, float]:
  costed, cycles = entry.costed, entry.total('cycles')
  tokens = entry.events[0].grid.tokens
  hop_bytes = entry.wavelet_bytes * entry.total('hops')
  pairs = {
      'non-zeros': (costed.flops / 2 / tokens, entry.total('nonzeros')),
      'multiply-adds': (costed.flops / 2, entry.total('multiply_adds')),
      'bytes': (costed.streamed_bytes, entry.total('streamed_bytes')),
      'hops': (costed.fabric_bytes, hop_bytes),
      'cycles': (costed.cycles, cycles),
      'own grid': (entry.simulated.cycles, cycles),
  }
  return {name: _error(*pair) for name, pair in pairs.items()}


def _error(costed: float, executed: float) -> float:
  """Returns the relative error: 0 if both numbers are 0."""
  if executed:
    return costed / executed - 1
  return math.inf if costed else 0.0


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
  # The latency would dominate the time of products this small.
  device = wafer.create_device('cs2', band, cores=_CORES, latency=0)
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
    executed = compare(events, report)
    unknown = jax.tree.map(_shape, case.mask)
    formula = wafer.simulate(gradients, device, sparsity=case.sparsity)(
        params, unknown, tokens
    )
    yield f'{case.name}\n{executed_table(executed)}\n'
    cycles = sum(entry.total('cycles') for entry in executed)
    nonzeros = sum(entry.total('nonzeros') for entry in executed)
    errors = largest_errors(executed)
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


def _loss(device: wafer.WaferDevice, sparsity: float) -> Any:
  model = _model(dtype='float16', lowering=wafer.lowering(device, sparsity))
  return lambda params, mask, tokens: _cross_entropy(
      params, tokens, model.apply, {'masks': mask}
  )


def _cases(params: PyTree) -> Iterator[_Case]:
  hidden = jax.tree_util.tree_map_with_path(
      lambda path, leaf: (
          leaf if models.sparsifiable(trees.path_name(path), leaf) else None
      ),
      params,
  )
  key = jax.random.key(1)
  for sparsity in (0.0, 0.75, 0.9):
    name = f'random, {sparsity:.0%} zeros' if sparsity else 'dense'
    yield _Case(name, sparsity, masks.random(key, hidden, sparsity))
  yield _Case(
      'magnitude, 75% zeros', 0.75, masks.magnitude(key, hidden, 0.75)
  )
  blocks = structures.block(_BLOCK, _BLOCK)
  yield _Case(
      'blocks, 75% zeros', 0.75,
      masks.magnitude(key, hidden, 0.75, structure=blocks),
  )


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _masked(report: wafer.Report) -> Cost:
  """Returns the cost of the products with masks."""
  rows = [
      row.cost for row in report.rows
      if isinstance(row.operation.work, Product)
      and row.operation.name.startswith('sparse_matmul')
  ]
  return sum(rows, Cost())
