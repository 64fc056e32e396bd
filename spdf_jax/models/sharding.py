# SPDX-License-Identifier: Apache-2.0
"""Partition specs of the parameters of a decoder."""

from collections.abc import Mapping
from collections.abc import Sequence

import jax

# As in Megatron-LM, layers that read the residual stream are split over their
# outputs and layers that write to it over their inputs, so that a pair of them
# needs one all-reduce; the other axis is split for storage only.
_READERS = ('attn/wq', 'attn/wk', 'attn/wv', 'mlp/wi', 'mlp/wg')
_WRITERS = ('attn/wd', 'mlp/wo')

PARAMETER_AXES = {
    **{f'{layer}/kernel': ('fsdp', 'tensor') for layer in _READERS},
    **{f'{layer}/bias': ('tensor',) for layer in _READERS},
    **{f'{layer}/kernel': ('tensor', 'fsdp') for layer in _WRITERS},
    'wte/embedding': ('tensor', 'fsdp'),
    'wpe/embedding': (None, 'fsdp'),
    'head/kernel': ('fsdp', 'tensor'),
}
"""Mesh axes of the last axes of parameters, by the end of their path; all other
parameters (norms, biases of the residual stream) are replicated."""


def partition_spec(
    path: str, shape: Sequence[int], mesh: Mapping[str, int]
) -> jax.P:
  """Returns the partition spec of a parameter.

  Args:
    path: Path of the parameter, joined by `'/'`.
    shape: Shape of the parameter; leading axes (scanned layers) are not split.
    mesh: Sizes of the axes of the mesh, by name.

  Returns:
    A spec for `NamedSharding`. An axis is split only if the mesh axis divides
    its size.

  References:
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019,
    section 3
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020

  Example:
    >>> mesh = dict(fsdp=4, tensor=4)
    >>> tuple(partition_spec('h/mlp/wi/kernel', (12, 64, 250), mesh))
    (None, 'fsdp', None)
  """
  parts = path.split('/')
  ends = ('/'.join(parts[-3:]), '/'.join(parts[-2:]))
  axes = next((PARAMETER_AXES[e] for e in ends if e in PARAMETER_AXES), ())
  if not axes:
    return jax.P()
  sizes = shape[len(shape) - len(axes):]
  fitting = [
      axis if axis is not None and size % mesh[axis] == 0 else None
      for axis, size in zip(axes, sizes)
  ]
  return jax.P(*[None] * (len(shape) - len(axes)), *fitting)
