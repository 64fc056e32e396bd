# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a plan: AdamW, or another one by its name."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
import math
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax import names
from spdf_jax import sparsity
from spdf_jax.sparsity import tracking
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.hard_threshold import threshold_by
from spdf_jax.sparsity.selection import select
from spdf_jax.sparsity.selection import Where
from spdf_jax.training.configs.fields import check_type
from spdf_jax.training.configs.fields import read_fields
from spdf_jax.training.configs.settings import AdapterConfig
from spdf_jax.training.configs.settings import OptimizerConfig
from spdf_jax.training.plan import Plan

PyTree = Any
Constructor = Callable[..., optax.GradientTransformation]

# Arguments whose values follow from the phases and the model.
_MASKS = ('mask', 'weight_decay_mask')
_FROM_PHASES = (
    'learning_rate', 'adam_learning_rate', 'weight_decay', 'weight_decay_rate',
    'adam_weight_decay',
)
_FROM_MODEL = (*_MASKS, 'muon_weight_dimension_numbers')


def _constructors() -> dict[str, Constructor]:
  """Collects the functions of optax from a learning rate to an optimizer."""
  constructors = {}
  for module in (optax, optax.contrib):
    for name, function in vars(module).items():
      # `optax.nadamw` is a partial function; classes are no optimizers.
      is_function = isinstance(function, (FunctionType, functools.partial))
      if is_function and not name.startswith(('_', 'scale_')):
        first = next(iter(inspect.signature(function).parameters), '')
        if first == 'learning_rate':
          constructors[name] = function
  return constructors


OPTIMIZERS = _constructors()
"""Optimizers of optax by their names, e.g. `'lion'`."""


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
  """An optimizer by its name and arguments.

  Attributes:
    name: A key of `OPTIMIZERS`, or `'package.module:function'`.
    clip_norm: Largest global norm of the gradient.
    arguments: Arguments of the function, without the learning rate, the weight
      decay and the mask of decayed leaves.

  Raises:
    ValueError: the name or an argument is unknown, or a number is out of its
      range. A user's own function is not imported or checked here.
  """

  name: str
  clip_norm: float
  arguments: Mapping[str, Any]

  def __post_init__(self):
    if not 0 < self.clip_norm < math.inf:
      raise ValueError(
          f'optimizer.clip_norm is {self.clip_norm}; give a positive, finite '
          'number.'
      )
    for name, value in self.arguments.items():
      if name in (*_FROM_PHASES, *_FROM_MODEL):
        whose = (
            'fields of the phases' if name in _FROM_PHASES
            else 'parameters of the model'
        )
        raise ValueError(
            f'optimizer.{name} is {value!r}, but {whose} set this argument; '
            'remove it.'
        )
      if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'optimizer.{name} is {value}; it must be finite.')
    if ':' not in self.name:
      self._bind(names.lookup('optimizer', self.name, OPTIMIZERS))

  def as_dict(self) -> dict[str, Any]:
    """Returns the fields as `read_optimizer` reads them."""
    fields = {'name': self.name, 'clip_norm': self.clip_norm}
    return fields | dict(self.arguments)

  def _bind(self, function: Constructor) -> Constructor:
    # The learning rate is passed later, by its keyword.
    given = {**self.arguments, 'learning_rate': None}
    names.bind(f'optimizer {self.name!r}', function, given)
    return names.bind(
        f'optimizer {self.name!r}', function, self.arguments, missing=1
    )

  def constructor(self, where: Where) -> Constructor:
    """Returns a function of the learning rate, and perhaps the weight decay.

    Args:
      where: The model's selection of hidden matrices. `'muon'` applies to
        these, and AdamW to all other parameters.

    Returns:
      The function, with all other arguments bound.

    Raises:
      ValueError: a user's own function cannot be imported, or an argument is
        missing or unexpected.
    """
    own = ':' in self.name
    function = names.import_function(
        'optimizer', self.name
    ) if own else OPTIMIZERS[self.name]
    if not callable(function):
      raise ValueError(
          f'optimizer {self.name!r} is {function!r:.60}; give the name of a '
          'function.'
      )
    make = self._bind(function)
    if self.name == 'muon':
      # Its AdamW has no mask of decayed leaves: the decay is applied after it.
      return lambda learning_rate: make(
          learning_rate=learning_rate,
          muon_weight_dimension_numbers=lambda params: _muon_axes(
              where, params
          ),
      )
    masks = set(_MASKS) & inspect.signature(function).parameters.keys()
    return names.bind(
        f'optimizer {self.name!r}', make, dict.fromkeys(masks, matrices),
        missing=1,
    )


