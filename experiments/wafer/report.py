"""Text of simulations of recipes: time, energy, cost and batch sizes."""

import math
from typing import NamedTuple

from experiments.wafer import run_costs
from experiments.wafer.run_costs import Estimate
from experiments.wafer.run_costs import Inference
from spdf_jax.accelerator.wafer import views
from spdf_jax.training.run import Run

_DAY = 86_400


class Rate(NamedTuple):
  """A price or a carbon intensity, with its source.

  Attributes:
    value: Price per hour of a system, or kg of CO2 per kWh.
    source: Publication that states the value.
  """

  value: float
  source: str

  @classmethod
  def checked(
      cls, name: str, value: float | None, source: str
  ) -> 'Rate | None':
    """Returns a rate, or `None` if neither value nor source is given.

    Args:
      name: Name of the rate for error messages.
      value: Value of the rate.
      source: Source of the value.

    Returns:
      The rate, or `None`.

    Raises:
      ValueError: `value` is negative or not finite, or only one of value and
        source is given.

    Example:
      >>> Rate.checked('price_per_hour', None, '') is None
      True
    """
    if value is None and not source:
      return None
    if value is None or not 0 <= value < math.inf or not source:
      raise ValueError(
          f'{name} is {value} from {source!r}; give a number from 0 and its '
          'source, or neither.'
      )
    return cls(value, source)


def format_estimate(
    estimate: Estimate, run: Run,
    *, price: Rate | None = None, carbon: Rate | None = None,
) -> str:
  """Formats an estimate by phase and in total, with advice on batch sizes.

  Args:
    estimate: Estimate of the run.
    run: The run.
    price: Price per hour of a system; `None` omits the cost.
    carbon: Carbon intensity, kg of CO2 per kWh; `None` omits the emissions.

  Returns:
    A text of several lines.
  """
  device = estimate.device
  lines = [
      f'{run.parameters:,} parameters on {estimate.systems} x '
      f'{device.name}: modeled, not measured',
      '',
      f'{"phase":<14}{"steps":>9}{"tokens":>18}{"sparsity":>10}'
      f'{"micro-batches":>15}{"sparse":>12}{"dense":>12}{"speedup":>9}'
      f'{"on hosts":>12}',
  ]
  for p in estimate.phases:
    lines.append(
        f'{p.name:<14}{p.steps:>9,}{p.tokens:>18,}{p.sparsity:>10.1%}'
        f'{p.micro_batches:>15}{views.duration(p.seconds):>12}'
        f'{views.duration(p.dense_seconds):>12}'
        f'{p.dense_seconds / p.seconds:>9.2f}'
        f'{views.duration(p.host_seconds):>12}'
    )
  total, dense = estimate.seconds, estimate.dense_seconds
  low, high = (joules / 3.6e6 for joules in estimate.energy)
  lines += [
      '',
      f'all phases: {views.duration(total)} ({total / _DAY:,.4g} days) sparse, '
      f'{views.duration(dense)} dense, {dense / total:.2f} times faster',
      f'energy: {views.amount(low)} to {views.amount(high)} kWh (energy per '
      'FLOP at peak speed, peak power throughout)',
  ]
  if price:
    cost = price.value * estimate.systems * total / 3600
    lines.append(f'cost: {cost:,.2f} ({price.value:g} per hour of a system, '
                 f'{price.source})')
  if carbon:
    lines.append(
        f'carbon: {views.amount(low * carbon.value)} to '
        f'{views.amount(high * carbon.value)} kg of CO2 '
        f'({carbon.value:g} kg per kWh, {carbon.source})'
    )
  return '\n'.join([*lines, *_advice(estimate, run)])


def _advice(estimate: Estimate, run: Run) -> list[str]:
  device = estimate.device
  lines = []
  hosts = sum(p.host_seconds for p in estimate.phases)
  on_wafer = estimate.seconds - hosts
  if hosts > on_wafer:
    lines.append(
        f'the hosts take {hosts / estimate.seconds:.0%} of the time, for the '
        'optimizer, which no sparsity shortens: this model is too small to '
        'show what sparsity saves. It would be half of the time with some '
        f'{hosts / on_wafer:,.0f} times as many FLOPs per step'
    )
  for length in dict.fromkeys(p.length for p in run.plan.phases):
    advice = run_costs.advise_batch(run.model.config, device, length)
    lines.append(
        f'micro-batch of {length} tokens: at most {advice.largest:,} sequences '
        f'per system, {advice.advised:,} if the inputs of all layers are stored'
    )
  for p, cost in zip(run.plan.phases, estimate.phases):
    advice = run_costs.advise_batch(run.model.config, device, p.length)
    own = -(-p.batch_size // (estimate.systems * cost.micro_batches))
    if own > advice.advised:
      lines.append(
          f'phase {p.name!r}: {own:,} sequences of a micro-batch have '
          f'{own * advice.stash / 1e9:,.1f} GB of layer inputs, more than the '
          f'{device.sram / 1e9:,.0f} GB of SRAM; they would be recomputed, '
          'which is not costed'
      )
  return lines


def format_inference(
    inferences: tuple[Inference, Inference], *, decode: bool
) -> str:
  """Formats the cost of inference, sparse and dense.

  Args:
    inferences: Result of `simulate_inference`.
    decode: Whether one token of each sequence was computed.

  Returns:
    A text of three lines.
  """
  what = 'a token of each sequence' if decode else 'a forward pass'
  lines = ['modeled, not measured']
  for entry in inferences:
    lines.append(
        f'sparsity {entry.sparsity:.1%}: {what} takes '
        f'{views.duration(float(entry.report.seconds))}, '
        f'{entry.tokens_per_second:,.4g} tokens/s, bound by '
        f'{entry.report.bound}'
    )
  return '\n'.join(lines)
