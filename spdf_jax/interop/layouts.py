# SPDX-License-Identifier: Apache-2.0
"""Layouts: the tensors of Hugging Face files, and our parameters in them."""

from collections.abc import Mapping, Set
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import models
from spdf_jax.sparsity import trees

PyTree = Any
Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]

HEAD = 'lm_head.weight'
"""The output matrix [vocabulary, width], in both architectures."""


class Tensor(NamedTuple):
  """A tensor of a file."""

  name: str
  """Name in the file, e.g. `'transformer.h.0.attn.c_attn.weight'`."""

  parts: tuple[str, ...]
  """Paths of the parameters that are concatenated on their last axis."""

  transposed: bool = False
  """Whether the file stores the transpose, (out, in)."""

  def shape(self, shapes: Shapes) -> tuple[int, ...]:
    """Returns the shape in the file, given the shapes of the parameters."""
    *first, _ = shapes[self.parts[0]]
    shape = (*first, sum(shapes[part][-1] for part in self.parts))
    return shape[::-1] if self.transposed else shape


_GPT = {
    'transformer.wte.weight': 'wte/embedding',
    'transformer.wpe.weight': 'wpe/embedding',
    'transformer.ln_f.weight': 'ln_f/scale',
    'transformer.ln_f.bias': 'ln_f/bias',
}
_GPT_LAYER = {
    'ln_1.weight': 'ln_1/scale',
    'ln_1.bias': 'ln_1/bias',
    'ln_2.weight': 'ln_2/scale',
    'ln_2.bias': 'ln_2/bias',
    'attn.c_attn.weight': 'attn/wq/kernel attn/wk/kernel attn/wv/kernel',
    'attn.c_attn.bias': 'attn/wq/bias attn/wk/bias attn/wv/bias',
    'attn.c_proj.weight': 'attn/wd/kernel',
    'attn.c_proj.bias': 'attn/wd/bias',
    'mlp.c_fc.weight': 'mlp/wi/kernel',
    'mlp.c_fc.bias': 'mlp/wi/bias',
    'mlp.c_proj.weight': 'mlp/wo/kernel',
    'mlp.c_proj.bias': 'mlp/wo/bias',
}
_LLAMA = {
    'model.embed_tokens.weight': 'wte/embedding',
    'model.norm.weight': 'ln_f/scale',
}
_LLAMA_BIASES = {
    'self_attn.q_proj.bias': 'attn/wq/bias',
    'self_attn.k_proj.bias': 'attn/wk/bias',
    'self_attn.v_proj.bias': 'attn/wv/bias',
}
_LLAMA_NORMS = {
    'self_attn.q_norm.weight': 'attn/q_norm/scale',
    'self_attn.k_norm.weight': 'attn/k_norm/scale',
}
_LLAMA_LAYER = {
    'input_layernorm.weight': 'ln_1/scale',
    'post_attention_layernorm.weight': 'ln_2/scale',
    'self_attn.q_proj.weight': 'attn/wq/kernel',
    'self_attn.k_proj.weight': 'attn/wk/kernel',
    'self_attn.v_proj.weight': 'attn/wv/kernel',
    'self_attn.o_proj.weight': 'attn/wd/kernel',
    'mlp.gate_proj.weight': 'mlp/wg/kernel',
    'mlp.up_proj.weight': 'mlp/wi/kernel',
    'mlp.down_proj.weight': 'mlp/wo/kernel',
}


def tensors_of(config: models.GPTConfig | models.LlamaConfig) -> list[Tensor]:
  """Lists the tensors of a model's file, as saved by transformers.

  There is no tensor for a tied head. Matrices are stored (in, out) by GPT-2, as
  in our models, and (out, in) by Llama.

  Args:
    config: Config of the model.

  Returns:
    The tensors. `parts` of a tensor are the paths of the parameters that it
    consists of, of a model whose layers are not stacked.

  Example:
    >>> tensors_of(models.GPTConfig(64, 1, 2, 16, 48, 32))[8].parts
    ('h_0/attn/wq/kernel', 'h_0/attn/wk/kernel', 'h_0/attn/wv/kernel')
  """
  if isinstance(config, models.GPTConfig):
    once, prefix, layer = _GPT, 'transformer.h', _GPT_LAYER
  else:
    once, prefix, layer = _LLAMA, 'model.layers', _LLAMA_LAYER
    layer = layer | (_LLAMA_BIASES if config.qkv_bias else {})
    layer = layer | (_LLAMA_NORMS if config.qk_norm else {})
    if not config.tied:
      once = once | {HEAD: 'head/kernel'}
  transposed = lambda path: (
      isinstance(config, models.LlamaConfig) and path.endswith('kernel')
  )
  tensors = [Tensor(k, (path,), transposed(path)) for k, path in once.items()]
  for i in range(config.n_layers):
    tensors += [
        Tensor(
            f'{prefix}.{i}.{name}',
            tuple(f'h_{i}/{path}' for path in parts.split()),
            transposed(parts),
        )
        for name, parts in layer.items()
    ]
  return tensors