def read_optimizer(given: Any, path: str) -> OptimizerConfig | NamedOptimizer:
  """Reads the optimizer of a config; without a name it is AdamW.

  Args:
    given: The fields: `name`, `clip_norm` and the optimizer's arguments.
    path: Dotted name of the fields in the config, for error messages.

  Returns:
    The optimizer.

  Raises:
    ValueError: a field is unknown, missing, of another type or out of its
      range.

  Example:
    >>> read_optimizer({'name': 'lion', 'b1': 0.9, 'clip_norm': 1.0}, '')
    NamedOptimizer(name='lion', clip_norm=1.0, arguments={'b1': 0.9})
  """
  if not isinstance(given, Mapping) or 'name' not in given:
    return read_fields(OptimizerConfig, given, path)
  arguments = {k: v for k, v in given.items() if k not in ('name', 'clip_norm')}
  check_type(given['name'], str, f'{path}.name')
  if given['name'] == 'adamw':
    return read_fields(
        OptimizerConfig, {k: v for k, v in given.items() if k != 'name'}, path
    )
  if 'clip_norm' not in given:
    raise ValueError(
        f"config field '{path}.clip_norm' is missing; set it, as "
        'configs/base.py does.'
    )
  check_type(given['clip_norm'], float, f'{path}.clip_norm')
  return NamedOptimizer(given['name'], given['clip_norm'], arguments)


def check_optimizer(
    config: OptimizerConfig | NamedOptimizer, params: PyTree, where: Where
) -> None:
  """Raises ValueError if an optimizer does not support the parameters.

  Args:
    config: The optimizer.
    params: Shapes of the parameters.
    where: The model's selection of hidden matrices.
  """
  if isinstance(config, OptimizerConfig):
    return
  make = config.constructor(where)

  def update(params, rate):
    decay = {'weight_decay': rate} if takes_decay(make) else {}
    made = make(learning_rate=rate, **decay)
    if not isinstance(made, optax.GradientTransformation):
      raise TypeError(
          f'it returned {made!r:.60}, not an optax.GradientTransformation'
      )
    made = optax.with_extra_args_support(made)
    return made.update(params, made.init(params), params)

  try:
    _, state = jax.eval_shape(
        update, params, jax.ShapeDtypeStruct((), jnp.float32)
    )
  except Exception as error:  # The optimizer may raise any exception.
    reason = str(error).strip().split('\n')[0].rstrip('.')
    raise ValueError(
        f'optimizer {config.name!r} fails on this model '
        f'({type(error).__name__}: {reason:.200}); correct its arguments, or '
        'use another optimizer.'
    ) from error
  if any(0 in leaf.shape for leaf in jax.tree.leaves(state)):
    raise ValueError(
        f'optimizer {config.name!r} has empty arrays in its state, which '
        'checkpoints cannot hold; use another optimizer.'
    )


def check_adapter(
    adapter: AdapterConfig | None, params: PyTree, where: Where
) -> None:
  """Raises ValueError if a model cannot have adapters.

  Args:
    adapter: The adapters; `None`: there are none.
    params: Shapes of the parameters.
    where: The model's selection of hidden matrices.
  """
  if adapter is None:
    return
  try:
    jax.eval_shape(functools.partial(
        sparsity.create_adapters, rank=adapter.rank, where=where
    ), jax.random.key(0), params)
  except ValueError as error:
    raise ValueError(f'adapter: {error}') from error


