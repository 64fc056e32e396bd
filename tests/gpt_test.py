"""A GPT is causal, takes masks, and has the sizes of the papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax.models import create_model
from spdf_jax.models import GPT
from spdf_jax.models import GPTConfig
from spdf_jax.models import sparsifiable
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.axes import to_layers
from spdf_jax.sparsity.paths import path_name

L, V = 7, 23
CONFIG = dict(
    vocab_size=V, n_layers=2, n_heads=2, d_model=16, d_ff=24, max_length=8
)
MATRICES = ('attn/wq', 'attn/wk', 'attn/wv', 'attn/wd', 'mlp/wi', 'mlp/wo')


def make_model(**changes):
  return GPT(GPTConfig(**CONFIG | changes))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, variables, tokens):
  return model.apply(variables, tokens)


def make_tokens(batch=2, length=L):
  rng = np.random.default_rng(5)
  return rng.integers(V, size=(batch, length), dtype=np.int32)


def abstract_params(model):
  tokens = jnp.zeros((1, 2), jnp.int32)
  return jax.eval_shape(model.init, jax.random.key(0), tokens)['params']


def make_params(model):
  """Parameters of which none is zero, biases and norms included."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda x: rng.normal(0.1, 0.3, x.shape).astype(x.dtype),
      abstract_params(model),
  )


def make_mask(params, sparsity=0.75):
  rng = np.random.default_rng(2)
  return jax.tree_util.tree_map_with_path(
      lambda path, x: rng.random(x.shape) >= sparsity if sparsifiable(
          path_name(path), x
      ) else None,
      params,
  )


def stack_layers(params):
  """Turns the parameters, or masks, of the loop into those of the scan."""
  rest = {k: v for k, v in params.items() if not k.startswith('h_')}
  layers = [params[f'h_{i}'] for i in range(len(params) - len(rest))]
  stack = lambda *xs: None if xs[0] is None else np.stack(xs)
  return rest | {
      'h': jax.tree.map(stack, *layers, is_leaf=lambda x: x is None)
  }


@pytest.mark.parametrize('scan_layers', [False, True])
def test_a_logit_depends_on_no_later_token(scan_layers):
  model = make_model(scan_layers=scan_layers)
  tokens = make_tokens(batch=1)
  params = make_params(model)
  # Tied embeddings are the head too: what enters is moved by the positions.
  at = lambda wpe: model.apply(
      {'params': params | {'wpe': {'embedding': wpe}}}, tokens
  )[0]
  jacobian_LxVxPxD = jax.jit(jax.jacrev(at))(params['wpe']['embedding'])
  size_LxP = np.abs(jacobian_LxVxPxD).max(axis=(1, 3))
  for t in range(L):
    assert (size_LxP[t, :t + 1] > 0).all()
    assert (size_LxP[t, t + 1:] == 0).all()


def test_later_tokens_change_no_earlier_logit():
  model = make_model()
  params = make_params(model)
  tokens = make_tokens()
  changed = tokens.copy()
  changed[:, 4:] = (changed[:, 4:] + 1) % V
  before = logits_of(model, {'params': params}, tokens)
  after = logits_of(model, {'params': params}, changed)
  np.testing.assert_array_equal(before[:, :4], after[:, :4])
  assert (before[:, 4:] != after[:, 4:]).any()


@pytest.mark.parametrize('scan_layers', [False, True])
def test_masks_change_nothing_on_masked_parameters(scan_layers):
  model = make_model(scan_layers=scan_layers)
  dense = make_params(model)
  mask = make_mask(dense)
  params = spdf.apply_mask(dense, mask)
  tokens = make_tokens()
  without = logits_of(model, {'params': params}, tokens)
  within = logits_of(model, {'params': params, 'masks': mask}, tokens)
  np.testing.assert_array_equal(within, without)
  unmasked = logits_of(model, {'params': dense}, tokens)
  assert (unmasked != without).any()


@pytest.mark.parametrize('scan_layers', [False, True])
def test_masks_hide_whatever_pruned_weights_hold(scan_layers):
  model = make_model(scan_layers=scan_layers)
  dense = make_params(model)
  mask = make_mask(dense)
  poisoned = jax.tree.map(
      lambda m, p: p if m is None else np.where(m, p, np.nan),
      mask, dense, is_leaf=lambda x: x is None,
  )
  tokens = make_tokens()

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    logits = model.apply({'params': params, 'masks': mask}, tokens)
    return (logits ** 2).sum()

  masked = spdf.apply_mask(dense, mask)
  found = jax.tree.leaves(loss(poisoned))
  for one, other in zip(found, jax.tree.leaves(loss(masked))):
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, other)


