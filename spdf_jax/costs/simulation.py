# SPDX-License-Identifier: Apache-2.0
"""Whole recipes on the modeled wafer: time and energy of all phases."""

from collections.abc import Callable
import dataclasses
import functools
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax.accelerator.wafer import Report
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import trace_program
from spdf_jax.accelerator.wafer import WaferDevice
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.what_if import in_micro_batches
from spdf_jax.accelerator.wafer.what_if import with_sparsity
from spdf_jax.costs.sparsity_spans import find_spans
from spdf_jax.costs.wafer_memory import micro_batches
from spdf_jax.data import Batch
from spdf_jax.training.phases import Phase
from spdf_jax.training.planned_sparsity import mean_sparsity
from spdf_jax.training.planned_sparsity import planned_sparsities
from spdf_jax.training.planned_sparsity import PlannedSparsity
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.step import train_step

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
  """The estimated cost of a recipe on systems of a device.

  Attributes:
    device: One system of the device.
    systems: Number of systems.
    phases: Estimates of the phases, in order.
    report: Report of a step of the first phase, operation by operation.
  """

  device: WaferDevice
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


def trace_step(recipe: Recipe, batch_size: int, length: int) -> Program:
  """Traces a recipe's train step, with sparse products, from shapes.

  Args:
    recipe: Recipe of the run.
    batch_size: Number of sequences.
    length: Number of tokens of each sequence.

  Returns:
    The program; `with_sparsity` sets the sparsity of the masked products.
  """
  shape = lambda dtype: jax.ShapeDtypeStruct((batch_size, length), dtype)
  batch = Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
  step = functools.partial(
      train_step,
      apply_fn=_as_products(recipe.model).apply,
      optimizer=recipe.optimizer,
      learning_rate=recipe.plan.learning_rate,
      loss=recipe.loss,
      dropout_key=recipe.dropout_key,
  )
  # The only loops of unknown length select masks, on the hosts, at no modeled
  # time, so any number of trips gives the same time.
  trace = trace_program(step, sparsity=_MASKED, trips=1)
  return trace(recipe.abstract_state, batch)


def _as_products(model: Any) -> Any:
  """Returns the model with XLA's attention, whose products have cost rules."""
  return model.clone(
      config=dataclasses.replace(model.config, attention='xla')
  )


def step_reports(
    recipe: Recipe, device: WaferDevice, systems: int = 1
) -> Callable[[tuple[int, int], Callable[[str], float], bool], Report]:
  """Returns a function that reports on a recipe's steps.

  Each batch shape is traced once. Batches that do not fit the wafer are split
  into micro-batches.

  Args:
    recipe: Recipe of the run.
    device: One system of the device.
    systems: Number of systems over which each batch is split.

  Returns:
    A function `((batch_size, length), sparsity, dense_grads) -> report`, where
    `sparsity` is a function from the layer's name to the fraction of zeros.
  """
  traced = functools.cache(functools.partial(trace_step, recipe))
  parts_of = _parts_of(recipe, device, systems)

  def report(
      shape: tuple[int, int],
      sparsity: Callable[[str], float],
      dense_grads: bool,
  ) -> Report:
    program = with_sparsity(traced(*shape), sparsity, dense_grads=dense_grads)
    parts = in_micro_batches(program, parts_of(*shape))
    return report_on(parts, device, systems)

  return report


