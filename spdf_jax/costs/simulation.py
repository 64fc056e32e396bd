"""Whole recipes on the modeled wafer: days, energy and cost of a plan."""

from collections.abc import Callable
import dataclasses
import functools
import re
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
from spdf_jax.costs.sparsity_spans import find_segments
from spdf_jax.costs.wafer_memory import micro_batches
from spdf_jax.data import Batch
from spdf_jax.training.phases import Phase
from spdf_jax.training.plan import asked_levels
from spdf_jax.training.plan import Level
from spdf_jax.training.plan import mean_sparsity
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.step import train_step

_MASKED = 0.5  # Traced at any sparsity above 0; the real one is set later.
_STACK = re.compile(r'\[\d+\]$')
Levels = tuple[tuple[str, Level], ...]


class PhaseEstimate(NamedTuple):
  """What a phase takes.

  Attributes:
    name: Of the phase.
    steps: Optimizer steps.
    tokens: Trained on.
    sparsity: Fraction of zeros in the sparsified matrices at its end.
    micro_batches: In which a step takes its batch.
    seconds: Of the phase, mask updates included.
    dense_seconds: The same phase dense.
    host_seconds: Of both, in which the wafer waits for the optimizer.
    flops: Done.
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
  """What a recipe takes on systems of a device.

  Attributes:
    device: One system.
    systems: Their number.
    phases: In order.
    report: A step of the first phase, operation by operation.
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
    """Seconds of the same phases dense."""
    return sum(phase.dense_seconds for phase in self.phases)

  @property
  def energy(self) -> tuple[float, float]:
    """J, at least and at most: FLOPs at the peak's energy; full power."""
    flops = sum(phase.flops for phase in self.phases)
    power = self.systems * self.device.power
    return flops * self.device.energy_per_flop, self.seconds * power


def trace_step(recipe: Recipe, batch_size: int, length: int) -> Program:
  """Traces a recipe's train step from shapes: sparse products, all masks.

  Args:
    recipe: The recipe.
    batch_size: Sequences.
    length: Tokens of each.

  Returns:
    The program, its masked products at a sparsity to be set by
    `with_sparsity`.
  """
  shape = lambda dtype: jax.ShapeDtypeStruct((batch_size, length), dtype)
  batch = Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
  step = functools.partial(
      train_step,
      apply_fn=_as_products(recipe.model).apply,
      optimizer=recipe.optimizer,
      learning_rate=recipe.plan.learning_rate,
      loss=recipe.loss,
  )
  # Its only loops of unknown length choose masks, at the hosts.
  trace = trace_program(step, sparsity=_MASKED, trips=1)
  return trace(recipe.abstract_state, batch)


def _as_products(model: models.GPT | models.Llama) -> models.GPT | models.Llama:
  """Returns the model with attention as XLA's products: any device's."""
  return model.clone(
      config=dataclasses.replace(model.config, attention='xla')
  )


