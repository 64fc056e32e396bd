"""The modeled wafer: its constants, checked, and where they come from."""

import dataclasses
from typing import Any

import jax

from spdf_jax.accelerator.wafer.constants import BANDS
from spdf_jax.accelerator.wafer.constants import Fact
from spdf_jax.accelerator.wafer.constants import PRESETS
from spdf_jax.names import lookup

_MAY_BE_ZERO = (
    'dispatch', 'imbalance', 'io_latency', 'latency', 'overlap', 'row_dispatch',
    'scaling_loss', 'step_seconds',
)
_SHARES = ('attention_efficiency', 'efficiency', 'imbalance', 'overlap')
ENCODINGS = ('wavelet', 'bitmap')
"""How sparse weights travel: index and value, or one bit per weight and the
values."""


@dataclasses.dataclass(frozen=True)
class WaferDevice:
  """A wafer-scale device that skips zeros, as numbers.

  A pytree of its numbers: `jax.vmap` sweeps over them and `jax.grad` finds
  what they are worth. Build one with `create_device`. The bandwidths of memory
  and mesh are printed for reference: in the model a core's own memory never
  waits, and a link carries one wavelet a cycle.

  Attributes:
    cores: Processing elements.
    lanes: fp16 multiply-adds per cycle and core.
    clock: Hz.
    sram: Bytes, on the wafer.
    memory_bandwidth: SRAM, bytes/s.
    fabric_bandwidth: Mesh, bits/s.
    io_bandwidth: Into the wafer, and out of it, bits/s.
    io_latency: Of a hop between systems, s.
    wavelet_bits: Of a weight on the wire with its index.
    value_bits: Of a weight on the wire, and of an activation.
    fan_out: Systems that a node of the SwarmX tree serves.
    largest_cluster: Systems.
    scaling_loss: Share lost per doubling of systems.
    power: W, at most, of a system.
    power_with_servers: W, with its share of the servers.
    energy_per_flop: J, at the peak.
    dispatch: Cycles per non-zero beside its multiply-adds.
    row_dispatch: Cycles per output row.
    overlap: Share of the partial sums' time that computation hides.
    window: Output rows within which columns of cores wait for the busiest.
    imbalance: Share of that waiting which remains.
    latency: Of a product, s.
    attention_efficiency: Share of the peak in products of activations.
    efficiency: Share of the kernel law that whole programs reach.
    step_seconds: What an optimizer step takes off the wafer, s.
    name: What the device is called.
    encoding: `'wavelet'` or `'bitmap'`.
    facts: Unit, grade and source of each number.

  Raises:
    ValueError: a number is out of its range, or the encoding is unknown.

  Example:
    >>> device = create_device('cs2')
    >>> f'{device.peak_flops / 1e15:.2f} PF'
    '5.78 PF'
  """

  cores: float
  lanes: float
  clock: float
  sram: float
  memory_bandwidth: float
  fabric_bandwidth: float
  io_bandwidth: float
  io_latency: float
  wavelet_bits: float
  value_bits: float
  fan_out: float
  largest_cluster: float
  scaling_loss: float
  power: float
  power_with_servers: float
  energy_per_flop: float
  dispatch: float
  row_dispatch: float
  overlap: float
  window: float
  imbalance: float
  latency: float
  attention_efficiency: float
  efficiency: float
  step_seconds: float
  name: str = 'wafer'
  encoding: str = 'wavelet'
  facts: tuple[tuple[str, Fact], ...] = ()

  def __post_init__(self):
    for name in NUMBERS:
      value = getattr(self, name)
      if isinstance(value, (int, float)):  # Tracers are not looked into.
        _check_number(name, value)
    lookup('encoding', self.encoding, {e: e for e in ENCODINGS})

  @property
  def peak_flops(self) -> Any:
    """Dense fp16 FLOP/s; a multiplication and an addition are two."""
    return 2 * self.cores * self.lanes * self.clock

  def as_kernel(self) -> 'WaferDevice':
    """Returns the device that runs one kernel and no program around it.

    Efficiency is 1 and an optimizer step takes no time: what Appendix C of
    SPDF shows.
    """
    return dataclasses.replace(self, efficiency=1.0, step_seconds=0.0)

  def audit(self) -> str:
    """Writes every number with its unit, grade and source.

    Example:
      >>> print(create_device('cs3', clock=1.1e9).audit().splitlines()[3])
      clock                        1.1e+09 Hz  -   set by the caller
    """
    facts = dict(self.facts)
    rows = [f'{self.name}: grades {GRADES}']
    for name in NUMBERS:
      value = getattr(self, name)
      fact = facts.get(name)
      if fact is None or fact.value != value:
        unit = fact.unit if fact else ''
        fact = Fact(value, unit, '-', 'set by the caller')
      number = f'{value:,.6g}'
      rows.append(
          f'{name:<22}{number:>14} {fact.unit}  {fact.grade:<3} {fact.source}'
      )
    return '\n'.join(rows)


_META = ('name', 'encoding', 'facts')
NUMBERS = tuple(
    f.name for f in dataclasses.fields(WaferDevice) if f.name not in _META
)
"""Names of the fields that are numbers."""
GRADES = (
    'P printed, P2 printed in a secondary source, C computed from those, '
    'K calibrated by us, A assumed, - set by the caller'
)
"""What the grades of `audit` mean."""
jax.tree_util.register_dataclass(
    WaferDevice, data_fields=NUMBERS, meta_fields=_META
)


def create_device(
    name: str, band: str = 'default', **changes: Any
) -> WaferDevice:
  """Builds a device by name.

  Args:
    name: `'cs2'` or `'cs3'`.
    band: What is lost around the multiply-adds: `'ideal'`, `'optimistic'`,
      `'default'` or `'pessimistic'`. The default is our calibration, near the
      8.3 times that the vendor prints for 90 % zeros.
    **changes: Fields to set.

  Returns:
    The device.

  Raises:
    ValueError: a name is unknown, or a number is out of its range.

  Example:
    >>> create_device('cs2', 'ideal').dispatch
    0
  """
  facts = lookup('device', name, PRESETS) | lookup('band', band, BANDS)
  for field in changes:
    lookup('device field', field, dict.fromkeys((*NUMBERS, *_META)))
  values = {field: fact.value for field, fact in facts.items()}
  values |= dict(name=f'{name} ({band})', facts=tuple(facts.items()))
  return WaferDevice(**values | changes)


def _check_number(name: str, value: float) -> None:
  if not 0 <= value < float('inf') or (value == 0 and name not in _MAY_BE_ZERO):
    least = 'at least 0' if name in _MAY_BE_ZERO else 'above 0'
    raise ValueError(f'{name} is {value}; give a finite number {least}.')
  if name in _SHARES and value > 1:
    raise ValueError(f'{name} is {value}; it is a share, at most 1.')
