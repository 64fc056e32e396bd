"""`where` on the parameter trees of other people's training."""

import logging
import pathlib
import re

from host_trees import HOST_TREES
import jax
import jax.numpy as jnp
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.trees import path_name

GUIDE = pathlib.Path(__file__).parents[1] / 'experiments/guides/hosts.md'
CASES = [
    pytest.param(name, variables, id=name + '-variables' * variables)
    for name, tree in HOST_TREES.items()
    for variables in ([False, True] if tree.nnx else [False])
]


@pytest.fixture(autouse=True)
def forget_warnings():
  selection._warn_once.cache_clear()


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
    chosen = set(selected(spdf.hidden_matrices, params))
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


@pytest.mark.parametrize(
    'name', [
        'maxtext',
        pytest.param('tunix_gemma', marks=pytest.mark.slow),
        pytest.param('levanter', marks=pytest.mark.slow),
        pytest.param('linen_moe', marks=pytest.mark.slow),
    ]
)
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
