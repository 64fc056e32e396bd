# SPDX-License-Identifier: Apache-2.0
"""Reader of model directories of transformers."""

from collections.abc import Iterator
import contextlib
import dataclasses
import logging
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from spdf_jax import extras
from spdf_jax import lowerings
from spdf_jax import models
from spdf_jax.accelerator import listed_matrix
from spdf_jax.interop import configs
from spdf_jax.interop import layouts
from spdf_jax.interop import tensors
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.sparsity import trees

PyTree = Any
Arrays = dict[str, np.ndarray]
Stored = dict[str, tensors.StoredTensor]

logger = logging.getLogger('spdf_jax')

_MASK, _ORIG = '_mask', '_orig'  # Ends of names of masks and weights.
_NAN_SHARE = 0.01  # Least share of NaN that are pruned weights.
_BUFFERS = re.compile(r'\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$')
"""Names of buffers, which older files contain besides weights."""
_WRAPPERS = re.compile(
    r'(?<!\w)(module|_orig_mod|_(fsdp|checkpoint)_wrapped_module)\.'
)
"""Parts of names that PyTorch's DDP, compile, FSDP and checkpoint add."""


class HFModel(NamedTuple):
  """A model loaded by `load_hf`."""

  config: GPTConfig | LlamaConfig
  """Config of the model, unscanned and with float32 computation."""

  params: PyTree
  """Parameters, NumPy float32."""

  mask: PyTree | None
  """Mask, with `None` for dense leaves; `None` for a dense model."""


def load_hf(
    directory: str | os.PathLike[str], *, allow_non_finite: bool = False
) -> HFModel:
  """Reads a GPT-2, Cerebras-GPT, Llama, Mistral, Qwen2 or Qwen3.

  Args:
    directory: Directory with config.json and weights: `model.safetensors`,
      `model.compact.safetensors`, `pytorch_model.bin` (which needs torch), or
      shards and their index; in float32, float16 or bfloat16. Masks of other
      programs are read too: `weight_mask` beside `weight` or `weight_orig`, and
      NaN in place of pruned weights, if 1 % of a matrix or more are NaN.
    allow_non_finite: Whether other weights may be infinite or NaN.

  Returns:
    Config, parameters and mask, see `HFModel`. GPT-2 stores the three
    projections of attention in one tensor, so that if one of them has a mask,
    all have; the mask of a dense projection is all `True`.

  Raises:
    ValueError: the models here do not support the architecture or an option of
      it; tensors or masks are missing, unexpected, damaged or of another shape;
      weights are not finite; or the mask prunes weights that are not zero.
    ImportError: safetensors is not installed, or torch for a .bin file.

  Example:
    >>> import tempfile
    >>> from spdf_jax import interop
    >>> config = models.GPTConfig(vocab_size=64, n_layers=2, n_heads=2,
    ...                           d_model=16, d_ff=64, max_length=32)
    >>> params = jax.tree.map(lambda x: np.ones(x.shape, np.float32),
    ...                       layouts.abstract_params(config))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   interop.save_hf(directory, config, params)
    ...   loaded = load_hf(directory)
    >>> loaded.config == config, loaded.params['ln_f']['bias'].shape
    (True, (16,))
  """
  config, weights, stored = _open(pathlib.Path(directory))
  layout = layouts.tensors_of(config)
  names = {tensor.name for tensor in layout}
  is_compact = weights.name == tensors.COMPACT
  stored, foreign = _without_masks(stored)
  there = stored.keys() - ({layouts.HEAD} - names)
  if is_compact:
    there = tensors.names_of(there)
  layouts.refuse_other_names(str(weights), there, names)
  params = layouts.abstract_params(config)
  shapes = layouts.shapes_of(params)
  expected = {tensor.name: tensor.shape(shapes) for tensor in layout}
  arrays, pruned = _read_pruned(stored, foreign, allow_non_finite)
  masks: Arrays = {}
  with _naming(weights):
    if is_compact:
      arrays, masks = tensors.unpack_tensors(arrays, expected)
    arrays = _without_head(arrays, layout[0].name, expected)
    _refuse_other_dtypes(arrays)
  layouts.refuse_other_shapes(str(weights), layouts.shapes_of(arrays), expected)
  path = weights.parent / tensors.MASKS
  if pruned:
    masks = pruned
    layouts.check_masks(str(weights), masks, expected)
  elif path.exists() and not is_compact:
    masks = tensors.read_tensors(path)
    layouts.check_masks(str(path), masks, expected)
    layouts.refuse_pruned_weights(str(path), arrays, masks)
  leaves: Arrays = {}
  # One by one, since a copy of all tensors may not fit into memory.
  for tensor in layout:
    part = _as_float32({tensor.name: arrays.pop(tensor.name)})
    leaves |= layouts.from_tensors([tensor], part, shapes)
  kept = layouts.from_tensors(layout, masks, shapes)
  return HFModel(
      config,
      layouts.fill(params, leaves),
      layouts.fill(params, kept) if kept else None,
  )