def takes_decay(make: Constructor) -> bool:
  """Returns whether a constructor has an argument for the weight decay."""
  return 'weight_decay' in inspect.signature(make).parameters


def matrices(params: PyTree) -> PyTree:
  """Returns the mask of leaves with weight decay: all but norms and biases.

  Example:
    >>> import jax.numpy as jnp
    >>> matrices({'wi': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}})
    {'wi': {'bias': False, 'kernel': True}}
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, _: trees.path_name(path[-1:]) not in ('bias', 'scale'),
      params,
  )


def _muon_axes(where: Where, params: PyTree) -> PyTree:
  """Returns the axes of hidden matrices, and None for all other leaves."""
  axes = select(where, params)
  return jax.tree.unflatten(jax.tree.structure(params), [
      a and optax.contrib.MuonDimensionNumbers(*a[:2]) for a in axes
  ])


# A step that is never reached. Without any restart, XLA would compile the step
# of a single phase differently from that of a run of all phases, and their
# results would differ in rounding.
_NEVER = 2**31 - 1
_ADAPTERS = 1  # Folded into the key of the masks.


def adamw(
    plan: Plan,
    *,
    where: Any,
    key: jax.Array,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
    adapter: AdapterConfig | None = None,
    revival_warmup: int | None = None,
    scale_layers: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds sparse AdamW with the plan's learning rate, decay and masks.

  Gradients are clipped by their global norm, and weight decay applies to all
  parameters but biases and norms. Moments are reset at the start of phases with
  `reset_moments`; the learning rate is not. The fields `revive` and
  `rewind_weights_to` of the phases apply.

  Args:
    plan: Plan of `create_plan`, with all phases.
    where: Selection of sparsified leaves, as `sparsify` takes it.
    key: Typed PRNG key of the masks.
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Term added to the square root of the second moment.
    clip_norm: Largest global norm of the gradient.
    adapter: Adapters that are trained in place of the weights; `None`: none.
    revival_warmup: Steps over which updates of revived weights rise, whose
      moments are corrected from their revival, see `sparsity.with_age`; `None`:
      there is neither.
    scale_layers: Transformation of updates before weight decay, e.g.
      `sparsity.scale_by_density`; `None`: there is none.

  Returns:
    The optimizer, wrapped in `sparsify`, or in `hard_threshold` if the phases
    name it, and in `rewind_weights` if a phase rewinds. Mask updates are
    tracked if `plan.updates_masks`.

  References:
    Loshchilov and Hutter, `AdamW <https://arxiv.org/abs/1711.05101>`_, 2019
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023
  """
  adam = optax.scale_by_adam(b1, b2, eps)
  if revival_warmup is not None:
    adam = sparsity.with_age(adam, warmup=revival_warmup, where=where)
  inner = optax.chain(
      optax.clip_by_global_norm(clip_norm),
      sparsity.reset_state(adam, plan.restarts or (_NEVER,)),
      *([] if scale_layers is None else [scale_layers]),
      optax.add_decayed_weights(plan.weight_decay, mask=matrices),
      optax.scale_by_learning_rate(plan.learning_rate),
  )
  return _sparse(inner, plan, where, key, adapter)


