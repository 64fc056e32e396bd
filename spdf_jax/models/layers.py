# SPDX-License-Identifier: Apache-2.0
"""Layers with optional masks."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.listed_matrix import ListedMatrix
from spdf_jax.packing import PackedMask


class MaskedDense(nn.Module):
  """A linear layer y = x @ (mask ⊙ kernel) + bias.

  The mask is read from the collection `'masks'` at the path of the kernel.
  Without that collection, or with `None` at the path, the layer is dense; on
  parameters that are zero off the mask both give the same output. The gradient
  of the kernel is computed where the mask is `True`, or, with the collection
  `'grad_masks'`, where the mask of that collection is. With a packed mask the
  parameter holds the values of the kept weights, [size], and `'grad_masks'`
  must be absent. For inference the parameter may be a `ListedMatrix`, which has
  its own mask.

  Attributes:
    features: Size of the last axis of the output.
    use_bias: Whether to add a bias.
    kernel_init: Initializer of the kernel [inputs, features].
    dtype: Dtype of the computation; parameters are float32.
    lowering: Lowering of the product, see `accelerator.sparse_matmul`.

  Example:
    >>> layer = MaskedDense(8)
    >>> x = jnp.ones((2, 4))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> masks = {'kernel': jnp.zeros((4, 8), bool), 'bias': None}
    >>> y = layer.apply({**variables, 'masks': masks}, x)
    >>> bool((y == 0).all())
    True
  """

  features: int
  use_bias: bool = True
  kernel_init: Any = nn.initializers.lecun_normal()
  dtype: Any = jnp.float32
  lowering: str = 'reference'

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    mask: Any = self.get_variable('masks', 'kernel')
    kernel: Any = self.get_variable('params', 'kernel')
    shape = (x.shape[-1], self.features)
    if isinstance(kernel, ListedMatrix):
      self._check_listed(kernel, shape, mask)
    elif not isinstance(mask, PackedMask):
      kernel = self.param('kernel', self.kernel_init, shape, jnp.float32)
    x = x.astype(self.dtype)
    if isinstance(kernel, ListedMatrix):
      y = listed_matrix.listed_matmul(x, kernel, lowering=self.lowering)
    elif mask is None:
      y = bf16_matmul.matmul(x, kernel.astype(self.dtype))
    else:
      y = primitives.sparse_matmul(
          x,
          kernel.astype(self.dtype),
          mask,
          grad_mask=self.get_variable('grad_masks', 'kernel'),
          lowering=self.lowering,
          layer='/'.join(map(str, self.path)),
      )
    if self.use_bias:
      bias = self.param(
          'bias', nn.initializers.zeros_init(), (self.features,), jnp.float32
      )
      # The sum is float32, and so is the gradient of the bias, a sum over
      # tokens, which XLA:CPU computes much more slowly in 16 bits.
      y = y + bias
    return y.astype(self.dtype)

  def _check_listed(
      self, kernel: ListedMatrix, shape: tuple[int, int], mask: Any
  ) -> None:
    """Raises ValueError if a listed kernel has another shape, or a mask."""
    where = '/'.join((*self.path, 'kernel'))
    if kernel.shape != shape:
      raise ValueError(
          f'{where} is a ListedMatrix {list(kernel.shape)}, but the layer '
          f'needs {list(shape)}; give list_params the parameters of this model.'
      )
    if mask is not None:
      raise ValueError(
          f'{where} is a ListedMatrix, which includes a mask, but the '
          "collection 'masks' has one for it, too; omit the collection, and "
          'for another mask call list_params again.'
      )
