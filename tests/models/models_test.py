"""GPTs and Llamas are causal, take masks, and compute what NumPy does."""

import functools
import math
import re

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.models import attention
from spdf_jax.models import rotary
from spdf_jax.models.attention import causal_attention
from spdf_jax.sparsity.trees import path_name
from tests.hf_models import make_mask
from tests.hf_models import make_params

L, V = 7, 23
SIZES = dict(
    vocab_size=V, n_layers=2, n_heads=4, d_model=16, d_ff=24, max_length=16
)


def make_gpt(**changes):
  return models.GPT(models.GPTConfig(**SIZES | changes))


def make_llama(**changes):
  return models.Llama(models.LlamaConfig(**SIZES | changes))


def make_tokens(batch=2, length=L):
  rng = np.random.default_rng(5)
  return rng.integers(V, size=(batch, length), dtype=np.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, variables, tokens):
  return model.apply(variables, tokens)


MODELS = {
    'gpt': make_gpt(),
    'scanned gpt': make_gpt(scan_layers=True),
    'llama': make_llama(n_kv_heads=2),
    'qwen2': make_llama(n_kv_heads=2, qkv_bias=True),
    'qwen3': make_llama(head_dim=6, qk_norm=True, scan_layers=True),
}


@pytest.mark.parametrize('name', ['scanned gpt', 'llama'])
def test_a_logit_depends_on_no_later_token(name):
  model = MODELS[name]
  params = make_params(model.config)
  tokens = np.arange(L)[None]  # Each token occurs once.
  # Perturbs the positions of a GPT, whose embeddings are also the head.
  moved = 'wte' if name == 'llama' else 'wpe'
  at = lambda embedding: model.apply(
      {'params': params | {moved: {'embedding': embedding}}}, tokens
  )[0]
  jacobian_LxVxPxD = jax.jit(jax.jacrev(at))(params[moved]['embedding'])
  size_LxP = np.abs(jacobian_LxVxPxD).max(axis=(1, 3))[:, :L]
  for t in range(L):
    assert (size_LxP[t, :t + 1] > 0).all()
    assert (size_LxP[t, t + 1:] == 0).all()


@pytest.mark.parametrize('name', ['gpt', 'llama'])
def test_values_of_pruned_weights_change_no_loss_or_gradient(name):
  model = MODELS[name]
  dense = make_params(model.config)
  mask = make_mask(dense)
  masked = spdf.apply_mask(dense, mask)
  poisoned = jax.tree.map(
      lambda m, p: p if m is None else np.where(m, p, np.nan),
      mask, dense, is_leaf=lambda x: x is None,
  )
  # Every token once: GPUs add the gradients of a repeated token in any order.
  tokens = np.random.default_rng(5).permutation(V)[:2 * L].reshape(2, L)

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    logits = model.apply({'params': params, 'masks': mask}, tokens)
    return (logits ** 2).sum()

  actual = jax.tree.leaves(loss(poisoned))
  for one, other in zip(actual, jax.tree.leaves(loss(masked))):
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', ['gpt', 'llama'])
def test_on_masked_parameters_masks_change_nothing(name):
  model, tokens = MODELS[name], make_tokens()
  dense = make_params(model.config)
  mask = make_mask(dense)
  masked = spdf.apply_mask(dense, mask)
  logits = lambda **variables: logits_of(model, variables, tokens)
  within = logits(params=masked, masks=mask)
  all_kept = jax.tree.map(np.ones_like, mask)
  np.testing.assert_array_equal(within, logits(params=masked, masks=all_kept))
  # Without masks it is another program, for which a GPU may choose other
  # kernels.
  rtol = 0.0 if jax.default_backend() == 'cpu' else 1e-5
  np.testing.assert_allclose(within, logits(params=masked), rtol=rtol)
  assert (logits(params=dense) != within).any()