def load_listed(
    directory: str | os.PathLike[str], *, dtype: Any = None
) -> HFModel:
  """Reads a compact export for inference, without holding dense matrices.

  The file is mapped to memory and read matrix by matrix.

  Args:
    directory: Directory that `save_hf` wrote with `format='compact'`.
    dtype: Dtype of the kept weights, `'float32'` or `'bfloat16'`; `None`: that
      of the file, or float32 if that is float16.

  Returns:
    An `HFModel`: config with `lowering='native'`, and parameters with an
    `accelerator.ListedMatrix` for every hidden matrix with a mask, as
    `accelerator.list_params` returns them; the field `mask` is `None`.

  Raises:
    ValueError: the export is not in the format compact, `load_hf` cannot read
      it, weights are not finite, or a matrix has more than 65,536 inputs.
    TypeError: `dtype` is not supported.
    ImportError: safetensors is not installed.
  """
  config, weights, stored = _open(pathlib.Path(directory))
  if weights.name != tensors.COMPACT:
    raise ValueError(
        f'{weights} is not compact; read it with load_hf and list the matrices '
        "with accelerator.list_params, or export it with format='compact'."
    )
  layout = layouts.tensors_of(config)
  names = {tensor.name for tensor in layout}
  tied = {layouts.HEAD} - names
  there = tensors.names_of(stored.keys() - tied)
  layouts.refuse_other_names(str(weights), there, names)
  params = layouts.abstract_params(config)
  shapes = layouts.shapes_of(params)
  leaves: dict[str, Any] = {}
  for tensor in layout:
    parts = tensors.parts_of(tensor.name)
    expected = {tensor.name: tensor.shape(shapes)}
    arrays = _read({k: stored[k] for k in parts if k in stored}, False)
    with _naming(weights):
      is_hidden = all(models.sparsifiable(part, None) for part in tensor.parts)
      if tensor.name in arrays or not is_hidden:
        arrays = _as_float32(tensors.unpack_tensors(arrays, expected)[0])
        layouts.refuse_other_shapes(
            'the file', layouts.shapes_of(arrays), expected
        )
        leaves |= layouts.from_tensors([tensor], arrays, shapes)
        continue
      _refuse_other_dtypes({k: arrays[k] for k in parts[1:2] if k in arrays})
      matrix = tensors.list_tensor(
          tensor.name, arrays, expected[tensor.name],
          transposed=tensor.transposed, dtype=dtype,
      )
    sizes = [shapes[part][-1] for part in tensor.parts]
    leaves |= zip(tensor.parts, listed_matrix.split_outputs(matrix, sizes))
  embedding = layout[0]
  arrays = _read({k: stored[k] for k in tied if k in stored}, False)
  arrays[embedding.name] = leaves[embedding.parts[0]]
  with _naming(weights):
    _without_head(arrays, embedding.name, {})
  config = dataclasses.replace(config, lowering=lowerings.NATIVE)
  return HFModel(config, layouts.fill(params, leaves), None)


