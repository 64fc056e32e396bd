"""`where` on the parameter trees of other people's training.

Shapes are small, layouts and names are those of the hosts. Sources:

* MaxText, repository of 2026-08-22 (e591f30): `src/maxtext/models/llama2.py`,
  `layers/moe.py`, `utils/muon_utils.py`; layers are scanned along axis 1
  (`param_scan_axis`).
* Tunix 0.1.7: `tunix/models/{gemma,llama3,qwen3}/model.py`, LoRA by qwix 0.1.8.
* EasyDeL 0.3.0: `LlamaForCausalLM`, `Qwen3MoeForCausalLM`.
* levanter, repository of 2025-09-26 (9263f81): `models/llama.py`,
  `layers/attention.py`; Haliax linear layers have their outputs first.
* nanodo, repository of 2024-06-04 (10aefde): `nanodo/model.py`.
* Flax 0.12: `nn.MultiHeadDotProductAttention`, and `examples/imagenet`
  (ResNet-18).
* V-MoE, repository of 2026-06-06 (942a78b): `vmoe/nn/vit_moe.py`, a mixture of
  experts in Flax Linen.
"""

import logging
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selection_report
from spdf_jax.sparsity.trees import path_name

GUIDE = pathlib.Path(__file__).parents[2] / 'experiments/guides/hosts.md'
_D, _F, _V, _H, _K, _E, _L = 64, 128, 256, 16, 2, 8, 3


class HostTree(NamedTuple):
  """The leaves of a model of a host, by their paths."""

  hidden: dict[str, tuple[tuple[int, ...], str]]
  """Hidden matrices: shape and axes, a letter per axis: `i` for inputs, `o`
  for outputs, `l` for layers that are independent of each other."""

  dense: dict[str, tuple[int, ...]]
  """Heads, routers, embeddings, adapters and stems: never sparsified."""

  vectors: dict[str, tuple[int, ...]]
  """Norms and biases."""

  nnx: bool = False
  """Whether leaves are NNX variables, which add `value` to their paths."""

  def params(self, variables: bool = False):
    """Returns the tree of shapes, its leaves below `value` if `variables`."""
    tree = {}
    shapes = {path: shape for path, (shape, _) in self.hidden.items()}
    for path, shape in (shapes | self.dense | self.vectors).items():
      *parents, name = path.split('/') + ['value'] * variables
      node = tree
      for parent in parents:
        node = node.setdefault(parent, {})
      node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def _layers(pattern: str, leaves: dict) -> dict:
  """Repeats the leaves of a layer for two layers."""
  return {
      f'{pattern.format(i)}/{path}': leaf
      for i in range(2) for path, leaf in leaves.items()
  }


def _scanned(pattern: str, leaves: dict, axis: int) -> dict:
  """Inserts an axis of layers into the leaves of a layer."""
  insert = lambda shape, axis, x: (*shape[:axis], x, *shape[axis:])
  stacked = {}
  for path, leaf in leaves.items():
    if isinstance(leaf[-1], str):
      shape, axes = leaf
      stacked[f'{pattern}/{path}'] = (
          insert(shape, axis, _L), ''.join(insert(axes, axis, 'l'))
      )
    else:
      stacked[f'{pattern}/{path}'] = insert(leaf, axis, _L)
  return stacked


def _attention(query, key, value, out, name='kernel') -> dict:
  return {
      f'{query}/{name}': ((_D, 4, _H), 'ioo'),
      f'{key}/{name}': ((_D, _K, _H), 'ioo'),
      f'{value}/{name}': ((_D, _K, _H), 'ioo'),
      f'{out}/{name}': ((4, _H, _D), 'iio'),
  }


def _gated_mlp(gate, up, down, name='/kernel') -> dict:
  return {
      f'{gate}{name}': ((_D, _F), 'io'),
      f'{up}{name}': ((_D, _F), 'io'),
      f'{down}{name}': ((_F, _D), 'io'),
  }


