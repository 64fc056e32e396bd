"""Which axes of a mesh the parameters of a decoder are split over."""

from collections.abc import Mapping
from collections.abc import Sequence

import jax

# Megatron's way: what reads the residual stream is split by its outputs, what
# writes to it by its inputs; the other axis is split for storage only.
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
"""The mesh axis of each of a parameter's last axes, by the end of its path; all
other parameters (norms, biases of the residual stream) are on every device."""


def partition_spec(
    path: str, shape: Sequence[int], mesh: Mapping[str, int]
) -> jax.P:
  """Returns how a parameter is split over a mesh.

  Args:
    path: The parameter's path, parts joined by `'/'`.
    shape: Its shape; axes in front (scanned layers) are not split.
    mesh: The size of every axis of the mesh, by name.

  Returns:
    A spec for `NamedSharding`. An axis that a mesh axis does not divide is not
    split.

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
