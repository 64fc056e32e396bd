"""The interpreter: walks a traced program and collects what it asks for."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
import warnings

from jax.extend.core import jaxprs_in_params
from jax.extend.core import Literal
import numpy as np

from spdf_jax.accelerator.wafer.control_flow import call
from spdf_jax.accelerator.wafer.control_flow import CONTROL
from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import GRADIENT
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import TOKEN
from spdf_jax.accelerator.wafer.equations import WEIGHT
from spdf_jax.accelerator.wafer.equations import Weights
from spdf_jax.accelerator.wafer.inputs import evaluate
from spdf_jax.accelerator.wafer.inputs import literal_of
from spdf_jax.accelerator.wafer.inputs import operand_of
from spdf_jax.accelerator.wafer.inputs import result_of
from spdf_jax.accelerator.wafer.layers import layer_of
from spdf_jax.accelerator.wafer.masks import MaskProfile
from spdf_jax.accelerator.wafer.program import join
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.rules import FREE
from spdf_jax.accelerator.wafer.rules import is_elementwise
from spdf_jax.accelerator.wafer.rules import rule_of
from spdf_jax.accelerator.wafer.spaces import is_hosted
from spdf_jax.accelerator.wafer.spaces import is_product
from spdf_jax.accelerator.wafer.spaces import resident_operands
from spdf_jax.accelerator.wafer.spaces import source_of
from spdf_jax.accelerator.wafer.spaces import spaces_of
from spdf_jax.accelerator.wafer.work import Host
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import Work

Density = float | Callable[[str], float]
Frequencies = Mapping[str, float | Sequence[float]]

_UPDATES = ('div', 'mul', 'sub')  # What optimizers do to gradients.


class Interpreter:
  """One walk through a program, with what the caller told about it.

  Attributes:
    density: Of masks that are not known; a number or a function of the layer.
    frequencies: By cond, how often its branches are taken.
    trips: Of loops whose length does not follow from the inputs.
    weight_shapes: Shapes of the program's weights, and of their slices.
    updates: Whether gradients have been used to update weights.
    products: How many there are.
    activations: Inputs that met products as activations.
    conds: Names of the conds met so far, by equation.
    shards: Depth of `shard_map`s around, where values are not followed.
  """

  def __init__(
      self,
      density: Density | None,
      frequencies: Frequencies,
      trips: int | None,
      inputs: Sequence[Operand],
  ):
    """Starts a walk."""
    self.density = density
    self.frequencies = frequencies
    self.trips = trips
    self.weight_shapes = {
        shape
        for o in inputs if o.space == WEIGHT
        for shape in (o.shape, o.shape[1:]) if shape
    }
    self.updates = False
    self.products = 0
    self.activations: set[int] = set()
    self.conds: dict[int, str] = {}
    self.shards = 0
    self._warned: set[str] = set()

  def walk(
      self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Operand],
      scope: str = '',
  ) -> tuple[Program, list[Operand]]:
    """Walks a jaxpr.

    Args:
      jaxpr: An open jaxpr.
      consts: Values or operands of its `constvars`.
      inputs: Operands for its `invars`.
      scope: Name stack of the equation it belongs to.

    Returns:
      The program, and what comes out.
    """
    env = {}
    for var, const in zip(jaxpr.constvars, consts):
      if not isinstance(const, Operand):
        const = operand_of(const)
      env[var] = const
    env.update(zip(jaxpr.invars, inputs))
    read = lambda v: literal_of(v) if isinstance(v, Literal) else env[v]
    parts = []
    for eqn in jaxpr.eqns:
      operands = tuple(map(read, eqn.invars))
      stack = str(eqn.source_info.name_stack)
      path = f'{scope}/{stack}' if scope and stack else scope or stack
      part, results = self._equation(eqn, operands, path)
      parts.append(part)
      env.update(zip(eqn.outvars, results))
    return join(parts), [read(v) for v in jaxpr.outvars]

  def _equation(self, eqn, operands, path) -> tuple[Program, list[Operand]]:
    name = str(eqn.primitive)
    control = CONTROL.get(name)
    if control is not None:
      return control(self, eqn, operands, path)
    rule = rule_of(name)
    inner = list(jaxprs_in_params(eqn.params))
    if rule is None and name not in FREE and len(inner) == 1:
      return call(self, eqn, operands, path)
    results = tuple(result_of(v) for v in eqn.outvars)
    layer, phase = layer_of(path)
    equation = Equation(
        operands, results, eqn.params,
        lambda mask: self._weights_of(mask, layer),
    )
    spaces = spaces_of(name, equation, self.weight_shapes)
    self._note_activations(name, equation)
    values = [None] * len(results)
    if not self.shards:
      values = evaluate(eqn, operands, results)
    outs = [
        r._replace(
            space=s, known=k, source=_source(name, r, operands, s)
        )
        for r, s, k in zip(results, spaces, values)
    ]
    if name in FREE:
      return Program(free={name: 1}), outs
    if rule is None:
      return Program(unknown={name: 1}), outs
    works = rule(equation)
    if is_hosted(name, equation):
      works = [Host(_multiply_adds(work)) for work in works]
    else:
      works = [self._placed(name, work, spaces) for work in works]
    return Program(tuple(
        Operation(layer, name, phase, work) for work in works
    )), outs

  def _note_activations(self, name, equation) -> None:
    self.products += is_product(name)
    for operand in resident_operands(name, equation):
      if operand.space == WEIGHT and operand.source is not None:
        self.activations.add(operand.source)

  def _placed(self, name, work, spaces):
    """Moves what is done to weights to where they are stored."""
    on_weights = TOKEN not in spaces and {WEIGHT, GRADIENT} & set(spaces)
    if not (on_weights and is_elementwise(name)):
      return work
    if GRADIENT in spaces and name in _UPDATES:
      self.updates = True
    return Host(work.operations)

  def _weights_of(self, mask: Operand, layer: str) -> list[Weights]:
    matrices = int(np.prod(mask.shape[:-2]))
    told = self.density
    if callable(told):
      told = told(layer)
    if told is not None and not 0 < told <= 1:
      raise ValueError(
          f'the density of {layer or "a product"} is {told}; it is the share '
          'of kept weights, above 0 and at most 1.'
      )
    if mask.known is None:
      if told is None:
        raise ValueError(
            f'the mask of {layer or "a product"} is not known and density is '
            'None; give arrays for the masks, or density=1 - sparsity.'
        )
      return [Weights(told)] * matrices
    stack = mask.known.reshape(-1, *mask.shape[-2:])
    found = [MaskProfile(m) for m in stack]
    mean = float(np.mean([m.density for m in found]))
    if told is not None and abs(mean - told) > 0.005:
      message = (
          f'the mask of {layer or "a product"} has density {mean:.4f} and '
          f'density is {told:.4f}; the mask is used.'
      )
      if message not in self._warned:
        self._warned.add(message)
        warnings.warn(message, stacklevel=2)
    return [Weights(m.density, m) for m in found]


def _source(name, result, operands, space) -> int | None:
  """Follows an input through what is not yet known to be of tokens."""
  if space != WEIGHT or is_product(name):
    return None
  return source_of(result, operands)


def _multiply_adds(work: Work) -> float:
  if isinstance(work, Product):
    return work.tokens * work.kept
  return work[0]
