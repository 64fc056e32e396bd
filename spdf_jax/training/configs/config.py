# SPDX-License-Identifier: Apache-2.0
"""The config of a run, parsed into dataclasses that validate themselves."""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any

from spdf_jax import models
from spdf_jax.accelerator.wafer.execute import WAFER
from spdf_jax.names import lookup
from spdf_jax.training.configs import fields
from spdf_jax.training.configs import learning_rates
from spdf_jax.training.configs import settings
from spdf_jax.training.configs.early_stop import EarlyStop
from spdf_jax.training.configs.phases import check_order
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.configs.phases import Rate
from spdf_jax.training.own_models import OwnSizes
from spdf_jax.training.step import optimizers
from spdf_jax.training.step.losses import Loss
from spdf_jax.training.step.matmul import MATMULS

_PHASE_FIELDS = {
    f.name: None for f in dataclasses.fields(Phase)
    if f.name not in ('name', 'steps')
}

_OF_TEACHER = ('teacher', 'temperature', 'teacher_weight')

STORAGES = ('auto', 'dense', 'compact')
"""Ways to store the state: all weights, or the values of kept weights only."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The config of a run, as `configs/base.py` documents it.

  Its fields are checked here; `Run.create` checks it against the devices and
  the data.

  Attributes:
    seed: Seed of initial weights, masks and data order.
    model: The model.
    matmul: Matrix products of sparse steps: `'auto'`, `'native'`, `'dense'`,
      `'blocks-64'` or `'blocks-128'`, see `sparse_steps`; `'wafer'` emulates
      all masked products of all steps, see `accelerator.wafer.lowering`.
    storage: Storage of the state: `'dense'`, `'compact'` or `'auto'`, see
      `storage.choose_storage`.
    loss: Loss to minimize.
    micro_batches: Number of parts of a batch for gradient accumulation.
    max_skipped_steps: Steps in a row whose loss or gradient norm may be not
      finite, which are then skipped; one more stops training.
    mesh: Sizes of the mesh.
    data: Corpus and task.
    optimizer: Settings of AdamW, or another optimizer by its name.
    revival_warmup: Steps over which updates of revived weights rise; their
      moments are then corrected from their revival, see `sparsity.with_age`.
      There is no rise where `reset_moments` restarts all moments. `None`: there
      is neither.
    parameterization: Scales of initial weights and learning rates by width and
      density; `None`: the standard parameterization, which has none.
    phases: The phases, in order.
    evaluation: Settings of the evaluations.
    eval_every: Steps between evaluations.
    log_every: Steps between rows of the log.
    checkpoints: Interval and number of checkpoints.
    resume: `'WORKDIR'` or `'WORKDIR@PHASE'` to resume from; `''`: none.
    init_from: The same, to start from the parameters only.
    adapter: Low-rank adapters, which are trained in place of the weights;
      `None`: the weights are trained.

  Raises:
    ValueError: a field is out of its range, or two contradict one another.
  """

  seed: int
  model: settings.ModelConfig
  matmul: str
  storage: str
  loss: Loss
  micro_batches: int
  max_skipped_steps: int
  mesh: settings.MeshConfig
  data: settings.DataConfig
  optimizer: settings.OptimizerConfig | optimizers.NamedOptimizer
  revival_warmup: int | None
  parameterization: settings.Parameterization | None
  phases: tuple[Phase, ...]
  evaluation: settings.EvaluationConfig
  eval_every: int
  log_every: int
  checkpoints: settings.CheckpointConfig
  resume: str
  init_from: str
  adapter: settings.AdapterConfig | None

  def __post_init__(self):
    fields.check_numbers(
        self, '', 'at least 1', 'eval_every', 'log_every', 'micro_batches'
    )
    fields.check_numbers(self, '', '0 or more', 'max_skipped_steps')
    if not 0 <= self.seed < 2**32:
      raise ValueError(
          f'seed is {self.seed}; give a whole number in [0, 2**32).'
      )
    lookup('matmul', self.matmul, dict.fromkeys(MATMULS))
    lookup('storage', self.storage, dict.fromkeys(STORAGES))
    if self.matmul == WAFER and self.model.sizes.dtype != 'float16':
      raise ValueError(
          f"matmul is 'wafer' and model.dtype is {self.model.sizes.dtype!r}; "
          'the wafer computes in fp16, which needs a loss scale: set '
          "model.dtype to 'float16', which has one."
      )
    if self.revival_warmup is not None:
      fields.check_numbers(self, '', '0 or more', 'revival_warmup')
    for name in ('adapter', 'parameterization', 'revival_warmup'):
      if getattr(self, name) is None:
        continue
      if isinstance(self.optimizer, optimizers.NamedOptimizer):
        raise ValueError(
            f'{name} is set, which needs AdamW, and the optimizer is '
            f"{self.optimizer.name!r}; use 'adamw', or leave {name} out."
        )
      if self.adapter is not None and name != 'adapter':
        raise ValueError(
            f'{name} is set, which follows masks, and adapter.rank is '
            f'{self.adapter.rank}, whose factors have none; leave one out.'
        )
      if name != 'parameterization' and any(
          phase.thresholds for phase in self.phases
      ):
        raise ValueError(
            f'{name} is set, which follows the masks of sparsify, and a phase '
            f'has hard_threshold; leave {name} out.'
        )
    self._check_features()
    self._check_rewinds()
    check_order(self.phases)
    for phase in self.phases:
      self._check_phase(phase)
    lengths = [phase.length for phase in self.phases if phase.data == 'corpus']
    for length in lengths:
      if max(lengths) % length:
        raise ValueError(
            f'phases on the corpus have the lengths {length} and '
            f'{max(lengths)}; choose lengths that divide the longest one.'
        )

  def _check_rewinds(self) -> None:
    """Checks that weights can be rewound: no state keeps iterates of them."""
    rewound = [p.name for p in self.phases if p.rewind_weights_to is not None]
    name = getattr(self.optimizer, 'name', '')
    if not rewound or not (self.adapter or name.startswith('schedule_free')):
      return
    what = 'adapter.rank' if self.adapter else f'optimizer {name!r}'
    raise ValueError(
        f'rewind_weights_to of phase {rewound[0]!r} is set, and {what} keeps '
        'trained weights in its state, which are not rewound; leave one out.'
    )

  def _check_features(self) -> None:
    """Checks that the model supports what is set."""
    for feature, name, value, needed in (
        (models.READ_OUT, 'loss.chunk', self.loss.chunk, 0),
        (
            models.CACHE, 'evaluation.generations',
            self.evaluation.generations if self.data.task else 0, 0
        ),
    ):
      if value != needed and feature not in self.model.sizes.features:
        raise ValueError(
            f'{name} is {value!r}, which the model {self.model.preset!r}, your '
            f'own, does not support; set {name} to {needed!r}.'
        )

  def _check_phase(self, phase: Phase) -> None:
    """Checks a phase against the model, the data and the evaluations."""
    sources = ('corpus', 'task') if self.data.task else ('corpus',)
    lookup(
        f'data of phase {phase.name!r}:', phase.data, dict.fromkeys(sources)
    )
    max_length = self.model.sizes.max_length
    if phase.length > max_length:
      raise ValueError(
          f'phase {phase.name!r} has length {phase.length}, in tokens per '
          f'sequence, and model.max_length is {max_length}; lower the length '
          'or raise model.max_length.'
      )
    if phase.batch_size % self.micro_batches:
      raise ValueError(
          f'micro_batches is {self.micro_batches}, which does not divide the '
          f'batch_size of phase {phase.name!r}, {phase.batch_size}; choose a '
          'divisor.'
      )
    if phase.early_stop is not None:
      use = f'early_stop.metric of phase {phase.name!r} is'
      self.check_metric(phase.early_stop.metric, use)

  def check_metric(self, metric: str, use: str) -> None:
    """Raises ValueError if evaluations do not measure a metric.

    Args:
      metric: One of `METRICS`.
      use: Beginning of the error's sentence, e.g. `early_stop.metric is`.
    """
    if not self.data.task and not metric.startswith('validation/'):
      raise ValueError(
          f'{use} {metric!r}, but the config has no task; set data.task, or '
          "use 'validation/loss'."
      )
    if metric.startswith('task/') and not self.evaluation.generations:
      raise ValueError(
          f'{use} {metric!r}, which is measured on generated text, but '
          'evaluation.generations is 0; set it to 1 or more.'
      )

  def as_dict(self) -> dict[str, Any]:
    """Returns the config as `parse` reads it, JSON-able."""
    values = dataclasses.asdict(self)
    values['model'] = self.model.as_dict()
    values['optimizer'] = self.optimizer.as_dict()
    values['phases'] = {'order': [phase.name for phase in self.phases]} | {
        phase.pop('name'): phase for phase in values['phases']
        if not phase.pop('steps')
    }
    return values


