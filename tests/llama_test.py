"""A Llama: rotary positions, grouped queries, a gate, and what GPTs share."""

import functools
import itertools
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except

import spdf_jax as spdf
from spdf_jax.models import GPT
from spdf_jax.models import GPTConfig
from spdf_jax.models import Llama
from spdf_jax.models import LlamaConfig
from spdf_jax.models import sparsifiable
from spdf_jax.models.rotary import frequencies
from spdf_jax.models.rotary import Rotary
from spdf_jax.models.rotary import rotate
from spdf_jax.sparsity.paths import path_name

L, V = 7, 23
SIZES = dict(
    vocab_size=V, n_layers=2, n_heads=4, d_model=16, d_ff=24, max_length=16
)


def make_llama(**changes):
  return Llama(LlamaConfig(**SIZES | changes))


def make_gpt(**changes):
  return GPT(GPTConfig(**SIZES | changes))


def make_params(model, stddev=0.3):
  rng = np.random.default_rng(1)
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  return jax.tree.map(
      lambda x: rng.normal(0.1, stddev, x.shape).astype(x.dtype), shapes
  )


def make_tokens(batch=2, length=L):
  rng = np.random.default_rng(5)
  return rng.integers(V, size=(batch, length), dtype=np.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, variables, tokens, positions=None):
  return model.apply(variables, tokens, positions)


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
    {}, dict(n_kv_heads=2), dict(n_kv_heads=1), dict(tied=True),
    dict(head_dim=6, n_kv_heads=2), dict(head_dim=8, n_heads=3),
])
def test_logits_equal_a_plain_llama(changes):
  model = make_llama(**changes)
  params = make_params(model)
  tokens = make_tokens()
  found = logits_of(model, {'params': params}, tokens)
  for row, sequence in zip(found, tokens):
    want = plain_llama(model.config, params, sequence)
    np.testing.assert_allclose(row, want, rtol=1e-4, atol=1e-4)


def test_later_tokens_change_no_earlier_logit():
  model = make_llama(n_kv_heads=2)
  # The head is apart: what enters is moved by the embeddings.
  params = make_params(model)
  tokens = np.arange(L)[None]  # Every token once.

  def at(embedding):
    moved = params | {'wte': {'embedding': embedding}}
    return model.apply({'params': moved}, tokens)[0]

  jacobian = jax.jit(jax.jacrev(at))(params['wte']['embedding'])
  size_LxT = np.abs(jacobian).max(axis=(1, 3))[:, :L]
  for t in range(L):
    assert (size_LxT[t, :t + 1] > 0).all()
    assert (size_LxT[t, t + 1:] == 0).all()


def test_loop_and_scan_give_the_same_logits_and_masks_hold():
  model = make_llama(n_kv_heads=2)
  params = make_params(model)
  rng = np.random.default_rng(2)
  mask = jax.tree_util.tree_map_with_path(
      lambda path, x: rng.random(x.shape) >= 0.75 if sparsifiable(
          path_name(path), x
      ) else None,
      params,
  )
  is_none = lambda x: x is None
  stack = lambda tree: {
      k: v for k, v in tree.items() if not k.startswith('h_')
  } | {'h': jax.tree.map(
      lambda *xs: None if xs[0] is None else np.stack(xs),
      tree['h_0'], tree['h_1'], is_leaf=is_none,
  )}
  masked = spdf.apply_mask(params, mask)
  tokens = make_tokens()
  without = logits_of(model, {'params': masked}, tokens)
  within = logits_of(model, {'params': params, 'masks': mask}, tokens)
  np.testing.assert_array_equal(within, without)
  scanned = logits_of(
      make_llama(n_kv_heads=2, scan_layers=True),
      {'params': stack(params), 'masks': stack(mask)}, tokens,
  )
  np.testing.assert_allclose(scanned, within, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 2**16))
