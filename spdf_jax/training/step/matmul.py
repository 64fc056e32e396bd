# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a training step: XLA, sparse kernels, or the wafer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import backend as backends
import jax.numpy as jnp

from spdf_jax.accelerator import crossovers
from spdf_jax.accelerator import mask_counts
from spdf_jax.accelerator import native
from spdf_jax.accelerator.pallas.lowering import BLOCKS
from spdf_jax.accelerator.wafer.execute import WAFER
from spdf_jax.models import Model
from spdf_jax.names import lookup
from spdf_jax.sparsity.algorithms import member_specs

PyTree = Any
# The result is `Any`, since Flax's `apply` may also return a tuple.
ApplyFn = Callable[..., Any]

MATMULS = ('auto', 'native', 'dense', *BLOCKS, WAFER)
"""The values of `config.matmul`."""

# With 32 tokens layers are not faster than XLA's (`--suite=matmul`); models
# narrower than 64 were not measured.
_LEAST_TOKENS = 64
_LEAST_WIDTH = 64


class SparseSteps(NamedTuple):
  """The model and the threshold of steps with sparse kernels."""

  apply_fn: ApplyFn
  """The model with sparse kernels."""

  crossover: float
  """The sparsity of the masks above which `apply_fn` is used."""


def sparse_steps(
    matmul: str, model: Model, tokens: int, in_blocks: bool = False
) -> SparseSteps | None:
  """Chooses the matrix products of training steps with sparse weights.

  Args:
    matmul: `'dense'` always uses XLA's dense products; `'native'` uses the
      native CPU kernels if a mask has zeros and gradients of pruned weights are
      not needed; `'auto'` does so only where the kernels are faster, see
      `crossovers`; `'blocks-64'` and `'blocks-128'` use the Pallas kernels that
      skip blocks of this size; `'wafer'`, which emulates a wafer, uses none.
    model: The model, whose `with_lowering` returns it with kernels.
    tokens: Tokens that a product multiplies, the fewest of all batches.
    in_blocks: Whether all masks consist of whole blocks, see `are_in_blocks`.

  Returns:
    A `SparseSteps`, the argument of `train_step`: the model with kernels and
    the sparsity above which a step uses it. `None`: no step uses kernels, also
    because there are several devices, or for native kernels no CPU, or kernels
    for its dtype are not available; the log has the reason if they cannot be
    built.

  Raises:
    ValueError: `matmul` is unknown.

  Example:
    >>> from spdf_jax import models
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> sparse_steps('dense', model, tokens=1024) is None
    True
  """
  lookup('matmul', matmul, dict.fromkeys(MATMULS))
  dtype = model.config.dtype
  small = tokens < _LEAST_TOKENS or model.config.d_model < _LEAST_WIDTH
  if matmul in ('dense', WAFER) or (matmul == 'auto' and small):
    return None
  lowering = matmul if matmul in BLOCKS else native.NATIVE
  # Decided for this process, whose processor the native kernels are built for.
  # In a program lowered for another platform they fall back to the reference.
  is_cpu = jax.default_backend() == 'cpu'
  if jax.device_count() > 1 or is_cpu != (lowering == native.NATIVE):
    return None
  if is_cpu and not native.is_available(dtype):
    return None
  if is_cpu and in_blocks and dtype == 'bfloat16':
    native.has_matrix_unit()  # Logs why the matrix unit is not used.
  crossover = 0.0
  if matmul == 'auto':
    crossover = crossovers.crossover(
        dtype, model.config.d_model, tokens, in_blocks
    )
  return SparseSteps(model.with_lowering(lowering).apply, crossover)


def are_in_blocks(algorithms: Iterable[Mapping[str, Any]], width: int) -> bool:
  """Returns whether all masks consist of whole 32 x 32 blocks.

  Args:
    algorithms: Algorithms of sparse phases, as `create_algorithm` reads them.
    width: Width of the model.

  Example:
    >>> block = lambda n: dict(structure='block', inputs=n, outputs=n)
    >>> masks = [dict(name='static', structure=block(n)) for n in (32, 64, 16)]
    >>> are_in_blocks(masks[:2], 128), are_in_blocks(masks, 128)
    (True, False)
    >>> balanced = dict(name='rigl', structure=block(32) | dict(balanced=True))
    >>> are_in_blocks([balanced], 128)
    True
  """
  side = crossovers.BLOCK

  def in_blocks(member):
    structure = member.get('structure')
    return member['name'] == 'dense' or (
        isinstance(structure, Mapping) and structure['structure'] == 'block'
        and structure['inputs'] % side == structure['outputs'] % side == 0
    )

  return width % side == 0 and all(
      in_blocks(member) for spec in algorithms for member in member_specs(spec)
  )


def check_devices(matmul: str, devices: int) -> None:
  """Checks that the devices run the kernels of a value of `config.matmul`.

  Raises:
    ValueError: the wafer would be emulated on several devices, or kernels that
      skip blocks are requested where there are none.
  """
  backend = jax.default_backend()
  if matmul in BLOCKS and backend == 'cpu':
    raise ValueError(
        f'matmul is {matmul!r}, whose kernels are for GPUs and TPUs, and this '
        "is a CPU; use 'auto' or 'native'."
    )
  is_rocm = 'rocm' in backends.get_backend().platform_version.lower()
  if matmul in BLOCKS and is_rocm:
    raise ValueError(
        f"matmul is {matmul!r}, whose kernels are for NVIDIA's GPUs and TPUs, "
        "and this is a GPU of AMD; use 'auto' or 'dense'."
    )
  if matmul == 'blocks-64' and backend == 'tpu':
    raise ValueError(
        "matmul is 'blocks-64', and kernels for TPUs skip blocks of 128; use "
        "'blocks-128'."
    )
  if matmul == WAFER and devices > 1:
    raise ValueError(
        f"matmul is 'wafer' and the mesh has {devices} devices; the emulation "
        'runs on one: start with one device, or choose another matmul.'
    )


def dense_apply(matmul: str, model: Model) -> ApplyFn:
  """Returns the model of steps without sparse kernels.

  Args:
    matmul: Value of `config.matmul`.
    model: The model, with the reference lowering.

  Returns:
    The model with dense products and without masks; for `'wafer'`, with all
    masked products on the emulated wafer, also where a mask has no zeros.
  """
  if matmul != WAFER:
    return without_masks(model.apply)
  return model.with_lowering(WAFER).apply


def without_masks(apply_fn: ApplyFn) -> ApplyFn:
  """Calls a model without its masks, since pruned parameters are zero.

  Multiplying by masks would cost a copy of the weights and one of their
  gradients, which `train_step` masks in any case.

  Args:
    apply_fn: Apply function of the model.

  Returns:
    The apply function without masks.
  """
  def apply(variables, *args, **kwargs):
    return apply_fn({'params': variables['params']}, *args, **kwargs)

  return apply


def mask_sparsity(mask: PyTree) -> jax.Array:
  """Returns the sparsity over all masks.

  Example:
    >>> mask = {'w': jnp.arange(8).reshape(2, 4) < 2, 'b': None}
    >>> float(mask_sparsity(mask))
    0.75
  """
  leaves = jax.tree.leaves(mask)
  # A stacked leaf of a large model may have more weights than int32 counts.
  bands = (mask_counts.kept_in_bands(jnp.atleast_2d(m)) for m in leaves)
  kept = (jnp.sum(mask_counts.count_kept(b), dtype=jnp.float32) for b in bands)
  return 1 - sum(kept) / jnp.float32(sum(m.size for m in leaves))
