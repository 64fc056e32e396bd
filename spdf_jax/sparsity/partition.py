# SPDX-License-Identifier: Apache-2.0
"""`partition`: an algorithm that applies one algorithm per label of leaves."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import fnmatch
import functools
import operator
from typing import Any
from typing import TypeGuard

import jax

from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.combinators import mask_by
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.paths import path_name

PyTree = Any
Patterns = Sequence[tuple[str, str]]
Labels = Patterns | Callable[[str, Any], str] | PyTree

_is_none = lambda x: x is None


def partition(
    algorithms: Mapping[str, Algorithm], labels: Labels
) -> Algorithm:
  """Applies different algorithms to sparsified leaves, by label.

  Each member receives its own leaves, and `None` for the others, so total
  sparsities such as those of `erk` and `model_wide` are totals over the leaves
  of one label. If a member replaces gradient steps by mask updates, it does so
  for all leaves.

  Freeze leaves that are not trained with `optax.partition` around `sparsify`.

  Args:
    algorithms: The algorithm of each label.
    labels: The label of each sparsified leaf: pairs of a pattern and a label,
      where the first pattern that matches the whole path applies (shell
      patterns; `*` also matches `/`); or `(path, leaf) -> label`, with the leaf
      as `[layers, inputs, outputs]`; or a tree of labels that is a prefix of
      the parameters.

  Returns:
    The algorithm.

  Raises:
    ValueError: there are no algorithms; or, once the parameters are known, a
      leaf has no label or one without an algorithm, an algorithm has no leaf,
      or a pattern is the first match of no leaf.

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax import dense, static
    >>> algorithm = partition(
    ...     {'attention': dense(), 'rest': static(0.75)},
    ...     [('*/attn/*', 'attention'), ('*', 'rest')],
    ... )
    >>> w = jnp.ones((1, 4, 4))
    >>> params = {'h_0': {'attn': {'wq': w}, 'mlp': {'wi': w}}}
    >>> algorithm.sparsity_at(0, params)
    {'h_0': {'attn': {'wq': 0.0}, 'mlp': {'wi': 0.75}}}
  """
  algorithms = dict(algorithms)
  if not algorithms:
    raise ValueError(
        'algorithms is empty; give an algorithm for every label.'
    )

  def per_leaf(act, params, *trees):
    """Merges what `act(member, params, *trees)` returns for every member."""
    found = _labels_of(labels, params, algorithms)
    treedef: Any = jax.tree.structure(params, is_leaf=_is_none)
    columns = [treedef.flatten_up_to(tree) for tree in (params, *trees)]
    merged = [None] * treedef.num_leaves
    for label, member in algorithms.items():
      own = [here == label for here in found]
      restricted = [
          treedef.unflatten(x if mine else None for x, mine in zip(column, own))
          for column in columns
      ]
      result = treedef.flatten_up_to(act(member, *restricted))
      merged = [x if mine else m for x, mine, m in zip(result, own, merged)]
    return treedef.unflatten(merged)

  def sparsity_at(count, params):
    def sparsities(member, params):
      found = member.sparsity_at(count, params)
      if isinstance(found, ModelWide):
        return jax.tree.map(lambda p: found.sparsity, params)
      return found

    return per_leaf(sparsities, params)

  def init(key, params):
    # All members share the key, because masks fold in the paths of leaves.
    return per_leaf(lambda member, params: member.init(key, params), params)

  def mask_by_members(maker, key, params):
    return per_leaf(
        lambda member, params: mask_by(member, maker, key, params), params
    )

  def update(key, count, mask, params, grads):
    times = [member.update_at(count) for member in algorithms.values()]
    alone = sum(now is not False for now in times) == 1

    def update_member(member, params, mask, grads):
      now = member.update_at(count)
      if now is False:
        return mask
      if alone:  # `update` is called only at steps of this member's updates.
        return member.update(key, count, mask, params, grads)
      return jax.lax.cond(
          now,
          lambda: member.update(key, count, mask, params, grads),
          lambda: mask,
      )

    return per_leaf(update_member, params, mask, grads)

  def any_of(field):
    def at(count):
      flags = [getattr(m, field)(count) for m in algorithms.values()]
      possible = [flag for flag in flags if flag is not False]
      return functools.reduce(operator.or_, possible) if possible else False

    return at

  return Algorithm(
      sparsity_at=sparsity_at,
      init=init,
      update=update,
      update_at=any_of('update_at'),
      dense_grads_at=any_of('dense_grads_at'),
      skip_step_at=any_of('skip_step_at'),
      mask_by=mask_by_members,
  )


def _labels_of(
    labels: Labels, params: PyTree, algorithms: Mapping[str, Algorithm]
) -> list[str | None]:
  """Returns the label of every leaf, `None` where it is not sparsified."""
  paths_and_leaves = jax.tree_util.tree_leaves_with_path(
      params, is_leaf=_is_none
  )
  leaves = [leaf for _, leaf in paths_and_leaves]
  names = [path_name(path) for path, _ in paths_and_leaves]
  if _are_patterns(labels):
    found = _by_pattern(labels, names, leaves)
  elif callable(labels):
    found = [
        None if leaf is None else labels(name, leaf)
        for name, leaf in zip(names, leaves)
    ]
  else:
    found = _from_tree(labels, params)
  found = [None if p is None else label for p, label in zip(leaves, found)]
  for name, leaf, label in zip(names, leaves, found):
    if leaf is not None and label not in algorithms:
      known = ', '.join(map(repr, algorithms))
      raise ValueError(
          f'labels gives {name!r} the label {label!r}, for which algorithms '
          f'has no entry; there are {known}.'
      )
  unused = [label for label in algorithms if label not in found]
  # `optax.tree.map_params` passes a tree without leaves as a placeholder.
  if unused and any(leaf is not None for leaf in leaves):
    raise ValueError(
        f'algorithms has an entry {unused[0]!r}, but labels gives that label '
        'to none of the sparsified leaves; they are '
        f'{_listed(names, leaves)}.'
    )
  return found


def _are_patterns(labels: Labels) -> TypeGuard[Patterns]:
  return isinstance(labels, (list, tuple)) and all(
      isinstance(pair, (list, tuple))
      and len(pair) == 2
      and all(isinstance(text, str) for text in pair)
      for pair in labels
  )


def _by_pattern(
    patterns: Patterns, names: list[str], leaves: list[Any]
) -> list[str | None]:
  """Returns the label of the first pattern that matches each name."""
  matched, used = set(), set()
  found = []
  for name, leaf in zip(names, leaves):
    matching = [
        i for i, (pattern, _) in enumerate(patterns)
        if leaf is not None and fnmatch.fnmatchcase(name, pattern)
    ]
    found.append(patterns[matching[0]][1] if matching else None)
    matched.update(matching)
    used.update(matching[:1])
    if not matching and leaf is not None:
      raise ValueError(
          f'no pattern matches the sparsified leaf {name!r}; add one for it, '
          "or '*' as the last."
      )
  if any(leaf is not None for leaf in leaves):
    for i, (pattern, _) in enumerate(patterns):
      if i in matched - used:
        raise ValueError(
            f'the patterns before {pattern!r} match all of its leaves; put it '
            'before them, or remove it.'
        )
      if i not in matched:
        raise ValueError(
            f'the pattern {pattern!r} matches none of the sparsified leaves; '
            f'they are {_listed(names, leaves)}.'
        )
  return found


def _from_tree(labels: PyTree, params: PyTree) -> list[Any]:
  try:
    full = jax.tree.broadcast(labels, params, is_leaf=_is_none)
    structure: Any = jax.tree.structure(params, is_leaf=_is_none)
    return structure.flatten_up_to(full)
  except (ValueError, TypeError) as error:
    raise ValueError(
        'labels is a tree that does not fit the parameters; give it the '
        f'structure {jax.tree.structure(params)} or a prefix of it, or pairs '
        'of a pattern and a label.'
    ) from error


def _listed(names: list[str], leaves: list[Any]) -> str:
  return ', '.join(n for n, leaf in zip(names, leaves) if leaf is not None)
