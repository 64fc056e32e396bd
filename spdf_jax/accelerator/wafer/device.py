# SPDX-License-Identifier: Apache-2.0
"""The modeled wafer: its constants, each with unit, grade and source."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax import names

GRADES = (
    'P printed, P2 printed in a secondary source, C computed from those, '
    'K calibrated for this model, A assumed, - set by the caller'
)
"""Definitions of the grades of evidence; P2 cites the primary source."""


class Fact(NamedTuple):
  """A number with its unit and its evidence.

  Attributes:
    value: The number.
    unit: Unit of the number; `'1'` for a ratio.
    grade: Grade of the evidence: P, P2, C, K or A, as in `GRADES`.
    source: Publication that states the number, or the way it was derived.
  """

  value: float
  unit: str
  grade: str
  source: str


_SDK = 'Cerebras SDK white paper'
_STREAMING = 'Cerebras weight-streaming white paper'
_HOT_CHIPS = 'Hot Chips 34'
_ALCF = 'ALCF user guides'
_ASSUMED_SAME = 'as the CS-2'

_CS2 = dict(
    cores=Fact(850_000, 'cores', 'P', f'{_SDK}; SDK grid 750 x 994'),
    lanes=Fact(4, 'fp16 multiply-adds/cycle/core', 'P', (
        f'{_SDK} ("eight operations per clock")'
    )),
    clock=Fact(0.85e9, 'Hz', 'P', (
        'SDK timing scripts (csl-examples); the vendor\'s peak takes 1.1 GHz'
    )),
    sram=Fact(40e9, 'bytes', 'P', f'{_SDK}; 48 kB per core; {_HOT_CHIPS}'),
    memory_bandwidth=Fact(20e15, 'bytes/s', 'P', f'{_SDK}; James 2021'),
    fabric_bandwidth=Fact(220e15, 'bits/s', 'P', _SDK),
    io_bandwidth=Fact(1.2e12, 'bits/s', 'P', (
        f'12 x 100 GbE; ALCF SC24 tutorial; {_STREAMING}'
    )),
    io_latency=Fact(5e-6, 's/hop', 'P2', 'Hot Chips 36 deck ("< 5 us")'),
    wavelet_bits=Fact(32, 'bits/non-zero', 'P', (
        f'{_SDK}; csl-examples: 16-bit index, 16-bit value'
    )),
    value_bits=Fact(16, 'bits', 'P', f'fp16; {_SDK}'),
    fan_out=Fact(4, 'systems/SwarmX node', 'P2', _STREAMING),
    largest_cluster=Fact(64, 'systems', 'P2', f'near-linear; {_STREAMING}'),
    scaling_loss=Fact(0.0115, '1/doubling', 'K', (
        '16 CS-3 = 15.3x one (Sandia Kingfisher)'
    )),
    power=Fact(23e3, 'W', 'P', f'peak; {_HOT_CHIPS}'),
    power_with_servers=Fact(31e3, 'W', 'P2', 'Andromeda, per system'),
    energy_per_flop=Fact(3.4e-12, 'J', 'C', (
        '30 mW per core at the fp16 peak of 7.5 PF; nothing is published per '
        'SRAM byte or hop'
    )),
)

PRESETS = {
    'cs2': _CS2,
    'cs3': _CS2 | dict(
        cores=Fact(900_000, 'cores', 'P', _ALCF),
        lanes=Fact(8, 'fp16 multiply-adds/cycle/core', 'C', (
            f'12.2 PF at 0.85 GHz; {_ALCF}, testbed table'
        )),
        clock=Fact(0.85e9, 'Hz', 'A', _ASSUMED_SAME),
        sram=Fact(44e9, 'bytes', 'P', f'{_SDK}; {_HOT_CHIPS}'),
        memory_bandwidth=Fact(21e15, 'bytes/s', 'P', _SDK),
        fabric_bandwidth=Fact(214e15, 'bits/s', 'P', _SDK),
        energy_per_flop=Fact(1.6e-12, 'J', 'A', (
            "the CS-2's 20 kW at 0.85 GHz, at a peak of 12.2 PF"
        )),
        largest_cluster=Fact(2048, 'systems', 'P2', _STREAMING),
    ),
}
"""Constants of the hardware by device name."""


def _band(
    dispatch: float,
    row_dispatch: float,
    overlap: float,
    window: float,
    *,
    grade: str,
    source: str,
    imbalance: float = 1.0,
    latency: float = 20e-6,
) -> dict[str, Fact]:
  """Returns the constants of one assumption about overhead."""
  return dict(
      dispatch=Fact(dispatch, 'cycles/non-zero', grade, source),
      row_dispatch=Fact(row_dispatch, 'cycles/output row', grade, source),
      overlap=Fact(overlap, 'of partial sums', grade, source),
      window=Fact(window, 'output rows', grade, source),
      imbalance=Fact(imbalance, '1', grade, source),
      latency=Fact(latency, 's/product', grade, source),
      attention_efficiency=Fact(0.5, 'of peak', 'A', 'dense, in small pieces'),
      efficiency=Fact(0.354, 'of the kernel law', 'K', (
          'GPT-J 6B on 2 CS-2, batch 120, length 2048: 43.67 seq/s '
          f'({_ALCF}, history)'
      )),
      step_seconds=Fact(0.10, 's/optimizer step', 'K', (
          'BERT-large, length 128, batch 1024, CS-2: 4,044 seq/s '
          f'({_ALCF}, history)'
      )),
  )


_NO_LOSS = 'theoretical limit without overhead'
BANDS = {
    'ideal': _band(
        0, 0, 1, 16384, imbalance=0, latency=0, grade='A', source=_NO_LOSS
    ) | dict(
        attention_efficiency=Fact(1, 'of peak', 'A', _NO_LOSS),
        efficiency=Fact(1, 'of the kernel law', 'A', _NO_LOSS),
        step_seconds=Fact(0, 's/optimizer step', 'A', _NO_LOSS),
    ),
    'optimistic': _band(
        0.25, 0, 1, 16384, latency=0, grade='A',
        source='lower bound of the overhead of hardware',
    ),
    'default': _band(
        1, 2, 0.9, 4096, grade='K',
        source='calibrated: near the 8.3x that the vendor prints at 90 % zeros',
    ),
    'pessimistic': _band(
        2, 8, 0.75, 1024, grade='A',
        source='twice the dispatch, a quarter of the buffers',
    ),
}
"""Constants of the overhead in addition to the multiply-adds, by name."""

_MAY_BE_ZERO = (
    'dispatch', 'imbalance', 'io_latency', 'latency', 'overlap', 'row_dispatch',
    'scaling_loss', 'step_seconds',
)
SHARES = ('attention_efficiency', 'efficiency', 'imbalance', 'overlap')
ENCODINGS = ('wavelet', 'bitmap')
"""Formats of streamed sparse weights: an index with each value, or one bit per
weight followed by the values."""


@dataclasses.dataclass(frozen=True)
class WaferDevice:
  """The parameters of a wafer-scale device that skips zeros.

  The class is a pytree of its numbers, so that `jax.vmap` can map over them and
  `jax.grad` differentiate with respect to them. `create_device` builds one by
  name. The model does not use the bandwidths of memory and mesh: it assumes
  that a core's own memory never stalls and that a link carries one wavelet per
  cycle.

  Attributes:
    cores: Number of processing elements.
    lanes: fp16 multiply-adds per cycle and core.
    clock: Clock frequency, Hz.
    sram: SRAM of the whole wafer, bytes.
    memory_bandwidth: SRAM bandwidth, bytes/s.
    fabric_bandwidth: Bandwidth of the mesh, bits/s.
    io_bandwidth: Bandwidth of the wafer's I/O in each direction, bits/s.
    io_latency: Latency of a hop between systems, s.
    wavelet_bits: Streamed bits of a weight with its index.
    value_bits: Bits of a weight without its index, and of an activation.
    fan_out: Number of children of a node of the SwarmX tree.
    largest_cluster: Maximum number of systems in a cluster.
    scaling_loss: Increase of the time per doubling of systems, as a fraction.
    power: Peak power of a system, W.
    power_with_servers: Power of a system with its share of the servers, W.
    energy_per_flop: Energy per FLOP at peak speed, J.
    dispatch: Cycles per non-zero in addition to the multiply-adds.
    row_dispatch: Cycles per output row.
    overlap: Fraction of the time of partial sums that computation hides.
    window: Number of output rows after which columns of cores synchronize.
    imbalance: Fraction of the load imbalance that costs time.
    latency: Latency of a product, s.
    attention_efficiency: Fraction of the peak speed in products of activations.
    efficiency: Fraction of the kernel model's speed that whole programs reach.
    step_seconds: Time of an optimizer step on the hosts, s.
    name: Name of the device.
    encoding: Format of sparse weights, `'wavelet'` or `'bitmap'`.
    facts: Unit, grade and source of each number, by name.

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
      if isinstance(value, (int, float)):  # Tracers cannot be checked.
        _check_number(name, value)
    names.lookup('encoding', self.encoding, dict.fromkeys(ENCODINGS))

  @property
  def peak_flops(self) -> Any:
    """Dense fp16 FLOP/s; a multiply-add counts as two."""
    return 2 * self.cores * self.lanes * self.clock

  def energy(self, flops: Any, seconds: Any) -> tuple[Any, Any]:
    """Returns a lower and an upper bound of the energy, J.

    Args:
      flops: FLOPs of all systems.
      seconds: Time, summed over the systems, s.

    Returns:
      Energy per FLOP at peak speed, at most the second one, and peak power.

    Example:
      >>> create_device('cs3').energy(1e15, 1.0)
      (1600.0, 23000.0)
    """
    most = seconds * self.power
    least = flops * self.energy_per_flop
    if isinstance(most, jax.Array):
      return jnp.minimum(least, most), most
    return min(least, most), most

  def as_kernel(self) -> 'WaferDevice':
    """Returns the device without the overhead of whole programs.

    Efficiency is 1 and an optimizer step takes no time, as in Appendix C of
    SPDF.
    """
    return dataclasses.replace(self, efficiency=1.0, step_seconds=0.0)

  def audit(self) -> str:
    """Formats every number with its unit, grade and source.

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
jax.tree_util.register_dataclass(
    WaferDevice, data_fields=NUMBERS, meta_fields=_META
)


def create_device(
    name: str, band: str = 'default', **changes: Any
) -> WaferDevice:
  """Builds the model of a Cerebras wafer by name.

  Args:
    name: `'cs2'` or `'cs3'`.
    band: Overhead in addition to the multiply-adds: `'ideal'` (none),
      `'optimistic'`, `'default'` or `'pessimistic'`. The default is calibrated
      to be near the speedup of 8.3 that the vendor publishes for 90 % zeros.
    **changes: Values that replace those of fields of `WaferDevice`, by name.

  Returns:
    The device.

  Raises:
    ValueError: a name is unknown, or a number is out of its range.

  Example:
    >>> device = create_device('cs2', 'ideal', clock=1.1e9)
    >>> device.name, device.cores, device.clock
    ('cs2 (ideal)', 850000, 1100000000.0)
  """
  facts = names.lookup('device', name, PRESETS) | names.lookup(
      'band', band, BANDS
  )
  for field in changes:
    names.lookup('device field', field, dict.fromkeys((*NUMBERS, *_META)))
  values: dict[str, Any] = {field: fact.value for field, fact in facts.items()}
  values |= dict(name=f'{name} ({band})', facts=tuple(facts.items()))
  return WaferDevice(**values | changes)


def _check_number(name: str, value: float) -> None:
  if not 0 <= value < float('inf') or (value == 0 and name not in _MAY_BE_ZERO):
    least = 'at least 0' if name in _MAY_BE_ZERO else 'above 0'
    raise ValueError(f'{name} is {value}; give a finite number {least}.')
  if name in SHARES and value > 1:
    raise ValueError(f'{name} is {value}; give a fraction, at most 1.')
