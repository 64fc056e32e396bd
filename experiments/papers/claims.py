"""Claims as data: contrasts of arms, margins, and verdicts.

Lower is better in all contrasts: of losses in nats, perplexities and cosine
distances.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.papers import paired
from experiments.papers.arms import Arm
from experiments.papers.paired import Interval

LEVEL = 0.05
"""Significance level: largest probability of any wrong verdict in a family.

It does not cover the word 'better' in `BETTER`, whose intervals of 95 % are not
corrected; protocols register this rule.
"""

FEWEST_SEEDS = 5
"""Smallest number of seeds for a verdict."""

HOLDS, BETTER = 'holds', 'holds (better)'
FAILS, UNDECIDED = 'does not hold', 'undecided'
NO_VERDICT = 'no verdict'
PRIMARY, SECONDARY = 'primary', 'secondary'

Measured = Mapping[Arm, Mapping[int, Mapping[str, float]]]
"""Measured values by arm, seed and metric."""


class Term(NamedTuple):
  """One part of a contrast.

  Attributes:
    weight: Factor of the measured value.
    arm: The arm.
    metric: Name of the metric in outcomes of runs.
  """

  weight: float
  arm: Arm
  metric: str


class Comparison(NamedTuple):
  """Claim that a sum of terms, the contrast, is below a margin.

  Attributes:
    text: The comparison in words.
    terms: Terms of the contrast, which is computed for each seed.
    margin: Claimed upper bound of the contrast: 0, or the allowed excess loss
      in a comparison of non-inferiority.
  """

  text: str
  terms: tuple[Term, ...]
  margin: float = 0.0


class Expected(NamedTuple):
  """The expected numbers of a claim, for its power before the runs.

  Attributes:
    difference: Expected contrast.
    deviation: Standard deviation of the contrast over seeds.
    source: Runs that both come from.
  """

  difference: float
  deviation: float
  source: str


class Claim(NamedTuple):
  """A claim of the papers: it holds if each of its comparisons does.

  Attributes:
    key: Short name of the claim.
    text: The claim in words.
    source: Paper and place that state the claim.
    comparisons: Comparisons that the claim consists of.
    family: Name of the family of claims that the p-value is corrected for.
    expected: Values that the power is calculated from; `None`: it is not.
  """

  key: str
  text: str
  source: str
  comparisons: tuple[Comparison, ...]
  family: str = PRIMARY
  expected: Expected | None = None

  @property
  def arms(self) -> tuple[Arm, ...]:
    """Arms that the claim needs."""
    terms = (t for c in self.comparisons for t in c.terms)
    return tuple(dict.fromkeys(term.arm for term in terms))


NATS, PERPLEXITIES = 'nats', 'perplexities'

_UNITS = {'distance/': 'cosine distances', '/perplexity': PERPLEXITIES}


def unit_of(claim: Claim) -> str:
  """Returns the unit of a claim's contrasts.

  Example:
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> unit_of(Claim('a', '', '', (better(b, a, 'distance/all'),)))
    'cosine distances'
  """
  metric = claim.comparisons[0].terms[0].metric
  return next((u for part, u in _UNITS.items() if part in metric), NATS)


def describe_units(claims: Iterable[Claim]) -> str:
  """Names nats, and the units and keys of claims in others.

  Example:
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> claim = Claim('a', '', '', (better(b, a, 'distance/all'),))
    >>> describe_units([claim, claim._replace(key='b')])
    'nats (cosine distances for a, b)'
  """
  keys: dict[str, list[str]] = {}
  for claim in claims:
    keys.setdefault(unit_of(claim), []).append(claim.key)
  keys.pop(NATS, None)
  others = ', '.join(f'{u} for {", ".join(k)}' for u, k in keys.items())
  return f'{NATS} ({others})' if others else NATS


class Finding(NamedTuple):
  """Verdict on a claim, and the numbers behind it.

  Attributes:
    claim: The claim.
    values: Contrasts of each comparison, by seed.
    intervals: 95 % interval of each comparison, not corrected.
    p: Two-sided p-value of the claim.
    corrected: The p-value with Holm's correction over the family.
    verdict: `'holds'`, `'holds (better)'`, `'does not hold'`, `'undecided'` or
      `'no verdict'`.
    reason: Why there is no verdict; empty where there is one.
    repeats: For each comparison, the changes of its contrast where all of its
      runs were repeated with other rounding errors.
  """

  claim: Claim
  values: tuple[tuple[float, ...], ...]
  intervals: tuple[Interval, ...]
  p: float
  corrected: float
  verdict: str
  reason: str
  repeats: tuple[tuple[float, ...], ...]


def judge(
    claims: Sequence[Claim],
    measured: Measured,
    failures: Mapping[str, str] | None = None,
    repeated: Measured | None = None,
    seeds: Mapping[Arm, int] | None = None,
) -> list[Finding]:
  """Judges claims, with p-values corrected for the number of claims.

  A claim holds if all of its comparisons do, so the p-value in favor is the
  largest of the comparisons' p-values. It does not hold if any comparison does
  not, so the p-value against is the smallest times their number (Bonferroni).
  Twice the smaller of the two is corrected by Holm within the claim's family,
  in which claims without a verdict count too.

  Args:
    claims: All claims of a scale.
    measured: Measurements by arm and seed; each comparison pairs the seeds
      that all of its arms have.
    failures: Failed gates by the key of a claim; such a claim gets no verdict.
    repeated: Measurements of repeated runs; they do not count for the verdict.
    seeds: Number of seeds that an arm is judged by; a claim has a verdict if
      its arms have them all, at least `FEWEST_SEEDS`.

  Returns:
    A finding for each claim.

  Raises:
    ValueError: a run lacks a metric.

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
    pro = max(map(paired.p_below, values, margins))
    con = min(1.0, len(values) * min(map(paired.p_above, values, margins)))
    judged.append((claim, values, pro, con, min(1.0, 2 * min(pro, con))))
  corrected = {}
  for family in dict.fromkeys(claim.family for claim in claims):
    members = [(c.key, p) for c, *_, p in judged if c.family == family]
    corrected |= zip(
        [key for key, _ in members], paired.holm([p for _, p in members])
    )
  findings = []
  for claim, values, pro, con, p in judged:
    intervals = tuple(paired.t_interval(v) if v else NOT_RUN for v in values)
    reason = (failures or {}).get(claim.key, '')
    needed = max(
        FEWEST_SEEDS, min((seeds or {}).get(arm, 0) for arm in claim.arms)
    )
    if min(map(len, values)) < needed:
      reason = '; '.join(filter(None, (
          f'{min(map(len, values))} of at least {needed} seeds', reason
      )))
    verdict = NO_VERDICT if reason else _verdict(
        pro < con, corrected[claim.key], claim, intervals
    )
    findings.append(Finding(
        claim, values, intervals, p, corrected[claim.key], verdict, reason,
        tuple(_changes(c, measured, repeated or {}) for c in claim.comparisons),
    ))
  return findings


