# SPDX-License-Identifier: Apache-2.0
"""Views of results: tables, and traces for Perfetto."""

from collections.abc import Iterator
import json
import os
import pathlib
from typing import Any

from spdf_jax import files
from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.simulate import bound_of
from spdf_jax.accelerator.wafer.simulate import Report

_TRACKS = ('operation', 'core', 'fabric', 'io')
_MOST_EVENTS = 200_000
# Times are multiples of 1/1024 microsecond, which floats add exactly, since
# viewers nest events that overlap by a rounding error.
_TICKS = 1024
_UNITS = {
    'days': 86_400, 'h': 3600, 'min': 60, 's': 1, 'ms': 1e-3, 'us': 1e-6,
}
_NOTED = 1e-3  # Smallest effect of a cond to show, as a fraction of the time.


def format_report(report: Report, rows: int = 20) -> str:
  """Formats totals, the costliest layers and primitives without a rule.

  Args:
    report: Report of a program.
    rows: Maximum number of layers, the costliest first.

  Returns:
    A text of several lines.

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax.accelerator.wafer import create_device
    >>> from spdf_jax.accelerator.wafer import simulate
    >>> x = jnp.ones((4096, 64), jnp.float16)
    >>> report = simulate(jnp.dot, create_device('cs2'))(x, x[:64])
    >>> print(format_report(report).splitlines()[0])
    1 x cs2 (default), modeled: 20.9 us, bound by latency
  """
  low, high = report.energy
  clock = report.device.clock
  lines = [
      f'{report.systems} x {report.device.name}, modeled: '
      f'{_seconds(report.seconds)}, bound by {report.bound}',
      f'FLOPs done {report.flops:.4g}, skipped {report.skipped_flops:.4g}, '
      f'{report.utilisation:.1%} of peak',
      f'streamed {_bytes(report.total.streamed_bytes)} per system, largest '
      f'working set {_bytes(report.total.sram_bytes)} of '
      f'{_bytes(report.device.sram)}',
      f'energy between {low:.3g} J (energy per FLOP at peak speed) and '
      f'{high:.3g} J (peak power throughout)',
      '',
      f'{"layer":<36}{"time":>10}{"share":>7}  {"bound":<8}{"FLOPs":>10}'
      f'{"skipped":>10}{"streamed":>10}',
  ]
  layers = sorted(
      report.by_layer().items(), key=lambda item: -item[1].cycles
  )
  for name, cost in layers[:rows]:
    lines.append(_row(name or '(no layer)', cost, report.cycles, clock))
  rest = layers[rows:]
  if rest:
    cost = sum((cost for _, cost in rest), Cost())
    lines.append(_row(f'{len(rest)} more', cost, report.cycles, clock))
  for branch in report.branches:
    cycles = [r.cycles for r in branch.reports]
    if max(cycles) - min(cycles) < _NOTED * report.cycles:
      continue
    times = ', '.join(_seconds(r.seconds) for r in branch.reports)
    lines.append(f'{branch.name}: {times}; unknown, the costliest counts')
  hosted = report.total.host_operations
  lines += ['', f'operations on weights, on the hosts: {hosted:.3g}']
  if report.unknown:
    names = ', '.join(f'{k} x {v:g}' for k, v in report.unknown.items())
    lines.append(f'NOT COSTED, no rule: {names}')
  return '\n'.join(lines)


