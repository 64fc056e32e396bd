# SPDX-License-Identifier: Apache-2.0
"""The protocol of models: what training, costs and evaluation need of one."""

from collections.abc import Callable
from typing import Any, Protocol

from spdf_jax.sparsity.selection import Where

READ_OUT = 'read_out'
"""The feature of an argument `read_out=` of `apply`, for losses in chunks."""

CACHE = 'cache'
"""The feature of decoding with a cache of keys and values."""

PACKED = 'packed'
"""The feature of parameters that hold the values of kept weights only."""


class Sizes(Protocol):
  """The config of a model, from which its sizes are read."""

  @property
  def vocab_size(self) -> int:
    """Number of token ids, the outputs of the head."""

  @property
  def max_length(self) -> int:
    """Largest sequence length."""

  @property
  def d_model(self) -> int:
    """Width of the residual stream."""

  @property
  def dtype(self) -> str:
    """Dtype of the computation."""

  @property
  def dropout(self) -> float:
    """Dropout rate; unless it is 0, training passes a key to the model."""

  @property
  def features(self) -> frozenset[str]:
    """Optional features: `READ_OUT`, an argument `read_out=` of `apply` for
    losses in chunks; `CACHE`, decoding with a cache; `PACKED`, parameters
    and masks that are stored compactly."""

  @property
  def n_layers(self) -> int:
    """Number of blocks, each with the following sizes."""

  @property
  def hidden_weights(self) -> int:
    """Number of weights in the sparsified matrices of a block."""

  @property
  def n_heads(self) -> int:
    """Number of attention heads of a block; 0: unknown."""

  @property
  def attention_width(self) -> int:
    """Total width of the heads of a block; 0: unknown."""

  def as_dict(self) -> dict[str, Any]:
    """Returns the fields that create the config again."""

  def describe(self) -> dict[str, Any]:
    """Returns the sizes that `plan.json` records."""


class Model(Protocol):
  """A model: `GPT`, `Llama`, or a user's own, see `training.own_models`."""

  @property
  def config(self) -> Sizes:
    """Sizes of the model."""

  @property
  def where(self) -> Where:
    """Selection of the sparsified leaves, as `sparsify` takes it."""

  @property
  def init(self) -> Callable[..., Any]:
    """Function of `(key, tokens)`, returns `dict(params=params)`."""

  @property
  def apply(self) -> Callable[..., Any]:
    """Function `(variables, tokens, rngs={}) -> logits [B, L, V]`."""

  def with_lowering(self, lowering: str) -> 'Model':
    """Returns the model with another lowering of its sparse products.

    Args:
      lowering: Lowering of `accelerator.sparse_matmul`, e.g. `'native'`.

    Returns:
      The model, which uses it where `variables` have masks.
    """
