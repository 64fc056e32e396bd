"""Pairs of checkpoints whose parameter subspaces are compared."""

from collections.abc import Mapping
from collections.abc import Sequence
import csv
import io
import pathlib

from experiments.papers import subspaces
from experiments.papers.subspaces import Distances
from experiments.scores import language_models
from spdf_jax.runs import markdown
from spdf_jax.training import workdir


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
  found = {}
  for i, (one, other) in enumerate(zip(before, after)):
    params = language_models.read_model(one)[1]
    name = names[i] if names else (
        f'{one} to {other}, '
        f'{markdown.percent(subspaces.weight_sparsity(params))} zeros'
    )
    try:
      found[name] = subspaces.cosine_distances(
          params, language_models.read_model(other)[1]
      )
    except ValueError as error:
      raise ValueError(f'{one} and {other}: {error}') from error
  return found


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
      writer.writerow([name, layer + 1, subspaces.MODULES[module], distance])
  return text.getvalue()