def _experts(gate, up, down, name='/kernel') -> dict:
  return {
      path: ((_E, *shape), f'l{axes}')
      for path, (shape, axes) in _gated_mlp(gate, up, down, name).items()
  }


_names = lambda prefix, *names: [f'{prefix}/{name}' for name in names]

_MAXTEXT_ATTENTION = _attention(
    *_names('self_attention', 'query', 'key', 'value', 'out')
)
_MAXTEXT_LAYER = _MAXTEXT_ATTENTION | _gated_mlp(
    *_names('mlp', 'wi_0', 'wi_1', 'wo')
)
_MAXTEXT_MOE_LAYER = _MAXTEXT_ATTENTION | _experts(
    *_names('MoeBlock_0', 'wi_0', 'wi_1', 'wo'), name=''
)
_MAXTEXT_NORMS = {
    'pre_self_attention_layer_norm/scale': (_D,),
    'post_self_attention_layer_norm/scale': (_D,),
}
_MAXTEXT_DENSE = {
    'params/token_embedder/embedding': (_V, _D),
    'params/decoder/logits_dense/kernel': (_D, _V),
}
_MAXTEXT_VECTORS = {'params/decoder/decoder_norm/scale': (_D,)}

_TUNIX_ATTENTION = _attention(
    *_names('attn', 'q_proj', 'k_proj', 'v_proj', 'o_proj'), name='w'
)
_TUNIX_MLP = _names('mlp', 'gate_proj', 'up_proj', 'down_proj')
_GEMMA_LAYER = {
    'attn/q_einsum/w': ((4, _D, _H), 'oio'),
    'attn/kv_einsum/w': ((2, 1, _D, _H), 'ooio'),
    'attn/attn_vec_einsum/w': ((4, _H, _D), 'iio'),
} | _gated_mlp(*_TUNIX_MLP)
_GEMMA_LORA = {
    'attn/q_einsum/w_lora_a': (_D, 4),
    'attn/q_einsum/w_lora_b': (4, 4, _H),
    'attn/kv_einsum/w_lora_a': (_D, 4),
    'attn/kv_einsum/w_lora_b': (4, 2, 1, _H),
    'attn/attn_vec_einsum/w_lora_a': (4, _H, 4),
    'attn/attn_vec_einsum/w_lora_b': (4, _D),
    'mlp/gate_proj/kernel_lora_a': (_D, 4),
    'mlp/gate_proj/kernel_lora_b': (4, _F),
    'mlp/up_proj/kernel_lora_a': (_D, 4),
    'mlp/up_proj/kernel_lora_b': (4, _F),
    'mlp/down_proj/kernel_lora_a': (_F, 4),
    'mlp/down_proj/kernel_lora_b': (4, _D),
}
_GEMMA_NORMS = {
    'pre_attention_norm/scale': (_D,), 'pre_ffw_norm/scale': (_D,),
}
_GEMMA = HostTree(
    hidden=_layers('layers/{}', _GEMMA_LAYER),
    dense={'embedder/input_embedding': (_V, _D)},
    vectors=_layers('layers/{}', _GEMMA_NORMS) | {'final_norm/scale': (_D,)},
    nnx=True,
)
_LLAMA_DENSE = {
    'embedder/input_embedding': (_V, _D), 'lm_head/w': (_D, _V),
}
_LLAMA_NORMS = {
    'input_layernorm/w': (_D,), 'post_attention_layernorm/w': (_D,),
}
_QWEN_NORMS = {'attn/q_norm/w': (_H,), 'attn/k_norm/w': (_H,)}

