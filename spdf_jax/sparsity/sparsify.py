"""`sparsify`: the wrapper that makes any optax optimizer train sparsely."""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import state_matching
from spdf_jax.sparsity import storage

PyTree = Any
Revival = Callable[[jax.Array, PyTree, PyTree], PyTree]

_REVIVAL = 1  # What a step's key is folded with for the values of weights.


def never(count: Any) -> bool:
  """At no step: the answer of algorithms that do not do a thing."""
  del count
  return False


class Algorithm(NamedTuple):
  """A sparse-training algorithm: pure functions of the step and the weights.

  Trees of parameters, gradients and masks reach these functions with every
  sparsified leaf in the form `[layers, inputs, outputs]` and `None` elsewhere;
  layers of one leaf are independent.
  """

  sparsity_at: Callable[[int, PyTree], PyTree]
  """`(count, params) -> levels`: the sparsity asked for at a step, per leaf, on
  the host; needs only shapes."""

  init: Callable[[jax.Array, PyTree], PyTree]
  """`(key, params) -> mask`: the first mask."""

  update: Callable[[jax.Array, jax.Array, PyTree, PyTree, PyTree], PyTree]
  """`(key, count, mask, params, grads) -> mask`: called where `update_at`."""

  update_at: Callable[[Any], Any]
  """`(count) -> bool`: whether the mask changes at this step."""

  dense_grads_at: Callable[[Any], Any]
  """`(count) -> bool`: whether this step needs gradients of pruned weights."""

  skip_step_at: Callable[[Any], Any] = never
  """`(count) -> bool`: whether weights and moments stay as they are, but for
  the change of the mask."""


class SparsifyState(NamedTuple):
  """State of `sparsify`: the only place where a mask lives."""

  count: jax.Array
  """Steps taken, int32."""

  mask: PyTree
  """`True` where a weight is kept; `None` for leaves that stay dense. Packed
  where the state is stored compactly, see `pack_state`."""

  key: jax.Array
  """Key data of the PRNG key given to `sparsify`; constant."""

  dense_grads: jax.Array
  """Whether the next step needs the gradients of pruned weights, bool."""

  inner_state: PyTree
  """State of the wrapped transformation."""