def mask_of_zeros(params: Any) -> Any:
  """Derives a mask from the zeros of parameters.

  Kept weights that are exactly zero are indistinguishable from pruned ones.

  Args:
    params: Parameters of a `GPT` or `Llama` of `spdf_jax.models`.

  Returns:
    A tree of the structure of `params`: booleans for hidden matrices with
    zeros, `None` for all other leaves. If no hidden matrix has a zero, `None`
    in place of the tree.

  Example:
    >>> layer = {'wi': {'kernel': np.array([[2., 0.]]), 'bias': np.zeros(2)}}
    >>> mask_of_zeros({'h_0': {'mlp': layer}})['h_0']['mlp']['wi']
    {'bias': None, 'kernel': array([[ True, False]])}
  """
  def mask_of(path, x):
    kept = np.asarray(x) != 0
    selected = models.sparsifiable(trees.path_name(path), x) is not False
    return kept if selected and not kept.all() else None

  mask = jax.tree_util.tree_map_with_path(mask_of, params)
  return mask if jax.tree.leaves(mask) else None


def check_hf(
    directory: str | os.PathLike[str],
    tokens_BxL: np.ndarray | None = None,
    *,
    allow_non_finite: bool = False,
) -> float:
  """Compares the logits of a saved model here and in transformers.

  Both compute in float32. This needs torch and transformers, which no extra of
  this package installs.

  Args:
    directory: Directory with a model that `load_hf` and transformers can read,
      so no compact export.
    tokens_BxL: Token ids; `None`: two random sequences of up to 64 tokens.
    allow_non_finite: Whether weights may be infinite or NaN.

  Returns:
    The largest absolute difference of two logits.

  Raises:
    ValueError: `load_hf` cannot read the directory.
    ImportError: torch, transformers or safetensors is not installed.

  Example:
    >>> check_hf('gpt2')  # doctest: +SKIP
    4.9e-05
  """
  torch = extras.require('torch', None)
  transformers = extras.require('transformers', None)
  config, params, _ = load_hf(directory, allow_non_finite=allow_non_finite)
  if tokens_BxL is None:
    tokens_BxL = np.random.default_rng(0).integers(
        config.vocab_size, size=(2, min(64, config.max_length))
    )
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    logits_BxLxV = theirs(torch.tensor(np.asarray(tokens_BxL))).logits.numpy()
  with jax.default_matmul_precision('highest'):
    ours_BxLxV = models.model_of(config).apply({'params': params}, tokens_BxL)
  return float(np.abs(np.asarray(ours_BxLxV) - logits_BxLxV).max())