_EASYDEL_ATTENTION = {
    'self_attn/q_proj/kernel': ((_D, _D), 'io'),
    'self_attn/k_proj/kernel': ((_D, _K * _H), 'io'),
    'self_attn/v_proj/kernel': ((_D, _K * _H), 'io'),
    'self_attn/o_proj/kernel': ((_D, _D), 'io'),
}
_EASYDEL_DENSE = {
    'model/embed_tokens/embedding': (_V, _D), 'lm_head/kernel': (_D, _V),
}
_EASYDEL_NORMS = {
    'input_layernorm/kernel': (_D,), 'post_attention_layernorm/kernel': (_D,),
}

_LEVANTER_LAYER = {
    'self_attn/q_proj/weight/0': ((_K, 2, _H, _D), 'oooi'),
    'self_attn/k_proj/weight/0': ((_K, _H, _D), 'ooi'),
    'self_attn/v_proj/weight/0': ((_K, _H, _D), 'ooi'),
    'self_attn/o_proj/weight/0': ((_D, 4, _H), 'oii'),
    'mlp/gate_proj/weight/0': ((_F, _D), 'oi'),
    'mlp/up_proj/weight/0': ((_F, _D), 'oi'),
    'mlp/down_proj/weight/0': ((_D, _F), 'oi'),
}
_LEVANTER_NORMS = {
    'input_layernorm/weight/0': (_D,),
    'post_attention_layernorm/weight/0': (_D,),
}

_NANODO_BLOCK = {
    'CausalAttn_0/query/kernel': ((_D, 4, _H), 'ioo'),
    'CausalAttn_0/key/kernel': ((_D, 4, _H), 'ioo'),
    'CausalAttn_0/value/kernel': ((_D, 4, _H), 'ioo'),
    'CausalAttn_0/attn_out_proj/kernel': ((4, _H, _D), 'iio'),
    'Mlp_0/Dense_0/kernel': ((_D, _F), 'io'),
    'Mlp_0/Dense_1/kernel': ((_F, _D), 'io'),
}
_NANODO_NORMS = {'LayerNorm_0/scale': (_D,), 'LayerNorm_1/scale': (_D,)}

_LINEN_ATTENTION = {
    'query/kernel': ((_D, 4, _H), 'ioo'),
    'key/kernel': ((_D, 4, _H), 'ioo'),
    'value/kernel': ((_D, 4, _H), 'ioo'),
    'out/kernel': ((4, _H, _D), 'iio'),
}
_LINEN_ATTENTION_BIASES = {
    'query/bias': (4, _H), 'key/bias': (4, _H), 'value/bias': (4, _H),
    'out/bias': (_D,),
}
_below = lambda parent, leaves: {f'{parent}/{p}': x for p, x in leaves.items()}


def _vision_moe() -> HostTree:
  attention = _below('Encoder/encoderblock_{}/SelfAttention', _LINEN_ATTENTION)
  biases = _below(
      'Encoder/encoderblock_{}/SelfAttention', _LINEN_ATTENTION_BIASES
  )
  return HostTree(
      hidden={
          path.format(i): x for i in range(2) for path, x in attention.items()
      } | {
          'Encoder/encoderblock_0/Mlp/Dense_0/kernel': ((_D, _F), 'io'),
          'Encoder/encoderblock_0/Mlp/Dense_1/kernel': ((_F, _D), 'io'),
          'Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel': (
              (_E, _D, _F), 'lio'
          ),
          'Encoder/encoderblock_1/Moe/Mlp/Dense_1/kernel': (
              (_E, _F, _D), 'lio'
          ),
      },
      dense={
          'embedding/kernel': (4, 4, 3, _D),
          'Encoder/posembed_input/pos_embedding': (1, 64, _D),
          'Encoder/encoderblock_1/Moe/Router/dense/kernel': (_D, _E),
          'head/kernel': (_D, 10),
      },
      vectors={
          path.format(i): x for i in range(2) for path, x in biases.items()
      } | {
          'cls': (1, 1, _D),
          'embedding/bias': (_D,),
          'Encoder/encoderblock_0/LayerNorm_0/scale': (_D,),
          'Encoder/encoderblock_0/Mlp/Dense_0/bias': (_F,),
          'Encoder/encoderblock_1/Moe/Mlp/Dense_0/bias': (_E, _F),
          'Encoder/encoderblock_1/Moe/Mlp/Dense_1/bias': (_E, _D),
          'Encoder/encoder_norm/scale': (_D,),
          'head/bias': (10,),
      },
  )


