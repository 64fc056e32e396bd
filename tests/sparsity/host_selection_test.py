"""`where` on the parameter trees of other training frameworks.

Shapes are small; layouts and names are those of the hosts, in
`host_trees.json`. Sources:

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

import json
import logging
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selection_report
from spdf_jax.sparsity.trees import by_name

GUIDE = pathlib.Path(__file__).parents[2] / 'experiments/guides/hosts.md'
TREES = pathlib.Path(__file__).with_name('host_trees.json')
# Shape and kind of every leaf, by path. Braces in a path denote two layers.
# The kind of a hidden matrix has a letter per axis: `i` for inputs, `o` for
# outputs, `l` for layers that are independent of each other. Norms and biases
# are vectors; heads, routers, embeddings, adapters and stems stay dense.
HOSTS = {
    host: {
        path.format(i): (tuple(shape), kind)
        for path, (shape, kind) in leaves.items()
        for i in range(2 if '{}' in path else 1)
    }
    for host, leaves in json.loads(TREES.read_text()).items()
}
# The leaves of these are NNX variables, which add `value` to their paths.
CASES = [
    pytest.param(host, variables, id=host + '-variables' * variables)
    for host in HOSTS
    for variables in range(2 if host.startswith(('easydel', 'tunix')) else 1)
]


def hidden(host):
  """Returns the axes of the hidden matrices, by path."""
  return {
      path: kind for path, (_, kind) in HOSTS[host].items()
      if kind not in ('dense', 'vector')
  }


def params_of(host, variables=False):
  """Returns the tree of shapes, its leaves below `value` if `variables`."""
  tree = {}
  for path, (shape, _) in HOSTS[host].items():
    *parents, name = path.split('/') + ['value'] * variables
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return tree


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
  return {
      path.removesuffix('/value'): axes for path, axes in zip(
          by_name(params), selection.select(where, params)
      ) if axes
  }


def letters(axes, rank):
  """Returns a letter per axis, as `hidden` does."""
  return ''.join(
      'i' if n in axes.reduction else 'o' if n in axes.output else 'l'
      for n in range(rank)
  )


@pytest.mark.parametrize('host, variables', CASES)
def test_the_default_selects_all_hidden_matrices_or_warns(
    host, variables, caplog
):
  params = params_of(host, variables)
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.75), key=0)
  try:
    chosen = set(selected(spdf.where.hidden_matrices, params))
    with caplog.at_level(logging.WARNING, 'spdf_jax'):
      jax.eval_shape(tx.init, params)
  except ValueError as error:
    assert 'per_head' in str(error)
    return
  others = chosen - set(hidden(host))
  assert not others, 'it selects a head, a router, a norm or the like'
  assert chosen == set(hidden(host)) or caplog.records


@pytest.mark.parametrize('host, variables', CASES)
def test_the_guide_selects_the_hidden_matrices_and_nothing_else(
    host, variables, recommended
):
  chosen = selected(recommended[host], params_of(host, variables))
  assert {
      path: letters(axes, len(HOSTS[host][path][0]))
      for path, axes in chosen.items()
  } == hidden(host)


@pytest.mark.parametrize('host', [
    'maxtext', pytest.param('linen_moe', marks=pytest.mark.slow),
])
def test_models_of_other_frameworks_keep_exact_counts(host, recommended):
  tx = spdf.sparsify(
      optax.sgd(0.1), spdf.static(0.75), where=recommended[host], key=0
  )
  mask = jax.jit(lambda: spdf.get_mask(tx.init(jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), params_of(host)
  ))))()
  for path, kept in by_name(mask).items():
    shape, axes = HOSTS[host][path]
    inside = tuple(i for i, axis in enumerate(axes) if axis != 'l')
    size = math.prod(shape[i] for i in inside)
    assert set(kept.sum(inside).ravel().tolist()) == {size // 4}, path


def test_nanodo_takes_few_lines():
  section = GUIDE.read_text().split('## nanodo')[1].split('## ')[0]
  changed = [
      line for line in section.splitlines() if line.startswith(('+', '-'))
  ]
  assert 0 < len(changed) <= 6