@pytest.mark.parametrize('make', [make_gpt, make_llama])
def test_loop_and_scan_give_the_same_logits_and_gradients(make):
  params = make_params(make().config)
  mask = make_mask(params)

  def run(model, params, mask):
    def loss(params):
      variables = {'params': params, 'masks': mask, 'grad_masks': mask}
      logits = model.apply(variables, make_tokens())
      return (logits ** 2).mean(), logits

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return logits, jax.tree.leaves(interop.unstack_layers(grads))

  logits, grads = run(make(), params, mask)
  stack = interop.stack_layers
  scanned = run(make(scan_layers=True), stack(params), stack(mask))
  np.testing.assert_allclose(scanned[0], logits, rtol=1e-5, atol=1e-5)
  largest = max(np.abs(grad).max() for grad in grads)
  for grad, wanted in zip(scanned[1], grads, strict=True):
    # A bias of keys does not change the softmax: its gradient is a rounding
    # error.
    scale = max(np.abs(wanted).max(), 1e-3 * largest)
    np.testing.assert_allclose(grad, wanted, rtol=0, atol=1e-5 * scale)


def plain_llama(config, params, tokens, rotary_theta=10000.0):
  """One sequence in NumPy, float64, head by head (Touvron et al., 2023)."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  norm = lambda x, s: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * s
  softmax = lambda s: np.exp(s) / np.exp(s).sum(-1, keepdims=True)
  size, length = config.head_size, len(tokens)
  half = size // 2
  angle = np.arange(length)[:, None] * (
      rotary_theta ** (-np.arange(half) / half)
  )

  def turn(x):
    a, b = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

  x = p['wte']['embedding'][tokens]
  later = np.triu(np.full((length, length), -np.inf), 1)
  for i in range(config.n_layers):
    layer = p[f'h_{i}']
    h = norm(x, layer['ln_1']['scale'])
    q, k, v = (h @ layer['attn'][w]['kernel'] for w in ('wq', 'wk', 'wv'))
    heads = []
    for j in range(config.n_heads):
      g = j // (config.n_heads // config.kv_heads)
      of = lambda y, n: y[:, n * size:(n + 1) * size]
      scores = turn(of(q, j)) @ turn(of(k, g)).T / np.sqrt(size)
      heads.append(softmax(scores + later) @ of(v, g))
    x = x + np.concatenate(heads, axis=1) @ layer['attn']['wd']['kernel']
    h = norm(x, layer['ln_2']['scale'])
    gate = h @ layer['mlp']['wg']['kernel']
    gate = gate / (1 + np.exp(-gate))
    x = x + (gate * (h @ layer['mlp']['wi']['kernel'])) @ (
        layer['mlp']['wo']['kernel']
    )
  x = norm(x, p['ln_f']['scale'])
  head = p['wte']['embedding'].T if config.tied else p['head']['kernel']
  return x @ head


@pytest.mark.parametrize('changes', [
    dict(n_kv_heads=2), dict(n_kv_heads=1, tied=True, head_dim=8, n_heads=3),
])
def test_logits_equal_a_plain_llama(changes):
  model = make_llama(**changes)
  params = make_params(model.config)
  tokens = make_tokens()
  logits = logits_of(model, {'params': params}, tokens)
  for row, sequence in zip(logits, tokens):
    want = plain_llama(model.config, params, sequence)
    np.testing.assert_allclose(row, want, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 2**16))
def test_attention_scores_depend_only_on_the_distance_of_tokens(i, j, seed):
  rng = np.random.default_rng(seed)
  q, k = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)
  turned = lambda x, i: rotary.rotate(
      x, *rotary.rotations(rotary.Rotary(), 8, np.array([[i]]))
  )
  score = lambda i, j: (turned(q, i) * turned(k, j)).sum()
  np.testing.assert_allclose(
      score(i, j), score(i + 37, j + 37), rtol=1e-3, atol=2e-3
  )
  length = np.linalg.norm(turned(q, i))
  np.testing.assert_allclose(length, np.linalg.norm(q), rtol=1e-5)


def test_rotations_of_known_positions_are_constants_of_the_program():
  model = make_llama()
  params = {'params': make_params(model.config)}
  given = jnp.arange(make_tokens().shape[1])[None]
  programs = [
      jax.jit(model.apply).lower(params, make_tokens(), *positions).as_text()
      for positions in ([], [given])
  ]
  assert ['cosine' in program for program in programs] == [False, True]


def test_position_interpolation_slows_long_waves_down():
  plain = rotary.frequencies(rotary.Rotary(5e5), 64)
  linear = rotary.frequencies(rotary.Rotary(5e5, 'linear', 4.0), 64)
  np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
  ratio = plain / rotary.frequencies(rotary.Rotary(5e5, 'llama3', 8.0), 64)
  rounds = 8192 * plain / (2 * np.pi)
  np.testing.assert_allclose(ratio[rounds > 4], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[rounds < 1], 8, rtol=1e-6)
  between = ratio[(rounds < 4) & (rounds > 1)]
  assert len(between) and (between > 1).all() and (between < 8).all()


@pytest.mark.parametrize('scan_layers, remat, make', [
    (True, 'full', make_gpt), (False, 'dots', make_llama),
])
def test_rematerialization_changes_no_gradient(make, remat, scan_layers):
  plain = make(scan_layers=scan_layers)
  params, tokens = make_params(plain.config), make_tokens()

  def gradients(model):
    loss = lambda p: (model.apply({'params': p}, tokens) ** 2).mean()
    return jax.jit(jax.grad(loss))(params)

  want = gradients(plain)
  actual = gradients(make(scan_layers=scan_layers, remat=remat))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
      actual, want,
  )


def test_activations_and_multipliers_equal_their_formulas():
  params, tokens = make_params(make_gpt().config), make_tokens()
  logits = lambda params=params, **changes: logits_of(
      make_gpt(**changes), {'params': params}, tokens
  )
  assert 1e-5 < np.abs(logits(activation='gelu') - logits()).max() < 0.1
  np.testing.assert_allclose(logits(logits_scale=0.5), logits() / 2, rtol=1e-6)
  # The head is tied, so the logits are divided by the same factor.
  larger = {
      k: {'embedding': 10 * v['embedding']} if k in ('wte', 'wpe') else v
      for k, v in params.items()
  }
  np.testing.assert_allclose(
      logits(embeddings_scale=10.0), logits(larger) / 10, rtol=1e-4, atol=1e-4
  )
  # Dividing by the head size is dividing twice by its root.
  halved = jax.tree_util.tree_map_with_path(
      lambda path, x: x / 2 if 'wq' in path_name(path) else x, params
  )
  np.testing.assert_allclose(
      logits(attention_by_size=True), logits(halved), rtol=1e-4, atol=1e-4
  )


def test_scores_are_divided_by_the_number_of_the_layer():
  changes = dict(n_layers=3, attention='blocks')
  plain = make_gpt(**changes)
  params = make_params(plain.config)
  divided = jax.tree_util.tree_map_with_path(
      lambda path, x: x / (int(path[0].key[2:]) + 1)
      if 'attn/wq' in path_name(path) else x,
      params,
  )
  logits = lambda params, **options: logits_of(
      make_gpt(**changes, **options), {'params': params}, make_tokens()
  )
  want = logits(divided)
  assert np.abs(logits(params) - want).max() > 1e-3
  by_layer = dict(attention_by_layer=True)
  scanned = dict(scan_layers=True, remat='full')
  for actual in (
      logits(params, **by_layer),
      logits(interop.stack_layers(params), **by_layer, **scanned),
  ):
    np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-5)


def test_the_computation_has_the_requested_dtype():
  model = make_gpt(dtype='bfloat16')
  params = make_params(model.config)
  logits = logits_of(model, {'params': params}, make_tokens())
  exact = logits_of(make_gpt(), {'params': params}, make_tokens())
  assert {
      x.dtype.name for x in jax.tree.leaves(params)
  } == {'float32'}
  assert logits.dtype == jnp.float32
  error = float(jnp.abs(logits - exact).max() / jnp.abs(exact).max())
  assert 1e-6 < error < 0.05


@pytest.mark.parametrize('make, changes, message', [
    (make_llama, dict(n_kv_heads=3), 'n_kv_heads is 3, which does not divide'),
    (make_llama, dict(head_dim=5), 'head is 5, and rotary positions need an'),
    (make_llama, dict(rope_scaling='yarn'), "scaling is 'yarn'; use one of"),
    (make_llama, dict(rope_low_freq_factor=5.0), 'give less than high_freq'),
    (make_llama, dict(norm_eps=math.nan), 'norm_eps is nan; it must be'),
    (make_gpt, dict(n_layers=0), 'n_layers is 0; it must be positive'),
    (make_gpt, dict(d_model=2**31), 'd_model is .*; give at most 16,777,216'),
    (make_gpt, dict(n_layers=10**9), 'n_layers is .*; give at most 10,000'),
    (make_gpt, dict(vocab_size=2**33), 'vocab_size is .*; give at most'),
    (make_gpt, dict(dtype='float23'), "dtype is 'float23'; use one of float"),
    (make_gpt, dict(lowering='nativ'), "lowering 'nativ' is unknown"),
    (make_gpt, dict(attention='fast'), "attention is 'fast'; use one of auto"),
])
def test_impossible_decoders_are_refused(make, changes, message):
  with pytest.raises(ValueError, match=message):
    make(**changes)


def jax_attention(q, k, v, scale=None):
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale)


def draw_heads(length, heads, groups, dtype='float32'):
  rng = np.random.default_rng(length)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  q = 3 * normal(2, length, heads, 8)
  return q, normal(2, length, groups, 8), normal(2, length, groups, 8)


@pytest.mark.parametrize('heads, groups, length', [
    (4, 4, 1), (4, 2, 1100),
])
def test_attention_and_its_gradients_equal_those_of_jax(length, heads, groups):
  operands = draw_heads(length, heads, groups)
  weights = jnp.cos(jnp.arange(operands[0].size)).reshape(operands[0].shape)

  def run(attend):
    loss = lambda *xs: jnp.sum(weights * attend(*xs))
    both = lambda *xs: (attend(*xs), *jax.grad(loss, (0, 1, 2))(*xs))
    return jax.jit(both)(*operands)

  for ours, theirs in zip(run(causal_attention), run(jax_attention)):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


def test_attention_of_bfloat16_stays_bfloat16_and_sums_in_float32():
  operands = draw_heads(300, 2, 2, 'bfloat16')
  actual = causal_attention(*operands)
  assert actual.dtype == jnp.bfloat16
  exact = jax_attention(*(x.astype(jnp.float32) for x in operands))
  np.testing.assert_allclose(
      actual.astype(jnp.float32), exact, rtol=2e-2, atol=2e-2
  )


def test_too_long_a_sequence_is_refused():
  model = make_gpt()
  params = make_params(model.config)
  with pytest.raises(ValueError, match='has 17 tokens and the model 16 posit'):
    model.apply({'params': params}, make_tokens(length=17))


@pytest.mark.parametrize('platform', ['cpu', 'cuda', 'tpu'])
def test_attention_is_that_of_the_platform_for_which_it_is_lowered(platform):
  x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32)
  text = export.export(
      jax.jit(attention.attend), platforms=[platform]
  )(x, x, x).mlir_module()
  # The branches are those of CPUs and of all others; the index is a constant.
  index = re.search(r'"stablehlo.case"\((%c\w*)\)', text).group(1)
  value = re.search(rf'{index} = stablehlo.constant dense<(\d)>', text)
  assert int(value.group(1)) == (platform != 'cpu')


def test_attention_by_cudnn_is_refused_where_it_cannot_run():
  x = jnp.ones((1, 8, 2, 8))  # cuDNN has no attention in float32.
  with pytest.raises(ValueError, match="attention is 'cudnn'.*; use 'auto'"):
    attention.attend(x, x, x, implementation='cudnn')


def test_attention_in_float16_runs_on_cpus_by_all_implementations():
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (jax.random.normal(key, (1, 8, 2, 8), jnp.float16) for key in keys)
  mask = jnp.tril(jnp.ones((1, 1, 8, 8), bool))
  wanted = jax_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
  for args in ((), (mask,)):
    for name in ('auto', 'blocks', 'xla'):
      actual = attention.attend(q, k, v, *args, implementation=name)
      assert actual.dtype == jnp.float16
      np.testing.assert_allclose(actual, wanted, atol=2e-3)