def _open(
    directory: pathlib.Path,
) -> tuple[GPTConfig | LlamaConfig, pathlib.Path, Stored]:
  """Reads a config, and opens the weights beside it."""
  config = _read_config(directory / tensors.CONFIG)
  weights = tensors.find_weights(directory)
  stored = tensors.open_tensors(weights)
  if config.n_layers > len(stored):
    raise ValueError(
        f'{weights} holds {len(stored)} tensors, and the config.json beside it '
        f'describes {config.n_layers} layers; fetch both again.'
    )
  return config, weights, _normalized(stored, config)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """Prefixes the message of a ValueError with a path."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def _read_config(path: pathlib.Path) -> GPTConfig | LlamaConfig:
  fields = tensors.read_json(path)
  with _naming(path):
    return configs.read_config(fields)


def _read(stored: Stored, allow_non_finite: bool) -> Arrays:
  arrays = {}
  for name, tensor in stored.items():
    arrays[name] = tensor.read()
    if not allow_non_finite and not np.isfinite(arrays[name]).all():
      raise ValueError(
          f'{tensor.path} has weights in {name!r} that are not finite; export '
          'the model again, or read it with load_hf and allow_non_finite.'
      )
  return arrays


def _without_masks(stored: Stored) -> tuple[Stored, Stored]:
  """Separates weights from the masks that other programs store beside them.

  `torch.nn.utils.prune` stores `weight_orig` and `weight_mask`, others `weight`
  and `weight_mask`.
  """
  base = lambda name: name.removesuffix(_MASK).removesuffix(_ORIG)
  weights = {base(name): x for name, x in stored.items() if name[-5:] != _MASK}
  masks = {
      base(name): x for name, x in stored.items()
      if name.endswith(_MASK) and base(name) in weights
  }
  return {
      base(name) if base(name) in masks else name: x
      for name, x in stored.items()
      if not (name.endswith(_MASK) and base(name) in masks)
  }, masks


def _read_pruned(
    stored: Stored, masks: Stored, allow_non_finite: bool
) -> tuple[Arrays, Arrays]:
  """Reads tensors, and the masks that are stored beside or as NaN in them."""
  arrays, kept = {}, {}
  for name, tensor in stored.items():
    x = tensor.read()
    if name in masks:
      kept[name] = masks[name].read().astype(bool)
      if kept[name].shape != x.shape:
        raise ValueError(
            f'{tensor.path} has a mask of shape {kept[name].shape} for '
            f'{name!r} of shape {x.shape}; save both again.'
        )
    elif x.ndim == 2 and np.isnan(x).mean() >= _NAN_SHARE:
      kept[name] = ~np.isnan(x)  # Checkpoints of Cerebras mark zeros by NaN.
    if name in kept:
      x = np.where(kept[name], x, np.zeros_like(x))
    if not allow_non_finite and not np.isfinite(x).all():
      raise ValueError(
          f'{tensor.path} has weights in {name!r} that are not finite; fetch '
          'the file again, or set allow_non_finite.'
      )
    arrays[name] = x
  if kept:
    logger.info(
        'the masks of %d tensors are those stored beside them, or their NaN',
        len(kept),
    )
  return arrays, kept


def _normalized(stored: Stored, config: GPTConfig | LlamaConfig) -> Stored:
  """Removes buffers, and gives tensors the names that transformers gives."""
  prefix = '' if isinstance(config, LlamaConfig) else 'transformer.'
  named: dict[str, str] = {}
  for k, x in stored.items():
    if _BUFFERS.search(k):
      continue
    name = _WRAPPERS.sub('', k)
    if name != layouts.HEAD and not name.startswith(prefix):
      name = prefix + name  # Old files lack the prefix.
    if name in named:
      raise ValueError(
          f'{x.path} has both {named[name]!r} and {k!r}, which are names of '
          'one tensor; fetch the file again.'
      )
    named[name] = k
  return {name: stored[k] for name, k in named.items()}


def _without_head(
    arrays: Arrays, embedding: str, expected: layouts.Shapes
) -> Arrays:
  """Removes the tied head, after checking that it equals the embedding."""
  if layouts.HEAD in expected or layouts.HEAD not in arrays:
    return arrays
  rest = {k: x for k, x in arrays.items() if k != layouts.HEAD}
  tied = rest.get(embedding)
  if tied is None or not np.array_equal(arrays[layouts.HEAD], tied):
    raise ValueError(
        f'{layouts.HEAD} differs from {embedding}, but the model ties the two; '
        'only equal ones can be read here.'
    )
  return rest


def _as_float32(arrays: Arrays) -> Arrays:
  _refuse_other_dtypes(arrays)
  return {name: x.astype(np.float32) for name, x in arrays.items()}


def _refuse_other_dtypes(arrays: Arrays) -> None:
  for name, x in arrays.items():
    if x.dtype.name not in tensors.DTYPES:
      raise ValueError(
          f'{name!r} is of dtype {x.dtype}; save it in one of '
          f'{", ".join(tensors.DTYPES)}.'
      )
