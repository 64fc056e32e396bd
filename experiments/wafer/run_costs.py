"""Costs on the modeled wafer: time, energy and batches of recipes."""

from collections.abc import Callable
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax import training
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer import program as programs
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.simulate import Report
from spdf_jax.costs import plan_costs
from spdf_jax.data import Batch
from spdf_jax.training import plan as plans
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.plan import PlannedSparsity
from spdf_jax.training.run import Run
from spdf_jax.training.step import losses
from spdf_jax.training.step import teacher as teachers

_MASKED = 0.5  # Any value above 0 marks masked products for `with_sparsity`.
_STACK = re.compile(r'\[\d+\]$')
Sparsities = tuple[tuple[str, PlannedSparsity], ...]


class PhaseEstimate(NamedTuple):
  """The estimated cost of a phase.

  Attributes:
    name: Name of the phase.
    steps: Number of optimizer steps.
    tokens: Number of training tokens.
    sparsity: Fraction of zeros in the sparsified matrices at the phase's end.
    micro_batches: Number of micro-batches of a step.
    seconds: Time of the phase, including mask updates.
    dense_seconds: Time of the same phase without sparsity.
    host_seconds: Part of either time in which the wafer waits for the optimizer
      on the hosts.
    flops: Number of executed FLOPs.
  """

  name: str
  steps: int
  tokens: int
  sparsity: float
  micro_batches: int
  seconds: float
  dense_seconds: float
  host_seconds: float
  flops: float


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The estimated cost of a run on systems of a device.

  Attributes:
    device: The device, of which a run uses one or more systems.
    systems: Number of systems.
    phases: Estimates of the phases, in order.
    report: Report of a step of the first phase, operation by operation.
  """

  device: wafer.WaferDevice
  systems: int
  phases: tuple[PhaseEstimate, ...]
  report: Report

  @property
  def seconds(self) -> float:
    """Seconds of all phases."""
    return sum(phase.seconds for phase in self.phases)

  @property
  def dense_seconds(self) -> float:
    """Seconds of the same phases without sparsity."""
    return sum(phase.dense_seconds for phase in self.phases)

  @property
  def energy(self) -> tuple[float, float]:
    """Lower and upper bound, J: energy per FLOP at peak, and peak power."""
    flops = sum(phase.flops for phase in self.phases)
    return self.device.energy(flops, self.seconds * self.systems)


def trace_step(run: Run, batch_size: int, length: int) -> Program:
  """Traces a run's train step, with sparse products, from shapes.

  Args:
    run: The run, of any model.
    batch_size: Number of sequences.
    length: Number of tokens of each sequence.

  Returns:
    The program; `with_sparsity` sets the sparsity of the masked products.
  """
  shape = lambda dtype: jax.ShapeDtypeStruct((batch_size, length), dtype)
  batch = Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
  is_ours = isinstance(run.model.config, models.DecoderConfig)
  model = (
      _as_products(run.model) if is_ours
      else run.model.with_lowering(lowerings.REFERENCE)
  )
  apply_fn, optimizer = model.apply, run.programs.optimizer
  teacher, loss = None, run.config.loss
  if loss.teacher is not None:
    teacher = _as_products(
        models.model_of(teachers.teacher_config(loss.teacher))
    )

  def step(state, batch, teacher_params):
    taught = loss if teacher is None else losses.Distillation(
        loss, functools.partial(teacher.apply, {'params': teacher_params})
    )
    return training.train_step(
        state, batch, apply_fn=apply_fn, optimizer=optimizer, loss=taught,
        learning_rate=run.plan.learning_rate,
        dropout_key=run.programs.dropout_key,
    )

  # The only loops of unknown length select masks, on the hosts, at no modeled
  # time, so any number of trips gives the same time.
  trace = wafer.trace_program(step, sparsity=_MASKED, trips=1)
  return trace(
      run.programs.abstract_state, batch,
      None if teacher is None else jax.eval_shape(
          teacher.init, jax.random.key(0), batch.inputs
      )['params'],
  )


def _as_products(model: Any) -> Any:
  """Returns a model with XLA's attention, whose products have cost rules."""
  if not isinstance(model.config, models.DecoderConfig):
    raise ValueError(
        'model.preset names a model of your own, and only GPT and Llama are '
        'modeled on the wafer; set it to one of spdf_jax.models.PRESETS.'
    )
  return model.clone(
      config=dataclasses.replace(model.config, attention='xla')
  )


