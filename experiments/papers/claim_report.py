"""Report of claims: tables, and the numbers behind them as JSON."""

import collections
from collections.abc import Mapping, Sequence
import math
from typing import Any

from experiments.papers import claims
from experiments.papers import paired
from experiments.papers.arms import Arm
from experiments.papers.claims import Claim
from experiments.papers.claims import Finding
from experiments.papers.claims import LEVEL
from experiments.papers.gates import Gate
from spdf_jax.runs import markdown


def format_claims(findings: Sequence[Finding]) -> str:
  """Formats a table of claims: differences, intervals and verdicts.

  Args:
    findings: Result of `judge`.

  Returns:
    A Markdown table, a line for each comparison; the first line of a claim has
    its corrected p-value and verdict.

  Example:
    >>> from experiments.papers.claims import better, judge
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> claim = Claim('a', 'b is better', '', (better(b, a, 'loss'),))
    >>> runs = {a: {1: {'loss': 2.0}}, b: {1: {'loss': 1.5}}}
    >>> print(format_claims(judge([claim], runs)))
    ... # doctest: +NORMALIZE_WHITESPACE
    | claim | comparison | seeds | difference | 95 % interval | margin |
    p, Holm | verdict |
    | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |
    | (a) b is better | static-50 below dense | 1 | -0.5000 | – | 0 | 1 |
    **no verdict** (1 of at least 5 seeds) |
  """
  has_repeats = any(map(any, (f.repeats for f in findings)))
  rows = []
  for finding in findings:
    for i, (comparison, interval, values) in enumerate(
        zip(finding.claim.comparisons, finding.intervals, finding.values)
    ):
      ends = markdown.MISSING
      if math.isfinite(interval.low):
        ends = f'{interval.low:+.4f} to {interval.high:+.4f}'
      verdict = f'**{finding.verdict}**'
      if finding.reason:
        verdict += f' ({markdown.escape(finding.reason)})'
      rows.append([
          '' if i else f'({finding.claim.key}) '
          f'{markdown.escape(finding.claim.text)}',
          markdown.escape(comparison.text),
          str(len(values)),
          f'{interval.mean:+.4f}' if values else markdown.MISSING,
          ends,
          *[_deviation(finding.repeats[i])] * has_repeats,
          f'{comparison.margin:g}',
          '' if i else f'{finding.corrected:.2g}',
          '' if i else verdict,
      ])
  numbers = [
      'seeds', 'difference', '95 % interval', *['SD, repeated'] * has_repeats,
      'margin', 'p, Holm',
  ]
  return markdown.markdown_table(
      ['claim', 'comparison', *numbers, 'verdict'], rows, numbers=numbers
  )


def format_power(
    claims: Sequence[Claim], seeds: Mapping[Arm, int]
) -> str:
  """Formats a table of the power of each claim, calculated before its runs.

  The level is that of the first step of Holm's correction in the claim's
  family, one-sided.

  Args:
    claims: All claims of a scale; those without `expected` are left out.
    seeds: Number of evaluation seeds of each arm.

  Example:
    >>> from experiments.papers.claims import better, Expected
    >>> a, b = Arm('dense'), Arm('static', 0.5)
    >>> claim = Claim('a', '', '', (better(b, a, 'loss', 0.02),),
    ...               expected=Expected(0.0, 0.0134, 'a pilot'))
    >>> print(format_power([claim], {a: 12, b: 12}))
    ... # doctest: +NORMALIZE_WHITESPACE
    | claim | expected | margin | deviation | seeds | power | seeds for 0.9 |
    source |
    | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |
    | a | +0.000 | 0.02 | 0.0134 | 12 | 1.00 | 7 | a pilot |
  """
  sizes = collections.Counter(claim.family for claim in claims)
  rows = []
  for claim in claims:
    if claim.expected is None:
      continue
    difference, deviation, source = claim.expected
    margin = claim.comparisons[0].margin
    level = LEVEL / (2 * sizes[claim.family])
    n = min(seeds.get(arm, 0) for arm in claim.arms)
    of = difference - margin, deviation
    rows.append([
        claim.key, f'{difference:+.3f}', f'{margin:g}', f'{deviation:g}',
        str(n),
        f'{paired.power(*of, n, level):.2f}' if n > 1 else markdown.MISSING,
        str(paired.seeds_for(*of, level)), source,
    ])
  numbers = [
      'expected', 'margin', 'deviation', 'seeds', 'power', 'seeds for 0.9'
  ]
  return markdown.markdown_table(
      ['claim', *numbers, 'source'], rows, numbers=numbers
  )


