"""The interpreter: walks a traced program and collects what it asks for."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import re
from typing import Any
import warnings

import jax
from jax.extend.core import jaxprs_in_params
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import GRADIENT
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import TOKEN
from spdf_jax.accelerator.wafer.equations import WEIGHT
from spdf_jax.accelerator.wafer.equations import Weights
from spdf_jax.accelerator.wafer.masks import MaskProfile
from spdf_jax.accelerator.wafer.program import Branches
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
_WRAPPED = re.compile(r'\w+\((.*)\)')
_REMAT = 'rematted_computation'
_NO_LAYER = (_REMAT, 'checkpoint', 'remat', 'remat2', '')
_SMALL = 4096  # Elements.
_MOST_ITERATIONS = 4096  # Of a loop whose every step is looked at.


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
    self._conds = 0
    self._shards = 0
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
    read = lambda v: _literal(v) if isinstance(v, Literal) else env[v]
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
    control = _CONTROL.get(name)
    if control is not None:
      return control(self, eqn, operands, path)
    rule = rule_of(name)
    inner = list(jaxprs_in_params(eqn.params))
    if rule is None and name not in FREE and len(inner) == 1:
      return self._call(eqn, operands, path)
    results = tuple(_abstract(v) for v in eqn.outvars)
    layer, phase = layer_of(path)
    equation = Equation(
        operands, results, eqn.params,
        lambda mask: self._weights_of(mask, layer),
    )
    spaces = spaces_of(name, equation, self.weight_shapes)
    self._note_activations(name, equation)
    values = [None] * len(results)
    if not self._shards:
      values = _evaluate(eqn, operands, results)
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

  def _call(self, eqn, operands, path):
    """jit, remat, custom derivatives: one jaxpr of the same operands."""
    jaxpr, consts = _only_jaxpr(eqn)
    return self.walk(jaxpr, consts, operands, path)

  def _shard_map(self, eqn, operands, path):
    jaxpr, consts = _only_jaxpr(eqn)
    inside = [
        o._replace(shape=v.aval.shape, known=None)
        for o, v in zip(operands, jaxpr.invars)
    ]
    self._shards += 1
    program, outs = self.walk(jaxpr, consts, inside, path)
    self._shards -= 1
    results = [
        _abstract(v)._replace(space=o.space)
        for v, o in zip(eqn.outvars, outs)
    ]
    mesh, axes = eqn.params['mesh'], eqn.params['newly_manual_axes']
    shards = int(np.prod([mesh.shape[a] for a in axes]))
    return program * shards, results

  def _scan(self, eqn, operands, path):
    jaxpr, consts = _only_jaxpr(eqn)
    length = eqn.params['length']
    consts_end = eqn.params['num_consts']
    carry_end = consts_end + eqn.params['num_carry']
    fixed = operands[:consts_end]
    carry = list(operands[consts_end:carry_end])
    xs = operands[carry_end:]
    known = any(x.known is not None and x.size > length for x in xs)
    steps = length if known and length <= _MOST_ITERATIONS else 1
    order = range(length)
    order = reversed(order) if eqn.params['reverse'] else order
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
      program, outs = self.walk(
          jaxpr, consts, [*fixed, *carry, *row], path
      )
      parts.append(program)
      carry = outs[:carry_end - consts_end]
    program = join(parts) if steps == length else parts[0] * length
    results = [
        _abstract(v)._replace(space=o.space)
        for v, o in zip(eqn.outvars, outs)
    ]
    return program, results

  def _while(self, eqn, operands, path):
    params = eqn.params
    test, test_consts = _opened(params['cond_jaxpr'])
    body, body_consts = _opened(params['body_jaxpr'])
    of_test = params['cond_nconsts']
    of_body = of_test + params['body_nconsts']
    carry = list(operands[of_body:])
    parts = []
    while len(parts) < _MOST_ITERATIONS:
      _, (again,) = self.walk(
          test, test_consts, [*operands[:of_test], *carry], path
      )
      if again.known is None:
        break
      if not again.known:
        return join(parts), carry
      program, carry = self.walk(
          body, body_consts, [*operands[of_test:of_body], *carry], path
      )
      parts.append(program)
    if self.trips is None:
      raise ValueError(
          f'a while loop in {layer_of(path)[0] or "the program"} ends when its '
          'data says so; give trips, the number of its iterations.'
      )
    unknown = [c._replace(known=None) for c in operands[of_body:]]
    tests, _ = self.walk(
        test, test_consts, [*operands[:of_test], *unknown], path
    )
    program, _ = self.walk(
        body, body_consts, [*operands[of_test:of_body], *unknown], path
    )
    return (program + tests) * self.trips, unknown

  def _cond(self, eqn, operands, path):
    index, *rest = operands
    branches = eqn.params['branches']
    name = f'cond_{self._conds}'
    self._conds += 1
    if index.known is not None:
      taken = int(np.clip(int(index.known), 0, len(branches) - 1))
      jaxpr, consts = _opened(branches[taken])
      return self.walk(jaxpr, consts, rest, path)
    programs, outs = zip(*(
        self.walk(*_opened(b), rest, path) for b in branches
    ))
    results = []
    for i, var in enumerate(eqn.outvars):
      spaces = [o[i].space for o in outs]
      space = next((s for s in (TOKEN, GRADIENT, WEIGHT) if s in spaces), None)
      results.append(_abstract(var)._replace(space=space))
    shares = _shares(self.frequencies.get(name), name, len(branches))
    return Program(branches=(Branches(name, programs, shares),)), results


_CONTROL = {
    'cond': Interpreter._cond,
    'scan': Interpreter._scan,
    'shard_map': Interpreter._shard_map,
    'while': Interpreter._while,
}


def layer_of(path: str) -> tuple[str, str]:
  """Reads a name stack: the module, and the phase of training.

  Args:
    path: Names joined by `'/'`, with the transformations around them.

  Returns:
    The layer and `'forward'`, `'backward'` or `'recompute'`.

  Example:
    >>> layer_of('transpose(jvp(GPT))/h/attn/vmap(ij->ji)')
    ('GPT/h/attn', 'backward')
  """
  phase = 'backward' if 'transpose(' in path else 'forward'
  phase = 'recompute' if _REMAT in path else phase
  names = []
  for part in path.split('/'):
    while match := _WRAPPED.fullmatch(part):
      part = match[1]
    if part not in _NO_LAYER and '->' not in part:
      names.append(part)
  return '/'.join(names), phase


def operands_of(args: Any) -> list[Operand]:
  """Makes the operands of a program's arguments.

  Signed integers are tokens, and so is what has their shape, such as the weights of a
  loss; other arrays are weights until they meet a product.

  Args:
    args: A tree of arrays or their shapes.

  Returns:
    An operand for each leaf.

  Example:
    >>> args = jnp.zeros((2, 3), int), jnp.ones((2, 3)), jnp.ones((4, 4))
    >>> [operand.space for operand in operands_of(args)]
    ['token', 'token', 'weight']
  """
  operands = [operand_of(x) for x in jax.tree.leaves(args)]
  tokens = {o.shape for o in operands if o.space == TOKEN}
  return [
      o._replace(space=TOKEN, source=i) if o.shape in tokens
      else o._replace(source=i)
      for i, o in enumerate(operands)
  ]


def operand_of(x: Any) -> Operand:
  """Makes an operand; values of masks, integers and scalars are kept."""
  aval = jax.typeof(x) if not hasattr(x, 'shape') else x
  dtype = aval.dtype
  operand = Operand(tuple(aval.shape), dtype)
  if operand.size > 1:
    is_token = jnp.issubdtype(dtype, jnp.signedinteger)
    operand = operand._replace(space=TOKEN if is_token else WEIGHT)
  if isinstance(x, jax.ShapeDtypeStruct) or not _is_kept(operand):
    return operand
  return operand._replace(known=np.asarray(x))


def _is_kept(operand: Operand) -> bool:
  is_mask_or_count = _is_number(operand) and operand.dtype.kind in 'biu'
  return is_mask_or_count or (_is_number(operand) and operand.size == 1)


def _multiply_adds(work: Work) -> float:
  if isinstance(work, Product):
    return work.tokens * work.kept
  return work[0]


def _is_number(operand: Operand) -> bool:
  return isinstance(operand.dtype, np.dtype)  # Not a key of random numbers.


def _source(name, result, operands, space) -> int | None:
  """Follows an input through what is not yet known to be of tokens."""
  if space != WEIGHT or is_product(name):
    return None
  return source_of(result, operands)


def _literal(literal: Literal) -> Operand:
  return operand_of(literal.val)._replace(space=None)


def _abstract(var: Any) -> Operand:
  aval = var.aval
  shape = tuple(getattr(aval, 'shape', ()))
  return Operand(shape, getattr(aval, 'dtype', None))


def _evaluate(eqn, operands, results) -> list[np.ndarray | None]:
  """Computes the results of an equation where its operands are known."""
  known = [o.known for o in operands]
  # Nothing large is made from little, as masks of causality are.
  most = max([_SMALL, *(o.size for o in operands)])
  kept = all(r.size <= most and _is_number(r) for r in results)
  if not kept or any(k is None for k in known):
    return [None] * len(results)
  values = eqn.primitive.bind(*map(jnp.asarray, known), **eqn.params)
  values = values if eqn.primitive.multiple_results else [values]
  return [np.asarray(v) for v in values]


def _opened(closed: Any) -> tuple[Any, Sequence[Any]]:
  """Returns an open jaxpr and its constants."""
  return getattr(closed, 'jaxpr', closed), getattr(closed, 'consts', ())


def _only_jaxpr(eqn) -> tuple[Any, Sequence[Any]]:
  for value in eqn.params.values():
    if hasattr(value, 'eqns') or hasattr(value, 'jaxpr'):
      return _opened(value)
  raise ValueError(f'{eqn.primitive} has no jaxpr to look into.')


def _shares(
    given: float | Sequence[float] | None, name: str, branches: int
) -> tuple[float, ...] | None:
  """Reads a frequency: of the last of two branches, or of each."""
  if given is None:
    return None
  shares = given
  if isinstance(given, (int, float)):
    shares = (1 - given, given)
  shares = tuple(map(float, shares))
  if len(shares) != branches or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
    raise ValueError(
        f'the frequencies of {name} are {given}; give a share for each of its '
        f'{branches} branches, together 1.'
    )
  return shares