def _resnet() -> HostTree:
  blocks = [(16, 16), (16, 32)]
  hidden, vectors = {}, {'bn_init/scale': (16,), 'Dense_0/bias': (10,)}
  for i, (inputs, outputs) in enumerate(blocks):
    block = f'ResNetBlock_{i}'
    hidden[f'{block}/Conv_0/kernel'] = ((3, 3, inputs, outputs), 'iiio')
    hidden[f'{block}/Conv_1/kernel'] = ((3, 3, outputs, outputs), 'iiio')
    vectors[f'{block}/BatchNorm_0/scale'] = (outputs,)
  hidden['ResNetBlock_1/conv_proj/kernel'] = ((1, 1, 16, 32), 'iiio')
  return HostTree(
      hidden,
      dense={
          'conv_init/kernel': (7, 7, 3, 16),
          'Dense_0/kernel': (32, 10),  # The classifier.
      },
      vectors=vectors,
  )


HOST_TREES = {
    'maxtext': HostTree(
        hidden=_scanned('params/decoder/layers', _MAXTEXT_LAYER, 1),
        dense=_MAXTEXT_DENSE,
        vectors=_MAXTEXT_VECTORS | _scanned(
            'params/decoder/layers', _MAXTEXT_NORMS, 1
        ),
    ),
    'maxtext_moe': HostTree(
        hidden=_scanned('params/decoder/layers', _MAXTEXT_MOE_LAYER, 1),
        dense=_MAXTEXT_DENSE | {
            'params/decoder/layers/MoeBlock_0/gate/kernel': (_D, _L, _E)
        },
        vectors=_MAXTEXT_VECTORS | _scanned(
            'params/decoder/layers', _MAXTEXT_NORMS, 1
        ),
    ),
    'tunix_gemma': _GEMMA,
    'tunix_gemma_lora': _GEMMA._replace(
        dense=_GEMMA.dense | _layers('layers/{}', _GEMMA_LORA)
    ),
    'tunix_qwen_moe': HostTree(
        hidden=_layers(
            'layers/{}', _TUNIX_ATTENTION | _experts(*_TUNIX_MLP, name='')
        ),
        dense=_LLAMA_DENSE | _layers(
            'layers/{}', {'mlp/router/kernel': (_D, _E)}
        ),
        vectors=_layers('layers/{}', _LLAMA_NORMS | _QWEN_NORMS) | {
            'final_norm/w': (_D,)
        },
        nnx=True,
    ),
    'easydel_moe': HostTree(
        hidden=_layers(
            'model/layers/{}',
            _EASYDEL_ATTENTION | _experts(
                *_names('mlp/experts', 'gate_proj', 'up_proj', 'down_proj')
            ),
        ),
        dense=_EASYDEL_DENSE | _layers(
            'model/layers/{}', {'mlp/gate/kernel': (_D, _E)}
        ),
        vectors=_layers('model/layers/{}', _EASYDEL_NORMS) | {
            'model/norm/kernel': (_D,)
        },
        nnx=True,
    ),
    'levanter': HostTree(
        hidden=_scanned('transformer/layers/stacked', _LEVANTER_LAYER, 0),
        dense={
            'embeddings/token_embeddings/weight/0': (_V, _D),
            'lm_head/weight/0': (_V, _D),
        },
        vectors=_scanned('transformer/layers/stacked', _LEVANTER_NORMS, 0) | {
            'transformer/norm/weight/0': (_D,)
        },
    ),
    'nanodo': HostTree(
        hidden=_layers('blocks_{}', _NANODO_BLOCK),
        dense={
            'embed/embedding': (_V, _D), 'pos_embed/embedding': (_F, _D),
        },
        vectors=_layers('blocks_{}', _NANODO_NORMS) | {'out_ln/scale': (_D,)},
    ),
    'linen_attention': HostTree(
        hidden=_below('MultiHeadDotProductAttention_0', _LINEN_ATTENTION),
        dense={'Embed_0/embedding': (_V, _D)},
        vectors=_below(
            'MultiHeadDotProductAttention_0', _LINEN_ATTENTION_BIASES
        ),
    ),
    'linen_moe': _vision_moe(),
    'resnet': _resnet(),
}

