"""Measurements: interleaved timings, bootstrap intervals and verdicts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from spdf_jax.runs import markdown

_RESAMPLES = 2000
_FEWEST = 3
"""Smallest number of samples for an interval."""


class Row(NamedTuple):
  """One line of a benchmark's table."""

  case: str
  """Name of the measured case."""

  metric: str
  """Name of the measured quantity, with its unit."""

  value: float
  """Counted value, median of samples, or mean of such medians."""

  target: float | None
  """Bound for the value; `None` if it is only reported."""

  low: float
  """Lower end of the value's 95 % interval."""

  high: float
  """Upper end of the interval."""

  at_most: bool
  """Whether the target is an upper bound, not a lower one."""


class Timings(NamedTuple):
  """Seconds of interleaved calls, arrays [calls, repeats]."""

  wall: np.ndarray
  """Elapsed seconds."""

  cpu: np.ndarray
  """CPU seconds of all threads of the process."""

  results: list[Any]
  """Last result of each call."""


def interleave(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    *,
    warmups: int = 1,
    wall: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> Timings:
  """Times calls alternately, A B A B …, so that disturbances affect all alike.

  A call ends when all arrays that it returns are computed.

  Args:
    calls: Functions to time.
    repeats: Timed rounds.
    warmups: Untimed rounds before them.
    wall: Clock of elapsed seconds.
    cpu: Clock of CPU seconds.

  Returns:
    Seconds of every call; a column has the calls of one round.

  Example:
    >>> interleave([lambda: 1, lambda: 2], repeats=3).results
    [1, 2]
  """
  for _ in range(warmups):
    for call in calls:
      jax.block_until_ready(call())
  seconds = np.zeros((2, len(calls), repeats))
  results = [None] * len(calls)
  for j in range(repeats):
    for i, call in enumerate(calls):
      results[i] = None  # Frees the previous result outside of the timing.
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
    samples: Independent samples, [n], or those of several cases, [cases, n],
      for the mean of the cases' medians.
    rng: Random generator of the resamples.

  Returns:
    Median, lower and upper end; with fewer than three samples the interval is
    unbounded, because their spread is unknown.

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
  """Returns a row of repeated samples, with their median and its interval.

  For a ratio of two calls, pass the ratios of each round, `t.wall[1] /
  t.wall[0]`, in which disturbances of both cancel.

  Args:
    case: Name of the measured case.
    metric: Name of the measured quantity.
    samples: Samples, [n], or those of several cases to be averaged, [cases, n].
    rng: Random generator of the bootstrap's resamples.
    target: Bound for the value; `None`: the value is only reported.
    at_most: Whether the target is an upper bound.

  Returns:
    The row.
  """
  value, low, high = median_interval(samples, rng)
  return Row(case, metric, value, target, low, high, at_most)


def ratio_rows(
    case: str,
    metric: str,
    timings: Timings,
    ratio: tuple[int, int],
    rng: np.random.Generator,
    *,
    target: float | None = None,
    at_most: bool = True,
) -> Iterator[Row]:
  """Yields rows of the ratio of two calls, in wall time and in CPU time.

  Args:
    case: Name of the measured case.
    metric: Name of the ratio.
    timings: Result of `interleave`.
    ratio: Numbers of both calls, that of the numerator first.
    rng: Random generator of the bootstrap's resamples.
    target: Bound for the ratio; `None`: it is only reported.
    at_most: Whether the target is an upper bound.
  """
  over, under = ratio
  for clock, seconds in (('wall', timings.wall), ('CPU', timings.cpu)):
    yield sampled_row(
        case, f'{metric}, {clock}', seconds[over] / seconds[under], rng,
        target=target, at_most=at_most,
    )


def counted_row(
    case: str,
    metric: str,
    value: float,
    *,
    target: float | None = None,
    at_most: bool = True,
) -> Row:
  """Returns a row of an exact quantity, such as bytes, without an interval.

  Example:
    >>> verdict(counted_row('a', 'bytes', 3, target=2))
    'missed'
  """
  return Row(case, metric, value, target, value, value, at_most)


def verdict(row: Row) -> str:
  """Returns whether a row meets its target, given its interval.

  Args:
    row: The row.

  Returns:
    `'ok'` if the whole interval meets the target, `'missed'` if no part of it
    does, `'undecided'` otherwise; `''` without a target.
  """
  if row.target is None:
    return ''
  if row.at_most:
    kept, missed = row.high <= row.target, row.low > row.target
  else:
    kept, missed = row.low >= row.target, row.high < row.target
  return 'ok' if kept else 'missed' if missed else 'undecided'


def format_table(rows: Iterable[Row]) -> str:
  """Formats rows in aligned columns with a header.

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
  return markdown.align(table, '<' * len(table[0]))
