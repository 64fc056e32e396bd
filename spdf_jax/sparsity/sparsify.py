# SPDX-License-Identifier: Apache-2.0
"""`sparsify`: a wrapper that adds sparse training to any optax optimizer."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax import packing
from spdf_jax.sparsity import age
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import revival
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selection_report
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import storage
from spdf_jax.sparsity import tracking
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms import algorithm as algorithms
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.revival import Revival
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.state import check_not_nested
from spdf_jax.sparsity.state import check_update
from spdf_jax.sparsity.state import SparsifyState

PyTree = Any


def sparsify(
    inner: optax.GradientTransformation,
    algorithm: Algorithm,
    *,
    where: Where | None = None,
    key: int | jax.Array,
    revive: Revival | None = None,
    track: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer to keep pruned weights at exactly zero.

  With the mask :math:`m_t` that `algorithm` computes at step :math:`t`,

  .. math::
    u_t, s_{t+1} = \mathrm{inner}(m_t \odot g_t,\ m_t \odot s_t,\
    m_t \odot p_t), \qquad
    \Delta p_t = \mathrm{where}(m_t,\ u_t,\ -p_t)

  with parameters :math:`p_t`, gradients :math:`g_t` and the state :math:`s_t`
  of `inner`, of which leaves like the parameters (moments, averages) are
  masked. So :math:`p_t + \Delta p_t` is exactly zero off the mask for any inner
  optimizer, and the moments of a weight that is revived are zero; `with_age`
  corrects their bias. An inner optimizer may add noise to gradients before
  their momentum; the moments of a revived weight then are those of one step.

  `sparsify` must be the last transformation that changes updates. Around it,
  these make pruned weights nonzero, and belong inside: `optax.chain` with a
  transformation after `sparsify` (`optax.scale`, `optax.ema`, noise),
  `optax.apply_every`, `optax.lookahead`, `optax.conditionally_transform`,
  `optax.contrib.mechanize` and `optax.contrib.schedule_free`. Those that
  compute with the state of `sparsify` are refused: `optax.contrib.sam`, unless
  `opaque_mode=True`, and `optax.lookahead(reset_state=True)`. `check_zeros`
  finds pruned weights that are not zero.

  A preconditioner that divides by the second moments of the step before,
  `optax.contrib.acprop`, diverges where weights are revived, since theirs are
  zero; put `optax.clip(10.0)` right after `optax.contrib.scale_by_acprop()`.

  Transformations that skip or accumulate whole steps wrap `sparsify`:
  `optax.MultiSteps`, `optax.apply_if_finite`, `optax.partition`. The last can
  also freeze modules, which then keep every weight:

  .. code-block:: python

    tx = optax.partition(
        {'trained': sparsify(...), 'frozen': optax.set_to_zero()},
        {'encoder': 'frozen', 'decoder': 'trained'},
    )

  The caller masks the initial parameters once with
  `apply_mask(params, get_mask(opt_state))`.

  Args:
    inner: The optimizer.
    algorithm: Algorithm that computes the mask, e.g. `static(0.75)`.
    where: The leaves to sparsify and the axes of their matrices: a function
      `(path, leaf) -> MatrixAxes | bool | None`, such as those of
      `spdf_jax.where` (by default `hidden_matrices`); or a mapping from shell
      patterns of paths to functions or their results, e.g. `{'*/attn':
      MatrixAxes(0, (1, 2)), '*/mlp': True}`, or a tree of these. The first
      pattern that matches the path of a leaf, or of a subtree that contains it,
      applies. `True` means that the last two axes are (inputs, outputs) and
      earlier axes index independent layers; in a tree, it selects matrices
      only, no vectors or biases. `False` keeps a leaf dense. So does `None`,
      which means that the function does not recognize the leaf; a warning then
      names such matrices and their share of the weights.
    key: Seed or typed PRNG key of all randomness in the algorithm.
    revive: `(key, count, params, mask) -> values`: initial values of revived
      weights, to which the step adds their first update, e.g.
      `scaled_normal(0.5)`, which explains the arguments; by default revived
      weights start at zero.
    track: Whether to count the weights that mask updates grow and drop, and
      those that were ever kept, for `mask_statistics`. This takes one more byte
      of state per sparsified weight.

  Returns:
    The sparse optimizer; its `update` needs `params`.

  Raises:
    TypeError: an argument has the wrong type; on `init`, if a leaf of the
      parameters is not an array; on `init` and `update`, if the algorithm
      returns a mask that is not bool.
    ValueError: on `init`, if `where` selects no leaf, if it returns `None` for
      matrices with more weights than the selected ones, or if the sparsity or
      the structure does not fit the parameters; on `update`, if `params` is
      missing, or if a transformation around `sparsify` computed with its state.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> state = tx.init(params)
    >>> updates, state = tx.update({'w': jnp.ones((4, 4))}, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> int((params['w'] == 0).sum())
    12
  """
  arguments = Arguments.create(inner, algorithm, where, key, revive)
  tx = optax.GradientTransformationExtraArgs(
      functools.partial(init, arguments), functools.partial(_update, arguments)
  )
  return tracking.track_masks(tx, algorithm, arguments.where) if track else tx


