"""Compiled programs: their steps, and their memory as XLA reports it."""

from collections.abc import Callable
import math
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# `copy` writes a new buffer, except inside a fused computation.
_COPY = re.compile(r'= (\w+)\[([\d,]*)\]\S* copy\(')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%(\S+) \(.*\{$', re.MULTILINE)


class Program(NamedTuple):
  """A compiled step, with its first state and its argument."""

  executable: jax.stages.Compiled
  """`(state, argument) -> (state, anything)`; the state is donated."""

  state: Any
  """The first state."""

  argument: Any
  """Batch, gradients or the like: the same at every step."""

  jitted: Callable[[Any, Any], Any]
  """The jitted step, which compiles again for new shapes and types."""

  traces: Callable[[], int]
  """`() -> int`: number of traces so far."""

  seconds: float
  """Seconds of tracing and compiling."""


def compile_program(
    function: Callable[[Any, Any], Any], state: Any, argument: Any
) -> Program:
  """Compiles a step that donates its state.

  Args:
    function: `(state, argument) -> (state, anything)`.
    state: The first state; `repeated` donates it.
    argument: Second argument of every step.

  Returns:
    The program.

  Example:
    >>> step = lambda x, y: (x + y, ())
    >>> program = compile_program(step, jnp.zeros(2), jnp.ones(2))
    >>> unaliased_bytes(program)
    0
  """
  argument = jax.tree.map(jnp.asarray, argument)
  traces = 0

  def counted(state, argument):
    nonlocal traces
    traces += 1
    return function(state, argument)

  jitted = jax.jit(counted, donate_argnums=0)
  start = time.perf_counter()
  executable = jitted.lower(state, argument).compile()
  seconds = time.perf_counter() - start
  return Program(executable, state, argument, jitted, lambda: traces, seconds)


def repeated(program: Program) -> Callable[[], Any]:
  """Returns a call that takes a step from the state after the previous call.

  Example:
    >>> step = lambda x, y: (x + y, ())
    >>> call = repeated(compile_program(step, jnp.zeros(2), jnp.ones(2)))
    >>> [call()[0].tolist(), call()[0].tolist()]
    [[1.0, 1.0], [2.0, 2.0]]
  """
  state = program.state

  def call():
    nonlocal state
    state, rest = program.executable(state, program.argument)
    return state, rest

  return call


def count_compilations(program: Program, steps: int) -> int:
  """Counts the programs that a run compiles, by the traces of its step.

  Args:
    program: The program; its state is copied, not donated.
    steps: Number of steps to take from its state.

  Returns:
    Number of programs: 1 if all steps use the same one.

  Example:
    >>> widen = lambda x, y: (x + y, ())
    >>> program = compile_program(widen, jnp.int32(0), jnp.ones(2))
    >>> count_compilations(program, 3)
    2
  """
  state = jax.tree.map(jnp.copy, program.state)
  for _ in range(steps):
    state, _ = program.jitted(state, program.argument)
  jax.block_until_ready(state)
  return program.traces()


def tree_bytes(tree: Any) -> int:
  """Counts the bytes of a tree of arrays.

  Example:
    >>> tree_bytes({'w': jnp.ones((2, 2)), 'mask': jnp.ones((2, 2), bool)})
    20
  """
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def scratch_bytes(program: Program) -> int:
  """Returns the bytes of temporary buffers."""
  return program.executable.memory_analysis().temp_size_in_bytes


def unaliased_bytes(program: Program) -> int:
  """Returns the number of bytes of the state that are not updated in place."""
  memory = program.executable.memory_analysis()
  return tree_bytes(program.state) - memory.alias_size_in_bytes


def copied_bytes(program: Program, like: Any) -> int:
  """Counts the bytes that `copy` instructions write to arrays of some shapes.

  XLA inserts them if the old value of a donated buffer is still read after the
  new one is computed, and for values that a `cond` returns unchanged.

  Args:
    program: The program.
    like: Tree of arrays, such as an optimizer's state: only copies whose shape
      and type occur in it are counted.

  Returns:
    Number of bytes; every instruction of the program is counted once.
  """
  text = program.executable.as_text()
  wanted = {(x.shape, x.dtype.itemsize) for x in jax.tree.leaves(like)}
  starts = [(m.start(), m[1]) for m in _COMPUTATION.finditer(text)]
  ends = [start for start, _ in starts[1:]] + [len(text)]
  copies = [
      (tuple(int(n) for n in sizes.split(',') if n), _itemsize(dtype))
      for (start, name), end in zip(starts, ends)
      if 'fused' not in name
      for dtype, sizes in _COPY.findall(text, start, end)
  ]
  return sum(
      math.prod(shape) * itemsize
      for shape, itemsize in copies
      if (shape, itemsize) in wanted
  )


def _itemsize(dtype: str) -> int:
  # Names such as f32, bf16, f8e4m3fn contain the bits; pred takes a byte.
  bits = re.search(r'\d+', dtype)
  return int(bits[0]) // 8 if bits else 1