def _deviation(changes: Sequence[float]) -> str:
  """Formats the standard deviation of one contrast, repeated as it is."""
  if not changes:
    return markdown.MISSING
  return f'{math.sqrt(sum(x * x for x in changes) / (2 * len(changes))):.4f}'


def format_gates(gates: Sequence[Gate]) -> str:
  """Formats a table of gates, with failures in bold.

  Example:
    >>> print(format_gates([Gate('G4', None, 'much', 'little', False)]))
    | gate | condition | found |  |
    | --- | --- | --- | --- |
    | G4 | much | little | **fails** |
  """
  word = lambda gate: (
      'holds' if gate.passed else '**fails**' if gate.found else 'not yet run'
  )
  return markdown.markdown_table(['gate', 'condition', 'found', ''], [
      [
          gate.key, markdown.escape(gate.text),
          markdown.escape(gate.found) or markdown.MISSING, word(gate)
      ]
      for gate in gates
  ])


def describe_gates(gates: Sequence[Gate]) -> list[dict[str, Any]]:
  """Returns gates as JSON.

  Example:
    >>> describe_gates([])
    []
  """
  return [
      gate._asdict() | {'subject': gate.subject and gate.subject.name}
      for gate in gates
  ]


def describe_findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
  """Returns findings as JSON; infinite ends of an interval become `None`.

  Example:
    >>> describe_findings([])
    []
  """
  return [
      {
          'claim': finding.claim.key,
          'text': finding.claim.text,
          'source': finding.claim.source,
          'family': finding.claim.family,
          'verdict': finding.verdict,
          'reason': finding.reason,
          'p': finding.p,
          'p_holm': finding.corrected,
          'comparisons': [
              comparison._asdict() | {
                  'terms': [
                      term._asdict() | {'arm': term.arm.name}
                      for term in comparison.terms
                  ],
                  'differences': list(values),
                  **({'repeats': list(changes)} if changes else {}),
                  **{
                      name: x if math.isfinite(x) else None
                      for name, x in interval._asdict().items()
                  },
              }
              for comparison, values, interval, changes in zip(
                  finding.claim.comparisons, finding.values,
                  finding.intervals, finding.repeats,
              )
          ],
      }
      for finding in findings
  ]


def format_report(
    title: str,
    facts: Mapping[str, Any],
    findings: Sequence[Finding],
    tables: Mapping[str, str],
) -> str:
  """Formats the whole report.

  Args:
    title: Title of the report.
    facts: Facts about the machine and the runs, by name.
    findings: Result of `judge`.
    tables: Further tables by heading.

  Returns:
    Markdown.

  Example:
    >>> print(format_report('Claims', {'seeds': 5}, [], {}).splitlines()[0])
    # Claims
  """
  lines = [
      f'# {title}', '',
      'Differences are paired by seed, in '
      f'{claims.describe_units(f.claim for f in findings)}. The significance '
      f'level is {LEVEL:g}, with '
      "Holm's correction within each family of claims; intervals are of 95 % "
      'and not corrected; a claim with margins holds (better) if they are '
      'below 0. A claim gets no verdict if one of its gates fails.',
      '',
      *(f'* {name}: {value}' for name, value in facts.items()),
  ]
  for family in dict.fromkeys(f.claim.family for f in findings):
    members = [f for f in findings if f.claim.family == family]
    lines += ['', f'## {family[0].upper()}{family[1:]} claims', '',
              format_claims(members)]
  for heading, table in tables.items():
    lines += ['', f'## {heading}', '', table]
  return '\n'.join(lines) + '\n'
