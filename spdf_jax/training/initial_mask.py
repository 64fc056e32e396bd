# SPDX-License-Identifier: Apache-2.0
"""The mask of the first step, from the saliency of weights or another run."""

from collections.abc import Callable
import functools
from typing import Any

import jax

from spdf_jax.sparsity import initial_masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs
from spdf_jax.sparsity.algorithms import with_default_init
from spdf_jax.sparsity.algorithms.algorithm import for_kernels
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import structure_of
from spdf_jax.sparsity.structures import UNSTRUCTURED
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.checkpoints.files import read_masks
from spdf_jax.training.checkpoints.workdir import read_source
from spdf_jax.training.plan import Plan

PyTree = Any

SALIENCIES = ('snip', 'grasp')
"""Scores of `init.saliency` that need no other loss than that of training."""


def mask_by_saliency(
    plan: Plan,
    loss_fn: Callable[[PyTree, Any], jax.Array],
    params: PyTree,
    batch: Any,
    *,
    where: Where,
) -> PyTree:
  """Returns the mask of the first phase by the saliency it names.

  The layers keep as many weights as the phase's algorithm plans for step 0, in
  its structure.

  Args:
    plan: The phases; `initial_mask` of the first is one of `SALIENCIES`.
    loss_fn: `(params, batch) -> scalar`.
    params: The initial parameters, dense.
    batch: The first batch.
    where: The selection of sparsified leaves.

  Returns:
    The mask, `None` for leaves that stay dense.

  Raises:
    ValueError: the scores are not finite.
  """
  init = initial_masks.saliency(
      plan.phases[0].initial_mask or '', loss_fn, params, batch, where=where
  )
  mask = init(
      jax.random.key(0), *_first_layers(plan, params, where),
      structure=_first_structure(plan),
  )
  return selection.from_layers(mask, params, selection.select(where, params))


def _first_layers(
    plan: Plan, params: PyTree, where: Where
) -> tuple[PyTree, PyTree]:
  """Returns the sparsified layers, and their planned sparsities at step 0."""
  axes = selection.select(where, params)
  layers = selection.to_layers(params, params, axes)
  algorithm = for_kernels(
      create_algorithm(plan.phases[0].algorithm),
      selection.kernel_sizes(params, axes),
  )
  return layers, algorithm.sparsity_at(0, layers)


def _first_structure(plan: Plan) -> Structure:
  return structure_of(plan.phases[0].algorithm.get('structure', UNSTRUCTURED))


def mask_of_run(source: str, params: PyTree) -> PyTree:
  """Reads the mask of a checkpoint of another run.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`.
    params: The parameters, or their shapes.

  Returns:
    The mask, `None` for leaves that stay dense.

  Raises:
    ValueError: there is no such checkpoint, or it has no masks.
  """
  try:
    masks = read_source(source, read_masks)
  except ValueError as error:
    raise ValueError(
        f'initial_mask is {source!r}, neither one of {", ".join(SALIENCIES)} '
        f'nor the mask of a run: {error}'
    ) from error
  if not masks:
    raise ValueError(
        f'initial_mask is {source!r}, a checkpoint of parameters only; give '
        'that of a run with masks.'
    )
  return jax.tree_util.tree_map_with_path(
      lambda path, _: masks.get(path_name(path)), params
  )


def init_with(
    plan: Plan, mask: PyTree, *, where: Where
) -> Callable[..., PyTree]:
  """Returns the initial-mask function of a plan whose first mask is given.

  Args:
    plan: The phases; the mask must have the sparsity and the structure with
      which the first begins.
    mask: The mask, `None` for leaves that stay dense.
    where: The selection of sparsified leaves.

  Returns:
    `(key, params, sparsities) -> mask`, as `init.given` returns it.
  """
  return functools.partial(
      initial_masks.given(mask, where=where), structure=_first_structure(plan)
  )


def first_init(
    plan: Plan,
    loss_fn: Callable[[PyTree, Any], jax.Array],
    params: PyTree,
    batch_at: Callable[[int], Any],
    *,
    where: Where,
    are_trained: bool = False,
) -> Callable[..., PyTree] | None:
  """Returns the initial-mask function that the first phase of a plan requests.

  Args:
    plan: The phases.
    loss_fn: `(params, batch) -> scalar`.
    params: The initial parameters, dense.
    batch_at: Function from a step to its batch.
    where: The selection of sparsified leaves.
    are_trained: Whether the parameters are those of another run: the mask is
      then by magnitude, except in groups whose algorithm has an `init`.

  Returns:
    `(key, params, sparsities) -> mask`; `None`: the mask is that of the first
    phase's algorithm.

  Raises:
    ValueError: there is no such mask, or it does not fit.
  """
  name = plan.phases[0].initial_mask
  if not name:
    spec = plan.phases[0].algorithm
    pruning = with_default_init(spec, 'magnitude') if are_trained else spec
    if pruning == spec:
      return None
    by_magnitude = create_algorithm(pruning)
    return lambda key, params, sparsities: by_magnitude.init(key, params)
  if name in SALIENCIES:
    mask = mask_by_saliency(plan, loss_fn, params, batch_at(0), where=where)
  else:
    mask = mask_of_run(name, params)
  return init_with(plan, mask, where=where)


def check_algorithms(plan: Plan, params: PyTree, where: Where) -> None:
  """Raises ValueError if an algorithm has no masks for the parameters."""
  layers = selection.to_layers(
      params, params, selection.select(where, params)
  )
  for span in plan.spans:
    algorithm = create_algorithm(span.algorithm)
    try:
      jax.eval_shape(algorithm.init, jax.random.key(0), layers)
    except ValueError as error:
      raise ValueError(f'phase {span.names[0]!r}: {error}') from error


def check_first_mask(
    plan: Plan, params: PyTree, where: Where, *, are_trained: bool
) -> None:
  """Checks that the initial mask, if any, fits the first phase.

  Args:
    plan: The phases.
    params: Shapes and dtypes of the parameters.
    where: The selection of sparsified leaves.
    are_trained: Whether the parameters are those of another run.

  Raises:
    ValueError: the first phase begins dense, the mask of a run does not fit the
      parameters or the phase, or the mask is that of zeros in weights that have
      none.
  """
  first = plan.phases[0]
  inits = [spec.get('init') for spec in member_specs(first.algorithm)]
  if 'nonzero' in inits and not are_trained:
    raise ValueError(
        f"phase {first.name!r} has init='nonzero', which keeps the zeros of "
        'trained weights, and initial weights have none; name the weights by '
        "init_from, or use init='random'."
    )
  if not first.initial_mask:
    return
  layers, sparsities = _first_layers(plan, params, where)
  if first.initial_mask in SALIENCIES:
    if not any(jax.tree.leaves(sparsities)):
      raise ValueError(
          f'phase {first.name!r} has the initial_mask {first.initial_mask!r} '
          'and begins with sparsity 0; give a higher initial sparsity, or no '
          'initial_mask.'
      )
    return
  try:
    init = init_with(plan, mask_of_run(first.initial_mask, params), where=where)
    init(jax.random.key(0), layers, sparsities)
  except ValueError as error:
    raise ValueError(f'phase {first.name!r}: {error}') from error