def parse(config: Any) -> RunConfig:
  """Parses and checks a config, without reading any data.

  Args:
    config: A ConfigDict, or mapping, as `configs/base.py` documents it. Under
      `'phase_defaults'` it may have fields for all phases that lack them.

  Returns:
    The `RunConfig`.

  Raises:
    ValueError: a field is unknown, missing, of another type or out of its
      range, or two contradict one another.
  """
  given = fields.plain(config)
  defaults = given.pop('phase_defaults', {})
  fields.check_known(defaults, _PHASE_FIELDS, 'phase_defaults')
  config = fields.read_fields(RunConfig, given, readers={
      **_READERS,
      tuple[Phase, ...]: lambda phases, _: parse_phases(phases, defaults),
  })
  if config.parameterization is None:
    return config
  model = config.parameterization.apply_to(config.model)
  return dataclasses.replace(config, model=model)


def parse_phases(
    phases: Mapping[str, Any],
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[Phase, ...]:
  """Parses the phases of a config.

  Args:
    phases: Mapping from the name of each phase to a mapping of its fields, see
      `configs/base.py`, and from `'order'` to a list of the names of the phases
      to run. Other phases are ignored.
    defaults: Values for fields, also nested ones, that a phase lacks.

  Returns:
    The phases, in order.

  Raises:
    ValueError: a phase or a field is unknown, or a field is missing, of another
      type or out of its range.
  """
  if not isinstance(phases, Mapping) or 'order' not in phases:
    raise ValueError(
        "config field 'phases' has no order; set phases.order to a list of the "
        'names of the phases to run.'
    )
  order = phases['order']
  if not isinstance(order, list | tuple) or not all(
      isinstance(name, str) for name in order
  ):
    raise ValueError(
        f"config field 'phases.order' is {order!r}; set phases.order to a list "
        'of the names of the phases to run.'
    )
  described = {name: spec for name, spec in phases.items() if name != 'order'}
  kind = 'phase of phases.order'
  return tuple(
      _read_phase(name, _merged(defaults, lookup(kind, name, described)))
      for name in order
  )


def parse_mesh(config: Any) -> settings.MeshConfig:
  """Parses only the mesh of a config, before JAX initializes its devices.

  Raises:
    ValueError: the mesh or one of its sizes is missing or not valid.

  Example:
    >>> parse_mesh({'mesh': {'data': 1, 'fsdp': 2, 'tensor': 1}})
    MeshConfig(data=1, fsdp=2, tensor=1)
  """
  given = fields.plain(config).get('mesh')
  return fields.read_fields(settings.MeshConfig, given, 'mesh')


def _read_model(given: Any, path: str) -> settings.ModelConfig:
  """Reads a preset and the fields to override; `None` keeps the default."""
  if not isinstance(given, Mapping) or 'preset' not in given:
    raise ValueError(
        f'config field {path!r} has no preset; set {path}.preset to one of '
        f'{", ".join(models.PRESETS)}.'
    )
  fields.check_type(given['preset'], str, f'{path}.preset')
  if ':' in given['preset']:
    arguments = {
        k: v for k, v in given.items() if k != 'preset' and v is not None
    }
    return settings.ModelConfig(given['preset'], OwnSizes(arguments))
  preset = lookup('preset', given['preset'], models.PRESETS)
  for field in dataclasses.fields(preset):
    if field.name in given:
      kind: Any = field.type
      fields.check_type(given[field.name], kind | None, f'{path}.{field.name}')
  sizes = models.create_model(**given).config
  return settings.ModelConfig(given['preset'], sizes)


def _merged(defaults: Any, given: Any) -> Any:
  """Returns a value with the fields of another one that it lacks."""
  if not (isinstance(defaults, Mapping) and isinstance(given, Mapping)):
    return given
  return {**defaults, **{
      name: _merged(defaults.get(name), value) for name, value in given.items()
  }}


def _read_phase(name: str, given: Any) -> Phase:
  """Reads a phase; error messages name the phase."""
  path = f'phases.{name}'

  def named(what: str, read: fields.Reader) -> fields.Reader:
    def read_named(value: Any, path: str) -> Any:
      try:
        return read(value, path)
      except ValueError as error:
        raise ValueError(f'{what}phase {name!r}: {error}') from error

    return read_named

  fields.check_known(given, _PHASE_FIELDS, path)
  given = {**given, 'name': name, 'steps': None}
  return fields.read_fields(Phase, given, path, {
      Any: lambda given, path: given,  # The number of steps is not given here.
      Rate: named('learning rate of ', _read_rate),
      EarlyStop | None: named('', _read_unless_empty(EarlyStop, 'metric')),
      float | None: _read_optional(float),
      str | int | None: _read_optional(str),
      str | None: _read_optional(str),
      tuple[str, ...] | None: _read_patterns,
  })


def _read_rate(given: Any, path: str) -> learning_rates.LearningRate:
  """Reads a learning rate, skipping the fields that its schedule ignores."""
  _check_fields(learning_rates.LearningRate, given, path)
  if 'schedule' in given:
    takes = lookup('schedule', given['schedule'], learning_rates.TAKES)
    given = {k: v for k, v in given.items() if k in ('schedule', *takes)}
  return fields.read_fields(learning_rates.LearningRate, given, path)


def _read_unless_empty(kind: Any, name: str) -> fields.Reader:
  """Returns a reader of a dataclass; it reads `None` if a field is empty."""
  def read(given: Any, path: str) -> Any:
    if given is None:
      return None
    _check_fields(kind, given, path)
    return fields.read_fields(kind, given, path) if given.get(name) else None

  return read


def _check_fields(kind: Any, given: Any, path: str) -> None:
  """Raises ValueError unless a value is a mapping of a dataclass' fields."""
  known = {field.name: None for field in dataclasses.fields(kind)}
  fields.check_known(given, known, path)


def _read_parameterization(
    given: Any, path: str
) -> settings.Parameterization | None:
  """Reads a parameterization; returns `None` for the standard one."""
  if given is None:
    return None
  _check_fields(settings.Parameterization, given, path)
  name = given.get('name')
  lookup(path, name, dict.fromkeys(settings.PARAMETERIZATIONS))
  if name == 'standard':
    return None
  return fields.read_fields(settings.Parameterization, given, path)


def _read_optional(kind: type) -> fields.Reader:
  """Returns a reader of a value that 0 or `''` sets to `None`."""
  def read(given: Any, path: str) -> Any:
    fields.check_type(given, kind | None, path)
    return given or None

  return read


def _read_patterns(given: Any, path: str) -> tuple[str, ...] | None:
  fields.check_type(given, list | None, path)
  for pattern in given or ():
    fields.check_type(pattern, str, path)
  return tuple(given) if given else None


def _read_loss(given: Any, path: str) -> Loss:
  """Reads the loss, without the fields of a teacher that is not given."""
  _check_fields(Loss, given, path)
  if not given.get('teacher'):
    given = {k: v for k, v in given.items() if k not in _OF_TEACHER}
  return fields.read_fields(Loss, given, path)


_READERS: Mapping[Any, fields.Reader] = {
    settings.AdapterConfig | None: _read_unless_empty(
        settings.AdapterConfig, 'rank'
    ),
    Loss: _read_loss,
    settings.ModelConfig: _read_model,
    settings.OptimizerConfig | optimizers.NamedOptimizer: (
        optimizers.read_optimizer
    ),
    settings.Parameterization | None: _read_parameterization,
}