def step_reports(
    recipe: Recipe, device: WaferDevice, systems: int = 1
) -> Callable[[tuple[int, int], Callable[[str], float], bool], Report]:
  """Prepares reports on a recipe's steps; each batch shape is traced once.

  Batches that do not fit the wafer are taken in micro-batches.

  Args:
    recipe: The recipe.
    device: One system.
    systems: Over which each batch is split.

  Returns:
    `((batch_size, length), sparsity, dense_grads) -> report`, with a function
    from the layer's name to the fraction of zeros.
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
  """Estimates what all phases of a recipe take, sparse and dense.

  Every segment of one level costs its own steps; steps that need gradients of
  pruned weights compute them densely, and a mask update takes the hosts
  another `step_seconds`, an assumption. Batches that do not fit the wafer are
  taken in micro-batches.

  Args:
    recipe: What would be run; its corpus may be of any size.
    device: One system.
    systems: Over which each batch is split.

  Returns:
    The estimate.

  Raises:
    ValueError: one sequence per system does not fit, or a number of systems
      is impossible.
  """
  updates = set(recipe.plan.update_steps.tolist())
  parts_of = _parts_of(recipe, device, systems)
  report = step_reports(recipe, device, systems)

  @functools.cache
  def cached(
      shape: tuple[int, int], levels: Levels | None, dense_grads: bool
  ) -> Report:
    return report(shape, _sparsity_of(levels), dense_grads)

  def step(phase: Phase, levels: Levels | None, dense_grads: bool) -> Report:
    return cached((phase.batch_size, phase.length), levels, dense_grads)

  levels_at = functools.partial(_levels_at, recipe)

  def total(value: Callable[[Report], float]) -> list[float]:
    cost = lambda *args: value(step(*args))
    return [
        sum(s.steps * s.flops_per_step for s in segments)
        for segments in find_segments(recipe.plan, levels_at, cost)
    ]

  seconds = total(lambda report: float(report.seconds))
  flops = total(lambda report: float(report.flops))
  phases = []
  for i, phase in enumerate(recipe.plan.phases):
    end = recipe.plan.ends[phase.name]
    start = end - phase.steps
    # Where one phase follows another the mask is made anew in any case.
    moved = sum(start < at < end for at in updates)
    dense = step(phase, None, False)
    hosted = dense.total.host / device.clock * phase.steps
    phases.append(PhaseEstimate(
        name=phase.name,
        steps=phase.steps,
        tokens=phase.tokens,
        sparsity=mean_sparsity(dict(levels_at(end - 1))),
        micro_batches=parts_of(phase.batch_size, phase.length),
        seconds=seconds[i] + moved * device.step_seconds,
        dense_seconds=float(dense.seconds) * phase.steps,
        host_seconds=float(hosted),
        flops=flops[i],
    ))
  first = step(recipe.plan.phases[0], levels_at(0), False)
  return Estimate(device, systems, tuple(phases), first)


class Inference(NamedTuple):
  """What a model takes once it is trained.

  Attributes:
    sparsity: Fraction of zeros in the sparsified matrices.
    report: Of one forward pass, or of one token of each sequence.
    tokens: Computed by it.
  """

  sparsity: float
  report: Report
  tokens: int

  @property
  def tokens_per_second(self) -> float:
    """Tokens of all sequences."""
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
  """Estimates a forward pass, or a token, with a recipe's masks and dense.

  Weights are streamed for every call, as in training: with few tokens that is
  what takes the time.

  Args:
    recipe: Its model, at the levels that its first phase ends with.
    device: One system.
    systems: Over which the sequences are split.
    batch_size: Sequences.
    length: Tokens of each, or of the cache.
    decode: Whether one token is computed, the others being in the cache.

  Returns:
    With zeros, and dense.

  Raises:
    ValueError: as `report_on`.
  """
  model = _as_products(recipe.model)
  params = recipe.abstract_state.params
  masks = sparsity.get_mask(recipe.abstract_state.opt_state)
  new = 1 if decode else length
  tokens = jax.ShapeDtypeStruct((batch_size, new), jnp.int32)
  if decode:
    cache = jax.eval_shape(
        lambda: models.create_cache(model, batch_size, length)
    )

    def call(params, masks, cache, tokens, positions):
      variables = {'params': params, 'masks': masks, 'cache': cache}
      return model.apply(
          variables, tokens, positions, mutable=['cache']
      )

    args = params, masks, cache, tokens, tokens
  else:
    call = lambda params, masks, tokens: model.apply(
        {'params': params, 'masks': masks}, tokens
    )
    args = params, masks, tokens
  program = trace_program(call, sparsity=_MASKED)(*args)
  levels = _levels_at(recipe, recipe.plan.phases[0].steps - 1)
  reports = (
      report_on(with_sparsity(program, _sparsity_of(at)), device, systems)
      for at in (levels, None)
  )
  shares = mean_sparsity(dict(levels)), 0.0
  return tuple(
      Inference(share, report, batch_size * new)
      for share, report in zip(shares, reports)
  )


def _levels_at(recipe: Recipe, step: int) -> Levels:
  return tuple(asked_levels(
      recipe.plan, step, recipe.abstract_state.params, recipe.where
  ).items())


def _sparsity_of(levels: Levels | None) -> Callable[[str], float]:
  """Returns the sparsity of a layer by its name in traces."""
  if levels is None:
    return lambda layer: 0.0
  zeros: dict[str, list[float]] = {}
  for path, level in levels:
    module = _STACK.sub('', path).rpartition('/')[0]
    zeros.setdefault(module, []).append(level.sparsity)
  means = {name: sum(found) / len(found) for name, found in zeros.items()}

  def sparsity_of(layer: str) -> float:
    # Traces have the model's name in front.
    names = layer.split('/')
    for start in range(len(names)):
      found = means.get('/'.join(names[start:]))
      if found is not None:
        return found
    raise ValueError(
        f'layer {layer!r} has no level of sparsity; known are '
        f'{", ".join(means)}.'
    )

  return sparsity_of
