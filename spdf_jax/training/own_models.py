# SPDX-License-Identifier: Apache-2.0
"""A user's own model, which a config names by `'package.module:function'`."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from spdf_jax.accelerator import skip_zeros
from spdf_jax.names import bind
from spdf_jax.names import import_function
from spdf_jax.sparsity.selection import select
from spdf_jax.sparsity.selection import to_layers
from spdf_jax.sparsity.selection import Where

_SIZES = ('vocab_size', 'd_model', 'max_length')


@dataclasses.dataclass(frozen=True)
class OwnSizes:
  """Arguments of the function that makes a user's own model.

  Attributes:
    arguments: Arguments by name, among them `vocab_size`, `d_model` and
      `max_length`, the largest sequence length; float32 unless there is a
      `dtype`, and without a key for dropout unless there is a `dropout`.
    hidden_weights: Number of weights in the sparsified matrices; 0 until the
      model is created.

  Raises:
    ValueError: a size is missing or not a positive whole number.
  """

  arguments: Mapping[str, Any]
  hidden_weights: int = 0

  features: ClassVar[frozenset[str]] = frozenset()
  # Matrices are counted over all blocks; the FLOPs of attention are not known.
  n_layers: ClassVar[int] = 1
  n_heads: ClassVar[int] = 0
  attention_width: ClassVar[int] = 0

  def __post_init__(self):
    for name in _SIZES:
      size = self.arguments[name] if name in self.arguments else None
      if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f'model.{name} is {size!r}; a model of your own needs a positive '
            f'whole number for each of {", ".join(_SIZES)}.'
        )

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    return self.arguments['vocab_size']

  @property
  def d_model(self) -> int:
    """Width of the model, which decides whether kernels are worth it."""
    return self.arguments['d_model']

  @property
  def max_length(self) -> int:
    """Largest sequence length."""
    return self.arguments['max_length']

  @property
  def dtype(self) -> str:
    """Dtype of the computation."""
    return self.arguments['dtype'] if 'dtype' in self.arguments else 'float32'

  @property
  def dropout(self) -> float:
    """Dropout rate; unless it is 0, training passes a key to the model."""
    return self.arguments['dropout'] if 'dropout' in self.arguments else 0.0

  def as_dict(self) -> dict[str, Any]:
    """Returns the arguments."""
    return dict(self.arguments)

  def describe(self) -> dict[str, int]:
    """Returns the sizes that `plan.json` records."""
    names = ('hidden_weights', 'd_model', 'vocab_size')
    return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class OwnModel:
  """A user's own model, see `models.Model`.

  Attributes:
    config: Arguments of the function that made it.
    where: Selection of sparsified leaves, as `sparsify` takes it.
    init: Function `(key, tokens) -> {'params': params}`.
    apply: Function `(variables, tokens) -> logits`.
  """

  config: OwnSizes
  where: Where
  init: Callable[..., Any]
  apply: Callable[..., Any]

  def with_lowering(self, lowering: str) -> 'OwnModel':
    """Returns the model with a lowering of its products of masked weights."""
    dense = self.apply
    sparse = skip_zeros(
        lambda params, *args, **kwargs: dense(
            {'params': params}, *args, **kwargs
        ),
        lowering=lowering,
    )

    def apply(variables, *args, **kwargs):
      return sparse(
          variables['params'], *args, mask=variables.get('masks'),
          grad_mask=variables.get('grad_masks'), **kwargs
      )

    return dataclasses.replace(self, apply=apply)


def create_own_model(name: str, sizes: OwnSizes) -> OwnModel:
  """Creates a user's own model and checks its shapes.

  Args:
    name: `'package.module:function'`. The function returns a pair of a Linen or
      NNX module, from tokens [B, L] to logits [B, L, V], and `where`, as
      `sparsify` takes it. For NNX it has an argument `rngs`.
    sizes: Arguments of the function.

  Returns:
    The model.

  Raises:
    ValueError: the function cannot be imported or fails, or the model has
      variables other than parameters or returns other shapes.
  """
  what = f'model {name!r}'
  function = import_function('model', name)
  is_nnx = 'rngs' in inspect.signature(function).parameters
  if is_nnx and sizes.dropout:
    raise ValueError(
        f'model.dropout is {sizes.dropout}, but {what} is of NNX, to which '
        'training gives no key; set model.dropout to 0, or write the model in '
        'Linen.'
    )
  rngs = {'rngs': None} if is_nnx else {}
  bind(what, function, {**sizes.arguments, **rngs})
  make = functools.partial(function, **sizes.arguments)
  try:
    model = (_of_nnx if is_nnx else _of_linen)(sizes, make)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )
    extra = sorted(shapes.keys() - {'params'})
    if extra:
      raise TypeError(f'it has other variables than parameters, {extra}')
    logits = jax.eval_shape(model.apply, shapes, jnp.zeros((1, 2), jnp.int32))
    params = shapes['params']
    layers = to_layers(params, params, select(model.where, params))
  except Exception as error:  # The model may raise any exception.
    reason = str(error).strip().split('\n')[0].rstrip('.')
    raise ValueError(
        f'{what} fails ({type(error).__name__}: {reason:.200}); correct it, or '
        'its arguments.'
    ) from error
  shape = getattr(logits, 'shape', type(logits).__name__)
  if shape != (1, 2, sizes.vocab_size):
    raise ValueError(
        f'{what} returns {shape} for tokens of shape [1, 2]; return logits of '
        f'shape [1, 2, {sizes.vocab_size}], with vocab_size in the last axis.'
    )
  hidden_weights = sum(x.size for x in jax.tree.leaves(layers))
  return dataclasses.replace(
      model, config=dataclasses.replace(sizes, hidden_weights=hidden_weights)
  )


def _pair(made: Any) -> tuple[Any, Where]:
  if not isinstance(made, tuple) or len(made) != 2:
    raise TypeError(
        f'it returned {type(made).__name__}, not the pair (module, where)'
    )
  return made


def _of_linen(sizes: OwnSizes, make: Callable[..., Any]) -> OwnModel:
  module, where = _pair(make())
  if not isinstance(module, nn.Module):
    raise TypeError(
        f'the module is {type(module).__name__}, not a flax.linen.Module'
    )
  return OwnModel(sizes, where, module.init, module.apply)


def _of_nnx(sizes: OwnSizes, make: Callable[..., Any]) -> OwnModel:
  # Imported late, since it would take a tenth of the time of --help.
  from flax import nnx

  made = lambda key: _pair(make(rngs=nnx.Rngs(key)))
  where: list[Where] = []

  def module(key):
    built, chosen = made(key)
    where[:] = [chosen]
    return built

  abstract = nnx.eval_shape(module, jax.random.key(0))
  graph, params, *rest = nnx.split(abstract, nnx.Param, ...)

  def init(key, tokens):
    del tokens
    state = nnx.split(made(key)[0], nnx.Param, ...)[1]
    others = {'other': 0} if jax.tree.leaves(rest) else {}
    return {'params': nnx.to_pure_dict(state), **others}

  def apply(variables, tokens):
    state = jax.tree.map(lambda x: x, params)
    nnx.replace_by_pure_dict(state, variables['params'])
    return nnx.merge(graph, state)(tokens)

  return OwnModel(sizes, where[0], init, apply)