def step_reports(
    run: Run, device: wafer.WaferDevice, systems: int = 1
) -> Callable[[tuple[int, int], Callable[[str], float], bool], Report]:
  """Returns a function that reports on a run's steps.

  Each batch shape is traced once. Batches that do not fit the wafer are split
  into micro-batches.

  Args:
    run: The run.
    device: The device, of which a run uses one or more systems.
    systems: Number of systems over which each batch is split.

  Returns:
    A function `((batch_size, length), sparsity, dense_grads) -> report`, where
    `sparsity` is a function from the layer's name to the fraction of zeros.
  """
  # Memory on the wafer is modeled for our own models only.
  _as_products(run.model)
  traced = functools.cache(functools.partial(trace_step, run))
  parts_of = _parts_of(run, device, systems)

  def report(
      shape: tuple[int, int],
      sparsity: Callable[[str], float],
      dense_grads: bool,
  ) -> Report:
    program = programs.with_sparsity(
        traced(*shape), sparsity, dense_grads=dense_grads
    )
    parts = programs.in_micro_batches(program, parts_of(*shape))
    return wafer.report_on(parts, device, systems)

  return report


def _parts_of(
    run: Run, device: wafer.WaferDevice, systems: int
) -> Callable[[int, int], int]:
  """Returns the number of micro-batches of a batch, by its shape."""

  def parts(batch_size: int, length: int) -> int:
    largest = advise_batch(run.model.config, device, length).largest
    own = -(-batch_size // systems)
    return -(-own // largest)

  return parts


def simulate_run(
    run: Run, device: wafer.WaferDevice, systems: int = 1
) -> Estimate:
  """Estimates the cost of all phases of a run, sparse and dense.

  Every step is costed at the sparsity planned for it; steps that need gradients
  of pruned weights compute them densely, and a mask update takes another
  `device.step_seconds`, the time of an optimizer step (an assumption). Batches
  that do not fit the wafer are split into micro-batches.

  Args:
    run: The run. Its data is not read, so it may be created with
      `planning=True`.
    device: The modeled machine, e.g. `create_device('cs2')`.
    systems: Number of such machines over which each batch is split.

  Returns:
    Seconds, FLOPs and micro-batches of every phase, and the energy.

  Raises:
    ValueError: one sequence does not fit the SRAM, `systems` is below 1 or
      above the device's `largest_cluster`, or the model is a user's own.
  """
  updates = set(run.plan.update_steps.tolist())
  parts_of = _parts_of(run, device, systems)
  report = step_reports(run, device, systems)

  @functools.cache
  def cached(
      shape: tuple[int, int], sparsities: Sparsities | None, dense_grads: bool
  ) -> Report:
    return report(shape, _sparsity_of(sparsities), dense_grads)

  def step(
      phase: Phase, sparsities: Sparsities | None, dense_grads: bool
  ) -> Report:
    return cached((phase.batch_size, phase.length), sparsities, dense_grads)

  sparsities_at = functools.partial(_sparsities_at, run)

  def total(value: Callable[[Report], float]) -> list[float]:
    cost = lambda *args: value(step(*args))
    return [
        sum(s.steps * s.cost_per_step for s in spans)
        for spans in plan_costs.find_spans(run.plan, sparsities_at, cost)
    ]

  seconds = total(lambda report: float(report.seconds))
  flops = total(lambda report: float(report.flops))
  phases = []
  for i, phase in enumerate(run.plan.phases):
    end = run.plan.ends[phase.name]
    start = end - phase.steps
    # Updates at phase boundaries are not counted, as the mask is replaced there
    # in any case.
    updated = sum(start < at < end for at in updates)
    dense = step(phase, None, False)
    hosted = dense.total.host / device.clock * phase.steps
    phases.append(PhaseEstimate(
        name=phase.name,
        steps=phase.steps,
        tokens=phase.tokens,
        sparsity=plans.mean_sparsity(dict(sparsities_at(end - 1))),
        micro_batches=parts_of(phase.batch_size, phase.length),
        seconds=seconds[i] + updated * device.step_seconds,
        dense_seconds=float(dense.seconds) * phase.steps,
        host_seconds=float(hosted),
        flops=flops[i],
    ))
  first = step(run.plan.phases[0], sparsities_at(0), False)
  return Estimate(device, systems, tuple(phases), first)


class Inference(NamedTuple):
  """The estimated cost of inference with a trained model.

  Attributes:
    sparsity: Fraction of zeros in the sparsified matrices.
    report: Report of one forward pass, or of one token of each sequence.
    tokens: Number of computed tokens.
  """

  sparsity: float
  report: Report
  tokens: int

  @property
  def tokens_per_second(self) -> float:
    """Tokens per second, summed over all sequences."""
    return self.tokens / float(self.report.seconds)


def simulate_inference(
    run: Run,
    device: wafer.WaferDevice,
    systems: int = 1,
    *,
    batch_size: int,
    length: int,
    decode: bool,
) -> tuple[Inference, Inference]:
  """Estimates inference with a run's model, sparse and dense.

  As in training, every call streams the weights to the wafer; with few tokens
  that takes most of the time.

  Args:
    run: Run of the model; the sparsities are those at the end of the
      first phase.
    device: The modeled machine, e.g. `create_device('cs2')`.
    systems: Number of such machines over which the sequences are split.
    batch_size: Number of sequences.
    length: Number of tokens of each sequence; with `decode`, number of
      positions of the cache.
    decode: Whether to compute one token of each sequence with a cache instead
      of a forward pass over all tokens.

  Returns:
    A pair of estimates: with the run's sparsity, and without sparsity.

  Raises:
    ValueError: `systems` is below 1 or above the device's `largest_cluster`,
      or the model is a user's own.
  """
  model = _as_products(run.model)
  params = run.programs.abstract_state.params
  masks = sparsity.get_mask(run.programs.abstract_state.opt_state)
  new = 1 if decode else length
  tokens = jax.ShapeDtypeStruct((batch_size, new), jnp.int32)
  call: Callable[..., Any]
  args: tuple[Any, ...]
  if decode:
    cache = jax.eval_shape(
        lambda: models.create_cache(model, batch_size, length)
    )

    call = lambda params, masks, cache, tokens, positions: model.apply(
        {'params': params, 'masks': masks, 'cache': cache},
        tokens, positions, mutable=['cache'],
    )
    args = params, masks, cache, tokens, tokens
  else:
    call = lambda params, masks, tokens: model.apply(
        {'params': params, 'masks': masks}, tokens
    )
    args = params, masks, tokens
  program = wafer.trace_program(call, sparsity=_MASKED)(*args)
  sparsities = _sparsities_at(run, run.plan.phases[0].steps - 1)
  reports = (
      wafer.report_on(
          programs.with_sparsity(program, _sparsity_of(at)), device, systems
      )
      for at in (sparsities, None)
  )
  shares = plans.mean_sparsity(dict(sparsities)), 0.0
  sparse, dense = (
      Inference(share, report, batch_size * new)
      for share, report in zip(shares, reports)
  )
  return sparse, dense


def _sparsities_at(run: Run, step: int) -> Sparsities:
  return tuple(plans.planned_sparsities(
      run.plan, step, run.programs.abstract_state.params, run.model.where
  ).items())


def _sparsity_of(sparsities: Sparsities | None) -> Callable[[str], float]:
  """Returns the sparsity of a layer by its name in traces."""
  if sparsities is None:
    return lambda layer: 0.0
  zeros: dict[str, list[float]] = {}
  for path, planned in sparsities:
    module = _STACK.sub('', path).rpartition('/')[0]
    zeros.setdefault(module, []).append(planned.sparsity)
  means = {name: sum(each) / len(each) for name, each in zeros.items()}

  def sparsity_of(layer: str) -> float:
    # Names in traces have the model's name as a prefix.
    names = layer.split('/')
    for start in range(len(names)):
      sparsity = means.get('/'.join(names[start:]))
      if sparsity is not None:
        return sparsity
    raise ValueError(
        f'layer {layer!r} has masked products but no planned sparsity, unlike '
        f'{", ".join(means)}; please report this error of spdf_jax.'
    )

  return sparsity_of


class BatchAdvice(NamedTuple):
  """Numbers of sequences that a system can process at a time.

  Attributes:
    largest: Maximum number for which the working set of every product fits.
    advised: Maximum number for which also the inputs of all layers fit, stored
      for the backward pass; at least 1.
    working_set: Bytes of input and output of the largest product, per sequence.
    stash: Bytes of the inputs of all layers, per sequence.
  """

  largest: int
  advised: int
  working_set: float
  stash: float


def advise_batch(
    config: models.DecoderConfig, device: wafer.WaferDevice, length: int
) -> BatchAdvice:
  """Returns the micro-batch sizes that fit the wafer's SRAM.

  A matrix product needs memory for its input and output; for the head these
  include the logits. Between the forward and the backward pass the inputs of
  all layers are kept, layers × tokens × width values: the stash. A step whose
  stash does not fit must recompute or reload it, which is not costed.

  Args:
    config: Config of the model, e.g. `GPTConfig` or an entry of `PRESETS`.
    device: The modeled machine, e.g. `create_device('cs2')`.
    length: Number of tokens of a sequence.

  Returns:
    The largest batch for which every product fits, `largest`; the largest one
    for which the stash fits too, `advised`, at least 1; and the bytes of a
    sequence in products and in the stash.

  Raises:
    ValueError: the largest product of one sequence does not fit.

  Example:
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> from spdf_jax.models import PRESETS
    >>> advice = advise_batch(PRESETS['gpt3-xl'], create_device('cs2'), 2048)
    >>> advice.advised, advice.largest  # The vendor's configs take 132.
    (186, 186)
  """
  bytes_each = device.value_bits / 8
  widths = config.d_ff, config.vocab_size, config.d_model
  working_set = length * (config.d_model + max(widths)) * bytes_each
  stash = config.n_layers * length * config.d_model * bytes_each
  largest = int(device.sram // working_set)
  if not largest:
    raise ValueError(
        f'the largest product of one sequence of {length:,} tokens needs '
        f'{working_set / 1e9:.1f} GB and {device.name} has '
        f'{device.sram / 1e9:.1f} GB of SRAM; shorten the sequence.'
    )
  advised = max(1, min(largest, int(device.sram // stash)))
  return BatchAdvice(largest, advised, working_set, stash)
