"""What simulations say in words and tables."""

from typing import NamedTuple

from spdf_jax.costs.simulation import Estimate
from spdf_jax.costs.simulation import Inference
from spdf_jax.costs.wafer_memory import advise_batch
from spdf_jax.training.recipe import Recipe

_DAY = 86_400
_UNITS = {
    'days': _DAY, 'h': 3600, 'min': 60, 's': 1, 'ms': 1e-3, 'us': 1e-6,
}


class Rate(NamedTuple):
  """A price or a carbon intensity, and who says so.

  Attributes:
    value: Per hour of a system, or kg of CO2 per kWh.
    source: Where it stands.
  """

  value: float
  source: str

  @classmethod
  def checked(
      cls, name: str, value: float | None, source: str
  ) -> 'Rate | None':
    """Returns a rate that has a source, or `None` where none is given.

    Raises:
      ValueError: it is negative, or one of value and source is missing.

    Example:
      >>> Rate.checked('price_per_hour', None, '') is None
      True
    """
    if value is None and not source:
      return None
    if value is None or value < 0 or not source:
      raise ValueError(
          f'{name} is {value} from {source!r}; give a number from 0 and its '
          'source, or neither.'
      )
    return cls(value, source)


def duration(seconds: float) -> str:
  """Writes a time in its largest unit.

  Example:
    >>> duration(0.25), duration(90), duration(2e5), duration(2e8)
    ('250 ms', '1.5 min', '2.31 days', '2,315 days')
  """
  unit = next((u for u, size in _UNITS.items() if seconds >= size), 'us')
  number = seconds / _UNITS[unit]
  return f'{number:,.0f} {unit}' if number >= 100 else f'{number:.3g} {unit}'


def format_estimate(
    estimate: Estimate, recipe: Recipe,
    *, price: Rate | None = None, carbon: Rate | None = None,
) -> str:
  """Writes what a plan takes: by phase, in total, and what to change.

  Args:
    estimate: Of the recipe.
    recipe: The recipe.
    price: Per hour of a system.
    carbon: kg of CO2 per kWh.

  Returns:
    Text.
  """
  device = estimate.device
  lines = [
      f'{recipe.parameters:,} parameters on {estimate.systems} x '
      f'{device.name}: modeled, not measured',
      '',
      f'{"phase":<14}{"steps":>9}{"tokens":>18}{"zeros":>8}{"parts":>7}'
      f'{"sparse":>12}{"dense":>12}{"faster":>8}{"of it hosts":>13}',
  ]
  for p in estimate.phases:
    lines.append(
        f'{p.name:<14}{p.steps:>9,}{p.tokens:>18,}{p.sparsity:>8.1%}'
        f'{p.micro_batches:>7}{duration(p.seconds):>12}'
        f'{duration(p.dense_seconds):>12}'
        f'{p.dense_seconds / p.seconds:>8.2f}{duration(p.host_seconds):>13}'
    )
  total, dense = estimate.seconds, estimate.dense_seconds
  low, high = (joules / 3.6e6 for joules in estimate.energy)
  lines += [
      '',
      f'all phases: {duration(total)} ({total / _DAY:,.4g} days) sparse, '
      f'{duration(dense)} dense, {dense / total:.2f} times faster',
      f'energy: {low:,.4g} to {high:,.4g} kWh (FLOPs at the peak\'s energy, '
      'full power all along)',
  ]
  if price:
    cost = price.value * estimate.systems * total / 3600
    lines.append(f'cost: {cost:,.2f} ({price.value:g} per hour of a system, '
                 f'{price.source})')
  if carbon:
    lines.append(
        f'carbon: {low * carbon.value:,.4g} to {high * carbon.value:,.4g} kg '
        f'of CO2 ({carbon.value:g} kg per kWh, {carbon.source})'
    )
  return '\n'.join([*lines, *_advice(estimate, recipe)])


def _advice(estimate: Estimate, recipe: Recipe) -> list[str]:
  device = estimate.device
  lines = []
  for length in dict.fromkeys(p.length for p in recipe.plan.phases):
    found = advise_batch(recipe.model.config, device, length)
    lines.append(
        f'micro-batch of {length} tokens: at most {found.largest:,} sequences '
        f'a system, {found.advised:,} with the inputs of all layers kept'
    )
  for p in recipe.plan.phases:
    found = advise_batch(recipe.model.config, device, p.length)
    own = -(-p.batch_size // estimate.systems)
    if own > found.advised:
      lines.append(
          f'phase {p.name!r}: {own:,} sequences a system keep '
          f'{own * found.stash / 1e9:,.1f} GB of layer inputs, more than the '
          f'{device.sram / 1e9:,.0f} GB there are; they would be computed '
          'again, which is not costed'
      )
  return lines


def format_inference(
    found: tuple[Inference, Inference], *, decode: bool
) -> str:
  """Writes what a trained model takes, with zeros and dense.

  Args:
    found: From `simulate_inference`.
    decode: Whether one token of each sequence was computed.

  Returns:
    Text.
  """
  what = 'a token of each sequence' if decode else 'a forward pass'
  lines = ['modeled, not measured']
  for entry in found:
    lines.append(
        f'{entry.sparsity:.1%} zeros: {what} takes '
        f'{duration(float(entry.report.seconds))}, '
        f'{entry.tokens_per_second:,.4g} tokens/s, bound by '
        f'{entry.report.bound}'
    )
  return '\n'.join(lines)