def sparsify(
    inner: optax.GradientTransformation,
    algorithm: Algorithm,
    *,
    where: selection.Where = selection.hidden_matrices,
    key: int | jax.Array,
    revive: Revival | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains with pruned weights that are exactly zero after every step.

  With the mask :math:`m_t` that `algorithm` gives at step :math:`t`,

  .. math::
    u_t, s_{t+1} = \mathrm{inner}(m_t \odot g_t,\ m_t \odot s_t,\
    m_t \odot p_t), \qquad
    \Delta p_t = m_t\, ?\ u_t : -p_t

  so that :math:`p_t + \Delta p_t` is exactly zero off the mask whatever the
  inner optimizer does, and everything of a weight's shape in the inner state
  (moments, averages) is zero when the weight comes back; only an optimizer that
  makes something of zeros, such as momentum of added noise, hands a weight what
  it made in the step before.

  `sparsify` must be the last transformation of a chain: one that changes
  updates after it (added noise, a second learning rate) loses the zeros. What
  skips or collects whole steps goes around it: `optax.MultiSteps`,
  `optax.apply_if_finite`, `optax.partition`. The last also freezes modules,
  which then keep every weight:

  .. code-block:: python

    tx = optax.partition(
        {'trained': sparsify(…), 'frozen': optax.set_to_zero()},
        {'encoder': 'frozen', 'decoder': 'trained'},
    )

  The initial parameters are the caller's: mask them once with
  `apply_mask(params, get_mask(opt_state))`.

  Args:
    inner: The optimizer.
    algorithm: What the mask is at each step, e.g. `static(0.75)`.
    where: Which leaves are sparsified: `(path, leaf) -> bool` or the axes.
    key: Seed or typed PRNG key of everything random in the algorithm.
    revive: `(key, params, mask) -> values` of the weights that come back, e.g.
      `scaled_normal(0.5)`; by default they start at zero.

  Returns:
    The sparse optimizer; its `update` needs `params`.

  Raises:
    ValueError: on `init`, if `where` selects no leaf; on `update`, if `params`
      is missing.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023

  Example:
    >>> import spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> state = tx.init(params)
    >>> updates, state = tx.update({'w': jnp.ones((4, 4))}, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> int((params['w'] == 0).sum())
    12
  """
  inner = optax.with_extra_args_support(inner)
  key = jax.random.key(key) if isinstance(key, int) else key
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    raise ValueError(
        f'key is an array of dtype {key.dtype}; give an int or a typed key, '
        'jax.random.key(0).'
    )

  def init_fn(params):
    axes = selection.select(where, params)
    selection.log_selection(params, axes)
    layers = selection.to_layers(params, params, axes)
    mask = selection.from_layers(algorithm.init(key, layers), params, axes)
    return SparsifyState(
        count=jnp.zeros([], jnp.int32),
        mask=mask,
        # A copy: the state may be donated, the caller's key must not be.
        key=jnp.array(jax.random.key_data(key)),
        dense_grads=jnp.asarray(algorithm.dense_grads_at(0), bool),
        inner_state=inner.init(masks.apply_mask(params, mask)),
    )

  def update_fn(updates, state, params=None, **extra_args):
    if params is None:
      raise ValueError(
          'sparsify needs params: call tx.update(grads, opt_state, params).'
      )
    if storage.is_packed(state.mask):
      return _update_packed(updates, state, params, extra_args)
    update_now = algorithm.update_at(state.count)
    mask = _next_mask(update_now, updates, state, params)
    masked_state = state_matching.map_like_params(
        masks.apply_mask, state.inner_state, params, mask
    )
    updates, inner_state = inner.update(
        masks.apply_mask(updates, mask),
        masked_state,
        masks.apply_mask(params, mask),
        **extra_args,
    )
    skip = algorithm.skip_step_at(state.count)
    if skip is not False:
      updates = jax.tree.map(lambda u: jnp.where(skip, 0, u), updates)
      inner_state = _keep_moments(skip, inner_state, masked_state, params)
    if revive is not None and update_now is not False:
      updates = _revive(update_now, updates, state, params, mask)
    count = optax.safe_increment(state.count)
    return _remove_pruned(updates, params, mask), SparsifyState(
        count=count,
        mask=mask,
        key=state.key,
        dense_grads=jnp.asarray(algorithm.dense_grads_at(count), bool),
        inner_state=inner_state,
    )

  def _update_packed(updates, state, params, extra_args):
    """Updates kept values, of which the mask is not to change."""
    if algorithm.skip_step_at(state.count) is not False:
      raise ValueError(
          'the algorithm skips steps, which compact storage cannot; unpack '
          'the state with unpack_state.'
      )
    storage.check_elementwise(
        inner, state.inner_state, params, state.mask, **extra_args
    )
    updates, inner_state = inner.update(
        updates, state.inner_state, params, **extra_args
    )
    count = optax.safe_increment(state.count)
    return updates, state._replace(
        count=count,
        dense_grads=jnp.asarray(algorithm.dense_grads_at(count), bool),
        inner_state=inner_state,
    )

  def _key_of_step(state):
    base = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(key))
    return jax.random.fold_in(base, state.count)

  def _next_mask(update_now, grads, state, params):
    if update_now is False:
      return state.mask
    axes = selection.select(where, params)
    as_layers = lambda tree: selection.to_layers(tree, params, axes)

    def new_mask():
      layers_of_grads = as_layers(grads)
      late = state._replace(count=_after(layers_of_grads, state.count))
      layers = algorithm.update(
          _key_of_step(late),
          late.count,
          as_layers(state.mask),
          as_layers(params),
          layers_of_grads,
      )
      return selection.from_layers(layers, params, axes)

    # The cond returns masks only: one that carried the optimizer state would
    # copy it at every step.
    return jax.lax.cond(update_now, new_mask, lambda: state.mask)

  def _revive(update_now, updates, state, params, mask):
    axes = selection.select(where, params)
    as_layers = lambda tree: selection.to_layers(tree, params, axes)

    def revived():
      revival_key = jax.random.fold_in(_key_of_step(state), _REVIVAL)
      values = revive(revival_key, as_layers(params), as_layers(state.mask))
      return jax.tree.map(
          lambda value, u, new, old: u if value is None else jnp.where(
              new & ~old, value.astype(u.dtype), u
          ),
          selection.from_layers(values, params, axes),
          updates, mask, state.mask, is_leaf=lambda x: x is None,
      )

    return jax.lax.cond(update_now, revived, lambda: updates)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _after(grads: PyTree, count: jax.Array) -> jax.Array:
  """Returns a count that is not known before all gradients are.

  Where XLA for CPUs can change masks early, while the old ones are in use, it
  copies them and schedules the whole step worse: every step takes 3 % longer.
  Sharded gradients are not asked, they would be sent.
  """
  if jax.device_count() > 1:
    return count
  above = [jnp.any(g.ravel()[:1] > jnp.inf) for g in jax.tree.leaves(grads)]
  return count + sum(above)  # Nothing is.


def _keep_moments(
    skip: jax.Array, new: PyTree, old: PyTree, params: PyTree
) -> PyTree:
  """Takes the old of everything of a weight's shape; counters go on."""
  like_params = state_matching.map_like_params(lambda _: True, new, params)
  return jax.tree.map(
      lambda chosen, n, o: jnp.where(skip, o, n) if chosen is True else n,
      like_params, new, old,
  )


def _remove_pruned(updates: PyTree, params: PyTree, mask: PyTree) -> PyTree:
  """Sends -p, in the parameter's own dtype, for pruned weights."""
  return jax.tree.map(
      lambda m, u, p: u if m is None else jnp.where(m, u, -p),
      mask, updates, params, is_leaf=lambda x: x is None,
  )


def stored_mask(opt_state: PyTree) -> PyTree:
  """Returns the mask as it is stored: booleans, or packed.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    What `get_mask` returns, with a `PackedMask` in place of packed leaves.

  Raises:
    ValueError: there is no `SparsifyState` in it.

  Example:
    >>> import spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4))}
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> _, state = spdf.pack_state(params, tx.init(params))
    >>> stored_mask(state)['w'].bits.shape
    (4, 1)
  """
  found = [state.mask for state in _sparsify_states(opt_state)]
  merged = functools.reduce(_merge, found)
  return jax.tree.map(
      lambda leaf: None if _is_empty(leaf) else leaf, merged, is_leaf=_is_empty
  )


def get_mask(opt_state: PyTree) -> PyTree:
  """Returns the mask out of any nesting of optimizer states.

  Several `sparsify` (under `optax.partition`) each own some leaves; their
  masks are merged, with `None` in place of a subtree that none owns.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    The mask, in the structure of the parameters.

  Raises:
    ValueError: there is no `SparsifyState` in it.

  Example:
    >>> import spdf_jax as spdf
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> int(get_mask(tx.init({'w': jnp.ones((4, 4))}))['w'].sum())
    8
  """
  return storage.unpack_masks(stored_mask(opt_state))


def get_dense_grads(opt_state: PyTree) -> jax.Array:
  """Returns whether the next step needs the gradients of pruned weights.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    A bool scalar: true where any `sparsify` in it asks.

  Raises:
    ValueError: there is no `SparsifyState` in it.

  Example:
    >>> import spdf_jax as spdf
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> bool(get_dense_grads(tx.init({'w': jnp.ones((4, 4))})))
    False
  """
  asks = [state.dense_grads for state in _sparsify_states(opt_state)]
  return jnp.any(jnp.stack(asks))


def densify(opt_state: PyTree) -> PyTree:
  """Sets every mask to all `True`; moments and counters stay.

  An algorithm that still has updates to come prunes again at the next one; to
  end it for good, `join` it with `dense()`.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`.

  Returns:
    The state with which the same optimizer continues densely.

  Raises:
    ValueError: there is no `SparsifyState` in it, or it is stored compactly.

  Example:
    >>> import spdf_jax as spdf
    >>> tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
    >>> state = densify(tx.init({'w': jnp.ones((4, 4))}))
    >>> bool(get_mask(state)['w'].all())
    True
  """
  if storage.is_packed(stored_mask(opt_state)):
    raise ValueError(
        'the optimizer state is stored compactly; unpack it first, with '
        'unpack_state(params, opt_state).'
    )
  all_true = lambda mask: jax.tree.map(jnp.ones_like, mask)
  return jax.tree.map(
      lambda s: s._replace(mask=all_true(s.mask)) if _is_state(s) else s,
      opt_state, is_leaf=_is_state,
  )


_is_state = lambda x: isinstance(x, SparsifyState)
_is_empty = lambda x: x is None or isinstance(x, optax.MaskedNode)


def _merge(one: PyTree, other: PyTree) -> PyTree:
  """Fills the places that `optax.partition` left empty in one mask."""
  if _is_empty(one):
    return other
  if _is_empty(other) or jax.tree_util.all_leaves([one]):
    return one
  children, treedef = jax.tree.flatten(one, is_leaf=lambda x: x is not one)
  return treedef.unflatten(map(_merge, children, treedef.flatten_up_to(other)))


def _sparsify_states(opt_state: PyTree) -> list[SparsifyState]:
  leaves = jax.tree.leaves(opt_state, is_leaf=_is_state)
  found = [leaf for leaf in leaves if _is_state(leaf)]
  if not found:
    raise ValueError(
        'the optimizer state holds no SparsifyState; wrap the optimizer with '
        'spdf_jax.sparsify and pass the state of that.'
    )
  return found