def create_optimizer(
    config: OptimizerConfig | NamedOptimizer,
    plan: Plan,
    *,
    where: Any,
    key: jax.Array,
    adapter: AdapterConfig | None = None,
    revival_warmup: int | None = None,
    scale_layers: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds the sparse optimizer of a config.

  It clips gradients, decays matrices, restarts and tracks mask updates as
  `adamw` does, whatever the optimizer.

  Args:
    config: Settings of AdamW, or another optimizer by its name.
    plan: The phases.
    where: Selection of sparsified leaves, as `sparsify` takes it.
    key: Typed PRNG key of the masks.
    adapter: Adapters that AdamW trains in place of the weights; `None`: none.
    revival_warmup: As for `adamw`; other optimizers ignore it.
    scale_layers: As for `adamw`; other optimizers ignore it.

  Returns:
    The optimizer, as `adamw` returns it.

  Raises:
    ValueError: a user's own optimizer cannot be imported.
  """
  if isinstance(config, OptimizerConfig):
    return adamw(
        plan, where=where, key=key, adapter=adapter,
        revival_warmup=revival_warmup, scale_layers=scale_layers,
        **dataclasses.asdict(config),
    )
  make = config.constructor(where)
  inner = [optax.clip_by_global_norm(config.clip_norm), _scheduled(make, plan)]
  if not takes_decay(make):
    inner.append(optax.add_decayed_weights(
        lambda step: -plan.learning_rate(step) * plan.weight_decay(step),
        mask=matrices,
    ))
  return _sparse(optax.chain(*inner), plan, where, key, None)


def _scheduled(
    make: Constructor, plan: Plan
) -> optax.GradientTransformationExtraArgs:
  """Constructs an optimizer anew at every step, for the step's learning rate.

  A schedule inside the optimizer would begin again with each restart.
  """
  def at(step):
    hyperparams = {'learning_rate': plan.learning_rate(step)}
    if takes_decay(make):
      hyperparams['weight_decay'] = plan.weight_decay(step)
    return sparsity.reset_state(
        make(**hyperparams), plan.restarts or (_NEVER,)
    )

  def update_fn(updates, state, params=None, **extra_args):
    return at(state.count).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(
      lambda params: at(0).init(params), update_fn
  )


def _sparse(
    inner: optax.GradientTransformation,
    plan: Plan,
    where: Any,
    key: jax.Array,
    adapter: AdapterConfig | None,
) -> optax.GradientTransformationExtraArgs:
  if adapter is not None:
    inner = sparsity.lora(
        inner, adapter.rank, key=jax.random.fold_in(key, _ADAPTERS),
        scale=adapter.scale, where=where,
    )
  if plan.thresholds:
    tx = threshold_by(inner, plan.algorithm, where=where)
    if plan.updates_masks:
      tx = tracking.track_masks(tx, plan.algorithm, where)
  else:
    revive = plan.revive and sparsity.scaled_normal(plan.revive)
    tx = sparsity.sparsify(
        inner, plan.algorithm, where=where, key=key, revive=revive,
        track=plan.updates_masks,
    )
  if not plan.rewinds:
    return tx
  return sparsity.rewind_weights(tx, plan.rewinds, snapshot_at=plan.rewind_to)


_is_schedule_free = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)


def evaluation_params(opt_state: PyTree, params: PyTree) -> PyTree:
  """Returns the parameters at which the model is evaluated.

  A schedule-free optimizer computes gradients at another point than the average
  of its iterates, which is the model.

  Args:
    opt_state: State of the optimizer.
    params: The parameters of the next step.

  Returns:
    The averages of a schedule-free optimizer; of others, `params`.

  References:
    Defazio et al., `The Road Less Scheduled
    <https://arxiv.org/abs/2405.15682>`_, 2024

  Example:
    >>> tx = optax.contrib.schedule_free_sgd(0.1)
    >>> params = {'w': jnp.ones(2)}
    >>> evaluation_params(tx.init(params), params)['w'].tolist()
    [1.0, 1.0]
  """
  for leaf in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free):
    if _is_schedule_free(leaf):
      return optax.contrib.schedule_free_eval_params(leaf, params)
  return params


def schedule_free_path(opt_state: PyTree) -> tuple[str, ...] | None:
  """Returns the path of a schedule-free optimizer's state, or `None`."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(
      opt_state, is_leaf=_is_schedule_free
  ):
    if _is_schedule_free(leaf):
      return trees.path_parts(path)
  return None
