# SPDX-License-Identifier: Apache-2.0
"""Updaters from the configurations of JaxPruner."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import spdf_jax as spdf
from spdf_jax.interop.hosts.updater_fields import final_sparsity
from spdf_jax.interop.hosts.updater_fields import ramp
from spdf_jax.interop.hosts.updater_fields import shape
from spdf_jax.interop.hosts.updater_fields import structure
from spdf_jax.interop.hosts.updater_fields import times
from spdf_jax.interop.hosts.updaters import Updater
from spdf_jax.names import lookup
from spdf_jax.sparsity.algorithms.connections import leafwise
from spdf_jax.sparsity.topk import keep_largest
from spdf_jax.sparsity.topk import keep_random

PyTree = Any
Reader = Callable[[Mapping[str, Any]], spdf.Algorithm]

_DEFAULT_SEED = 8  # That of JaxPruner.
_KEYS = frozenset((
    'algorithm', 'dist_type', 'sparsity', 'sparsity_type', 'update_freq',
    'update_start_step', 'update_end_step', 'drop_fraction', 'filter_fn',
    'rng_seed', 'skip_gradients', 'is_debug', 'eps',
))


def create_updater_from_config(
    config: Mapping[str, Any], *, where: Any = None
) -> Updater:
  """Creates an updater from a configuration written for JaxPruner.

  Reads what `jaxpruner.create_updater_from_config` reads, and selects the same
  leaves: those with two axes or more, embeddings and heads included, each
  ranked as one group. Pass `where=hidden_matrices` to keep these dense.

  The numbers of kept weights and the steps of mask updates are those of
  JaxPruner. Three things differ:

  * random masks, because the random numbers do;
  * optimizer state: pruned weights have none, whereas JaxPruner adds their
    gradients to the moments under gradual pruning;
  * `erk` for leaves with more than two axes: it counts their matrix
    `[inputs, outputs]`, JaxPruner every axis.

  Args:
    config: A ConfigDict or mapping. `algorithm`: `magnitude`, `random`,
      `saliency`, `global_magnitude`, `static_sparse`, `set`, `rigl` or
      `no_prune`. `dist_type`: `uniform` or `erk`. `sparsity`: the fraction of
      zeros, which N:M replaces. `sparsity_type`: `nm_2,4`, `block_4,4` or
      `channel_-1`. `update_freq`, `update_start_step`, `update_end_step`: the
      steps of mask updates; pruning is at once if the last two are equal.
      `drop_fraction`: of `rigl` and `set`, 0.1 by default. `filter_fn`: `(path,
      leaf) -> bool`, the path as a tuple. `rng_seed`: a PRNG key.
    where: Selection of the leaves to sparsify, as for `sparsify`; replaces
      `filter_fn`.

  Returns:
    The updater.

  Raises:
    ValueError: the configuration is not valid, or it has no counterpart here.

  Example:
    >>> updater = create_updater_from_config(dict(
    ...     algorithm='magnitude', dist_type='erk', sparsity=0.8,
    ...     update_freq=10, update_start_step=200, update_end_step=1000))
    >>> params = {'w': jnp.ones((1, 4, 5))}
    >>> round(updater.algorithm.sparsity_at(1000, params)['w'], 6)
    0.8
  """
  fields = {k: v for k, v in config.items() if v is not None}
  name: Any = fields.get('algorithm')
  if name in _REFUSED:
    raise ValueError(f'algorithm is {name!r}; {_REFUSED[name]}.')
  create = lookup('algorithm', name, _ALGORITHMS)
  if create is None:
    return Updater(None)
  _check_keys(fields)
  return Updater(
      create(fields),
      where=_whole_leaves(fields.get('filter_fn')) if where is None else where,
      key=_key(fields.get('rng_seed')),
  )


_REFUSED = {
    'global_saliency': (
        'saliency is ranked within layers here; give saliency, or '
        'global_magnitude'
    ),
} | dict.fromkeys(
    ('magnitude_ste', 'random_ste'),
    'a straight-through estimator trains pruned weights, and here they are '
    'zero; give magnitude, random or rigl',
)


def _check_keys(fields: Mapping[str, Any]) -> None:
  for key, value in fields.items():
    if key in ('use_packed_masks', 'is_sparse_gradients'):
      wanted = key == 'is_sparse_gradients'
      if bool(value) != wanted:
        raise ValueError(
            f'{key} is {value!r}; masks are stored as bool and gradients of '
            f'pruned weights do not reach the optimizer here: give {wanted}.'
        )
    elif key not in _KEYS:
      raise ValueError(
          f'config has {key!r}, which has no counterpart here; remove it, or '
          'wrap the optimizer with spdf_jax.sparsify, whose arguments '
          '`distribution` and `where` choose sparsities and leaves.'
      )


def _magnitude(fields: Mapping[str, Any]) -> spdf.Algorithm:
  return spdf.gmp(
      ramp(fields), **times(fields), **shape(fields, gradual=True),
      init=_keep_all,
  )


def _global_magnitude(fields: Mapping[str, Any]) -> spdf.Algorithm:
  return spdf.gmp(
      ramp(fields), **times(fields), distribution=spdf.model_wide,
      structure=structure(fields), init=_keep_all,
  )


def _scored(keep: Callable[[Any], jax.Array]) -> Reader:
  """Returns a reader for gradual pruning by other scores than magnitudes."""
  def create(fields):
    if 'sparsity_type' in fields:
      raise ValueError(
          f'sparsity_type is {fields["sparsity_type"]!r} with the algorithm '
          f'{fields["algorithm"]!r}; structures need magnitude, rigl or set.'
      )
    steps = times(fields)
    return leafwise(
        ramp(fields),
        spdf.update_times(
            steps['update_every'], steps['update_from'], steps['update_until']
        ),
        keep,
        **shape(fields, gradual=True),
        init=_keep_all,
    )
  return create


def _static(fields: Mapping[str, Any]) -> spdf.Algorithm:
  return spdf.static(final_sparsity(fields), **shape(fields))


def _dynamic(create: Callable[..., spdf.Algorithm]) -> Reader:
  """Returns a reader for RigL or SET; without update steps the mask is kept."""
  def from_fields(fields):
    if 'update_start_step' not in fields:
      return _static(fields)
    algorithm = create(
        final_sparsity(fields), **times(fields), **shape(fields),
        drop_fraction=spdf.cosine(
            fields.get('drop_fraction', 0.1), fields['update_end_step']
        ),
    )
    if not fields.get('skip_gradients', True):
      return algorithm
    return algorithm._replace(skip_step_at=algorithm.update_at)
  return from_fields


_ALGORITHMS = {
    'no_prune': None,
    'magnitude': _magnitude,
    'global_magnitude': _global_magnitude,
    'saliency': _scored(lambda units: keep_largest(
        units.magnitudes * units.grads, units.kept, among=units.mask
    )),
    'random': _scored(lambda units: keep_random(
        units.key, units.mask.shape, units.kept, among=units.mask
    )),
    'static_sparse': _static,
    'set': _dynamic(spdf.sparse_evolution),
    'rigl': _dynamic(spdf.rigl),
}


def _keep_all(
    key: jax.Array, params: PyTree, sparsities: PyTree, structure: Any = None
) -> PyTree:
  """Makes the mask before the first update of gradual pruning."""
  del key, sparsities, structure
  return jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)


def _whole_leaves(
    filter_fn: Callable[[tuple[str, ...], Any], bool] | None
) -> Callable[[str, Any], Any]:
  """Returns a `where` that ranks the weights of a leaf as one group."""
  def where(path, leaf):
    rank = len(leaf.shape)
    if rank < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
      return False
    parts = tuple(path.split('/'))
    if filter_fn is not None and not filter_fn(parts, leaf):
      return False
    return spdf.MatrixAxes(tuple(range(rank - 1)), rank - 1)

  return where


def _key(seed: Any) -> jax.Array | int:
  if seed is None:
    return _DEFAULT_SEED
  if isinstance(seed, int) or jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
    return seed
  return jax.random.wrap_key_data(jnp.asarray(seed, jnp.uint32))