def test_loop_and_scan_over_layers_give_the_same_logits():
  model = make_model()
  params = make_params(model)
  mask = make_mask(params)
  tokens = make_tokens()
  loop = logits_of(model, {'params': params, 'masks': mask}, tokens)
  scan = logits_of(
      make_model(scan_layers=True),
      {'params': stack_layers(params), 'masks': stack_layers(mask)},
      tokens,
  )
  np.testing.assert_allclose(scan, loop, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('attention', ['blocks', 'xla'])
def test_scores_are_divided_by_the_number_of_the_layer(attention):
  changes = dict(n_layers=3, attention=attention)
  plain = make_model(**changes)
  params = make_params(plain)
  divided = jax.tree_util.tree_map_with_path(
      lambda path, x: x / (int(path[0].key[2:]) + 1)
      if 'attn/wq' in path_name(path) else x,
      params,
  )
  logits = lambda params, **options: logits_of(
      make_model(**changes, **options), {'params': params}, make_tokens()
  )
  want = logits(divided)
  assert np.abs(logits(params) - want).max() > 1e-3
  by_layer = dict(attention_by_layer=True)
  scanned = dict(scan_layers=True, remat='full')
  for found in (
      logits(params, **by_layer),
      logits(stack_layers(params), **by_layer, **scanned),
  ):
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_overrides_replace_fields_and_none_keeps_the_preset():
  config = create_model('gpt-mini', n_layers=5, d_model=None).config
  assert (config.n_layers, config.d_model) == (5, 128)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_six_matrices_of_a_layer_are_sparsified_and_nothing_else(scan_layers):
  params = abstract_params(make_model(scan_layers=scan_layers))
  layers = ['h'] if scan_layers else ['h_0', 'h_1']
  paths = [
      path_name(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  axes = selection.select(sparsifiable, params)
  chosen = {path for path, a in zip(paths, axes) if a is not None}
  assert chosen == {f'{h}/{m}/kernel' for h in layers for m in MATRICES}
  params = make_params(make_model(scan_layers=scan_layers))
  stacks = to_layers(params, params, axes)
  depth = 2 if scan_layers else 1
  assert {x.shape[0] for x in jax.tree.leaves(stacks)} == {depth}
  assert {x.shape[1:] for x in jax.tree.leaves(stacks)} == {
      (16, 16), (16, 24), (24, 16)
  }


def test_the_computation_has_the_type_that_is_asked_for():
  model = make_model(dtype='bfloat16')
  params = make_params(model)
  logits = logits_of(model, {'params': params}, make_tokens())
  exact = logits_of(make_model(), {'params': params}, make_tokens())
  assert {
      x.dtype.name for x in jax.tree.leaves(abstract_params(model))
  } == {'float32'}
  assert logits.dtype == jnp.float32
  error = float(jnp.abs(logits - exact).max() / jnp.abs(exact).max())
  assert 1e-6 < error < 0.05


def test_too_long_a_sequence_is_refused():
  model = make_model()
  params = make_params(model)
  with pytest.raises(ValueError, match='has 9 tokens and the model 8 posit'):
    model.apply({'params': params}, make_tokens(length=9))


def test_an_unknown_preset_is_answered_with_the_nearest_name():
  with pytest.raises(ValueError, match="preset 'gpt2_small'.*'gpt2-small'"):
    create_model('gpt2_small')


def test_an_unknown_field_is_answered_with_the_nearest_name():
  with pytest.raises(ValueError, match="field 'n_layer' .*'n_layers'"):
    create_model('gpt-mini', n_layer=2)


@pytest.mark.parametrize('field, value, message', [
    ('n_heads', 3, 'n_heads is 3, which does not divide d_model 16'),
    ('n_layers', 0, 'n_layers is 0; it must be positive'),
    ('max_length', -1, 'max_length is -1'),
    ('dtype', 'float23', "dtype is 'float23'; use one of float32"),
    ('lowering', 'nativ', "lowering 'nativ' is unknown"),
])
def test_impossible_sizes_are_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    make_model(**{field: value})
