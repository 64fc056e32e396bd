"""Which products a training step runs: XLA's dense ones, or sparse kernels."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator import native
from spdf_jax.packing import PackedMask
from spdf_jax.sparsity.storage import is_packed

PyTree = Any
ApplyFn = Callable[[PyTree, jax.Array], jax.Array]

# At 30 % the quickstart's step gains on XLA; with 32 tokens layers do not
# (`--suite=matmul`), and models narrower than 64 were not measured.
CROSSOVERS = {'auto': 0.3, 'native': 0.0, 'dense': None}
"""The fraction of zeros above which the kernels are used, by `config.matmul`;
`None`: never."""

_LEAST_TOKENS = 64
_LEAST_WIDTH = 64


class SparseSteps(NamedTuple):
  """How a training step multiplies where masks are sparse."""

  apply_fn: ApplyFn
  """The model with sparse kernels."""

  crossover: float
  """The share of zeros in the masks above which it is used."""


def sparse_steps(
    matmul: str, model: nn.Module, tokens: int
) -> SparseSteps | None:
  """Chooses what runs the steps of a sparse phase.

  Args:
    matmul: `'dense'` always multiplies the zeros, in XLA; `'native'` uses the
      native kernels wherever a mask has zeros and gradients of pruned weights
      are not needed; `'auto'` does so where they are faster.
    model: The model, with the reference lowering.
    tokens: In the smallest batch.

  Returns:
    `None` for dense products, also where there are no kernels of the model's
    dtype that work here; the log says why.

  Example:
    >>> from spdf_jax import models
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> sparse_steps('dense', model, tokens=1024) is None
    True
  """
  crossover = CROSSOVERS[matmul]
  small = tokens < _LEAST_TOKENS or model.config.d_model < _LEAST_WIDTH
  if crossover is None or (matmul == 'auto' and small):
    return None
  is_cpu = jax.default_backend() == 'cpu' and jax.device_count() == 1
  if not (is_cpu and native.is_available(model.config.dtype)):
    return None
  config = dataclasses.replace(model.config, lowering=native.NATIVE)
  return SparseSteps(model.clone(config=config).apply, crossover)


def without_masks(apply_fn: ApplyFn) -> ApplyFn:
  """Leaves masks out of a model, whose parameters are zero off them.

  Multiplied in, masks cost a copy of the weights and one of their gradients,
  which `train_step` masks in any case. Packed masks stay: without them nothing
  says where values stand.

  Args:
    apply_fn: The model's.

  Returns:
    The same on parameters alone.
  """
  def apply(variables, *args, **kwargs):
    if not is_packed(variables.get('masks')):
      variables = {'params': variables['params']}
    return apply_fn(variables, *args, **kwargs)

  return apply


def choose_packed(
    apply_fn: ApplyFn,
    sparse_steps: SparseSteps | None,
    params: PyTree,
    mask: PyTree,
) -> ApplyFn:
  """Chooses what runs a step on kept values: how many is no data, but a shape.

  Args:
    apply_fn: The model's.
    sparse_steps: What runs sparse steps, if anything does.
    params: Packed.
    mask: Packed.

  Returns:
    The model with sparse kernels, or `apply_fn`, which unpacks.
  """
  if sparse_steps is None:
    return apply_fn
  count = lambda m, p: None if m is None else np.array(
      [p.size, math.prod(m.shape)]
  )
  counts = jax.tree.leaves(jax.tree.map(
      count, mask, params,
      is_leaf=lambda m: m is None or isinstance(m, PackedMask),
  ))
  kept, weights = sum(counts)
  skips = 1 - kept / weights > sparse_steps.crossover
  return sparse_steps.apply_fn if skips else apply_fn


def share_of_zeros(mask: PyTree) -> jax.Array:
  """Returns the fraction of pruned weights over all masks.

  Example:
    >>> mask = {'w': jnp.arange(8).reshape(2, 4) < 2, 'b': None}
    >>> float(share_of_zeros(mask))
    0.75
  """
  leaves = jax.tree.leaves(mask)
  kept = sum(jnp.sum(m, dtype=jnp.int32).astype(jnp.float32) for m in leaves)
  return 1 - kept / sum(m.size for m in leaves)
