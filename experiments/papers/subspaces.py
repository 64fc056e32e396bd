"""Parameter subspaces: rotation of the hidden matrices by training."""

from collections.abc import Mapping, Sequence
import csv
import io
import pathlib
import re
from typing import Any

import jax
import numpy as np

from experiments.scores import language_models
from spdf_jax import interop
from spdf_jax.runs import markdown
from spdf_jax.sparsity import trees
from spdf_jax.training.checkpoints import workdir

PyTree = Any
Distances = Mapping[tuple[int, str], float]

MODULES = {
    'wq': 'W_Q', 'wk': 'W_K', 'wv': 'W_V', 'wd': 'W_D', 'wi': 'W_I',
    'wg': 'W_G', 'wo': 'W_O',
}
"""The paper's names of the hidden matrices, in the order of its section 3.4:
query, key, value, attention output, intermediate, gate (of a Llama), output."""

_MATRIX = re.compile(r'h_(\d+)/(?:attn|mlp)/(\w+)/kernel')


def cosine_distances(
    before: PyTree, after: PyTree
) -> dict[tuple[int, str], float]:
  """Computes the cosine distance between two states of every hidden matrix.

  With a and b a matrix before and after, flattened to vectors, the distance is
  `1 - a·b / (|a| |b|)`: 0 for equal directions, 1 for orthogonal ones, 2 for
  opposite ones. It is computed as `|a / |a| - b / |b||² / 2` in float64, which
  is equal, and avoids cancellation where a and b are close.

  Args:
    before: Parameters of a GPT or Llama of `spdf_jax.models`, with scanned
      layers or not.
    after: Parameters of the same model, with scanned layers or not.

  Returns:
    Distances by layer, from 0, and module, a key of `MODULES`, in this order.

  Raises:
    ValueError: the models differ, or a matrix has no direction because it is
      all zero or not finite.

  References:
    Thangarasa et al. 2023, "SPDF", section 3.4, figures 3 and 4.

  Example:
    >>> model = lambda w: {'h_0': {'attn': {'wq': {'kernel': np.array([w])}}}}
    >>> cosine_distances(model([0.0, 2.0]), model([0.0, -1.0]))
    {(0, 'wq'): 2.0}
  """
  before, after = _leaves(before), _leaves(after)
  _refuse_other_models(before, after)
  distances = {}
  for path, matrix in hidden_matrices(before).items():
    layer, module = _MATRIX.fullmatch(path).groups()
    difference = _direction(path, matrix) - _direction(path, after[path])
    distances[int(layer), module] = float(np.vdot(difference, difference)) / 2
  order = list(MODULES)
  return dict(sorted(
      distances.items(), key=lambda item: (item[0][0], order.index(item[0][1]))
  ))


def hidden_matrices(params: PyTree) -> dict[str, np.ndarray]:
  """Returns the hidden matrices of a model by path, with layers unstacked.

  Args:
    params: Parameters of a GPT or Llama of `spdf_jax.models`, with scanned
      layers or not.

  Returns:
    Arrays by path, such as `'h_0/attn/wq/kernel'`.

  Raises:
    ValueError: there are none.

  Example:
    >>> list(hidden_matrices({'h': {'mlp': {'wo': {'kernel': np.ones((2, 3, 3))
    ... }}}}))
    ['h_0/mlp/wo/kernel', 'h_1/mlp/wo/kernel']
  """
  matrices = {
      path: x for path, x in _leaves(params).items() if _MATRIX.fullmatch(path)
  }
  if not matrices:
    raise ValueError(
        'the parameters have no hidden matrix, such as h_0/attn/wq/kernel; '
        'give those of a GPT or Llama of spdf_jax.models.'
    )
  return matrices


def weight_sparsity(params: PyTree) -> float:
  """Returns the fraction of zeros in a model's hidden matrices.

  Example:
    >>> weight_sparsity({'h_0': {'mlp': {'wi': {'kernel': np.eye(4)}}}})
    0.75
  """
  matrices = hidden_matrices(params).values()
  kept = sum(int(np.count_nonzero(x)) for x in matrices)
  return 1 - kept / sum(x.size for x in matrices)


def module_means(distances: Distances) -> dict[str, float]:
  """Averages distances over layers.

  Args:
    distances: Result of `cosine_distances`.

  Returns:
    Mean distances by module, in the order of `MODULES`.

  Example:
    >>> module_means({(0, 'wd'): 0.25, (1, 'wd'): 0.75})
    {'wd': 0.5}
  """
  columns = {m: [d for (_, n), d in distances.items() if n == m]
             for m in MODULES}
  return {m: float(np.mean(values)) for m, values in columns.items() if values}