def _changes(
    comparison: Comparison, measured: Measured, repeated: Measured
) -> tuple[float, ...]:
  """Returns repeated minus first contrasts, for seeds that have both."""
  first = {
      arm: {
          seed: outcome for seed, outcome in measured.get(arm, {}).items()
          if all(seed in repeated.get(t.arm, ()) for t in comparison.terms)
      }
      for arm in (term.arm for term in comparison.terms)
  }
  return tuple(
      again - once for once, again in zip(
          contrast(comparison, first), contrast(comparison, repeated)
      )
  )


def contrast(
    comparison: Comparison, measured: Measured
) -> tuple[float, ...]:
  """Returns the contrast of a comparison for each seed that its arms share.

  Raises:
    ValueError: a run lacks a metric.

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
"""Interval of a comparison without finished seeds."""


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
  """Returns the claim that an arm's metric is below another's plus a margin.

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
  """Returns the claim that one gap between two arms is smaller than another.

  A gap is the metric of the first arm of a pair minus that of the second.

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
  """Returns the claim that a metric rises with a number, as a linear contrast.

  Args:
    text: The comparison in words.
    arms: The number for each arm.
    metric: Name of the metric.

  Returns:
    A comparison whose contrast is minus the slope of the regression line: the
    weights are the mean minus the numbers, divided by the sum of squared
    deviations.

  Example:
    >>> sparsities = {Arm('dense'): 0.0, Arm('static', 0.5): 0.5}
    >>> [t.weight for t in trend('', sparsities, 'loss').terms]
    [2.0, -2.0]
  """
  mean = sum(arms.values()) / len(arms)
  scale = sum((x - mean) ** 2 for x in arms.values())
  terms = (Term((mean - x) / scale, arm, metric) for arm, x in arms.items())
  return Comparison(text, tuple(terms))
