"""The constants of the modeled wafers, each with its unit, grade and source.

Grades: P printed in a source that was read; P2 printed in a secondary source
that cites the primary one; C computed from P; K our calibration; A assumed.
"""

from typing import NamedTuple


class Fact(NamedTuple):
  """A number, and why it is believed.

  Attributes:
    value: The number.
    unit: Of the number, `'1'` for a ratio.
    grade: P, P2, C, K or A; see above.
    source: Where it stands, or how it was found.
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
        largest_cluster=Fact(2048, 'systems', 'P2', _STREAMING),
    ),
}
"""Devices by name."""


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
  """Makes a band from what a core loses around its multiply-adds."""
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


_NO_LOSS = 'nothing is lost: theory'
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
        source='the least that hardware would lose',
    ),
    'default': _band(
        1, 2, 0.9, 4096, grade='K',
        source='ours: 90 % zeros near the printed 8.3x of the vendor',
    ),
    'pessimistic': _band(
        2, 8, 0.75, 1024, grade='A',
        source='twice the dispatch, a quarter of the buffers',
    ),
}
"""What is lost around the multiply-adds, by name."""
