# SPDX-License-Identifier: Apache-2.0
"""Combinators that build algorithms from algorithms."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import fnmatch
import functools
import operator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import names
from spdf_jax.sparsity import initial_masks
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms import algorithm
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.masks import MaskMaker

PyTree = Any


@names.printed_as_call
def join(
    algorithms: Sequence[Algorithm],
    boundaries: Sequence[int],
    enter: MaskMaker | str = 'magnitude',
) -> Algorithm:
  """Applies algorithms one after the other, e.g. sparse and then dense.

  `algorithms[i + 1]` begins at step `boundaries[i]` and counts its steps from
  there. At a boundary, `enter` makes a new mask from the current weights, with
  the initial sparsity and the structure of the algorithm that begins. By
  default, a sparser algorithm prunes by magnitude, and a denser one keeps all
  kept weights and revives pruned weights at random. Boundary steps require
  dense gradients, so that revived weights receive a gradient at their first
  step.

  Revived weights start with zero moments: under Adam with b2 = 0.999 their
  first updates are several times the learning rate. `with_age` counts their
  steps from the boundary; warming up the learning rate again, or resetting the
  moments with `reset_state`, changes the updates of all weights.

  Args:
    algorithms: The algorithms, in order.
    boundaries: Increasing steps >= 1, at each of which the next algorithm
      begins.
    enter: Function that makes the masks at boundaries: `(key, params,
      sparsities) -> mask`, such as those of `spdf_jax.init`, or its name. It
      must also accept `structure=` if an algorithm has a structure.

  Returns:
    The algorithm.

  Raises:
    ValueError: the boundaries are not increasing steps >= 1, their number is
      not one less than the number of algorithms, or `enter` is unknown.

  References:
    Cerebras, Variable Sparse Pre-training and Dense Fine-tuning, 2023

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax import dense, static
    >>> variable = join([static(0.5), dense()], [62_500])
    >>> params = {'w': jnp.ones((1, 2, 2))}
    >>> [variable.sparsity_at(t, params) for t in (62_499, 62_500)]
    [{'w': 0.5}, {'w': 0.0}]
  """
  algorithms = tuple(algorithms)
  enter = initial_masks.init_of(enter, 'enter')
  boundaries = schedules.check_boundaries(boundaries)
  if len(algorithms) != len(boundaries) + 1 or 0 in tuple(boundaries):
    raise ValueError(
        f'join got {len(algorithms)} algorithms and boundaries '
        f'{list(boundaries)}; give one or more algorithms, and one boundary '
        'fewer, each at step 1 or later.'
    )
  starts = (0, *boundaries)
  table = np.asarray(boundaries, np.int32)

  def member_at(count):
    if isinstance(count, int):
      return int(np.searchsorted(table, count, side='right'))
    return jnp.sum(count >= table)

  def at_boundary(count):
    if isinstance(count, int):
      return count in boundaries
    return jnp.any(jnp.asarray(count) == table)

  def choose(flags, count):
    if isinstance(count, int):
      return flags[member_at(count)]
    return jnp.stack([jnp.asarray(flag) for flag in flags])[member_at(count)]

  def sparsity_at(count, params):
    i = member_at(count)
    return algorithms[i].sparsity_at(count - starts[i], params)

  def update(key, count, mask, params, grads, *state):
    def branch(i):
      member, start = algorithms[i], starts[i]
      own = [_own(i, *state)] if member.init_state is not None else []
      entered = lambda: algorithm.mask_by(member, enter, key, params)
      updated = lambda: member.update(
          key, count - start, mask, params, grads, *own
      )
      if i == 0:
        return updated
      if member.update_at(count - start) is False:
        return entered
      return lambda: jax.lax.cond(count == start, entered, updated)

    branches = [branch(i) for i in range(len(algorithms))]
    return jax.lax.switch(member_at(count), branches)

  def update_at(count):
    members = [m.update_at(count - s) for m, s in zip(algorithms, starts)]
    if not table.size:
      return members[0]
    return at_boundary(count) | choose(members, count)

  def dense_grads_at(count):
    members = [m.dense_grads_at(count - s) for m, s in zip(algorithms, starts)]
    return at_boundary(count) | choose(members, count)

  def sparsity_changes_at(count):
    members = [
        algorithm.sparsity_changes_at(m, count - s)
        for m, s in zip(algorithms, starts)
    ]
    return at_boundary(count) | choose(members, count)

  def skip_step_at(count):
    members = [m.skip_step_at(count - s) for m, s in zip(algorithms, starts)]
    if all(flag is False for flag in members):
      return False
    return choose(members, count)

  def init_state(mask, params):
    return _merge_states(
        (i, member.init_state(mask, params))
        for i, member in enumerate(algorithms) if member.init_state is not None
    )

  def update_state(count, state, mask, params, grads):
    def next_state(i, member, start):
      own = _own(i, state)
      begin = lambda: member.init_state(mask, params)
      change = lambda: own if member.update_state is None else (
          member.update_state(count - start, own, mask, params, grads)
      )
      if not table.size:
        return change()
      # A later member has the state with which it begins until after its start.
      return jax.lax.cond(
          (member_at(count) == i) & (count > start if i else True), change,
          lambda: jax.lax.cond(count == start, begin, lambda: own),
      )

    return _merge_states(
        (i, next_state(i, member, start))
        for i, (member, start) in enumerate(zip(algorithms, starts))
        if member.init_state is not None
    )

  has_state = any(member.init_state is not None for member in algorithms)
  return Algorithm(
      sparsity_at, algorithms[0].init, update, update_at, dense_grads_at,
      skip_step_at,
      sparsity_changes_at=sparsity_changes_at,
      mask_by=lambda *args: algorithm.mask_by(algorithms[0], *args),
      init_state=init_state if has_state else None,
      update_state=update_state if has_state else None,
      for_kernels=_members_for_kernels(
          algorithms, lambda members: join(members, boundaries, enter)
      ),
  )


def _members_for_kernels(
    members: Iterable[Algorithm], make: Callable[[list[Algorithm]], Algorithm]
) -> Callable[..., Algorithm] | None:
  if all(member.for_kernels is None for member in members):
    return None
  return lambda kernels: make(
      [algorithm.for_kernels(member, kernels) for member in members]
  )


def _merge_states(
    states: Iterable[tuple[Any, Mapping[str, PyTree]]]
) -> dict[str, PyTree]:
  """Merges the states of members, with the members' names as prefixes."""
  return {
      f'{member}.{name}': tree
      for member, state in states for name, tree in state.items()
  }