def test_scores_depend_on_the_distance_only(i, j, seed):
  rng = np.random.default_rng(seed)
  turns = frequencies(Rotary(), 8)
  q, k = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)
  score = lambda i, j: (
      rotate(q, np.array([[i]]), turns) * rotate(k, np.array([[j]]), turns)
  ).sum()
  np.testing.assert_allclose(
      score(i, j), score(i + 37, j + 37), rtol=1e-3, atol=2e-3
  )
  length = np.linalg.norm(rotate(q, np.array([[i]]), turns))
  np.testing.assert_allclose(length, np.linalg.norm(q), rtol=1e-5)


def test_stretched_positions_slow_the_long_waves_down():
  plain = frequencies(Rotary(5e5), 64)
  linear = frequencies(Rotary(5e5, 'linear', 4.0), 64)
  np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
  ratio = plain / frequencies(Rotary(5e5, 'llama3', 8.0), 64)
  rounds = 8192 * plain / (2 * np.pi)
  np.testing.assert_allclose(ratio[rounds > 4], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[rounds < 1], 8, rtol=1e-6)
  between = ratio[(rounds < 4) & (rounds > 1)]
  assert len(between) and (between > 1).all() and (between < 8).all()


@pytest.mark.parametrize('scan_layers, remat, make', slow_except(
    [(True, 'full', make_gpt), (False, 'dots', make_llama)],
    itertools.product((False, True), ('dots', 'full'), (make_gpt, make_llama)),
))
def test_computing_anew_changes_no_gradient(make, remat, scan_layers):
  plain = make(scan_layers=scan_layers)
  params, tokens = make_params(plain), make_tokens()

  def gradients(model):
    loss = lambda p: (model.apply({'params': p}, tokens) ** 2).mean()
    return jax.jit(jax.grad(loss))(params)

  want = gradients(plain)
  found = gradients(make(scan_layers=scan_layers, remat=remat))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
      found, want,
  )


def test_activations_and_multipliers_are_what_they_say():
  params, tokens = make_params(make_gpt()), make_tokens()
  logits = lambda params=params, **changes: logits_of(
      make_gpt(**changes), {'params': params}, tokens
  )
  assert 1e-5 < np.abs(logits(activation='gelu') - logits()).max() < 0.1
  np.testing.assert_allclose(logits(logits_scale=0.5), logits() / 2, rtol=1e-6)
  # The head is tied, so it is brought back.
  larger = {
      k: {'embedding': 10 * v['embedding']} if k in ('wte', 'wpe') else v
      for k, v in params.items()
  }
  np.testing.assert_allclose(
      logits(embeddings_scale=10.0), logits(larger) / 10, rtol=1e-4, atol=1e-4
  )
  # Dividing by the size is dividing by the root twice.
  halved = jax.tree_util.tree_map_with_path(
      lambda path, x: x / 2 if 'wq' in path_name(path) else x, params
  )
  np.testing.assert_allclose(
      logits(attention_by_size=True), logits(halved), rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize('make, changes, message', [
    (make_llama, dict(n_kv_heads=3), 'n_kv_heads is 3, which does not divide'),
    (make_llama, dict(n_kv_heads=0), 'n_kv_heads is 0; it must be positive'),
    (make_llama, dict(head_dim=5), 'a head has 5 features; rotary positions'),
    (make_llama, dict(rope_scaling='yarn'), "scaling is 'yarn'; use one of"),
    (make_llama, dict(rope_factor=0.0), 'rotary factor is 0.0; give more'),
    (make_llama, dict(rope_low_freq_factor=5.0), 'give less than high_freq'),
    (make_llama, dict(norm_eps=0.0), 'norm_eps is 0.0; it must be positive'),
    (make_llama, dict(norm_eps=math.nan), 'norm_eps is nan; it must be'),
    (make_gpt, dict(remat='some'), "remat is 'some'; use one of none, dots"),
    (make_gpt, dict(attention='fast'), "attention is 'fast'; use one of auto"),
    (make_gpt, dict(activation='relu'), "activation is 'relu'; use one"),
])
def test_impossible_decoders_are_refused(make, changes, message):
  with pytest.raises(ValueError, match=message):
    make(**changes)
