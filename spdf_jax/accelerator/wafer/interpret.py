# SPDX-License-Identifier: Apache-2.0
"""The interpreter that walks a traced program and collects its work."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
import warnings

import jax
from jax.extend.core import jaxprs_in_params
from jax.extend.core import Literal
import numpy as np

from spdf_jax.accelerator.wafer.control_flow import call
from spdf_jax.accelerator.wafer.control_flow import CONTROL
from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import evaluate
from spdf_jax.accelerator.wafer.equations import GRADIENT
from spdf_jax.accelerator.wafer.equations import layer_of
from spdf_jax.accelerator.wafer.equations import literal_of
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import operand_of
from spdf_jax.accelerator.wafer.equations import operands_of
from spdf_jax.accelerator.wafer.equations import result_of
from spdf_jax.accelerator.wafer.equations import TOKEN
from spdf_jax.accelerator.wafer.equations import WEIGHT
from spdf_jax.accelerator.wafer.equations import Weights
from spdf_jax.accelerator.wafer.program import Host
from spdf_jax.accelerator.wafer.program import join
from spdf_jax.accelerator.wafer.program import MaskProfile
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import Work
from spdf_jax.accelerator.wafer.rules import is_elementwise
from spdf_jax.accelerator.wafer.rules import is_hosted
from spdf_jax.accelerator.wafer.rules import is_product
from spdf_jax.accelerator.wafer.rules import resident_operands
from spdf_jax.accelerator.wafer.rules import RULES
from spdf_jax.accelerator.wafer.rules import source_of
from spdf_jax.accelerator.wafer.rules import spaces_of
from spdf_jax.names import lookup

Sparsity = float | Callable[[str], float]
Frequencies = Mapping[str, float | Sequence[float]]

_UPDATES = ('div', 'mul', 'sub')  # Operations of optimizers on gradients.


def trace_program(
    fn: Callable[..., Any],
    *,
    sparsity: Sparsity | None = None,
    frequencies: Frequencies | None = None,
    trips: int | None = None,
) -> Callable[..., Program]:
  """Returns a function that traces `fn` and collects its work.

  Args:
    fn: A JAX function, such as a forward pass or a whole training step.
    sparsity: Fraction of zeros in masks whose values are not given, or a
      function of the layer's name.
    frequencies: Fraction of the executions in which a cond is true, or the
      fraction of each branch, by the cond's name; see `simulate`.
    trips: Number of iterations of loops that depend on unknown data.

  Returns:
    A function `(*args) -> Program`; `report_on` costs the program on devices.

  Raises:
    ValueError: When the returned function is called: a number is out of its
      range, `fn` cannot be traced, or `sparsity` or `trips` is missing.

  Example:
    >>> import jax.numpy as jnp
    >>> program = trace_program(jnp.dot)(jnp.ones((8, 4)), jnp.ones((4, 2)))
    >>> program.operations[0].work.tokens
    8
  """
  if isinstance(sparsity, (int, float)):
    _check_sparsity('sparsity', sparsity)
  if trips is not None and trips < 0:
    raise ValueError(f'trips is {trips}; it must not be negative.')

  def traced(*args: Any) -> Program:
    try:
      closed = jax.make_jaxpr(fn)(*args)
    except (TypeError, jax.errors.JAXIndexError) as error:
      raise ValueError(
          f'fn {getattr(fn, "__name__", fn)!r} cannot be traced: {error}'
      ) from error
    inputs = operands_of(args)
    while True:
      interpreter = Interpreter(sparsity, frequencies or {}, trips, inputs)
      program, _ = interpreter.walk(closed.jaxpr, closed.consts, inputs)
      found = interpreter.activations
      if not interpreter.products:
        found = set(range(len(inputs)))
      resolved = [
          o._replace(space=TOKEN) if i in found and o.space else o
          for i, o in enumerate(inputs)
      ]
      if [o.space for o in resolved] == [o.space for o in inputs]:
        break
      inputs = resolved
    for name in frequencies or {}:
      lookup('cond', name, dict.fromkeys(interpreter.conds.values()))
    if interpreter.updates:
      step = Operation('', 'optimizer_step', 'backward', Host(0, 1))
      program += Program((step,))
    return program

  return traced


class Interpreter:
  """The state of one walk through a program.

  Attributes:
    sparsity: Sparsity of unknown masks: a number or a function of the layer.
    frequencies: Fractions of the executions that take each branch, by cond.
    trips: Number of iterations of loops that depend on unknown data.
    weight_shapes: Shapes of the program's weights and of their slices.
    updates: Whether the program updates weights with gradients.
    products: Number of products so far.
    activations: Indices of the inputs that are activations of a product.
    conds: Names of the conds so far, by equation.
    shards: Number of enclosing `shard_map`s; values inside are not computed.
  """

  def __init__(
      self,
      sparsity: Sparsity | None,
      frequencies: Frequencies,
      trips: int | None,
      inputs: Sequence[Operand],
  ):
    """Initializes a walk."""
    self.sparsity = sparsity
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
      jaxpr: Open jaxpr to walk.
      consts: Values or operands of the jaxpr's `constvars`.
      inputs: Operands of the jaxpr's `invars`.
      scope: Name stack of the equation that contains the jaxpr.

    Returns:
      The program, and the operands of the jaxpr's `outvars`.
    """
    env = {
        var: const if isinstance(const, Operand) else operand_of(const)
        for var, const in zip(jaxpr.constvars, consts)
    }
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

  def _equation(
      self, eqn: Any, operands: tuple[Operand, ...], path: str
  ) -> tuple[Program, list[Operand]]:
    name = str(eqn.primitive)
    control = CONTROL.get(name)
    if control is not None:
      return control(self, eqn, operands, path)
    rule = RULES.get(name)
    inner = list(jaxprs_in_params(eqn.params))
    if rule is None and len(inner) == 1:
      return call(self, eqn, operands, path)
    results = tuple(result_of(v) for v in eqn.outvars)
    layer, phase = layer_of(path)
    equation = Equation(
        operands, results, eqn.params,
        lambda mask: self._weights_of(mask, layer),
    )
    spaces = spaces_of(name, equation, self.weight_shapes)
    self._note_activations(name, equation)
    values: list[np.ndarray | None] = [None] * len(results)
    if not self.shards:
      values = evaluate(eqn, operands, results)
    outs = []
    for result, space, value in zip(results, spaces, values):
      out = result._replace(space=space, known=value)
      outs.append(out._replace(source=source_of(name, out, operands)))
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

  def _note_activations(self, name: str, equation: Equation) -> None:
    self.products += is_product(name)
    for operand in resident_operands(name, equation):
      if operand.space == WEIGHT and operand.source is not None:
        self.activations.add(operand.source)

  def _placed(
      self, name: str, work: Work, spaces: tuple[str | None, ...]
  ) -> Work:
    """Moves elementwise work on weights and gradients to the hosts."""
    on_weights = TOKEN not in spaces and {WEIGHT, GRADIENT} & set(spaces)
    if not (on_weights and is_elementwise(name)):
      return work
    if GRADIENT in spaces and name in _UPDATES:
      self.updates = True
    return Host(_multiply_adds(work))

  def _weights_of(self, mask: Operand, layer: str) -> list[Weights]:
    """Returns the sparsity of each matrix of a stack of masks."""
    label = layer or 'a product'
    given = self.sparsity
    if callable(given):
      given = given(layer)
    if given is not None:
      _check_sparsity(f'the sparsity of {label}', given)
    if mask.known is None:
      if given is None:
        raise ValueError(
            f'the mask of {label} is not known and sparsity is None; give '
            'arrays for the masks, or sparsity, the fraction of zeros.'
        )
      return [Weights(given)] * int(np.prod(mask.shape[:-2]))
    stack = mask.known.reshape(-1, *mask.shape[-2:])
    found = [MaskProfile(m) for m in stack]
    mean = float(np.mean([m.sparsity for m in found]))
    if given is not None and abs(mean - given) > 0.005:
      message = (
          f'the mask of {label} has sparsity {mean:.4f} and sparsity is '
          f'{given:.4f}; the mask is used.'
      )
      if message not in self._warned:
        self._warned.add(message)
        warnings.warn(message, stacklevel=2)
    return [Weights(m.sparsity, m) for m in found]


def _check_sparsity(label: str, sparsity: float) -> None:
  if not 0 <= sparsity < 1:
    raise ValueError(
        f'{label} is {sparsity}; it is the fraction of zeros, at least 0 and '
        'below 1.'
    )


def _multiply_adds(work: Work) -> float:
  if isinstance(work, Product):
    return work.tokens * work.kept
  return work[0]
