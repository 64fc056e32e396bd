# SPDX-License-Identifier: Apache-2.0
"""Tracing: an interpreter that walks a JAX program and collects its work."""

from collections.abc import Callable, Sequence
import functools
from typing import Any
import warnings

import jax
from jax.extend.core import jaxprs_in_params
from jax.extend.core import Literal
import numpy as np

from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import jaxprs
from spdf_jax.accelerator.wafer import cost_rules
from spdf_jax.accelerator.wafer import equations
from spdf_jax.accelerator.wafer import program as programs
from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import Weights
from spdf_jax.accelerator.wafer.program import Branches
from spdf_jax.accelerator.wafer.program import Host
from spdf_jax.accelerator.wafer.program import join
from spdf_jax.accelerator.wafer.program import MaskProfile
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import Work

Sparsity = float | Callable[[str], float]
Walked = tuple[Program, list[Operand]]

_MOST_ITERATIONS = 4096  # Longer loops are not unrolled.
_UPDATES = ('div', 'mul', 'sub')  # Operations of optimizers on gradients.


def trace_program(
    fn: Callable[..., Any],
    *,
    sparsity: Sparsity | None = None,
    trips: int | None = None,
) -> Callable[..., Program]:
  """Returns a function that lists the operations of `fn` for the cost model.

  Args:
    fn: A JAX function, such as a forward pass or a whole training step.
    sparsity: Fraction of zeros in masks whose values are not given, or a
      function from the layer's name to it.
    trips: Number of iterations of each `while_loop` whose condition depends on
      unknown values.

  Returns:
    A function `(*args) -> Program`, called with the arguments of `fn`: arrays
    or `jax.ShapeDtypeStruct`. `report_on(program, device)` estimates the time
    of the program on a device.

  Raises:
    ValueError: `sparsity` or `trips` is out of its range. When the returned
      function is called: `fn` cannot be traced, a sparsity that a function
      returns is out of its range, or `sparsity` or `trips` is missing.

  Example:
    >>> import jax.numpy as jnp
    >>> program = trace_program(jnp.dot)(jnp.ones((8, 4)), jnp.ones((4, 2)))
    >>> program.operations[0].work.tokens
    8
  """
  if isinstance(sparsity, (int, float)):
    programs.check_sparsity(sparsity)
  if trips is not None and trips < 0:
    raise ValueError(f'trips is {trips}; it must not be negative.')

  def traced(*args: Any) -> Program:
    try:
      closed = jax.make_jaxpr(fn)(*args)
    except (TypeError, jax.errors.JAXIndexError) as error:
      raise ValueError(
          f'fn {getattr(fn, "__name__", fn)!r} cannot be traced: {error}'
      ) from error
    inputs = equations.operands_of(args)
    while True:
      interpreter = Interpreter(sparsity, trips, inputs)
      program, _ = interpreter.walk(closed.jaxpr, closed.consts, inputs)
      active = interpreter.activations
      if not interpreter.products:
        active = set(range(len(inputs)))
      resolved = [
          o._replace(space=equations.TOKEN) if i in active and o.space else o
          for i, o in enumerate(inputs)
      ]
      if [o.space for o in resolved] == [o.space for o in inputs]:
        break
      inputs = resolved
    if sparsity and not interpreter.has_masks:
      warnings.warn(
          f'sparsity is {sparsity}, but no product of fn has a mask, so that '
          'none skips zeros; transform the loss by spdf_jax.skip_zeros, and '
          'give it the masks.',
          stacklevel=2,
      )
    if interpreter.updates:
      step = Operation('', 'optimizer_step', 'backward', Host(0, 1))
      program += Program((step,))
    return program

  return traced