class Arguments(NamedTuple):
  """The arguments of `sparsify`, with defaults and a typed key."""

  inner: optax.GradientTransformationExtraArgs
  algorithm: Algorithm
  where: Where
  key: jax.Array
  revive: Revival | None

  @classmethod
  def create(
      cls, inner: optax.GradientTransformation, algorithm: Algorithm,
      where: Where | None, key: int | jax.Array, revive: Revival | None = None,
  ) -> 'Arguments':
    """Checks the arguments of `sparsify`, and fills in the defaults."""
    _check_types(inner, algorithm, revive)
    where = selectors.hidden_matrices if where is None else where
    selection.selector_of(where)
    return cls(
        optax.with_extra_args_support(inner), algorithm, where,
        masks.typed_key(key), revive,
    )

  def fitted(self, params: PyTree, axes: list[Any]) -> Algorithm:
    """Returns the algorithm for the kernels of convolutions in `params`."""
    kernels = selection.kernel_sizes(params, axes)
    return algorithms.for_kernels(self.algorithm, kernels)

  def key_at(self, state: SparsifyState) -> jax.Array:
    """Returns the key of the step that `state` is at."""
    impl = jax.random.key_impl(self.key)
    return jax.random.fold_in(
        jax.random.wrap_key_data(state.key, impl=impl), state.count
    )


def init(arguments: Arguments, params: PyTree) -> SparsifyState:
  """Makes the first mask, and the state of the optimizer on masked weights."""
  algorithm = arguments.algorithm
  axes = selection.select(arguments.where, params)
  selection_report.report_selection(arguments.where, params, axes)

  def first_mask(key, chosen):
    layers = arguments.fitted(params, axes).init(
        key, selection.to_layers(chosen, params, axes)
    )
    _check_mask(layers)
    return selection.from_layers(layers, params, axes)

  chosen = selection.selected(params, params, axes)
  mask = trees.auto_axes(first_mask, chosen)(arguments.key, chosen)
  algorithm_state: Any = ()
  init_state = algorithm.init_state
  if init_state is not None:
    algorithm_state = _map_state(
        lambda _, *given: init_state(*given), axes, params, {}, mask, chosen
    )
  inner_state = arguments.inner.init(masks.apply_mask(params, mask))
  check_not_nested(inner_state)
  return SparsifyState(
      count=jnp.zeros([], jnp.int32),
      mask=mask,
      # A copy, because donating the state must not donate the caller's key.
      key=jnp.array(jax.random.key_data(arguments.key)),
      dense_grads=jnp.asarray(algorithm.dense_grads_at(0), bool),
      inner_state=inner_state,
      algorithm_state=algorithm_state,
  )


def _update(
    arguments: Arguments,
    updates: PyTree,
    state: SparsifyState,
    params: PyTree | None = None,
    **extra_args: Any,
) -> tuple[PyTree, SparsifyState]:
  """Updates the mask, then the kept weights, and removes the pruned ones."""
  check_update('sparsify', state, params)
  inner, algorithm, *_ = arguments
  if packing.is_packed(state.mask):
    return storage.update_packed(
        inner, algorithm, updates, state, params, **extra_args
    )
  state = _with_next_algorithm_state(arguments, updates, state, params)
  update_now = algorithm.update_at(state.count)
  mask = state.mask
  if update_now is not False:
    mask = next_mask(arguments, update_now, updates, state, params)
  updates, inner_state = _update_kept(
      arguments, updates, state, params, mask, **extra_args
  )
  if arguments.revive is not None and update_now is not False:
    updates = revival.add_revived(
        arguments.revive, update_now, updates, state, params, mask,
        axes=selection.select(arguments.where, params),
        key_of_step=functools.partial(arguments.key_at, state),
    )
  count = optax.safe_increment(state.count)
  return remove_pruned(updates, params, mask), SparsifyState(
      count=count,
      mask=mask,
      key=state.key,
      dense_grads=jnp.asarray(algorithm.dense_grads_at(count), bool),
      inner_state=inner_state,
      algorithm_state=state.algorithm_state,
  )


def _with_next_algorithm_state(
    arguments: Arguments, grads: PyTree, state: SparsifyState, params: PyTree
) -> SparsifyState:
  """Updates the state of the algorithm, if it has one."""
  update_state = arguments.algorithm.update_state
  if update_state is None:
    return state
  axes = selection.select(arguments.where, params)
  return state._replace(algorithm_state=_map_state(
      functools.partial(update_state, state.count), axes, params,
      state.algorithm_state, state.mask,
      selection.selected(params, params, axes),
      _seen(selection.selected(grads, params, axes), state),
  ))


