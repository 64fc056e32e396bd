# SPDX-License-Identifier: Apache-2.0
"""`sparsify`: a wrapper that adds sparse training to any optax optimizer."""

from collections.abc import Callable
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity import age
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import storage
from spdf_jax.sparsity import tracking
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms import algorithm as algorithms
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.state import check_state
from spdf_jax.sparsity.state import is_packed
from spdf_jax.sparsity.state import SparsifyState

PyTree = Any
Revival = Callable[[jax.Array, jax.Array, PyTree, PyTree], PyTree]

_REVIVAL = 1  # Folded into a step's key to draw the values of revived weights.


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
  _check_types(inner, algorithm, revive)
  where = selectors.hidden_matrices if where is None else where
  selection.selector_of(where)
  inner = optax.with_extra_args_support(inner)
  key = masks.typed_key(key)

  def _fitted(params, axes):
    kernels = selection.kernel_sizes(params, axes)
    return algorithms.for_kernels(algorithm, kernels)

  def init_fn(params):
    axes = selection.select(where, params)
    selection.report_selection(where, params, axes)

    def first_mask(key, chosen):
      layers = _fitted(params, axes).init(
          key, selection.to_layers(chosen, params, axes)
      )
      _check_mask(layers)
      return selection.from_layers(layers, params, axes)

    chosen = selection.selected(params, params, axes)
    mask = trees.auto_axes(first_mask, chosen)(key, chosen)
    algorithm_state: Any = ()
    init_state = algorithm.init_state
    if init_state is not None:
      algorithm_state = _map_state(
          lambda _, *given: init_state(*given), axes, params, {}, mask, chosen
      )
    return SparsifyState(
        count=jnp.zeros([], jnp.int32),
        mask=mask,
        # A copy, because donating the state must not donate the caller's key.
        key=jnp.array(jax.random.key_data(key)),
        dense_grads=jnp.asarray(algorithm.dense_grads_at(0), bool),
        inner_state=inner.init(masks.apply_mask(params, mask)),
        algorithm_state=algorithm_state,
    )

  def update_fn(updates, state, params=None, **extra_args):
    if params is None:
      raise ValueError(
          'sparsify needs params: call tx.update(grads, opt_state, params).'
      )
    check_state(state)
    if is_packed(state.mask):
      return storage.update_packed(
          inner, algorithm, updates, state, params, **extra_args
      )
    if algorithm.update_state is not None:
      axes = selection.select(where, params)
      state = state._replace(algorithm_state=_map_state(
          functools.partial(algorithm.update_state, state.count), axes, params,
          state.algorithm_state, state.mask,
          selection.selected(params, params, axes),
          _seen(selection.selected(updates, params, axes), state),
      ))
    update_now = algorithm.update_at(state.count)
    mask = _next_mask(update_now, updates, state, params)
    masked_state = like_params.map_like_params(
        masks.apply_mask, state.inner_state, params, mask
    )
    updates, inner_state = inner.update(
        masks.apply_mask(updates, mask),
        masked_state,
        masks.apply_mask(params, mask),
        **extra_args,
        **age.mask_argument(state.inner_state, mask),
    )
    skip = algorithm.skip_step_at(state.count)
    if skip is not False:
      updates = jax.tree.map(lambda u: jnp.where(skip, 0, u), updates)
      inner_state = _keep_moments(skip, inner_state, masked_state, params)
    if revive is not None and update_now is not False:
      updates = _revive(revive, update_now, updates, state, params, mask)
    count = optax.safe_increment(state.count)
    return _remove_pruned(updates, params, mask), SparsifyState(
        count=count,
        mask=mask,
        key=state.key,
        dense_grads=jnp.asarray(algorithm.dense_grads_at(count), bool),
        inner_state=inner_state,
        algorithm_state=state.algorithm_state,
    )

  def _key_of_step(state):
    base = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(key))
    return jax.random.fold_in(base, state.count)

  def _next_mask(update_now, grads, state, params):
    if update_now is False:
      return state.mask
    axes = selection.select(where, params)

    def updated(key, count, state, *given):
      layers = [selection.to_layers(tree, params, axes) for tree in given]
      if state:
        layers.append(_state_to_layers(state, params, axes))
      mask = _fitted(params, axes).update(key, count, *layers)
      _check_mask(mask)
      return selection.from_layers(mask, params, axes)

    def new_mask():
      return trees.auto_axes(updated, state.mask)(
          _key_of_step(state),
          state.count,
          state.algorithm_state,
          state.mask,
          selection.selected(params, params, axes),
          _seen(selection.selected(grads, params, axes), state),
      )

    # The cond returns masks only, because a cond that returned the optimizer
    # state would copy it at every step.
    return jax.lax.cond(update_now, new_mask, lambda: state.mask)

  def _revive(revive, update_now, updates, state, params, mask):
    axes = selection.select(where, params)
    chosen = selection.selected(params, params, axes)

    def values_of(key, *given):
      layers = [selection.to_layers(tree, params, axes) for tree in given]
      values = revive(key, state.count, *layers)
      return selection.from_layers(values, params, axes)

    def revived():
      revival_key = jax.random.fold_in(_key_of_step(state), _REVIVAL)
      values = trees.auto_axes(values_of, chosen)(
          revival_key, chosen, state.mask
      )
      return jax.tree.map(
          lambda value, u, new, old: u if value is None else jnp.where(
              new & ~old, u + value.astype(u.dtype), u
          ),
          values, updates, mask, state.mask, is_leaf=lambda x: x is None,
      )

    return jax.lax.cond(update_now, revived, lambda: updates)

  tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return tracking.track_masks(tx, algorithm) if track else tx


