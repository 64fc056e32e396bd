"""`where`: functions, trees and patterns; ready selectors; what is reported."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.selection import select
from spdf_jax.sparsity.trees import by_name
from tests.refusals import refuse
from tests.sparse_loop import trajectory

Muon = optax.contrib.MuonDimensionNumbers


def leaf(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {
    'embed': {'embedding': leaf(32, 8)},
    'h': [
        {'attn': {'q': leaf(8, 2, 4), 'o': leaf(2, 4, 8)}, 'norm': leaf(8),
         'mlp': {'wi': leaf(8, 16), 'wo': leaf(16, 8)}}
        for _ in range(2)
    ],
    'head': {'kernel': leaf(8, 32)},
}


def chosen(where, params=PARAMS):
  return {
      name: axes[:2] for name, axes in zip(
          by_name(params), select(where, params)
      ) if axes
  }


LAST_LAYERS = {
    'chain': ({'wi': (2, 256), 'w1': (256, 256), 'wo': (256, 3)}, 'wo'),
    'dense last': ({'wi': (2, 256), 'wo': (256, 1)}, None),
    'alone': ({'w': (8, 4)}, None),
    'MLP of Equinox': ({
        f'layers/{i}/{name}': shape for i, (inputs, outputs) in enumerate(
            [(8, 16), (16, 16), (16, 4)]
        ) for name, shape in (
            ('weight', (outputs, inputs)), ('bias', (outputs,))
        )
    }, 'layers/2/weight'),
    'CNN of Linen': ({
        'Conv_0/kernel': (3, 3, 1, 16), 'Conv_0/bias': (16,),
        'Dense_0/kernel': (256, 10), 'Dense_0/bias': (10,),
    }, 'Dense_0/kernel'),
    'transformer': ({
        f'h_{i}/{name}': shape for i in range(2) for name, shape in (
            ('wqkv', (16, 48)), ('wo', (16, 16)), ('mlp/wi', (16, 64)),
            ('mlp/wo', (64, 16)),
        )
    } | {'wte/embedding': (100, 16)}, None),
}


@pytest.mark.parametrize('name', LAST_LAYERS)
def test_the_log_of_the_selection_names_what_looks_like_a_last_layer(
    name, caplog
):
  shapes, last = LAST_LAYERS[name]
  params = {}
  for path, shape in shapes.items():
    node = params
    *parents, leaf = path.split('/')
    for part in parents:
      node = node.setdefault(part, {})
    node[leaf] = jnp.ones(shape)
  caplog.set_level('INFO', 'spdf_jax')
  where = spdf.where.hidden_matrices
  given = {'Dense_*': True} if 'CNN' in name else where
  spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), where=given, key=0).init(
      params
  )
  message, = (m for m in caplog.messages if m.startswith('sparsify: '))
  if last is None:
    assert 'last layer' not in message
  else:
    assert f"{last}, whose outputs no other matrix takes, looks like a" in (
        message
    )
    assert f"where={{'{last}': False, '*': where.hidden_matrices}}" in message


def test_patterns_trees_and_functions_select_the_same():
  patterns = {
      '*/attn/q': spdf.MatrixAxes(0, (1, 2)),
      '*/attn/o': spdf.MatrixAxes((0, 1), 2),
      '*/mlp': True,
  }
  layer = {
      'attn': {'q': Muon(0, (1, 2)), 'o': Muon((0, 1), -1)}, 'norm': None,
      'mlp': True,
  }
  tree = {'embed': False, 'h': [layer, layer], 'head': None}

  def function(path, _):
    if '/attn/' in path:
      return spdf.MatrixAxes(0, (1, 2)) if path.endswith('q') else (
          spdf.MatrixAxes((0, 1), 2))
    return '/mlp/' in path

  expected = chosen(function)
  assert len(expected) == 8
  assert chosen(patterns) == expected
  assert chosen(tree) == expected


def test_the_first_pattern_that_matches_applies():
  assert list(chosen({'*/wi': False, '*': spdf.where.hidden_matrices})) == [
      'h/0/mlp/wo', 'h/1/mlp/wo']
  # A mapping keeps its order, although a pytree sorts its keys.
  assert len(chosen({'h/1': False, '*/mlp': True, 'h/0/*': False})) == 2


def test_true_selects_matrices_below_a_path_and_no_vectors():
  assert set(chosen({'h/0': True})) == {
      'h/0/attn/q', 'h/0/attn/o', 'h/0/mlp/wi', 'h/0/mlp/wo'}
  assert list(chosen(True, jnp.ones((4, 4)))) == ['']
  heads = {'kernel': jnp.ones((8, 4, 2)), 'bias': jnp.ones((4, 2))}
  assert spdf.where.layer_shapes({'q': True}, {'q': heads}) == {
      'q/kernel': (8, 4, 2)}


@pytest.mark.parametrize('where, message', [
    ({'*/mpl': True, '*/mlp': True}, 'selects none'),
    ({'*/mlp': True, 'h/0/mlp/wi': True}, 'selects none'),
    ({'*/mlp': True, '*/norm': True}, 'selects none'),
    ({'Stem': False, '*': spdf.where.hidden_matrices}, 'matches none'),
    ({'*/norms': spdf.where.matrices, '*': True}, 'matches none'),
    ({'*': spdf.where.hidden_matrices, '*/q': False}, 'matches none'),
])
def test_a_pattern_that_changes_nothing_is_refused(where, message):
  refuse(f'has the pattern .* {message}', select, where, PARAMS)


@pytest.mark.parametrize('path, shape, expected', [
    ('out/kernel', (8, 8), None),  # At the top level a head, perhaps.
    ('attn/out/kernel', (8, 8), True),
    ('moe/gate/kernel', (8, 8), None),  # A router, or half of a gated MLP.
    ('mlp/gate_proj/kernel', (8, 8), True),
    ('moe/router/kernel', (8, 8), False),
    ('logits_dense/kernel', (8, 8), False),
    ('classifier/kernel', (8, 8), False),
    ('vocab_proj', (8, 8), False),
    ('mlp/wi/lora_a', (8, 4), False),
    ('adapter/down', (8, 4), False),
    ('position_mlp/kernel', (8, 8), True),
    ('pos_encoding', (8, 8), False),
    ('patch_embed/kernel', (8, 8), False),
    ('h/mlp/wi', (3, 8, 8), None),
    ('h/mlp/bias', (3, 8), False),
    ('h/norm/scale', (3, 8), False),
    ('MultiHeadDotProductAttention_0/query', (8, 8), True),
    ('wte/embedding', (8, 8), False),
    ('wpe', (8, 8), False),
    ('lm_head/kernel', (8, 8), False),
    ('ln_f/scale', (8, 8), False),
    ('rmsnorm/weight', (8, 8), False),
    ('mlp/wi/kernel', (8,), None),
])
def test_the_default_knows_names_and_leaves_out_what_is_ambiguous(
    path, shape, expected
):
  assert spdf.where.hidden_matrices(path, leaf(*shape)) is expected


def test_selectors_give_axes_in_the_layouts_of_flax():
  query = spdf.where.per_head('attention/query/kernel', leaf(8, 2, 4))
  out = spdf.where.per_head('attention/out/kernel', leaf(2, 4, 8))
  assert (query, out) == (((0,), (1, 2), ()), ((0, 1), (2,), ()))
  assert spdf.where.per_head('mlp/wi', leaf(3, 8, 8)) is None
  assert spdf.where.convolutions('Conv_1/kernel', leaf(3, 3, 8, 16)) == (
      (0, 1, 2), (3,), (0, 1))
  for name in ('c2', 'block/down', 'shortcut', 'layer1'):
    axes = spdf.where.convolutions(f'{name}/kernel', leaf(3, 3, 8, 16))
    assert axes == spdf.MatrixAxes((0, 1, 2), (3,), (0, 1))
  # Layers of projections with heads, which are no kernels.
  assert spdf.where.convolutions('a/kernel', leaf(4, 4, 8, 16)) is None
  assert spdf.where.convolutions('Conv_0/kernel', leaf(7, 7, 3, 16)) is False
  assert spdf.where.convolutions('conv_init/kernel', leaf(7, 7, 8, 16)) is False
  assert spdf.where.stacked()('h/mlp/wi', leaf(3, 8, 16)) == ((1,), (2,), ())
  assert spdf.where.stacked(axis=1)('h/mlp/wi', leaf(8, 3, 16)) == (
      (0,), (2,), ())
  assert spdf.where.stacked(axis=2)('h/mlp/bias', leaf(8, 16)) is None
  assert spdf.where.stacked(axis=-3)('h/mlp/bias', leaf(8, 16)) is None
  scanned = spdf.where.stacked(spdf.where.per_head, axis=1)
  assert scanned('attn/query', leaf(8, 3, 2, 4)) == ((0,), (2, 3), ())
  assert scanned('embed', leaf(32, 8)) is False
  assert spdf.where.matrices('embed', leaf(32, 8)) is True


D, H, S, K = 12, 4, 6, 2  # Width, heads, size of a head, heads of keys.
ATTENTIONS = {
    'flax': (
        'MultiHeadDotProductAttention_0/{}/kernel', 'query key value', 'out'
    ),
    'nnx': ('attention/{}/kernel', 'query key value', 'out'),
    'maxtext': ('self_attention/{}/kernel', 'query key value', 'out'),
    'nanodo': ('CausalAttn_0/{}/kernel', 'query key value', 'attn_out_proj'),
    'big_vision': ('MHSA_0/{}/kernel', 'query key value', 'out'),
    'short': ('att/{}/kernel', 'q k v', 'proj'),
    'letters': ('sa/{}', 'Q K V', 'O'),
    'mixer': ('mixer/{}/w', 'to_q to_k to_v', 'to_out'),
    'cross': ('ca/{}/kernel', 'queries keys values', 'merge'),
    'token_mixing': ('token_mixing/{}/weight', 'theta phi g', 'W'),
}


@pytest.mark.parametrize('name', ATTENTIONS)
def test_heads_are_recognized_by_the_shapes_of_siblings(name):
  pattern, projections, output = ATTENTIONS[name]
  q, k, v = projections.split()
  context = 10 if name == 'cross' else D
  params = {
      f'block/{pattern}'.format(q): leaf(D, H, S),
      f'block/{pattern}'.format(k): leaf(context, K, S),
      f'block/{pattern}'.format(v): leaf(context, K, S),
      f'block/{pattern}'.format(output): leaf(H, S, D),
      'block/mlp/wi/kernel': leaf(D, 4 * D),
  }
  inputs, outputs = ((0,), (1, 2)), ((0, 1), (2,))
  if name == 'cross':  # Keys of other inputs have as many heads.
    for key in (k, v):
      params[f'block/{pattern}'.format(key)] = leaf(context, H, S)
  for where in (spdf.where.per_head,
                spdf.where.any_of(spdf.where.per_head, spdf.where.convolutions),
                {'*': spdf.where.per_head}):
    assert chosen(where, params) == dict(
        zip(params, [inputs, inputs, inputs, outputs, ((0,), (1,))])
    )
  stack = {
      path: leaf(p.shape[0], 3, *p.shape[1:]) for path, p in params.items()
  }
  actual = chosen(spdf.where.stacked(spdf.where.per_head, axis=1), stack)
  assert actual == dict(zip(
      params, [((0,), (2, 3))] * 3 + [((0, 2), (3,)), ((0,), (2,))]
  ))


def test_one_selector_takes_convolutions_and_attention():
  params = {
      'stem/conv': leaf(7, 7, 3, 16), 'conv_1/kernel': leaf(3, 3, 16, 16),
      'att/q': leaf(16, 2, 8), 'att/o': leaf(2, 8, 16), 'mlp': leaf(16, 64),
  }
  where = spdf.where.any_of(spdf.where.per_head, spdf.where.convolutions)
  assert chosen(where, params) == {
      'conv_1/kernel': ((0, 1, 2), (3,)), 'att/q': ((0,), (1, 2)),
      'att/o': ((0, 1), (2,)), 'mlp': ((0,), (1,)),
  }


def init(params, where=spdf.where.hidden_matrices):
  arrays = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), where=where, key=0)
  return tx.init(arrays)


def test_matrices_that_stay_dense_are_warned_of_with_their_share(caplog):
  init(PARAMS)
  warning, = [r for r in caplog.records if r.levelname == 'WARNING']
  assert '33.3% of the weights of matrices dense' in warning.message
  assert '2 h/*/attn/o, 2 h/*/attn/q' in warning.message
  caplog.clear()
  init(PARAMS, spdf.where.per_head)
  init(PARAMS, {'*/attn': False, '*': spdf.where.hidden_matrices})
  assert not [r for r in caplog.records if r.levelname == 'WARNING']


def test_a_bare_array_trains():
  times = dict(update_every=1, update_until=3)
  tx = spdf.sparsify(optax.adam(0.1), spdf.rigl(0.75, **times), key=0)
  w = jax.random.normal(jax.random.key(0), (8, 8))
  *_, (w, state) = trajectory(tx, w, lambda _, w: w + 1, 4)
  spdf.check_zeros(w, state)
  assert np.count_nonzero(w) <= int(spdf.get_mask(state).sum()) == 16


class Attention(NamedTuple):
  query: jax.Array
  value: jax.Array


def test_a_module_with_an_attribute_called_value_is_refused():
  w = jnp.ones((4, 4))
  with pytest.raises(ValueError, match="'value' in 'h/attn'.*; rename"):
    init({'h': {'attn': Attention(w, w)}})
  select({'*': True}, {'h': w, 'h/attn': w})


def test_a_selection_of_less_than_half_of_the_matrices_is_refused():
  params = {'Conv_1': leaf(3, 3, 8, 8), 'Dense_0': leaf(8, 10)}
  refuse('leaves 87.8% .* dense, .* Conv_*', init, params)
  mask = spdf.get_mask(init(params, spdf.where.convolutions))
  assert mask['Conv_1'].sum() == 288