def next_mask(
    arguments: Arguments,
    update_now: jax.Array | bool,
    grads: PyTree,
    state: SparsifyState,
    params: PyTree,
) -> PyTree:
  """Returns the mask of this step, updated if `update_now`.

  Args:
    arguments: The arguments of `sparsify`.
    update_now: Whether to update it; `True`: without a condition in the step.
    grads: Gradients; those of pruned weights count where the state asks for
      them.
    state: The state before the step.
    params: The weights of which the algorithm makes the mask.

  Returns:
    The mask.
  """
  axes = selection.select(arguments.where, params)

  def updated(key, count, state, *given):
    layers = [selection.to_layers(tree, params, axes) for tree in given]
    if state:
      layers.append(_state_to_layers(state, params, axes))
    mask = arguments.fitted(params, axes).update(key, count, *layers)
    _check_mask(mask)
    return selection.from_layers(mask, params, axes)

  def new_mask():
    return trees.auto_axes(updated, state.mask)(
        arguments.key_at(state),
        state.count,
        state.algorithm_state,
        state.mask,
        selection.selected(params, params, axes),
        _seen(selection.selected(grads, params, axes), state),
    )

  if update_now is True:
    return new_mask()
  # The cond returns masks only, because a cond that returned the optimizer
  # state would copy it at every step.
  return jax.lax.cond(update_now, new_mask, lambda: state.mask)


def _update_kept(
    arguments: Arguments,
    grads: PyTree,
    state: SparsifyState,
    params: PyTree,
    mask: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
  """Calls the inner optimizer, with zeros in place of what is pruned.

  Returns:
    Its updates and its state; at a step that the algorithm skips, updates of
    zero and the moments of before.
  """
  masked_state = like_params.map_like_params(
      masks.apply_mask, state.inner_state, params, mask
  )
  updates, inner_state = arguments.inner.update(
      masks.apply_mask(grads, mask),
      masked_state,
      masks.apply_mask(params, mask),
      **extra_args,
      **age.mask_argument(state.inner_state, mask),
  )
  skip = arguments.algorithm.skip_step_at(state.count)
  if skip is not False:
    updates = jax.tree.map(lambda u: jnp.where(skip, 0, u), updates)
    inner_state = _keep_moments(skip, inner_state, masked_state, params)
  return updates, inner_state


def _seen(grads: PyTree, state: SparsifyState) -> PyTree:
  """Zeroes gradients of pruned weights, as kernels do, unless requested."""
  def masked(grads, mask, dense_grads):
    return jax.tree.map(
        lambda g, m: jnp.where(m | dense_grads, g, 0), grads, mask
    )

  return trees.auto_axes(masked, grads)(grads, state.mask, state.dense_grads)


def _check_mask(mask: PyTree) -> None:
  for name, leaf in trees.by_name(mask).items():
    if leaf.dtype != bool:
      raise TypeError(
          f'the algorithm returned a mask of dtype {leaf.dtype} for {name!r}; '
          'return bool arrays, True where a weight is kept.'
      )


def _state_to_layers(
    state: dict[str, PyTree], params: PyTree, axes: list[Any]
) -> dict[str, PyTree]:
  return {
      name: selection.to_layers(tree, params, axes)
      for name, tree in state.items()
  }


def _map_state(
    f: Callable[..., dict[str, PyTree]],
    axes: list[Any],
    params: PyTree,
    state: dict[str, PyTree] | tuple[()],
    *given: PyTree,
) -> dict[str, PyTree]:
  """Returns `f(state, *given)`, which takes and returns trees of layers."""
  def in_layers(state, *given):
    results = f(
        _state_to_layers(state, params, axes),
        *(selection.to_layers(tree, params, axes) for tree in given),
    )
    return {
        name: selection.from_layers(tree, params, axes)
        for name, tree in results.items()
    }

  names = state or jax.eval_shape(in_layers, state, *given)
  like = dict.fromkeys(names, given[0])
  return trees.auto_axes(in_layers, like)(state, *given)


def _check_types(inner: Any, algorithm: Any, revive: Any) -> None:
  """Raises TypeError for arguments of wrong types."""
  like_params.check_optimizer('inner', inner)
  if not isinstance(algorithm, Algorithm):
    raise TypeError(
        f'algorithm is {algorithm!r:.80}; give an algorithm, e.g. '
        'static(0.75).'
    )
  if revive is not None and not callable(revive):
    raise TypeError(
        f'revive is {revive!r:.80}; give a function (key, count, params, '
        'mask) -> values, e.g. scaled_normal(0.5).'
    )


def _keep_moments(
    skip: jax.Array, new: PyTree, old: PyTree, params: PyTree
) -> PyTree:
  """Restores moments, but not counters, where a step is skipped."""
  belongs = like_params.map_like_params(lambda _: True, new, params)
  return jax.tree.map(
      lambda chosen, n, o: jnp.where(skip, o, n) if chosen is True else n,
      belongs, new, old,
  )


def remove_pruned(updates: PyTree, params: PyTree, mask: PyTree) -> PyTree:
  """Replaces updates of pruned weights by -p, in the parameter's dtype."""
  return jax.tree.map(
      lambda m, u, p: u if m is None else jnp.where(m, u, -p),
      mask, updates, params, is_leaf=lambda x: x is None,
  )