CASES = [
    pytest.param(name, variables, id=name + '-variables' * variables)
    for name, tree in HOST_TREES.items()
    for variables in ([False, True] if tree.nnx else [False])
]


@pytest.fixture(autouse=True)
def forget_warnings():
  selection_report._warn_once.cache_clear()


@pytest.fixture(scope='module')
def recommended():
  """Returns the names that the scripts of the guide define."""
  names = {}
  for script in re.findall(r'```python\n(.*?)```', GUIDE.read_text(), re.S):
    exec(compile(script, str(GUIDE), 'exec'), names)
  return names


def selected(where, params):
  """Returns the axes of the selected leaves, by path."""
  paths = [
      path_name(path).removesuffix('/value')
      for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  return {
      path: axes for path, axes in zip(
          paths, selection.select(where, params)
      ) if axes
  }


def letters(axes, rank):
  """Returns a letter per axis, as `HostTree.hidden` has them."""
  return ''.join(
      'i' if n in axes.reduction else 'o' if n in axes.output else 'l'
      for n in range(rank)
  )


@pytest.mark.parametrize('name, variables', CASES)
def test_the_default_selects_all_hidden_matrices_or_is_loud(
    name, variables, caplog
):
  tree = HOST_TREES[name]
  params = tree.params(variables)
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.75), key=0)
  try:
    chosen = set(selected(spdf.where.hidden_matrices, params))
    with caplog.at_level(logging.WARNING, 'spdf_jax'):
      jax.eval_shape(tx.init, params)
  except ValueError as error:
    assert 'per_head' in str(error)
    return
  assert not chosen & set(tree.dense), 'it selects a head, router or the like'
  assert not chosen & set(tree.vectors)
  assert chosen == set(tree.hidden) or caplog.records


@pytest.mark.parametrize('name, variables', CASES)
def test_the_guide_selects_the_hidden_matrices_and_nothing_else(
    name, variables, recommended
):
  tree = HOST_TREES[name]
  found = selected(recommended[name], tree.params(variables))
  assert {
      path: letters(axes, len(tree.hidden[path][0]))
      for path, axes in found.items()
  } == {path: axes for path, (_, axes) in tree.hidden.items()}


@pytest.mark.parametrize('name', [
    'maxtext', pytest.param('linen_moe', marks=pytest.mark.slow),
])
def test_every_layer_of_a_host_gets_its_exact_count(name, recommended):
  tree = HOST_TREES[name]
  tx = spdf.sparsify(
      optax.sgd(0.1), spdf.static(0.75), where=recommended[name], key=0
  )
  mask = jax.jit(lambda: spdf.get_mask(tx.init(jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), tree.params()
  ))))()
  for path, kept in jax.tree_util.tree_leaves_with_path(mask):
    shape, axes = tree.hidden[path_name(path)]
    inside = tuple(i for i, axis in enumerate(axes) if axis != 'l')
    size = 1
    for i in inside:
      size *= shape[i]
    assert set(kept.sum(inside).ravel().tolist()) == {size // 4}, path


def test_nanodo_takes_few_lines():
  section = GUIDE.read_text().split('## nanodo')[1].split('## ')[0]
  changed = [
      line for line in section.splitlines() if line.startswith(('+', '-'))
  ]
  assert 0 < len(changed) <= 6
