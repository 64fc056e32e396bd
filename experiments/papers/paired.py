"""Paired differences: Student's intervals and tests, Holm's correction."""

from collections.abc import Sequence
import math
import statistics
from typing import Any, NamedTuple

_CONFIDENCE = 0.95


class Interval(NamedTuple):
  """Mean and its confidence interval.

  Attributes:
    mean: Mean of the differences.
    deviation: Standard deviation of the sample; nan for a single value.
    low: Lower end of the interval; -inf for a single value, or if a value is
      not finite.
    high: Upper end of the interval; inf in the same cases.
  """

  mean: float
  deviation: float
  low: float
  high: float


def t_interval(values: Sequence[float]) -> Interval:
  """Returns Student's 95 % interval of a mean.

  Args:
    values: Independent values, such as one difference for each seed; at least
      one.

  Returns:
    Mean, deviation and interval.

  Example:
    >>> [round(x, 4) for x in t_interval([1.0, 2.0, 3.0])]
    [2.0, 1.0, -0.4841, 4.4841]
  """
  mean = statistics.fmean(values)
  if len(values) == 1 or not math.isfinite(mean):
    return Interval(mean, math.nan, -math.inf, math.inf)
  deviation = statistics.stdev(values)
  quantile = float(_student(len(values)).ppf((1 + _CONFIDENCE) / 2))
  half = quantile * deviation / math.sqrt(len(values))
  return Interval(mean, deviation, mean - half, mean + half)


def p_below(values: Sequence[float], bound: float) -> float:
  """Tests whether a mean is below a bound, by Student's one-sided test.

  Args:
    values: Independent values, one for each seed.
    bound: Claimed upper bound of the mean.

  Returns:
    The p-value: probability of a sample mean this low or lower if the true mean
    equals `bound`; 1 for a single value, or if a value is not finite.

  Example:
    >>> round(p_below([-1.0, -2.0, -3.0], 0.0), 4)
    0.0371
  """
  if len(values) < 2 or not all(map(math.isfinite, values)):
    return 1.0
  mean, deviation = statistics.fmean(values), statistics.stdev(values)
  if deviation == 0:
    return 0.0 if mean < bound else 1.0
  t = (mean - bound) / deviation * math.sqrt(len(values))
  return float(_student(len(values)).cdf(t))


def p_above(values: Sequence[float], bound: float) -> float:
  """Tests whether a mean is above a bound; see `p_below`.

  Example:
    >>> round(p_above([1.0, 2.0, 3.0], 0.0), 4)
    0.0371
  """
  return p_below([-value for value in values], -bound)


def holm(p_values: Sequence[float]) -> list[float]:
  """Corrects p-values for multiple tests by Holm's step-down procedure.

  Rejecting the hypotheses whose corrected p-value is below a threshold keeps
  the probability of any false rejection below the threshold, for any dependence
  between the tests.

  Args:
    p_values: P-values of all tests of one family.

  Returns:
    Corrected p-values, in the same order, at most 1.

  References:
    Holm, A simple sequentially rejective multiple test procedure, 1979

  Example:
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
  """
  corrected = [0.0] * len(p_values)
  largest = 0.0
  order = sorted(range(len(p_values)), key=p_values.__getitem__)
  for rank, i in enumerate(order):
    largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
    corrected[i] = largest
  return corrected


def power(
    effect: float, deviation: float, seeds: int, level: float
) -> float:
  """Returns the power of a one-sided t-test of a mean difference.

  Args:
    effect: Distance of the true mean from the bound that it is tested against.
    deviation: Standard deviation of the differences.
    seeds: Number of differences, at least two.
    level: Significance level of the one-sided test.

  Returns:
    The probability of a p-value below the level, by the noncentral t
    distribution.

  Example:
    >>> round(power(0.022, 0.0169, 12, 0.05 / (2 * 4)), 2)
    0.91
  """
  from scipy import stats  # jax needs scipy.

  quantile = _student(seeds).ppf(1 - level)
  shift = abs(effect) / deviation * math.sqrt(seeds)
  return float(stats.nct(seeds - 1, shift).sf(quantile))


def seeds_for(
    effect: float, deviation: float, level: float, wanted: float = 0.9
) -> int:
  """Returns the smallest number of seeds with a wanted power; see `power`.

  Example:
    >>> seeds_for(0.022, 0.0169, 0.05 / (2 * 10))
    14
  """
  seeds = 2
  while power(effect, deviation, seeds, level) < wanted:
    seeds += 1
  return seeds


def _student(number: int) -> Any:
  from scipy import stats  # jax needs scipy.

  return stats.t(number - 1)