def abstract_params(config: models.GPTConfig | models.LlamaConfig) -> PyTree:
  """Returns shapes and dtypes of an unscanned model's parameters.

  One layer is traced, whatever the depth.
  """
  tokens = jnp.zeros((1, 1), jnp.int32)
  shallow = dataclasses.replace(config, n_layers=1, scan_layers=False)
  init = models.model_of(shallow).init
  params = dict(jax.eval_shape(init, jax.random.key(0), tokens)['params'])
  layer = params.pop('h_0')
  return params | {f'h_{i}': layer for i in range(config.n_layers)}


def shapes_of(tree: PyTree) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a tree's arrays, by path."""
  return {path: np.shape(x) for path, x in trees.by_name(tree).items()}


def to_tensors(
    tensors: list[Tensor], leaves: Mapping[str, Any], shapes: Shapes
) -> dict[str, np.ndarray]:
  """Converts parameters or masks to tensors of a file.

  Args:
    tensors: Result of `tensors_of`.
    leaves: Parameters or masks, by path; a path may be missing.
    shapes: Shapes of all parameters, by path.

  Returns:
    Arrays by name, some of them views, for every tensor that has a part in
    `leaves`; its missing parts are ones.

  Example:
    >>> shapes = {'q': (2, 1), 'k': (2, 1)}
    >>> to_tensors([Tensor('qk', ('q', 'k'), True)],
    ...            {'q': np.array([[3], [4]])}, shapes)['qk'].tolist()
    [[3, 4], [1, 1]]
  """
  arrays = {}
  for tensor in tensors:
    given = [leaves[part] for part in tensor.parts if part in leaves]
    if not given:
      continue
    ones = lambda part, like=given[0]: np.ones(shapes[part], like.dtype)
    parts = [leaves.get(part, ones(part)) for part in tensor.parts]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    arrays[tensor.name] = whole.T if tensor.transposed else whole
  return arrays


def from_tensors(
    tensors: list[Tensor], arrays: Mapping[str, np.ndarray], shapes: Shapes
) -> dict[str, np.ndarray]:
  """Converts tensors of a file to parameters or masks; inverts `to_tensors`.

  Args:
    tensors: Result of `tensors_of`.
    arrays: Arrays by name; a name may be missing.
    shapes: Shapes of all parameters, by path.

  Returns:
    Contiguous arrays by path.

  Example:
    >>> shapes = {'q': (2, 1), 'k': (2, 1)}
    >>> parts = from_tensors([Tensor('qk', ('q', 'k'), True)],
    ...                      {'qk': np.array([[3, 4], [1, 2]])}, shapes)
    >>> parts['k'].tolist()
    [[1], [2]]
  """
  leaves = {}
  for tensor in tensors:
    if tensor.name not in arrays:
      continue
    whole = arrays[tensor.name]
    whole = whole.T if tensor.transposed else whole
    ends = np.cumsum([shapes[part][-1] for part in tensor.parts])[:-1]
    for path, part in zip(tensor.parts, np.split(whole, ends, axis=-1)):
      leaves[path] = np.ascontiguousarray(part)
  return leaves


def fill(like: PyTree, leaves: Mapping[str, Any]) -> PyTree:
  """Builds a tree from leaves by path; missing leaves are `None`."""
  return jax.tree_util.tree_map_with_path(
      lambda path, _: leaves.get(trees.path_name(path)), like
  )


