# SPDX-License-Identifier: Apache-2.0
"""One-shot pruning of decoders, block by block, over calibration tokens."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.decoder import sparsifiable
from spdf_jax.models.layers import MaskedDense
from spdf_jax.models.presets import model_of
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.one_shot import Pruner
from spdf_jax.sparsity.one_shot import Sparsity

PyTree = Any


class PrunedBlock(NamedTuple):
  """A pruned block of a decoder."""

  name: str
  """Name of the block in the parameters, `'h_0'`, `'h_1'`, …"""

  params: PyTree
  """Parameters of the block, NumPy arrays."""

  mask: PyTree
  """Mask of the block, with `None` for leaves that stay dense."""


def prune_blocks(
    config: DecoderConfig,
    params: PyTree,
    tokens_NxL: np.ndarray,
    pruner: Pruner,
    sparsity: Sparsity | Mapping[str, float],
) -> Iterator[PrunedBlock]:
  """Prunes the hidden matrices of a decoder, one block after another.

  The inputs of a block are the outputs of the pruned blocks before it, as in
  the papers. Only one block is on the device at a time: beside the parameters,
  the memory holds the output of one block for all tokens, float32 `[N, L,
  d_model]`, a block, and the statistics of its layers, which for `sparsegpt`
  are `d_model ** 2` or `d_ff ** 2` numbers each.

  Args:
    config: Config of a `GPT` or `Llama` with unscanned layers.
    params: The parameters. To hold them once, replace each block in this
      mapping by the one that is yielded.
    tokens_NxL: Sequences of calibration tokens.
    pruner: Result of e.g. `one_shot.wanda`.
    sparsity: The fraction of zeros of all hidden matrices, N:M as `'2:4'`, or a
      mapping from patterns of their paths to fractions, as `by_pattern` takes
      it.

  Yields:
    The blocks, in order.

  Raises:
    ValueError: layers are scanned, there are no tokens or some are not in the
      vocabulary, a matrix cannot have its sparsity, or inputs of a layer are
      not finite.

  References:
    Frantar and Alistarh, `SparseGPT <https://arxiv.org/abs/2301.00774>`_, 2023,
    section 4

  Example:
    >>> from spdf_jax import models
    >>> from spdf_jax.sparsity import one_shot
    >>> model = models.create_model('gpt-mini', vocab_size=64, n_layers=2)
    >>> tokens = np.arange(32).reshape(2, 16)
    >>> params = dict(model.init(jax.random.key(0), tokens)['params'])
    >>> for block in prune_blocks(
    ...     model.config, params, tokens, one_shot.wanda(), 0.5
    ... ):
    ...   params[block.name] = block.params
    >>> float((params['h_1']['mlp']['wi']['kernel'] == 0).mean())
    0.5
  """
  tokens_NxL = np.asarray(tokens_NxL)
  _check(config, tokens_NxL)
  sparsities = _sparsities(params, sparsity)
  block, arguments, outputs = _enter(config, params, tokens_NxL)
  # Sums are donated, since statistics may be as large as the block.
  observe = jax.jit(
      functools.partial(_observe, block, pruner), donate_argnums=1
  )
  apply = jax.jit(lambda params, *args: block.apply({'params': params}, *args))
  for i in range(config.n_layers):
    name = f'h_{i}'
    totals: dict[str, jax.Array] = {}
    layer = jax.tree.map(jnp.asarray, params[name])
    with jax.default_matmul_precision('highest'):
      for x in outputs:
        totals = observe(layer, totals, x, *arguments[i])
    # The matrices are read again one by one, since a block may be large.
    del layer
    statistics = {
        path: total for key, total in totals.items() for path in key.split(',')
    }
    del totals
    layer, mask = _prune(pruner, name, params[name], statistics, sparsities)
    for j, x in enumerate(outputs):
      outputs[j] = np.asarray(apply(layer, x, *arguments[i])[0])
    yield PrunedBlock(name, jax.tree.map(np.asarray, layer), mask)
    del layer, mask


def _prune(
    pruner: Pruner,
    name: str,
    params: PyTree,
    statistics: dict[str, jax.Array],
    sparsities: dict[str, Sparsity],
) -> tuple[PyTree, PyTree]:
  """Returns the parameters and the mask of a block; empties the statistics."""
  treedef: Any
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  weights, masks = [], []
  # The last matrix, mlp/wo, has the most inputs: its statistics are the largest
  # and are freed before new weights fill the memory.
  for path, w in reversed(leaves):
    at = trees.path_name(path)
    sparsity = sparsities.get(f'{name}/{at}')
    mask = None
    if sparsity:
      try:
        w, mask = pruner.prune(
            jnp.asarray(w), statistics.pop(at.removesuffix('/kernel')), sparsity
        )
      except ValueError as error:
        raise ValueError(f'{name}/{at}: {error}') from error
    weights.append(w)
    masks.append(None if mask is None else np.asarray(mask))
  return treedef.unflatten(weights[::-1]), treedef.unflatten(masks[::-1])


def _check(config: DecoderConfig, tokens_NxL: np.ndarray) -> None:
  if config.scan_layers:
    raise ValueError(
        'scan_layers is True; prune the parameters of interop.unstack_layers, '
        'with scan_layers=False in the config.'
    )
  if tokens_NxL.ndim != 2 or not tokens_NxL.size:
    raise ValueError(
        f'tokens have the shape {tokens_NxL.shape}; give sequences of '
        'calibration tokens, [number, length].'
    )
  if not 0 <= tokens_NxL.min() <= tokens_NxL.max() < config.vocab_size:
    raise ValueError(
        f'tokens have ids up to {tokens_NxL.max()}, and the model has '
        f'{config.vocab_size}; encode the calibration text with the tokenizer '
        'of the model.'
    )


def _sparsities(
    params: PyTree, sparsity: Sparsity | Mapping[str, float]
) -> dict[str, Sparsity]:
  """Returns the sparsity of every hidden matrix by its path."""
  hidden = jax.tree_util.tree_map_with_path(
      lambda path, x: x if sparsifiable(trees.path_name(path), x) else None,
      params,
  )
  if isinstance(sparsity, Mapping):
    return trees.by_name(distributions.by_pattern(hidden, sparsity))
  return dict.fromkeys(trees.by_name(hidden), sparsity)


def _enter(
    config: DecoderConfig, params: PyTree, tokens_NxL: np.ndarray
) -> tuple[nn.Module, list[tuple[Any, ...]], list[np.ndarray]]:
  """Returns a block, the arguments of each block, and inputs of the first."""
  model = model_of(dataclasses.replace(config, remat='none'))
  names = {f'h_{i}': i for i in range(config.n_layers)}
  calls: dict[str, Any] = {}

  def skip(call, args, kwargs, context):
    if context.module.name not in names or context.method_name != '__call__':
      return call(*args, **kwargs)
    calls[context.module.name] = context.module, args
    return args[0], None

  @jax.jit  # Does not transfer the head, which is not used.
  def embed(params, tokens_1xL):
    with nn.intercept_methods(skip):
      model.apply(
          {'params': params}, tokens_1xL, read_out=lambda head, x: None
      )
    return calls['h_0'][1][0]

  rest = {name: x for name, x in params.items() if name not in names}
  inputs = [
      np.asarray(embed(rest, tokens_L[None])) for tokens_L in tokens_NxL
  ]
  block = calls['h_0'][0].clone(parent=None, name=None)
  return block, [calls[name][1][1:] for name in names], inputs


def _observe(
    block: nn.Module,
    pruner: Pruner,
    params: PyTree,
    totals: dict[str, jax.Array],
    *args: Any,
) -> dict[str, jax.Array]:
  """Adds the statistics of the inputs of all masked layers of a block.

  Those of layers with the same input, such as the projections of an attention,
  are computed once; their key is the paths of these layers, with commas.
  """
  layers: dict[int, tuple[list[str], jax.Array]] = {}

  def collect(call, args, kwargs, context):
    if isinstance(context.module, MaskedDense):
      paths, _ = layers.setdefault(id(args[0]), ([], args[0]))
      paths.append('/'.join(context.module.path))
    return call(*args, **kwargs)

  with nn.intercept_methods(collect):
    block.apply({'params': params}, *args)
  statistics = {}
  for paths, x in layers.values():
    key = ','.join(paths)
    x_NxI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    statistics[key] = pruner.statistics(x_NxI, totals.get(key, 0))
  return statistics
