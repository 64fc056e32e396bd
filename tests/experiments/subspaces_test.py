"""Cosine distances agree with the definition, for all kinds of checkpoints."""

import csv
import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers import subspaces
from experiments.papers.subspace_plots import plot_distances
from experiments.papers.subspaces import cosine_distances
from experiments.papers.subspaces import weight_sparsity
from spdf_jax import interop
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models import model_of
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.checkpoints.files import write_params
from tests.refusals import refuse

pytestmark = pytest.mark.papers

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
  distances = cosine_distances(before, after)
  modules = ['wq', 'wk', 'wv', 'wd', 'wi', 'wg', 'wo']
  if kind == 'gpt':
    modules.remove('wg')
  assert list(distances) == [(i, m) for i in range(3) for m in modules]
  for (layer, module), distance in distances.items():
    part = 'attn' if module in ('wq', 'wk', 'wv', 'wd') else 'mlp'
    a, b = (t[f'h_{layer}'][part][module]['kernel'] for t in (before, after))
    assert distance == pytest.approx(angle(a, b), rel=1e-12)


def test_tiny_distances_keep_their_digits():
  before = make_params(CONFIGS['gpt'], 0)
  x = before['h_0']['mlp']['wi']['kernel'].astype(np.float64)
  moved = x + 1e-9 * np.random.default_rng(1).normal(size=x.shape)
  tree = lambda w: {'h_0': {'mlp': {'wi': {'kernel': w}}}}
  distance = cosine_distances(tree(x), tree(moved))[0, 'wi']
  # To second order the distance is half of the squared angle, of the part of
  # the step that is orthogonal to x.
  step = moved - x
  off = step - x * np.vdot(x, step) / np.vdot(x, x)
  expected = np.vdot(off, off) / np.vdot(x, x) / 2
  assert 1e-20 < expected < 1e-17
  assert distance == pytest.approx(expected, rel=1e-6)


def test_scanned_layers_give_what_a_loop_gives():
  before = make_params(CONFIGS['llama'], 0)
  after = make_params(CONFIGS['llama'], 1, like=before)
  looped = cosine_distances(before, after)
  assert cosine_distances(
      jax.tree.map(jnp.asarray, interop.stack_layers(before)), after
  ) == looped
  assert looped[0, 'wq'] != looped[1, 'wq']


def test_zeros_are_counted_in_hidden_matrices_only():
  params = make_params(CONFIGS['gpt'], 0)
  thin = jax.tree_util.tree_map_with_path(
      lambda path, x: np.where(np.arange(x.size).reshape(x.shape) % 4, 0, x)
      if path_name(path).startswith('h_') else 0 * x, params
  )
  assert weight_sparsity(params) == 0
  assert weight_sparsity(thin) == weight_sparsity(interop.stack_layers(thin))
  assert weight_sparsity(thin) == 0.75


def test_other_models_are_refused_by_their_first_differing_leaf():
  gpt = make_params(CONFIGS['gpt'], 0)
  wider = make_params(GPTConfig(23, 3, 2, 16, 32, 8), 0)
  deeper = make_params(GPTConfig(23, 4, 2, 16, 24, 8), 0)
  llama, other = make_params(CONFIGS['llama'], 0), {'w': np.eye(2)}
  for message, before, after in (
      (r'h_0/mlp/wi/bias has shape \[24\] before and shape \[32\] after', gpt,
       wider),
      (r'h_3/\S+ has none before and shape \[16\] after', gpt, deeper),
      ('different models', gpt, llama), ('have no hidden matrix', other, other),
  ):
    refuse(message, cosine_distances, before, after)


@pytest.mark.parametrize('value, length', [(0, '0'), (np.nan, 'nan')])
def test_matrices_without_a_direction_are_refused(value, length):
  params = make_params(CONFIGS['gpt'], 0)
  other = make_params(CONFIGS['gpt'], 0)
  other['h_1']['attn']['wv']['kernel'][:] = value
  refuse(f'h_1/attn/wv/kernel has no direction: its length is {length}',
         cosine_distances, params, other)


GPT = CONFIGS['gpt']


def save_run(workdir, config, params):
  model = {'preset': 'gpt2-small'} | dataclasses.asdict(config)
  write_params(workdir, params, {'model': model})
  return str(workdir)


def test_workdirs_and_hugging_face_folders_are_compared(tmp_path):
  pytest.importorskip('safetensors')
  before = make_params(GPT, 0)
  before['h_0']['attn']['wq']['kernel'][:8] = 0
  after = make_params(GPT, 1, like=before, scale=0.1)
  scanned = dataclasses.replace(GPT, scan_layers=True)
  run = save_run(tmp_path / 'run', scanned, interop.stack_layers(before))
  exported = str(tmp_path / 'hf')
  interop.save_hf(exported, GPT, after)
  direct = cosine_distances(before, after)
  pairs = subspaces.measure_pairs([run], [exported, run])
  assert [*pairs.values()] == [direct, dict.fromkeys(direct, 0.0)]
  zeros = 128 / (3 * (4 * 256 + 2 * 384))
  assert list(pairs)[0] == f'{run} to {exported}, {100 * zeros:.3g}% zeros'
  named = subspaces.measure_pairs([run], [exported], ['mine'])
  assert list(named) == ['mine']
  rows = list(csv.DictReader(io.StringIO(subspaces.as_csv(named))))
  assert len(rows) == 18
  assert rows[-1]['layer'] == '3' and rows[-1]['module'] == 'W_O'
  assert float(rows[-1]['cosine_distance']) == direct[2, 'wo']


def test_pairs_that_cannot_be_compared_are_refused(tmp_path):
  run = save_run(tmp_path / 'run', GPT, make_params(GPT, 0))
  wider = dataclasses.replace(GPT, d_ff=32)
  other = save_run(tmp_path / 'other', wider, make_params(wider, 0))
  empty = tmp_path / 'empty'
  empty.mkdir()
  for args, message in (
      (([run], ['nowhere', 'nix']), 'no checkpoint at nowhere, nix;'),
      (([run], [str(empty)]), 'names no checkpoint'),
      (([run, run], [other] * 3), 'before has 2 checkpoints and after 3'),
      (([run], [run, run], ['one']), 'names has 1 entries for 2 pairs'),
      (([run], [run, run], ['one', 'one']), 'each pair a name of its own'),
      (([run], [other]), r'run and .*other: .* h_0/mlp/wi/bias has shape '),
  ):
    refuse(message, subspaces.measure_pairs, *args)


def test_heatmaps_show_every_distance_on_one_scale():
  first = {(i, m): 0.01 * i for i in range(5) for m in ('wq', 'wo')}
  second = {(i, m): 0.1 for i in range(5) for m in ('wq', 'wg', 'wo')}
  del second[4, 'wg']
  figure = plot_distances(['dense', 'sparse'], [first, second])
  top, bottom = figure.axes[:2]
  assert [ax.get_title(loc='left') for ax in (top, bottom)] == [
      'dense', 'sparse'
  ]
  one, other = (ax.images[0] for ax in (top, bottom))
  np.testing.assert_array_equal(
      one.get_array(), 2 * [[0.0, 0.01, 0.02, 0.03, 0.04]]
  )
  assert np.ma.masked_invalid(other.get_array()).count() == 14
  assert one.get_clim() == other.get_clim() == (0, 0.1)
  assert [t.get_text() for t in bottom.get_yticklabels()] == [
      '$W_{Q}$', '$W_{G}$', '$W_{O}$'
  ]
  assert [t.get_text() for t in top.get_xticklabels()] == list('12345')
