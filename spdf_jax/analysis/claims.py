"""The papers' claims as data: contrasts of arms, margins, and verdicts.

An arm is named as `experiments/arms.py` builds it: `'static-75'`, with
`'_small'` or `'_large'` for another width than the main one, and `'+task'` for
what was fine-tuned from it. All measures are losses in nats, lower is better,
but for cosine distances.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from spdf_jax.analysis.paired import holm
from spdf_jax.analysis.paired import Interval
from spdf_jax.analysis.paired import p_above
from spdf_jax.analysis.paired import p_below
from spdf_jax.analysis.paired import t_interval
from spdf_jax.names import lookup

MARGIN = 0.01
"""Nats, 1 % of perplexity: what `at most` and `matches` leave open."""

LEVEL = 0.05
"""Of the tests: the chance of any wrong verdict of a scale, at most."""

FEWEST_SEEDS = 5
"""There is no verdict on fewer."""

HOLDS, FAILS, UNDECIDED = 'holds', 'does not hold', 'undecided'
NO_VERDICT = 'no verdict'

PRETRAINED, TUNED = 'validation/loss', 'target/loss'


class Term(NamedTuple):
  """One part of a contrast.

  Attributes:
    weight: What the measure is multiplied by.
    arm: The name of an arm.
    metric: What its runs have measured.
  """

  weight: float
  arm: str
  metric: str


class Comparison(NamedTuple):
  """What is claimed of a sum of terms, seed by seed.

  Attributes:
    text: The claim, in words.
    terms: The contrast.
    relation: `'below'`: the sum is below the bound; `'at most'`: it is not
      above it by more; `'matches'`: it is no further than the bound from 0.
    bound: 0 for `'below'`, a margin for the others.
  """

  text: str
  terms: tuple[Term, ...]
  relation: str = 'below'
  bound: float = 0.0


class Claim(NamedTuple):
  """A claim of the papers: it holds if each of its comparisons does.

  Attributes:
    key: Its letter.
    text: What is claimed.
    source: Where.
    comparisons: What it comes to.
  """

  key: str
  text: str
  source: str
  comparisons: tuple[Comparison, ...]

  @property
  def arms(self) -> tuple[str, ...]:
    """The arms it needs."""
    terms = (t for c in self.comparisons for t in c.terms)
    return tuple(dict.fromkeys(term.arm for term in terms))


class Finding(NamedTuple):
  """What runs say of a claim.

  Attributes:
    claim: The claim.
    values: For each comparison its contrast by seed.
    intervals: For each comparison, of 95 %, not corrected.
    p: Two-sided, of the claim.
    corrected: By Holm over all claims of the scale.
    verdict: `'holds'`, `'does not hold'`, `'undecided'` or `'no verdict'`.
  """

  claim: Claim
  values: tuple[tuple[float, ...], ...]
  intervals: tuple[Interval, ...]
  p: float
  corrected: float
  verdict: str


def p_values(
    values: Sequence[float], comparison: Comparison
) -> tuple[float, float]:
  """Tests a comparison in both directions.

  Args:
    values: Its contrast by seed.
    comparison: The comparison.

  Returns:
    The p-value for the claim, of the test of its contrary, and that against
    it. For `'matches'` the first is that of two one-sided tests, the second
    that of the nearer side, doubled.

  Raises:
    ValueError: the relation is unknown.

  References:
    Schuirmann, A comparison of the two one-sided tests procedure, 1987

  Example:
    >>> better = Comparison('', (), 'below')
    >>> [round(p, 3) for p in p_values([-1.0, -2.0, -3.0], better)]
    [0.037, 0.963]
  """
  bound = comparison.bound
  test = lookup('relation', comparison.relation, {
      'below': lambda: (p_below(values, bound), p_above(values, bound)),
      'at most': lambda: (p_below(values, bound), p_above(values, bound)),
      'matches': lambda: (
          max(p_below(values, bound), p_above(values, -bound)),
          min(1.0, 2 * min(p_above(values, bound), p_below(values, -bound))),
      ),
  })
  return test()


def judge(
    claims: Sequence[Claim], measured: Mapping[str, Mapping[int, Mapping]]
) -> list[Finding]:
  """Judges claims, corrected for their number.

  A claim holds if all of its comparisons do: its p-value for is the largest of
  theirs. It does not hold if any does not: its p-value against is the smallest
  times their number. Twice the smaller of the two is corrected by Holm.

  Args:
    claims: All claims of a scale.
    measured: What was measured, by arm, seed and metric; seeds that all arms of
      a claim have are paired.

  Returns:
    A finding for each claim.

  Raises:
    ValueError: the arms of a claim share no seed, or miss a measure.

  Example:
    >>> claim = Claim('a', 'b is better', '', (better('b', 'a', 'loss'),))
    >>> runs = {'a': [2.0, 2.1, 2.2, 2.3, 2.1], 'b': [1.0, 1.1, 1.3, 1.2, 1.1]}
    >>> measured = {arm: {s: {'loss': x} for s, x in enumerate(values)}
    ...             for arm, values in runs.items()}
    >>> judge([claim], measured)[0].verdict
    'holds'
  """
  judged = []
  for claim in claims:
    values = tuple(
        contrast(claim, comparison, measured)
        for comparison in claim.comparisons
    )
    tests = [p_values(v, c) for v, c in zip(values, claim.comparisons)]
    pro = max(p for p, _ in tests)
    con = min(1.0, len(tests) * min(p for _, p in tests))
    judged.append((claim, values, pro, con, min(1.0, 2 * min(pro, con))))
  corrected = holm([p for *_, p in judged])
  return [
      Finding(
          claim, values, tuple(map(t_interval, values)), p, c,
          _verdict(len(values[0]), pro < con, c),
      )
      for (claim, values, pro, con, p), c in zip(judged, corrected)
  ]


def contrast(
    claim: Claim,
    comparison: Comparison,
    measured: Mapping[str, Mapping[int, Mapping]],
) -> tuple[float, ...]:
  """Returns the contrast of a comparison, by the seeds of its claim.

  Raises:
    ValueError: the arms of the claim share no seed, or miss a measure.

  Example:
    >>> comparison = better('b', 'a', 'loss')
    >>> measured = {'a': {1: {'loss': 3.0}}, 'b': {1: {'loss': 2.5}, 2: {}}}
    >>> contrast(Claim('a', '', '', (comparison,)), comparison, measured)
    (-0.5,)
  """
  seeds = [set(measured.get(arm, {})) for arm in claim.arms]
  shared = sorted(set.intersection(*seeds))
  if not shared:
    raise ValueError(
        f'claim ({claim.key}) has no seed that all of {", ".join(claim.arms)} '
        'were run with; finish the runs first.'
    )
  try:
    return tuple(
        sum(t.weight * measured[t.arm][s][t.metric] for t in comparison.terms)
        for s in shared
    )
  except KeyError as error:
    raise ValueError(
        f'claim ({claim.key}) needs {error}, which a run of '
        f'{", ".join(claim.arms)} has not measured; train it anew.'
    ) from None


def _verdict(seeds: int, favourable: bool, corrected: float) -> str:
  if seeds < FEWEST_SEEDS:
    return NO_VERDICT
  if corrected >= LEVEL:
    return UNDECIDED
  return HOLDS if favourable else FAILS


def better(
    arm: str, other: str, metric: str, relation: str = 'below',
    bound: float = 0.0,
) -> Comparison:
  """Compares two arms: the first one's measure is lower.

  Example:
    >>> better('rigl-90', 'set-90', 'loss', 'at most', 0.01).text
    'rigl-90 at most set-90 + 0.01'
  """
  text = f'{arm} {relation} {other}'
  sign = {'at most': '+', 'matches': '±'}.get(relation, '')
  terms = Term(1, arm, metric), Term(-1, other, metric)
  return Comparison(
      text + (f' {sign} {bound}' if sign else ''), terms, relation, bound
  )


def smaller_gap(
    text: str, first: tuple[str, str], second: tuple[str, str], metric: str
) -> Comparison:
  """Compares two gaps: the first arm of each minus the second.

  Example:
    >>> gap = smaller_gap('', ('a', 'b'), ('c', 'd'), 'loss')
    >>> [(term.weight, term.arm) for term in gap.terms]
    [(1, 'a'), (-1, 'b'), (-1, 'c'), (1, 'd')]
  """
  arms = *first, *second
  signs = 1, -1, -1, 1
  terms = (Term(sign, arm, metric) for sign, arm in zip(signs, arms))
  return Comparison(text, tuple(terms))