def _own(member: Any, state: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """Returns the state of a member."""
  start = f'{member}.'
  return {
      name.removeprefix(start): tree
      for name, tree in state.items() if name.startswith(start)
  }


Patterns = Sequence[tuple[str, str]]
Labels = Patterns | Callable[[str, Any], str] | PyTree

_is_none = lambda x: x is None


@names.printed_as_call
def partition(
    algorithms: Mapping[str, Algorithm], labels: Labels
) -> Algorithm:
  """Applies different algorithms to sparsified leaves, by label.

  Each algorithm receives the leaves of its label, and `None` for the others, so
  `erk` and `model_wide` distribute a sparsity over the leaves of one label. If
  an algorithm replaces gradient steps by mask updates, as does
  `rigl(skip_gradient_step=True)`, it does so for all leaves.

  To freeze leaves, use `optax.partition` around `sparsify`: this function only
  chooses their masks.

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
    ValueError: there are no algorithms; or, on `init` of the optimizer, if a
      leaf has no label or one without an algorithm, an algorithm has no leaf,
      or a pattern is not the first match of any leaf.

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

  def restricted(label, params, *trees):
    """Returns trees with the leaves of one label, and None for the others."""
    own = [here == label for here in _labels_of(labels, params, algorithms)]
    treedef: Any = jax.tree.structure(params, is_leaf=_is_none)
    return own, [
        treedef.unflatten(
            x if mine else None for x, mine in
            zip(treedef.flatten_up_to(tree), own)
        )
        for tree in (params, *trees)
    ]

  def per_leaf(act, params, *trees):
    """Merges the results of `act(label, params, *trees)` for all labels."""
    treedef: Any = jax.tree.structure(params, is_leaf=_is_none)
    merged = [None] * treedef.num_leaves
    for label in algorithms:
      own, given = restricted(label, params, *trees)
      result = treedef.flatten_up_to(act(label, *given))
      merged = [x if mine else m for x, mine, m in zip(result, own, merged)]
    return treedef.unflatten(merged)

  def sparsity_at(count, params):
    def sparsities(label, params):
      target = algorithms[label].sparsity_at(count, params)
      if isinstance(target, ModelWide):
        return jax.tree.map(lambda p: target.sparsity, params)
      return target

    return per_leaf(sparsities, params)

  def init(key, params):
    # All members share the key, because masks fold in the paths of leaves.
    return per_leaf(
        lambda label, params: algorithms[label].init(key, params), params
    )

  def mask_by_members(maker, key, params):
    return per_leaf(
        lambda label, params: algorithm.mask_by(
            algorithms[label], maker, key, params
        ),
        params,
    )

  def update(key, count, mask, params, grads, *state):
    times = [member.update_at(count) for member in algorithms.values()]
    alone = sum(now is not False for now in times) == 1

    def update_member(label, params, mask, grads):
      member = algorithms[label]
      own = [_own(label, *state)] if member.init_state is not None else []
      now = member.update_at(count)
      if now is False:
        return mask
      updated = lambda: member.update(key, count, mask, params, grads, *own)
      # `update` is called only at steps of some member's updates.
      return updated() if alone else jax.lax.cond(now, updated, lambda: mask)

    return per_leaf(update_member, params, mask, grads)

  def init_state(mask, params):
    def first_state(label, member):
      _, (own_params, own_mask) = restricted(label, params, mask)
      return member.init_state(own_mask, own_params)

    return _merge_states(
        (label, first_state(label, member))
        for label, member in algorithms.items() if member.init_state is not None
    )

  def update_state(count, state, mask, params, grads):
    def next_state(label, member):
      own = _own(label, state)
      if member.update_state is None:
        return own
      _, (p, m, g) = restricted(label, params, mask, grads)
      return member.update_state(count, own, m, p, g)

    return _merge_states(
        (label, next_state(label, member))
        for label, member in algorithms.items() if member.init_state is not None
    )

  def any_of(at_of):
    def at(count):
      flags = [at_of(m, count) for m in algorithms.values()]
      possible = [flag for flag in flags if flag is not False]
      return functools.reduce(operator.or_, possible) if possible else False

    return at

  members = algorithms.values()
  has_state = any(member.init_state is not None for member in members)
  return Algorithm(
      sparsity_at=sparsity_at,
      init=init,
      update=update,
      update_at=any_of(lambda m, count: m.update_at(count)),
      dense_grads_at=any_of(lambda m, count: m.dense_grads_at(count)),
      skip_step_at=any_of(lambda m, count: m.skip_step_at(count)),
      sparsity_changes_at=any_of(algorithm.sparsity_changes_at),
      mask_by=mask_by_members,
      init_state=init_state if has_state else None,
      update_state=update_state if has_state else None,
      for_kernels=_members_for_kernels(
          members, lambda bound: partition(dict(zip(algorithms, bound)), labels)
      ),
  )


def _labels_of(
    labels: Labels, params: PyTree, algorithms: Mapping[str, Algorithm]
) -> list[str | None]:
  """Returns the label of every leaf, `None` where it is not sparsified."""
  paths_and_leaves = jax.tree_util.tree_leaves_with_path(
      params, is_leaf=_is_none
  )
  leaves = [leaf for _, leaf in paths_and_leaves]
  names = [trees.path_name(path) for path, _ in paths_and_leaves]
  if _are_patterns(labels):
    chosen = _by_pattern(labels, names, leaves)
  elif callable(labels):
    chosen = [
        None if leaf is None else labels(name, leaf)
        for name, leaf in zip(names, leaves)
    ]
  else:
    chosen = _from_tree(labels, params)
  chosen = [None if p is None else label for p, label in zip(leaves, chosen)]
  for name, leaf, label in zip(names, leaves, chosen):
    if leaf is not None and label not in algorithms:
      known = ', '.join(map(repr, algorithms))
      raise ValueError(
          f'labels gives {name!r} the label {label!r}, for which algorithms '
          f'has no entry; add one, or give the leaf one of the labels {known}.'
      )
  unused = [label for label in algorithms if label not in chosen]
  # `optax.tree.map_params` passes a tree without leaves as a placeholder.
  if unused and any(leaf is not None for leaf in leaves):
    raise ValueError(
        f'algorithms has an entry {unused[0]!r}, but labels gives that label '
        'to none of the sparsified leaves; remove the entry, or give the label '
        f'to some of: {_listed(names, leaves)}.'
    )
  return chosen


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
  labels = []
  for name, leaf in zip(names, leaves):
    matching = [
        i for i, (pattern, _) in enumerate(patterns)
        if leaf is not None and fnmatch.fnmatchcase(name, pattern)
    ]
    labels.append(patterns[matching[0]][1] if matching else None)
    matched.update(matching)
    used.update(matching[:1])
    if not matching and leaf is not None:
      raise ValueError(
          f'no pattern matches the sparsified leaf {name!r}; add a pattern for '
          "it, or '*' as the last pattern."
      )
  if any(leaf is not None for leaf in leaves):
    for i, (pattern, _) in enumerate(patterns):
      if i in matched - used:
        raise ValueError(
            f'the patterns before {pattern!r} match all of its leaves; put '
            f'{pattern!r} before them, or remove it.'
        )
      if i not in matched:
        raise ValueError(
            f'the pattern {pattern!r} matches none of the sparsified leaves; '
            'remove it, or let it match some of: '
            f'{_listed(names, leaves)}.'
        )
  return labels


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
