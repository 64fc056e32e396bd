"""Measurements: interleaved timings, what they say, and how sure that is."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import math
import time
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

_RESAMPLES = 2000
_FEWEST = 3  # Fewer samples say nothing about their spread.


class Row(NamedTuple):
  """One line of a benchmark's table."""

  case: str
  """What was measured."""

  metric: str
  """Which of its quantities, with the unit."""

  value: float
  """The quantity: counted, a median of samples, or a mean of such medians."""

  target: float | None
  """What the value must keep to; `None` where it is only reported."""

  low: float
  """Lower end of the value's 95 % interval."""

  high: float
  """Upper end of the interval."""

  at_most: bool
  """Whether the value must be at most the target, or at least."""


class Timings(NamedTuple):
  """Seconds of interleaved calls, arrays [calls, repeats]."""

  wall: np.ndarray
  """Elapsed seconds."""

  cpu: np.ndarray
  """CPU seconds of the process, all threads together."""

  results: list[Any]
  """What each call returned last."""


def interleave(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    *,
    warmups: int = 1,
    wall: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> Timings:
  """Times calls in turn, A B A B …, so that each meets the same disturbances.

  A call ends when every array it returns is computed.

  Args:
    calls: What to time.
    repeats: Timed rounds.
    warmups: Untimed rounds before them.
    wall: Clock of elapsed seconds.
    cpu: Clock of CPU seconds.

  Returns:
    The seconds of every call; entries of one column belong together.

  Raises:
    ValueError: there is nothing to time.

  Example:
    >>> interleave([lambda: 1, lambda: 2], repeats=3).results
    [1, 2]
  """
  if repeats < 1 or not calls:
    raise ValueError(
        f'interleave got {len(calls)} calls and repeats {repeats}; give at '
        'least one of each.'
    )
  for _ in range(warmups):
    for call in calls:
      jax.block_until_ready(call())
  seconds = np.zeros((2, len(calls), repeats))
  results = [None] * len(calls)
  for j in range(repeats):
    for i, call in enumerate(calls):
      results[i] = None  # Freeing what it returned before is not its work.
      start = wall(), cpu()
      results[i] = jax.block_until_ready(call())
      end = wall(), cpu()
      seconds[:, i, j] = np.subtract(end, start)
  return Timings(seconds[0], seconds[1], results)


def median_interval(
    samples: np.ndarray, rng: np.random.Generator
) -> tuple[float, float, float]:
  """Returns the median and its 95 % bootstrap interval.

  Args:
    samples: Independent samples, [n], or those of several cases, [cases, n]:
      then the mean of the cases' medians is meant.
    rng: Where the resamples come from.

  Returns:
    Median, lower and upper end; with fewer than three samples the interval is
    the whole line, because they cannot say how sure they are.

  References:
    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13

  Example:
    >>> median_interval(np.full(9, 2.0), np.random.default_rng(0))
    (2.0, 2.0, 2.0)
    >>> cases = [[1.0, 1.0, 7.0], [3.0, 3.0, 3.0]]
    >>> median_interval(cases, np.random.default_rng(0))[0]
    2.0
  """
  cases = np.atleast_2d(samples)
  median = float(np.median(cases, axis=1).mean())
  count = cases.shape[1]
  if count < _FEWEST:
    return median, -math.inf, math.inf
  chosen = rng.integers(count, size=(_RESAMPLES, count))
  medians = np.median(cases[:, chosen], axis=2).mean(axis=0)
  low, high = np.quantile(medians, [0.025, 0.975])
  return median, float(low), float(high)


def sampled_row(
    case: str,
    metric: str,
    samples: np.ndarray,
    rng: np.random.Generator,
    *,
    target: float | None = None,
    at_most: bool = True,
) -> Row:
  """Makes a row of repeated samples: their median, with its interval.

  For a ratio of two calls give the ratios pair by pair, `t.wall[1] /
  t.wall[0]`: what slowed both down cancels.

  Args:
    case: What was measured.
    metric: Which of its quantities.
    samples: Its samples, [n], or those of the cases of a mean, [cases, n].
    rng: Where the bootstrap's resamples come from.
    target: What the value must keep to.
    at_most: Whether the target is an upper bound.

  Returns:
    The row.
  """
  value, low, high = median_interval(samples, rng)
  return Row(case, metric, value, target, low, high, at_most)


def counted_row(
    case: str,
    metric: str,
    value: float,
    *,
    target: float | None = None,
    at_most: bool = True,
) -> Row:
  """Makes a row of an exact quantity, such as bytes: its interval is a point.

  Example:
    >>> verdict(counted_row('a', 'bytes', 3, target=2))
    'missed'
  """
  return Row(case, metric, value, target, value, value, at_most)


def verdict(row: Row) -> str:
  """Says whether a row keeps to its target, as far as its interval can tell.

  Args:
    row: The row.

  Returns:
    `'ok'` or `'missed'` where the whole interval is on that side of the
    target, which itself is ok; `'undecided'` where the target is inside;
    nothing without a target.
  """
  if row.target is None:
    return ''
  if row.at_most:
    kept, missed = row.high <= row.target, row.low > row.target
  else:
    kept, missed = row.low >= row.target, row.high < row.target
  return 'ok' if kept else 'missed' if missed else 'undecided'


def format_table(rows: Iterable[Row]) -> str:
  """Lays rows out in aligned columns, under a heading.

  Example:
    >>> print(format_table([counted_row('toy', 'bytes', 3, target=4)]))
    case  metric  value  target  95 % interval  verdict
    toy   bytes   3      <= 4                   ok
  """
  table = [('case', 'metric', 'value', 'target', '95 % interval', 'verdict')]
  for row in rows:
    sign = '<=' if row.at_most else '>='
    spread = f'{row.low:.4g} to {row.high:.4g}'
    table.append((
        row.case,
        row.metric,
        f'{row.value:.4g}',
        '' if row.target is None else f'{sign} {row.target:.4g}',
        '' if row.low == row.high else spread,
        verdict(row),
    ))
  widths = [max(map(len, column)) for column in zip(*table)]
  return '\n'.join(
      '  '.join(f'{cell:<{w}}' for cell, w in zip(line, widths)).rstrip()
      for line in table
  )
