"""What claims came to: tables, and the numbers behind them."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
from typing import Any

from spdf_jax.analysis.claims import Finding
from spdf_jax.analysis.claims import LEVEL
from spdf_jax.analysis.claims import NO_VERDICT
from spdf_jax.analysis.paired import t_interval
from spdf_jax.analysis.pool import Arm
from spdf_jax.analysis.pool import choose
from spdf_jax.analysis.pool import Job
from spdf_jax.analysis.pool import Outcome
from spdf_jax.analysis.sweeps import points
from spdf_jax.analysis.tables import escape
from spdf_jax.analysis.tables import markdown_table
from spdf_jax.analysis.tables import MISSING


def measured(
    arms: Sequence[Arm],
    seeds: Sequence[int],
    selection_seed: int,
    done: Mapping[str, Outcome],
) -> dict[str, dict[int, Outcome]]:
  """Collects what the runs that judge have measured, by arm and seed.

  Args:
    arms: All arms.
    seeds: Those that judge.
    selection_seed: The seed of the grids.
    done: What finished runs have measured, by their names.

  Returns:
    Outcomes of the chosen points; none of the selection seed.

  Example:
    >>> measured([Arm('a', {}, '', 'loss')], [1], 0,
    ...          {'a/seed=0': {'loss': 2.0}, 'a/seed=1': {'loss': 3.0}})
    {'a': {1: {'loss': 3.0}}}
  """
  found: dict[str, dict[int, Outcome]] = {}
  for arm in arms:
    point = choose(arm, selection_seed, done)
    if point is None:
      continue
    names = {s: Job(arm.name, point, s, '').name for s in seeds}
    found[arm.name] = {s: done[n] for s, n in names.items() if n in done}
  return found


def format_claims(findings: Sequence[Finding]) -> str:
  """Writes a table of claims: differences, intervals and verdicts.

  Args:
    findings: From `judge`.

  Returns:
    A Markdown table, a line for each comparison; the corrected p-value and
    the verdict are the claim's.

  Example:
    >>> from spdf_jax.analysis.claims import better, Claim, judge
    >>> claim = Claim('a', 'b is better', '', (better('b', 'a', 'loss'),))
    >>> runs = {'a': {1: {'loss': 2.0}}, 'b': {1: {'loss': 1.5}}}
    >>> print(format_claims(judge([claim], runs)))
    ... # doctest: +NORMALIZE_WHITESPACE
    | claim | comparison | difference | 95 % interval | margin | p, Holm |
    verdict |
    | --- | --- | ---: | ---: | ---: | ---: | --- |
    | (a) b is better | b below a | -0.5000 | – | 0 | 1 | **no verdict** |
  """
  rows = []
  for finding in findings:
    for i, (comparison, interval) in enumerate(
        zip(finding.claim.comparisons, finding.intervals)
    ):
      ends = MISSING
      if math.isfinite(interval.low):
        ends = f'{interval.low:+.4f} to {interval.high:+.4f}'
      rows.append([
          '' if i else f'({finding.claim.key}) {escape(finding.claim.text)}',
          escape(comparison.text),
          f'{interval.mean:+.4f}',
          ends,
          f'{comparison.bound:g}',
          '' if i else f'{finding.corrected:.2g}',
          '' if i else f'**{finding.verdict}**',
      ])
  return markdown_table(
      ['claim', 'comparison', 'difference', '95 % interval', 'margin',
       'p, Holm', 'verdict'],
      rows,
      numbers=['difference', '95 % interval', 'margin', 'p, Holm'],
  )


def format_arms(
    arms: Sequence[Arm],
    selection_seed: int,
    done: Mapping[str, Outcome],
    found: Mapping[str, Mapping[int, Outcome]],
) -> str:
  """Writes a table of arms: the point chosen, the loss, and what it cost.

  Args:
    arms: All arms.
    selection_seed: The seed of the grids.
    done: What finished runs have measured, by their names.
    found: From `measured`.

  Returns:
    A Markdown table; FLOPs are those of the run itself, without the runs that
    it started from.

  Example:
    >>> done = {f'a/seed={s}': {'validation/loss': 2.0 + s, 'flops': 1e9}
    ...         for s in range(3)}
    >>> arms = [Arm('a', {}, '', 'validation/loss')]
    >>> print(format_arms(arms, 0, done, measured(arms, [1, 2], 0, done)))
    | arm | chosen | measure | mean ± deviation | seeds | FLOPs |
    | --- | --- | --- | ---: | ---: | ---: |
    | a | – | validation/loss | 3.5000 ± 0.7071 | 2 | 1.00e+09 |
  """
  rows = []
  for arm in arms:
    outcomes = list(found.get(arm.name, {}).values())
    if not outcomes or arm.metric not in outcomes[0]:
      continue
    mean, deviation, *_ = t_interval([o[arm.metric] for o in outcomes])
    spread = MISSING if math.isnan(deviation) else f'{deviation:.4f}'
    point = choose(arm, selection_seed, done) or {}
    chosen = ', '.join(f'{name} {value}' for name, value in point.items())
    rows.append([
        escape(arm.name), escape(chosen) or MISSING, arm.metric,
        f'{mean:.4f} ± {spread}', str(len(outcomes)),
        f'{outcomes[0]["flops"]:.2e}',
    ])
  return markdown_table(
      ['arm', 'chosen', 'measure', 'mean ± deviation', 'seeds', 'FLOPs'],
      rows, numbers=['mean ± deviation', 'seeds', 'FLOPs'],
  )


def format_choices(
    arms: Sequence[Arm], selection_seed: int, done: Mapping[str, Outcome]
) -> str:
  """Writes a table of all that was tried on the selection seed.

  Args:
    arms: All arms.
    selection_seed: The seed of the grids.
    done: What finished runs have measured, by their names.

  Returns:
    A Markdown table: the chosen point is bold, and marked where it is at the
    end of its grid.

  Example:
    >>> arm = Arm('a', {'rate': (1, 2)}, '', 'loss')
    >>> done = {'a/rate=1,seed=0': {'loss': 3.0},
    ...         'a/rate=2,seed=0': {'loss': 4.0}}
    >>> print(format_choices([arm._replace(metric='validation/loss')], 0, {
    ...     name: {'validation/loss': x['loss']} for name, x in done.items()}))
    | arm | tried on seed 0 |
    | --- | --- |
    | a | **rate 1: 3.0000** (first of its grid); rate 2: 4.0000 |
  """
  rows = []
  for arm in arms:
    best = choose(arm, selection_seed, done)
    if not arm.grid or best is None:
      continue
    cells = []
    for point in points(arm.grid):
      loss = done[Job(arm.name, point, selection_seed, '').name][arm.metric]
      text = ', '.join(f'{name} {value}' for name, value in point.items())
      text = escape(f'{text}: {loss:.4f}')
      cells.append(f'**{text}**{_edge(arm, best)}' if point == best else text)
    rows.append([escape(arm.name), '; '.join(cells)])
  return markdown_table(['arm', f'tried on seed {selection_seed}'], rows)


def _edge(arm: Arm, best: Mapping[str, Any]) -> str:
  rates = arm.grid.get('rate', ())
  if len(rates) < 2 or best['rate'] not in (rates[0], rates[-1]):
    return ''
  return f' ({"first" if best["rate"] == rates[0] else "last"} of its grid)'


def describe_findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
  """Returns findings as JSON; ends of an interval that are infinite are None.

  Example:
    >>> describe_findings([])
    []
  """
  return [
      {
          'claim': finding.claim.key,
          'text': finding.claim.text,
          'source': finding.claim.source,
          'verdict': finding.verdict,
          'p': finding.p,
          'p_holm': finding.corrected,
          'comparisons': [
              comparison._asdict() | {
                  'terms': [term._asdict() for term in comparison.terms],
                  'differences': list(values),
                  **{
                      name: x if math.isfinite(x) else None
                      for name, x in interval._asdict().items()
                  },
              }
              for comparison, values, interval in zip(
                  finding.claim.comparisons, finding.values, finding.intervals
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
  """Writes the whole report.

  Args:
    title: Its first line.
    facts: What it was made on and from, by name.
    findings: From `judge`.
    tables: Further tables by heading.

  Returns:
    Markdown.

  Example:
    >>> print(format_report('Claims', {'seeds': 5}, [], {}).splitlines()[0])
    # Claims
  """
  lines = [
      f'# {title}', '',
      'Differences are paired by seed, in nats (cosine distances for h). The '
      f'verdicts are at {LEVEL:g}, corrected by Holm over the claims of the '
      'table; intervals are not corrected.', '',
      *(f'* {name}: {json.dumps(value)}' for name, value in facts.items()), '',
      format_claims(findings),
  ]
  if any(finding.verdict == NO_VERDICT for finding in findings):
    lines += ['', 'There are too few seeds for a verdict.']
  for heading, table in tables.items():
    lines += ['', f'## {heading}', '', table]
  return '\n'.join(lines) + '\n'