class Interpreter:
  """The state of one walk through a program.

  Attributes:
    sparsity: Sparsity of unknown masks: a number or a function of the layer.
    trips: Number of iterations of loops that depend on unknown data.
    weight_shapes: Shapes of the program's weights and of their slices.
    updates: Whether the program updates weights with gradients.
    products: Number of products so far.
    activations: Indices of the inputs that are activations of a product.
    conds: Names of the conds so far, by equation.
    shards: Number of enclosing calls of `shard_map`, where nothing is computed.
  """

  def __init__(
      self,
      sparsity: Sparsity | None,
      trips: int | None,
      inputs: Sequence[Operand],
  ):
    """Initializes a walk."""
    self.sparsity = sparsity
    self.trips = trips
    self.weight_shapes = {
        shape
        for o in inputs if o.space == equations.WEIGHT
        for shape in (o.shape, o.shape[1:]) if shape
    }
    self.updates = False
    self.products = 0
    self.activations: set[int] = set()
    self.conds: dict[int, str] = {}
    self.shards = 0
    self._warned: set[str] = set()
    self.has_masks = False

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
    of = lambda x: x if isinstance(x, Operand) else equations.operand_of(x)
    env = dict(zip(jaxpr.constvars, map(of, consts)))
    env.update(zip(jaxpr.invars, inputs))

    def read(var):
      if isinstance(var, Literal):
        return equations.literal_of(var)
      return env[var]

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
    rule = cost_rules.RULES.get(name)
    inner = list(jaxprs_in_params(eqn.params))
    if rule is None and len(inner) == 1:
      return call(self, eqn, operands, path)
    results = tuple(equations.result_of(v) for v in eqn.outvars)
    layer, phase = equations.layer_of(path)
    equation = Equation(
        operands, results, eqn.params,
        lambda mask: self._weights_of(mask, layer),
    )
    spaces = cost_rules.spaces_of(name, equation, self.weight_shapes)
    self._note_activations(name, equation)
    values: list[np.ndarray | None] = [None] * len(results)
    if not self.shards:
      values = equations.evaluate(eqn, operands, results)
    outs = []
    for result, space, value in zip(results, spaces, values):
      out = result._replace(space=space, known=value)
      source = cost_rules.source_of(name, out, operands)
      outs.append(out._replace(source=source))
    if rule is None:
      return Program(unknown={name: 1}), outs
    works = rule(equation)
    if cost_rules.is_hosted(name, equation):
      works = [Host(_multiply_adds(work)) for work in works]
    else:
      works = [self._placed(name, work, spaces) for work in works]
    return Program(tuple(
        Operation(layer, name, phase, work) for work in works
    )), outs

  def _note_activations(self, name: str, equation: Equation) -> None:
    self.products += cost_rules.is_product(name)
    for operand in cost_rules.resident_operands(name, equation):
      if operand.space == equations.WEIGHT and operand.source is not None:
        self.activations.add(operand.source)

  def _placed(
      self, name: str, work: Work, spaces: tuple[str | None, ...]
  ) -> Work:
    """Moves elementwise work on weights and gradients to the hosts."""
    on_weights = equations.TOKEN not in spaces and {
        equations.WEIGHT, equations.GRADIENT
    } & set(spaces)
    if not (on_weights and cost_rules.is_elementwise(name)):
      return work
    if equations.GRADIENT in spaces and name in _UPDATES:
      self.updates = True
    return Host(_multiply_adds(work))

  def _weights_of(self, mask: Operand, layer: str) -> list[Weights]:
    """Returns the sparsity of each matrix of a stack of masks."""
    self.has_masks = True
    label = layer or 'a product'
    given = self.sparsity
    if callable(given):
      given = given(layer)
    if given is not None:
      programs.check_sparsity(given, f'the sparsity of {label}')
    if mask.known is None:
      if given is None:
        raise ValueError(
            f'the mask of {label} is not known and sparsity is None; give '
            'arrays for the masks, or sparsity, the fraction of zeros.'
        )
      return [Weights(given)] * int(np.prod(mask.shape[:-2]))
    stack = mask.known.reshape(-1, *mask.shape[-2:])
    profiles = [MaskProfile(m) for m in stack]
    mean = float(np.mean([m.sparsity for m in profiles]))
    if given is not None and abs(mean - given) > 0.005:
      message = (
          f'the mask of {label} has sparsity {mean:.4f} and sparsity is '
          f'{given:.4f}; the mask is used.'
      )
      if message not in self._warned:
        self._warned.add(message)
        warnings.warn(message, stacklevel=2)
    return [Weights(m.sparsity, m) for m in profiles]


def _multiply_adds(work: Work) -> float:
  if isinstance(work, Product):
    return work.tokens * work.kept
  return work[0]


def call(
    walker: Interpreter, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks the only jaxpr of `jit`, `remat` or a custom derivative."""
  jaxpr, consts = jaxprs.only_jaxpr(eqn)
  return walker.walk(jaxpr, consts, operands, path)


def einsum(
    walker: Interpreter, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks the product of the reference of a `bf16_matmul.einsum`."""
  params = {k: eqn.params[k] for k in ('subscripts', 'dtype')}
  avals = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]
  reference = functools.partial(bf16_matmul.einsum_reference, **params)
  closed = jax.make_jaxpr(reference)(*avals)
  return walker.walk(closed.jaxpr, closed.consts, operands, path)