def unstack_layers(tree: PyTree) -> PyTree:
  """Unstacks the layers in parameters or masks of a scanned model.

  Args:
    tree: Tree with a leading layer axis for all leaves under `'h'`. A tree
      without `'h'` is returned unchanged.

  Returns:
    The tree with the layers under `'h_0'`, `'h_1'` and so on.

  Example:
    >>> tree = unstack_layers({'h': {'w': np.array([[1, 2], [3, 4]])}})
    >>> tree['h_1']['w'].tolist()
    [3, 4]
  """
  if 'h' not in tree:
    return tree
  rest = {k: v for k, v in tree.items() if k != 'h'}
  depth = max((len(x) for x in jax.tree.leaves(tree['h'])), default=0)
  return rest | {
      f'h_{i}': jax.tree.map(lambda x, i=i: x[i], tree['h'])
      for i in range(depth)
  }


def stack_layers(tree: PyTree) -> PyTree:
  """Stacks the layers in parameters or masks of an unscanned model.

  A model is scanned if its config has `scan_layers=True`.

  Args:
    tree: Tree with the layers under `'h_0'`, `'h_1'` and so on.

  Returns:
    The tree with the layers stacked on a leading axis, under `'h'`.

  Example:
    >>> layer = {'w': np.ones(3)}
    >>> stack_layers({'h_0': layer, 'h_1': layer})['h']['w'].shape
    (2, 3)
  """
  rest = {k: v for k, v in tree.items() if not k.startswith('h_')}
  layers = [tree[f'h_{i}'] for i in range(len(tree) - len(rest))]
  return rest | {'h': jax.tree.map(lambda *xs: np.stack(xs), *layers)}


def refuse_other_names(
    what: str, names: Set[str], expected: Set[str]
) -> None:
  """Raises ValueError unless arrays have the names of a model.

  Args:
    what: Source of the arrays, for the error message.
    names: Names of the arrays.
    expected: Expected names.

  Raises:
    ValueError: an array is missing or unexpected; the message names the first
      one.
  """
  _refuse(what, 'lacks {}', expected - names)
  _refuse(what, 'has an unexpected {}', names - expected)


def refuse_other_shapes(what: str, shapes: Shapes, expected: Shapes) -> None:
  """Raises ValueError unless arrays have the names and shapes of a model.

  Args:
    what: Source of the arrays, for the error message.
    shapes: Shapes of the arrays, by name.
    expected: Expected shapes, by name.

  Raises:
    ValueError: an array is missing, unexpected or of another shape; the message
      names the first one.
  """
  refuse_other_names(what, shapes.keys(), expected.keys())
  wrong = {name for name in shapes if shapes[name] != expected[name]}
  for name in sorted(wrong)[:1]:
    text = f'{shapes[name]} instead of {expected[name]}'
    _refuse(what, 'has {} of shape ' + text, wrong)


def check_masks(what: str, masks: Arrays, shapes: Shapes) -> None:
  """Raises ValueError unless masks are boolean and have shapes of weights.

  Args:
    what: Source of the masks, for the error message.
    masks: Masks by name.
    shapes: Shapes of the weights, by name.

  Raises:
    ValueError: a mask has another dtype or shape, or no weight.
  """
  for name, x in masks.items():
    if name not in shapes:
      raise ValueError(
          f'{what} has for {name!r} a mask, but the model has no such weight; '
          'remove the mask.'
      )
    if x.dtype != bool or x.shape != shapes[name]:
      raise ValueError(
          f'{what} has for {name!r} a mask {x.dtype}{list(x.shape)}; it must '
          f'be bool{list(shapes[name])}, of the shape of the weight.'
      )


def refuse_pruned_weights(
    what: str, weights: Arrays, masks: Arrays
) -> None:
  """Raises ValueError if a mask prunes weights that are not zero.

  Args:
    what: Source of the masks, for the error message.
    weights: Weights by name.
    masks: Masks of some of them, by name.

  Raises:
    ValueError: a pruned weight is not zero.
  """
  for name, mask in masks.items():
    if np.any(weights[name][~mask]):
      raise ValueError(
          f'{what} prunes weights in {name!r} that are not zero; delete it if '
          'the weights were trained after their export, or export them again.'
      )


def _refuse(what: str, problem: str, names: Set[str]) -> None:
  if names:
    first, more = min(names), len(names) - 1
    raise ValueError(
        f'{what} {problem.format(repr(first))}'
        f'{f" (and {more} more)" if more else ""}; it must hold all arrays of '
        'the model that its config describes, and no others.'
    )