def _parts_of(
    recipe: Recipe, device: WaferDevice, systems: int
) -> Callable[[int, int], int]:
  return lambda batch_size, length: micro_batches(
      recipe.model.config, device, -(-batch_size // systems), length
  )


def simulate_recipe(
    recipe: Recipe, device: WaferDevice, systems: int = 1
) -> Estimate:
  """Estimates the cost of all phases of a recipe, sparse and dense.

  Every span of constant sparsity is costed at that sparsity; steps that need
  gradients of pruned weights compute them densely, and a mask update takes the
  hosts another `step_seconds` (an assumption). Batches that do not fit the
  wafer are split into micro-batches.

  Args:
    recipe: Recipe of the run; the corpus may be of any size.
    device: One system of the device.
    systems: Number of systems over which each batch is split.

  Returns:
    The estimate.

  Raises:
    ValueError: One sequence per system does not fit, or `systems` is below 1
      or above the device's `largest_cluster`.
  """
  updates = set(recipe.plan.update_steps.tolist())
  parts_of = _parts_of(recipe, device, systems)
  report = step_reports(recipe, device, systems)

  @functools.cache
  def cached(
      shape: tuple[int, int], sparsities: Sparsities | None, dense_grads: bool
  ) -> Report:
    return report(shape, _sparsity_of(sparsities), dense_grads)

  def step(
      phase: Phase, sparsities: Sparsities | None, dense_grads: bool
  ) -> Report:
    return cached((phase.batch_size, phase.length), sparsities, dense_grads)

  sparsities_at = functools.partial(_sparsities_at, recipe)

  def total(value: Callable[[Report], float]) -> list[float]:
    cost = lambda *args: value(step(*args))
    return [
        sum(s.steps * s.flops_per_step for s in spans)
        for spans in find_spans(recipe.plan, sparsities_at, cost)
    ]

  seconds = total(lambda report: float(report.seconds))
  flops = total(lambda report: float(report.flops))
  phases = []
  for i, phase in enumerate(recipe.plan.phases):
    end = recipe.plan.ends[phase.name]
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
        sparsity=mean_sparsity(dict(sparsities_at(end - 1))),
        micro_batches=parts_of(phase.batch_size, phase.length),
        seconds=seconds[i] + updated * device.step_seconds,
        dense_seconds=float(dense.seconds) * phase.steps,
        host_seconds=float(hosted),
        flops=flops[i],
    ))
  first = step(recipe.plan.phases[0], sparsities_at(0), False)
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
    """Computed tokens of all sequences per second."""
    return self.tokens / float(self.report.seconds)


def simulate_inference(
    recipe: Recipe,
    device: WaferDevice,
    systems: int = 1,
    *,
    batch_size: int,
    length: int,
    decode: bool,
) -> tuple[Inference, Inference]:
  """Estimates inference with a recipe's model, sparse and dense.

  Weights are streamed for every call, as in training, which takes most of the
  time if there are few tokens.

  Args:
    recipe: Recipe of the model; the sparsities are those at the end of the
      first phase.
    device: One system of the device.
    systems: Number of systems over which the sequences are split.
    batch_size: Number of sequences.
    length: Number of tokens of each sequence, or positions of the cache.
    decode: Whether to compute one token of each sequence with a cache instead
      of a forward pass over all tokens.

  Returns:
    Estimates with the recipe's sparsity, and without sparsity.

  Raises:
    ValueError: `systems` is below 1 or above the device's `largest_cluster`.
  """
  model = _as_products(recipe.model)
  params = recipe.abstract_state.params
  masks = sparsity.get_mask(recipe.abstract_state.opt_state)
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
  program = trace_program(call, sparsity=_MASKED)(*args)
  sparsities = _sparsities_at(recipe, recipe.plan.phases[0].steps - 1)
  reports = (
      report_on(with_sparsity(program, _sparsity_of(at)), device, systems)
      for at in (sparsities, None)
  )
  shares = mean_sparsity(dict(sparsities)), 0.0
  sparse, dense = (
      Inference(share, report, batch_size * new)
      for share, report in zip(shares, reports)
  )
  return sparse, dense


def _sparsities_at(recipe: Recipe, step: int) -> Sparsities:
  return tuple(planned_sparsities(
      recipe.plan, step, recipe.abstract_state.params, recipe.where
  ).items())


def _sparsity_of(sparsities: Sparsities | None) -> Callable[[str], float]:
  """Returns the sparsity of a layer by its name in traces."""
  if sparsities is None:
    return lambda layer: 0.0
  zeros: dict[str, list[float]] = {}
  for path, planned in sparsities:
    module = _STACK.sub('', path).rpartition('/')[0]
    zeros.setdefault(module, []).append(planned.sparsity)
  means = {name: sum(found) / len(found) for name, found in zeros.items()}

  def sparsity_of(layer: str) -> float:
    # Names in traces have the model's name as a prefix.
    names = layer.split('/')
    for start in range(len(names)):
      found = means.get('/'.join(names[start:]))
      if found is not None:
        return found
    raise ValueError(
        f'layer {layer!r} has no planned sparsity; known are '
        f'{", ".join(means)}.'
    )

  return sparsity_of