def _seen(grads: PyTree, state: SparsifyState) -> PyTree:
  """Returns gradients as kernels compute them: of pruned weights on request."""
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
    state: dict[str, PyTree],
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
  """Restores parameter-shaped state where a step is skipped, not counters."""
  belongs = like_params.map_like_params(lambda _: True, new, params)
  return jax.tree.map(
      lambda chosen, n, o: jnp.where(skip, o, n) if chosen is True else n,
      belongs, new, old,
  )


def _remove_pruned(updates: PyTree, params: PyTree, mask: PyTree) -> PyTree:
  """Replaces updates of pruned weights by -p, in the parameter's dtype."""
  return jax.tree.map(
      lambda m, u, p: u if m is None else jnp.where(m, u, -p),
      mask, updates, params, is_leaf=lambda x: x is None,
  )


def scaled_normal(
    scale: float | optax.Schedule,
) -> Callable[[jax.Array, jax.Array, PyTree, PyTree], PyTree]:
  r"""Returns a function that draws revived weights from a normal distribution.

  Pass it to `sparsify` as `revive`. In a layer whose kept weights have the
  standard deviation :math:`\sigma`, values are drawn from :math:`N(0,
  (\mathrm{scale}\ \sigma)^2)`. The SPDF paper reports that a "scaled normal"
  initialization, which it does not specify, is no better than zeros.

  Args:
    scale: The standard deviation as a multiple of :math:`\sigma`, or a schedule
      of it; where the schedule is 0, values are zero.

  Returns:
    `(key, count, params, mask) -> values`, with trees of leaves `[layers,
    inputs, outputs]`, or `None` for leaves that are not sparsified: `count` is
    the number of steps taken, and `mask` the mask before its update. Values are
    drawn for all weights, in the dtype of the parameters; `sparsify` takes
    those of revived weights.

  Raises:
    ValueError: the scale is a number that is not positive.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023,
    section 2.2

  Example:
    The kept weights are 1 and -1, with a standard deviation of 1:

    >>> import jax, jax.numpy as jnp
    >>> params = {'w': jnp.tile(jnp.array([1., -1.]), (1, 64, 32))}
    >>> mask = {'w': jnp.ones((1, 64, 64), bool)}
    >>> values = scaled_normal(0.5)(jax.random.key(0), 0, params, mask)
    >>> round(float(values['w'].std()), 1)
    0.5
  """
  is_number = isinstance(scale, numbers.Real) and 0 < float(scale) < math.inf
  if not callable(scale) and not is_number:
    raise ValueError(
        f'scale is {scale!r:.80}; give a positive number, by which the '
        'standard deviation of the kept weights is multiplied.'
    )

  def values(key, count, params, mask):
    multiple = scale(count) if callable(scale) else scale

    def draw(p, m, leaf_key):
      dtype = p.dtype if p.dtype.itemsize > 4 else jnp.float32
      weights = jnp.where(m, p, 0).astype(dtype)
      kept = jnp.sum(m, axis=(-2, -1), keepdims=True, dtype=jnp.int32)
      count = jnp.maximum(kept, 1).astype(weights.real.dtype)
      mean = jnp.sum(weights, axis=(-2, -1), keepdims=True) / count
      from_mean = jnp.where(m, weights - mean, 0)
      variance = jnp.sum(
          jnp.square(jnp.abs(from_mean)), axis=(-2, -1), keepdims=True
      ) / count
      normal = jax.random.normal(leaf_key, p.shape, dtype)
      deviation = multiple * jnp.sqrt(variance)
      return (deviation.astype(dtype) * normal).astype(p.dtype)

    kept = jax.tree.map(lambda m, p: p, mask, params)
    return jax.tree.map(draw, kept, mask, masks.leaf_keys(key, kept))

  return values
