"""Claims as data: contrasts of arms, margins, and verdicts.

All measures are losses in nats, lower is better, but for cosine distances and
perplexities.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from experiments.papers.arms import Arm
from experiments.papers.paired import holm
from experiments.papers.paired import Interval
from experiments.papers.paired import p_above
from experiments.papers.paired import p_below
from experiments.papers.paired import t_interval

LEVEL = 0.05
"""Level of the tests: the chance of any wrong verdict of a family, at most."""

FEWEST_SEEDS = 5
"""There is no verdict on fewer."""

HOLDS, BETTER = 'holds', 'holds (better)'
FAILS, UNDECIDED = 'does not hold', 'undecided'
NO_VERDICT = 'no verdict'
PRIMARY, SECONDARY = 'primary', 'secondary'

Measured = Mapping[Arm, Mapping[int, Mapping[str, float]]]
"""What was measured, by arm, seed and metric."""


class Term(NamedTuple):
  """One part of a contrast.

  Attributes:
    weight: Factor of the measure.
    arm: The arm.
    metric: The measure, as its runs name it.
  """

  weight: float
  arm: Arm
  metric: str


class Comparison(NamedTuple):
  """What is claimed of a sum of terms, seed by seed.

  Attributes:
    text: The comparison in words.
    terms: The contrast.
    margin: Upper bound that is claimed for the sum: 0, or in a comparison of
      non-inferiority the loss that is allowed.
  """

  text: str
  terms: tuple[Term, ...]
  margin: float = 0.0


class Claim(NamedTuple):
  """A claim of the papers: it holds if each of its comparisons does.

  Attributes:
    key: Short name of the claim.
    text: The claim in words.
    source: Where.
    comparisons: Comparisons that the claim consists of.
    family: `'primary'` or `'secondary'`: what its p-value is corrected in.
  """

  key: str
  text: str
  source: str
  comparisons: tuple[Comparison, ...]
  family: str = PRIMARY

  @property
  def arms(self) -> tuple[Arm, ...]:
    """The arms it needs."""
    terms = (t for c in self.comparisons for t in c.terms)
    return tuple(dict.fromkeys(term.arm for term in terms))


class Finding(NamedTuple):
  """What runs say of a claim.

  Attributes:
    claim: The claim.
    values: For each comparison its contrast by seed.
    intervals: For each comparison, of 95 %, not corrected.
    p: Two-sided p-value of the claim.
    corrected: The same, corrected by Holm over the family.
    verdict: `'holds'`, `'holds (better)'`, `'does not hold'`, `'undecided'` or
      `'no verdict'`.
    reason: Why there is no verdict; empty where there is one.
  """

  claim: Claim
  values: tuple[tuple[float, ...], ...]
  intervals: tuple[Interval, ...]
  p: float
  corrected: float
  verdict: str
  reason: str


def judge(
    claims: Sequence[Claim],
    measured: Measured,
    failures: Mapping[str, str] | None = None,
) -> list[Finding]:
  """Judges claims, corrected for their number.

  A claim holds if all of its comparisons do: its p-value for is the largest of
  theirs. It does not hold if any does not: its p-value against is the smallest
  times their number. Twice the smaller of the two is corrected by Holm within
  the claim's family; claims without a verdict count in it.

  Args:
    claims: All claims of a scale.
    measured: Measurements by arm and seed; each comparison pairs the seeds
      that all of its arms have.
    failures: By the key of a claim, the gates that it fails: there is no
      verdict.

  Returns:
    A finding for each claim.

  Raises:
    ValueError: a run misses a measure.

  Example:
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> claim = Claim('a', 'b is better', '', (better(b, a, 'loss'),))
    >>> runs = {a: [2.0, 2.1, 2.2, 2.3, 2.1], b: [1.0, 1.1, 1.3, 1.2, 1.1]}
    >>> measured = {arm: {s: {'loss': x} for s, x in enumerate(values)}
    ...             for arm, values in runs.items()}
    >>> judge([claim], measured)[0].verdict
    'holds'
  """
  judged = []
  for claim in claims:
    values = tuple(contrast(c, measured) for c in claim.comparisons)
    margins = [c.margin for c in claim.comparisons]
    pro = max(map(p_below, values, margins))
    con = min(1.0, len(values) * min(map(p_above, values, margins)))
    judged.append((claim, values, pro, con, min(1.0, 2 * min(pro, con))))
  corrected = {}
  for family in (PRIMARY, SECONDARY):
    members = [(c.key, p) for c, *_, p in judged if c.family == family]
    corrected |= zip(
        [key for key, _ in members], holm([p for _, p in members])
    )
  findings = []
  for claim, values, pro, con, p in judged:
    intervals = tuple(t_interval(v) if v else NOT_RUN for v in values)
    reason = (failures or {}).get(claim.key, '')
    if min(map(len, values)) < FEWEST_SEEDS:
      reason = '; '.join(filter(None, (
          f'{min(map(len, values))} of at least {FEWEST_SEEDS} seeds', reason
      )))
    verdict = NO_VERDICT if reason else _verdict(
        pro < con, corrected[claim.key], claim, intervals
    )
    findings.append(Finding(
        claim, values, intervals, p, corrected[claim.key], verdict, reason
    ))
  return findings


def contrast(
    comparison: Comparison, measured: Measured
) -> tuple[float, ...]:
  """Returns the contrast of a comparison, by the seeds its arms share.

  Raises:
    ValueError: a run misses a measure.

  Example:
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> contrast(better(b, a, 'loss'), {
    ...     a: {1: {'loss': 3.0}}, b: {1: {'loss': 2.5}, 2: {}}})
    (-0.5,)
  """
  seeds = [set(measured.get(term.arm, ())) for term in comparison.terms]
  try:
    return tuple(
        sum(t.weight * measured[t.arm][s][t.metric] for t in comparison.terms)
        for s in sorted(set.intersection(*seeds))
    )
  except KeyError as error:
    raise ValueError(
        f'comparison {comparison.text!r} needs {error}, which one of its runs '
        'has not measured; train it again.'
    ) from None


NOT_RUN = Interval(float('nan'), float('nan'), float('-inf'), float('inf'))
"""Interval of a comparison that has no seed yet."""


def _verdict(
    favourable: bool, corrected: float, claim: Claim,
    intervals: Sequence[Interval],
) -> str:
  if not corrected < LEVEL:
    return UNDECIDED
  if not favourable:
    return FAILS
  non_inferior = all(c.margin for c in claim.comparisons)
  is_better = all(interval.high < 0 for interval in intervals)
  return BETTER if non_inferior and is_better else HOLDS


def better(
    arm: Arm, other: Arm, metric: str, margin: float = 0.0
) -> Comparison:
  """Compares two arms: the first one's measure is lower, or not much higher.

  Example:
    >>> better(Arm('rigl', 0.9), Arm('dense'), 'loss', 0.01).text
    'rigl-90 at most dense + 0.01'
  """
  text = (
      f'{arm.name} at most {other.name} + {margin}' if margin
      else f'{arm.name} below {other.name}'
  )
  terms = Term(1, arm, metric), Term(-1, other, metric)
  return Comparison(text, terms, margin)


def smaller_gap(
    first: tuple[Arm, Arm], second: tuple[Arm, Arm], metric: str
) -> Comparison:
  """Compares two gaps: the first arm of each minus the second.

  Example:
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> gap = smaller_gap((a, b), (b, a), 'loss')
    >>> gap.text, [term.weight for term in gap.terms]
    ('dense - static-50 below static-50 - dense', [1, -1, -1, 1])
  """
  gap = lambda arms: f'{arms[0].name} - {arms[1].name}'
  terms = (
      Term(sign, arm, metric)
      for sign, arm in zip((1, -1, -1, 1), (*first, *second))
  )
  return Comparison(f'{gap(first)} below {gap(second)}', tuple(terms))


def trend(text: str, arms: Mapping[Arm, float], metric: str) -> Comparison:
  """Claims that a measure rises with a number, by one linear contrast.

  Args:
    text: The comparison in words.
    arms: The number of each arm.
    metric: The measure.

  Returns:
    A comparison whose weights are the numbers less their mean, negated and
    divided by the sum of their squares: minus the slope of the regression line.

  Example:
    >>> levels = {Arm('dense'): 0.0, Arm('static', 0.5): 0.5}
    >>> [t.weight for t in trend('', levels, 'loss').terms]
    [2.0, -2.0]
  """
  mean = sum(arms.values()) / len(arms)
  scale = sum((x - mean) ** 2 for x in arms.values())
  terms = (Term((mean - x) / scale, arm, metric) for arm, x in arms.items())
  return Comparison(text, tuple(terms))
