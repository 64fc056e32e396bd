# SPDX-License-Identifier: Apache-2.0
"""`with_age`: bias correction of moments from each weight's own revival."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import packing
from spdf_jax.sparsity import density
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import Where

PyTree = Any

OLDEST = int(np.iinfo(np.int16).max)
"""The age at which counting stops: a weight then has the count of all steps."""


class AgeState(NamedTuple):
  """State of `with_age`."""

  age: PyTree
  """Steps since a weight was last revived, int16; `None` for other leaves."""

  inner_state: PyTree
  """State of the wrapped transformation."""


def with_age(
    inner: optax.GradientTransformation,
    *,
    warmup: int = 0,
    where: Where | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Counts the steps of Adam from the revival of each weight.

  Moments of a revived weight begin at zero, but Adam corrects their bias by the
  count of all steps, so that its first updates are up to `(1 - b1) / sqrt(1 -
  b2)` times the learning rate, 3.2 at b2 = 0.999. With this wrapper a revived
  weight is updated as in an Adam that started when it was revived. The count is
  an int16 per sparsified weight; from 32,767 on it is that of all steps, where
  the corrections at b2 = 0.999 have been 1 for long.

  Put it inside `sparsify`, around the preconditioner:

  .. code-block:: python

    inner = optax.chain(
        spdf.with_age(optax.scale_by_adam(b2=0.999)),
        optax.scale_by_learning_rate(3e-3),
    )

  Args:
    inner: An elementwise transformation with a count in its state and second
      moments that begin at zero, such as `optax.scale_by_adam`,
      `optax.scale_by_amsgrad` and `optax.scale_by_belief`.
    warmup: Number of steps over which updates of a revived weight rise linearly
      to those of `inner`. Weights that are kept from the start have no warm-up.
    where: The `where` given to `sparsify`.

  Returns:
    The transformation.

  Raises:
    TypeError: `inner` is not an optimizer.
    ValueError: `warmup` is out of its range; on `init`, if the state of `inner`
      has no count, or no second moment for each weight; on `update`, if it is
      not inside `sparsify`, or `where` is not that of `sparsify`.

  References:
    Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2015, section 3

  Example:
    >>> import spdf_jax as spdf
    >>> adam = spdf.with_age(optax.scale_by_adam())
    >>> algorithm = spdf.join([spdf.static(0.5), spdf.dense()], [1])
    >>> tx = spdf.sparsify(adam, algorithm, key=0)
    >>> params = {'w': jnp.ones((2, 2))}
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...   _, state = tx.update(params, state, params)
    >>> sorted(state.inner_state.age['w'].ravel().tolist())
    [2, 2, 3, 3]
  """
  like_params.check_optimizer('inner', inner)
  if not 0 <= warmup < OLDEST:
    raise ValueError(
        f'warmup is {warmup}; give a number of steps from 0 to {OLDEST - 1}.'
    )
  inner = optax.with_extra_args_support(inner)
  where = selectors.hidden_matrices if where is None else where

  def init_fn(params):
    named = list(trees.by_name(params).items())
    selector = selection.selector_of(where, named)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    state = inner.init(params)
    _check_moments(state, params)
    return AgeState(
        trees.without_empty_variables(treedef.unflatten(
            jnp.zeros_like(p, jnp.int16) if p.size and selector(name, p)
            else None for (name, _), p in zip(named, leaves)
        )),
        state,
    )

  def update_fn(
      updates, state, params=None, *, sparsity_mask=None, **extra_args
  ):
    mask = density.mask_inside(sparsity_mask, params, 'with_age')
    moments = state.inner_state
    treedef: Any
    weights, treedef = jax.tree.flatten(params)
    columns = {
        name: treedef.flatten_up_to(tree)
        for name, tree in moments._asdict().items() if name != 'count'
    }

    def of_leaf(name, i, u, m, age):
      if (m is None) != (age is None):
        raise ValueError(
            f'with_age selects other leaves than sparsify, such as {name!r}; '
            'give both the same where.'
        )
      count = moments.count
      if age is not None:
        count = jnp.where(age == OLDEST, count, age.astype(count.dtype))
      update, new = inner.update(
          u,
          moments._replace(
              count=count, **{name: leaf[i] for name, leaf in columns.items()}
          ),
          weights[i],
          **extra_args,
      )
      if age is None:
        return update, new, None
      if warmup:
        from_start = age == jnp.minimum(moments.count, OLDEST)
        rise = jnp.minimum((age + 1) / (warmup + 1), 1)
        update *= jnp.where(from_start, 1, rise).astype(update.dtype)
      return update, new, jnp.where(
          packing.kept_entries(m), jnp.minimum(age, OLDEST - 1) + 1, 0
      ).astype(age.dtype)

    new_updates, states, ages = zip(*map(
        of_leaf, trees.by_name(params), range(len(weights)),
        treedef.flatten_up_to(updates),
        mask,
        trees.matching_leaves(state.age, params),
    ))
    return treedef.unflatten(new_updates), AgeState(
        trees.without_empty_variables(treedef.unflatten(ages)),
        moments._replace(
            count=optax.safe_increment(moments.count),
            **{
                name: treedef.unflatten(getattr(s, name) for s in states)
                for name in columns
            },
        ),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def mask_argument(inner_state: PyTree, mask: PyTree) -> dict[str, PyTree]:
  """Returns the argument that passes a mask to the transformations inside.

  It is empty unless one of them takes the mask, since some of optax, such as
  `optax.contrib.sam`, refuse unknown arguments.

  Args:
    inner_state: State of the optimizer inside `sparsify`.
    mask: The mask of the step.

  Returns:
    The extra argument of its `update`.

  Example:
    >>> mask_argument(optax.adam(0.1).init({'w': 1.0}), {'w': True})
    {}
    >>> mask_argument((density.DensityState(),), {'w': True})
    {'sparsity_mask': {'w': True}}
  """
  takes_mask = lambda x: isinstance(x, (density.DensityState, AgeState))
  states = jax.tree.leaves(inner_state, is_leaf=takes_mask)
  return {'sparsity_mask': mask} if any(map(takes_mask, states)) else {}


def _check_moments(state: PyTree, params: PyTree) -> None:
  """Raises ValueError unless a state has a count and second moments."""
  fields = getattr(state, '_fields', ())
  shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
  if not {'count', 'nu'} <= set(fields) or shapes(state.nu) != shapes(params):
    raise ValueError(
        f'with_age got an optimizer with the state {type(state).__name__}, '
        'which lacks a count or a second moment for each weight; wrap the '
        'preconditioner: optax.chain(with_age(optax.scale_by_adam()), …).'
    )
