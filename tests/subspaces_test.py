"""Cosine distances are those of the definition, of whatever is compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax.analysis.subspaces import cosine_distances
from spdf_jax.analysis.subspaces import MODULES
from spdf_jax.analysis.subspaces import share_of_zeros
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models import model_of
from spdf_jax.sparsity.selection import path_name

CONFIGS = {
    'gpt': GPTConfig(23, 3, 2, 16, 24, 8),
    'llama': LlamaConfig(23, 3, 4, 16, 24, 8, n_kv_heads=2),
}


def make_params(config, seed, like=None, scale=1.0):
  """Random parameters; near those of `like`, if given."""
  tokens = np.zeros((1, 2), np.int32)
  shapes = jax.eval_shape(model_of(config).init, jax.random.key(0), tokens)
  rng = np.random.default_rng(seed)
  noise = jax.tree.map(
      lambda x: scale * rng.normal(size=x.shape).astype(np.float32),
      shapes['params'],
  )
  return noise if like is None else jax.tree.map(np.add, like, noise)


def angle(a, b):
  """One minus the cosine, by the definition, in extended precision."""
  a, b = (np.asarray(x).ravel().astype(np.longdouble) for x in (a, b))
  return float(1 - (a @ b) / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize('kind', CONFIGS)
def test_distances_are_those_of_the_definition(kind):
  before = make_params(CONFIGS[kind], 0)
  after = make_params(CONFIGS[kind], 1, like=before, scale=0.3)
  found = cosine_distances(before, after)
  modules = ['wq', 'wk', 'wv', 'wd', 'wi', 'wg', 'wo']
  if kind == 'gpt':
    modules.remove('wg')
  assert list(found) == [(i, m) for i in range(3) for m in modules]
  for (layer, module), distance in found.items():
    part = 'attn' if module in ('wq', 'wk', 'wv', 'wd') else 'mlp'
    a, b = (t[f'h_{layer}'][part][module]['kernel'] for t in (before, after))
    assert distance == pytest.approx(angle(a, b), rel=1e-12)


def test_tiny_distances_keep_their_digits():
  before = make_params(CONFIGS['gpt'], 0)
  x = before['h_0']['mlp']['wi']['kernel'].astype(np.float64)
  moved = x + 1e-9 * np.random.default_rng(1).normal(size=x.shape)
  tree = lambda w: {'h_0': {'mlp': {'wi': {'kernel': w}}}}
  found = cosine_distances(tree(x), tree(moved))[0, 'wi']
  # To second order, half of the squared angle: what is moved off the direction.
  step = moved - x
  off = step - x * np.vdot(x, step) / np.vdot(x, x)
  expected = np.vdot(off, off) / np.vdot(x, x) / 2
  assert 1e-20 < expected < 1e-17
  assert found == pytest.approx(expected, rel=1e-6)


def test_scaling_is_no_distance_and_the_opposite_is_two():
  params = make_params(CONFIGS['gpt'], 0)
  scaled = jax.tree.map(lambda x: np.float32(4) * x, params)
  opposite = jax.tree.map(np.negative, params)
  assert set(cosine_distances(params, scaled).values()) == {0.0}
  assert cosine_distances(params, opposite)[1, 'wd'] == pytest.approx(2)


def test_scanned_layers_give_what_a_loop_gives():
  before = make_params(CONFIGS['llama'], 0)
  after = make_params(CONFIGS['llama'], 1, like=before)
  looped = cosine_distances(before, after)
  assert cosine_distances(
      jax.tree.map(jnp.asarray, interop.stack_layers(before)), after
  ) == looped
  assert looped[0, 'wq'] != looped[1, 'wq']


def test_ten_layers_are_in_their_order():
  layer = {'mlp': {'wo': {'kernel': np.eye(2)}}}
  params = {f'h_{i}': layer for i in range(12)}
  assert [i for i, _ in cosine_distances(params, params)] == list(range(12))


def test_zeros_are_counted_in_hidden_matrices_only():
  params = make_params(CONFIGS['gpt'], 0)
  thin = jax.tree_util.tree_map_with_path(
      lambda path, x: np.where(np.arange(x.size).reshape(x.shape) % 4, 0, x)
      if path_name(path).startswith('h_') else 0 * x, params
  )
  assert share_of_zeros(params) == 0
  assert share_of_zeros(thin) == share_of_zeros(interop.stack_layers(thin))
  assert share_of_zeros(thin) == 0.75


def refuse(message, before, after):
  with pytest.raises(ValueError, match=message) as caught:
    cosine_distances(before, after)
  text = str(caught.value)
  assert '\n' not in text and text.endswith('.')


def test_other_models_are_refused_by_their_first_differing_leaf():
  gpt = make_params(CONFIGS['gpt'], 0)
  wider = make_params(GPTConfig(23, 3, 2, 16, 32, 8), 0)
  refuse(
      r'h_0/mlp/wi/bias has shape \[24\] before and shape \[32\] after', gpt,
      wider,
  )
  deeper = make_params(GPTConfig(23, 4, 2, 16, 24, 8), 0)
  refuse(r'h_3/\S+ has none before and shape \[16\] after', gpt, deeper)
  refuse('different models', gpt, make_params(CONFIGS['llama'], 0))
  refuse('have no hidden matrix', {'w': np.eye(2)}, {'w': np.eye(2)})


@pytest.mark.parametrize('value, length', [(0, '0'), (np.nan, 'nan')])
def test_matrices_without_a_direction_are_refused(value, length):
  params = make_params(CONFIGS['gpt'], 0)
  other = make_params(CONFIGS['gpt'], 0)
  other['h_1']['attn']['wv']['kernel'][:] = value
  refuse(f'h_1/attn/wv/kernel has no direction: its length is {length}',
         params, other)


def test_every_module_has_the_papers_name():
  assert MODULES == {m: f'W_{m[1].upper()}' for m in MODULES}