def format_distances(names: Sequence[str], pairs: Sequence[Distances]) -> str:
  """Formats the mean distance of every module, a row for each pair.

  Example:
    >>> print(format_distances(['dense'], [{(0, 'wq'): 0.5, (0, 'wo'): 0.01}]))
    mean over layers       W_Q       W_O
    dense             5.00e-01  1.00e-02
  """
  means = [module_means(distances) for distances in pairs]
  modules = [m for m in MODULES if any(m in mean for mean in means)]
  rows = [['mean over layers', *(MODULES[m] for m in modules)]]
  for name, mean in zip(names, means):
    rows.append([name, *(
        f'{mean[m]:.2e}' if m in mean else markdown.MISSING for m in modules
    )])
  return markdown.align(rows, '<' + '>' * len(modules))


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
  return trees.by_name(interop.unstack_layers(jax.tree.map(np.asarray, tree)))


def _direction(path: str, matrix: np.ndarray) -> np.ndarray:
  vector = np.asarray(matrix, np.float64).ravel()
  length = np.linalg.norm(vector)
  if not 0 < length < np.inf:
    raise ValueError(
        f'{path} has no direction: its length is {length:g}; give parameters '
        'that are finite and not all zero.'
    )
  return vector / length


def _refuse_other_models(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> None:
  shape = lambda tree, path: (
      f'shape {list(tree[path].shape)}' if path in tree else 'none'
  )
  for path in [*before, *after]:
    if shape(before, path) != shape(after, path):
      raise ValueError(
          f'before and after are different models: {path} has '
          f'{shape(before, path)} before and {shape(after, path)} after; give '
          'two checkpoints of one model.'
      )


def measure_pairs(
    before: Sequence[str], after: Sequence[str], names: Sequence[str] = ()
) -> dict[str, Distances]:
  """Measures the cosine distances of pairs of checkpoints.

  Args:
    before: Checkpoints: `'WORKDIR'`, `'WORKDIR@PHASE'` or a Hugging Face
      directory. A single one is compared with every `after`.
    after: Checkpoints, as many as in `before`, or any number for a single one.
    names: Names of the pairs; by default the checkpoints, and the sparsity of
      the hidden matrices before.

  Returns:
    Results of `cosine_distances` by name.

  Raises:
    ValueError: the numbers of checkpoints or names differ; names are equal;
      checkpoints are missing; or those of a pair are of different models.
  """
  if len(before) == 1:
    before = list(before) * len(after)
  if len(before) != len(after) or not after:
    raise ValueError(
        f'before has {len(before)} checkpoints and after {len(after)}; give '
        'equal numbers, or a single one before.'
    )
  if names and len(names) != len(after):
    raise ValueError(
        f'names has {len(names)} entries for {len(after)} pairs; give a name '
        'for each, or none.'
    )
  if len(set(names)) < len(names):
    raise ValueError(
        f'names has {list(names)}; give each pair a name of its own.'
    )
  missing = [
      source for source in dict.fromkeys([*before, *after])
      if not pathlib.Path(workdir.split_source(source)[0]).is_dir()
  ]
  if missing:
    raise ValueError(
        f'no checkpoint at {", ".join(missing)}; give workdirs of runs or '
        'Hugging Face directories.'
    )
  distances = {}
  for i, (one, other) in enumerate(zip(before, after)):
    params = language_models.read_model(one)[1]
    name = names[i] if names else (
        f'{one} to {other}, '
        f'{markdown.percent(weight_sparsity(params))} zeros'
    )
    try:
      distances[name] = cosine_distances(
          params, language_models.read_model(other)[1]
      )
    except ValueError as error:
      raise ValueError(f'{one} and {other}: {error}') from error
  return distances


def as_csv(pairs: Mapping[str, Distances]) -> str:
  """Formats distances as CSV, a row for each, with layers counted from 1.

  Example:
    >>> print(as_csv({'dense': {(0, 'wq'): 0.25}}), end='')
    pair,layer,module,cosine_distance
    dense,1,W_Q,0.25
  """
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(['pair', 'layer', 'module', 'cosine_distance'])
  for name, distances in pairs.items():
    for (layer, module), distance in distances.items():
      writer.writerow([name, layer + 1, MODULES[module], distance])
  return text.getvalue()