def shard_map(
    walker: Interpreter, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks the work of one shard and multiplies it by the number of shards."""
  jaxpr, consts = jaxprs.only_jaxpr(eqn)
  inside = [
      o._replace(shape=v.aval.shape, known=None)
      for o, v in zip(operands, jaxpr.invars)
  ]
  walker.shards += 1
  program, outs = walker.walk(jaxpr, consts, inside, path)
  walker.shards -= 1
  mesh, axes = eqn.params['mesh'], eqn.params['newly_manual_axes']
  shards = int(np.prod([mesh.shape[a] for a in axes]))
  return program * shards, _with_spaces(eqn, outs)


def scan(
    walker: Interpreter, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks every step if masks are scanned, else one step times the length."""
  jaxpr, consts = jaxprs.only_jaxpr(eqn)
  length = eqn.params['length']
  consts_end, carried = jaxprs.scan_operands(eqn)
  carry_end = consts_end + carried
  fixed = operands[:consts_end]
  carry = list(operands[consts_end:carry_end])
  xs = operands[carry_end:]
  if not length:
    return Program(), [
        *carry, *map(equations.result_of, eqn.outvars[len(carry):])
    ]
  known = any(x.known is not None and x.size > length for x in xs)
  steps = length if known and length <= _MOST_ITERATIONS else 1
  order = range(length)[::-1 if eqn.params['reverse'] else 1]
  parts = []
  for _, i in zip(range(steps), order):
    row = [
        x._replace(
            shape=x.shape[1:],
            known=None if x.known is None or steps == 1 < length
            else x.known[i],
        )
        for x in xs
    ]
    if steps == 1 < length:
      carry = [c._replace(known=None) for c in carry]
    program, outs = walker.walk(
        jaxpr, consts, [*fixed, *carry, *row], path
    )
    parts.append(program)
    carry = outs[:carried]
  program = join(parts) if steps == length else parts[0] * length
  return program, _with_spaces(eqn, outs)


def _with_spaces(eqn: Any, outs: Sequence[Operand]) -> list[Operand]:
  """Returns the results of an equation, with the memory spaces of `outs`."""
  return [
      equations.result_of(v)._replace(space=o.space) for v,
      o in zip(eqn.outvars, outs)
  ]


def while_loop(
    walker: Interpreter, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks all iterations if their number is known, else one times `trips`."""
  params = eqn.params
  test, test_consts = jaxprs.opened(params['cond_jaxpr'])
  body, body_consts = jaxprs.opened(params['body_jaxpr'])
  of_test = params['cond_nconsts']
  of_body = of_test + params['body_nconsts']
  carry = list(operands[of_body:])
  parts: list[Program] = []
  while len(parts) < _MOST_ITERATIONS:
    _, (again,) = walker.walk(
        test, test_consts, [*operands[:of_test], *carry], path
    )
    if again.known is None:
      break
    if not again.known:
      return join(parts), carry
    program, carry = walker.walk(
        body, body_consts, [*operands[of_test:of_body], *carry], path
    )
    parts.append(program)
  if walker.trips is None:
    where = equations.layer_of(path)[0] or 'the program'
    raise ValueError(
        f'the number of iterations of a while loop in {where} depends on '
        'unknown values; give this number as trips.'
    )
  unknown = [c._replace(known=None) for c in operands[of_body:]]
  tests, _ = walker.walk(
      test, test_consts, [*operands[:of_test], *unknown], path
  )
  program, _ = walker.walk(
      body, body_consts, [*operands[of_test:of_body], *unknown], path
  )
  return (program + tests) * walker.trips, unknown


def cond(
    walker: Interpreter, eqn: Any, operands: Sequence[Operand], path: str
) -> Walked:
  """Walks one branch if the predicate is known, all of them otherwise."""
  index, *rest = operands
  branches = eqn.params['branches']
  name = walker.conds.setdefault(id(eqn), f'cond_{len(walker.conds)}')
  if index.known is not None:
    taken = int(np.clip(int(index.known), 0, len(branches) - 1))
    jaxpr, consts = jaxprs.opened(branches[taken])
    return walker.walk(jaxpr, consts, rest, path)
  programs, outs = zip(*(
      walker.walk(*jaxprs.opened(b), rest, path) for b in branches
  ))
  results = []
  for i, var in enumerate(eqn.outvars):
    space = equations.strongest([o[i].space for o in outs])
    results.append(equations.result_of(var)._replace(space=space))
  return Program(branches=(Branches(name, programs),)), results


CONTROL = {
    'cond': cond,
    'bf16_einsum': einsum,
    'scan': scan,
    'shard_map': shard_map,
    'while': while_loop,
}
"""Handlers `(walker, equation, operands, path) -> (program, results)`, by
primitive."""
