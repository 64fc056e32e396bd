"""Sparse-training algorithms, and their names."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from spdf_jax.names import lookup
from spdf_jax.sparsity.algorithms.gmp import gmp
from spdf_jax.sparsity.algorithms.granet import granet
from spdf_jax.sparsity.algorithms.iterative import iterative
from spdf_jax.sparsity.algorithms.rigl import rigl
from spdf_jax.sparsity.algorithms.sparse_evolution import sparse_evolution
from spdf_jax.sparsity.algorithms.static import dense
from spdf_jax.sparsity.algorithms.static import static
from spdf_jax.sparsity.sparsify import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    'dense': dense,
    'gmp': gmp,
    'granet': granet,
    'iterative': iterative,
    'rigl': rigl,
    'sparse_evolution': sparse_evolution,
    'static': static,
}


def create_algorithm(spec: float | Mapping[str, Any]) -> Algorithm:
  """Builds the algorithm that a config names.

  Args:
    spec: A number, which means `static`, or a mapping with the name under
      `algorithm` and the arguments beside it.

  Returns:
    The algorithm.

  Raises:
    ValueError: the name is unknown, or an argument is out of its range.
    TypeError: the algorithm does not take an argument.

  Example:
    >>> import jax.numpy as jnp
    >>> spec = {'algorithm': 'static', 'sparsity': 0.5}
    >>> create_algorithm(spec).sparsity_at(0, {'w': jnp.ones((2, 2))})
    {'w': 0.5}
  """
  if not isinstance(spec, Mapping):
    return static(spec)
  arguments = dict(spec)
  make = lookup('algorithm', arguments.pop('algorithm', ''), ALGORITHMS)
  return make(**arguments)