def write_trace(report: Report, path: str | os.PathLike[str]) -> pathlib.Path:
  """Writes a report as a trace for Perfetto or chrome://tracing.

  The first track has the operations in sequence; the others show the time that
  cores, links and I/O take for each. Operations that take less than a
  nanosecond are omitted.

  Args:
    report: Report of a program.
    path: Path of the JSON file.

  Returns:
    The path.

  Raises:
    ValueError: the report has too many operations for a viewer.

  Example:
    >>> import tempfile
    >>> from spdf_jax.accelerator.wafer import create_device, simulate
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((64, 64))
    >>> report = simulate(jnp.dot, create_device('cs2'))(x, x)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   path = write_trace(report, pathlib.Path(directory) / 'trace.json')
    ...   sorted(json.loads(path.read_text()))
    ['displayTimeUnit', 'otherData', 'traceEvents']
  """
  events = list(_events(report))
  if len(events) > _MOST_EVENTS:
    raise ValueError(
        f'the report has {len(events):,} events, but viewers support at most '
        f'{_MOST_EVENTS:,}; scan over the layers and give masks as shapes, so '
        'that an operation of all layers is one event.'
    )
  path = pathlib.Path(path)
  files.write_atomically(path, json.dumps({
      'traceEvents': events,
      'displayTimeUnit': 'ms',
      'otherData': {
          'device': report.device.name,
          'systems': report.systems,
          'seconds': float(report.seconds),
          'modeled': 'not measured',
      },
  }))
  return path


def duration(seconds: float) -> str:
  """Formats a time in the largest unit that fits.

  Example:
    >>> duration(0.25), duration(90), duration(2e5), duration(2e8)
    ('250 ms', '1.5 min', '2.31 days', '2,315 days')
  """
  unit = next((u for u, size in _UNITS.items() if seconds >= size), 'us')
  return f'{amount(seconds / _UNITS[unit])} {unit}'


def amount(number: float) -> str:
  """Formats a number with three digits, or more before the point.

  Example:
    >>> amount(0.12345), amount(1234.5)
    ('0.123', '1,234')
  """
  return f'{number:,.0f}' if number >= 100 else f'{number:.3g}'


def _events(report: Report) -> Iterator[dict[str, Any]]:
  name = f'{report.systems} x {report.device.name} (modeled)'
  yield dict(name='process_name', ph='M', pid=0, args=dict(name=name))
  for tid, track in enumerate(_TRACKS):
    yield dict(
        name='thread_name', ph='M', pid=0, tid=tid, args=dict(name=track)
    )
  ticks = 1e6 * _TICKS / report.device.clock
  cycles_before = 0.0
  for operation, cost in report.rows:
    label = operation.layer.rpartition('/')[2] or operation.name
    args = dict(
        layer=operation.layer, operation=operation.name,
        phase=operation.phase, executions=operation.count,
        bound=bound_of(cost), flops=float(cost.flops),
        skipped_flops=float(cost.skipped_flops),
        streamed_bytes=float(cost.streamed_bytes),
    )
    start = round(cycles_before * ticks)
    cycles_before += float(cost.cycles)
    longest = round(cycles_before * ticks) - start
    lengths = (cost.cycles, cost.core, cost.fabric, cost.io)
    for tid, cycles in enumerate(lengths):
      length = min(round(float(cycles) * ticks), longest) if tid else longest
      if length:
        yield dict(
            name=label, cat=operation.phase, ph='X', pid=0, tid=tid,
            ts=start / _TICKS, dur=length / _TICKS, args=args,
        )


def _row(name: str, cost: Cost, cycles: float, clock: float) -> str:
  return (
      f'{name[-36:]:<36}{_seconds(cost.cycles / clock):>10}'
      f'{cost.cycles / max(cycles, 1e-30):>7.1%}  {bound_of(cost):<8}'
      f'{cost.flops:>10.3g}{cost.skipped_flops:>10.3g}'
      f'{_bytes(cost.streamed_bytes):>10}'
  )


def _seconds(seconds: float) -> str:
  for unit, scale in (('s', 1), ('ms', 1e3), ('us', 1e6)):
    if seconds * scale >= 1:
      return f'{seconds * scale:,.3g} {unit}'
  return f'{seconds * 1e9:.3g} ns'


def _bytes(number: float) -> str:
  for unit, scale in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
    if number >= scale:
      return f'{number / scale:.3g} {unit}'
  return f'{number:.0f} B'
