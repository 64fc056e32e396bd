"""What claims came to: tables, and the numbers behind them."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

from experiments.papers.claims import Finding
from experiments.papers.claims import LEVEL
from experiments.papers.claims import PRIMARY
from experiments.papers.claims import SECONDARY
from experiments.papers.gates import Gate
from experiments.papers.paired import t_interval
from experiments.papers.pool import choose_all
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import loss_of
from experiments.papers.pool import Outcome
from experiments.papers.pool import SELECTION_SEED
from experiments.papers.pool import tried
from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING


def measured(
    entries: Sequence[Entry], done: Done
) -> dict[Any, dict[int, Outcome]]:
  """Collects what the runs that judge have measured, by arm and seed.

  Args:
    entries: All entries of the pool.
    done: Outcomes of finished runs.

  Returns:
    Outcomes of the chosen points; none of the selection seed.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> measured([Entry(Arm('init'), {}, 1)], {
    ...     'init/seed=0': {'loss': 2.0}, 'init/seed=1': {'loss': 3.0}})
    ... # doctest: +ELLIPSIS
    {Arm(...): {1: {'loss': 3.0}}}
  """
  found: dict[Any, dict[int, Outcome]] = {}
  chosen = choose_all(entries, done)
  for entry in entries:
    point = chosen[entry.arm]
    if point is None:
      continue
    names = {
        seed: Job(entry.arm, point, seed).name
        for seed in range(1, entry.seeds + 1)
    }
    outcomes = {s: done[name] for s, name in names.items() if name in done}
    if outcomes:
      found[entry.arm] = outcomes
  return found


def format_claims(findings: Sequence[Finding]) -> str:
  """Writes a table of claims: differences, intervals and verdicts.

  Args:
    findings: From `judge`.

  Returns:
    A Markdown table, a line for each comparison; the corrected p-value and
    the verdict are the claim's.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> from experiments.papers.claims import better, Claim, judge
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
  rows = []
  for finding in findings:
    for i, (comparison, interval, values) in enumerate(
        zip(finding.claim.comparisons, finding.intervals, finding.values)
    ):
      ends = MISSING
      if math.isfinite(interval.low):
        ends = f'{interval.low:+.4f} to {interval.high:+.4f}'
      verdict = f'**{finding.verdict}**'
      if finding.reason:
        verdict += f' ({escape(finding.reason)})'
      rows.append([
          '' if i else f'({finding.claim.key}) {escape(finding.claim.text)}',
          escape(comparison.text),
          str(len(values)),
          f'{interval.mean:+.4f}' if values else MISSING,
          ends,
          f'{comparison.margin:g}',
          '' if i else f'{finding.corrected:.2g}',
          '' if i else verdict,
      ])
  return markdown_table(
      ['claim', 'comparison', 'seeds', 'difference', '95 % interval', 'margin',
       'p, Holm', 'verdict'],
      rows,
      numbers=['seeds', 'difference', '95 % interval', 'margin', 'p, Holm'],
  )


def format_gates(gates: Sequence[Gate]) -> str:
  """Writes a table of gates, those that fail in bold.

  Example:
    >>> print(format_gates([Gate('G4', None, 'much', 'little', False)]))
    | gate | asks for | found |  |
    | --- | --- | --- | --- |
    | G4 | much | little | **fails** |
  """
  word = lambda gate: (
      'holds' if gate.passed else '**fails**' if gate.found else 'not yet run'
  )
  return markdown_table(['gate', 'asks for', 'found', ''], [
      [gate.key, escape(gate.text), escape(gate.found) or MISSING, word(gate)]
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


def format_arms(
    entries: Sequence[Entry],
    done: Done,
    found: Mapping[Any, Mapping[int, Outcome]],
) -> str:
  """Writes a table of arms: the point chosen, the loss, and what it cost.

  Args:
    entries: All entries.
    done: Outcomes of finished runs.
    found: From `measured`.

  Returns:
    A Markdown table; FLOPs are those of the run itself, without the runs that
    it started from.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> done = {f'dense/rate=1,seed={s}': {
    ...     'validation/loss': 2.0 + s, 'flops': 1e9} for s in range(3)}
    >>> entries = [Entry(Arm('dense'), {'rate': (1,)}, 2, extend=False)]
    >>> print(format_arms(entries, done, measured(entries, done)))
    | arm | chosen | measure | mean ± deviation | seeds | FLOPs |
    | --- | --- | --- | ---: | ---: | ---: |
    | dense | rate 1 | validation/loss | 3.5000 ± 0.7071 | 2 | 1.00e+09 |
  """
  rows = []
  chosen = choose_all(entries, done)
  for entry in entries:
    arm = entry.arm
    outcomes = list(found.get(arm, {}).values())
    if not outcomes or arm.metric not in outcomes[0]:
      continue
    mean, deviation, *_ = t_interval([o[arm.metric] for o in outcomes])
    spread = MISSING if math.isnan(deviation) else f'{deviation:.4f}'
    rows.append([
        escape(arm.name), escape(_text(chosen[arm])) or MISSING, arm.metric,
        f'{mean:.4f} ± {spread}', str(len(outcomes)),
        f'{outcomes[0]["flops"]:.2e}',
    ])
  return markdown_table(
      ['arm', 'chosen', 'measure', 'mean ± deviation', 'seeds', 'FLOPs'],
      rows, numbers=['mean ± deviation', 'seeds', 'FLOPs'],
  )


def format_choices(entries: Sequence[Entry], done: Done) -> str:
  """Writes a table of all that was tried on the selection seed.

  Args:
    entries: All entries.
    done: Outcomes of finished runs.

  Returns:
    A Markdown table of the arms whose grids are finished; the chosen point is
    bold.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> entry = Entry(Arm('dense'), {'rate': (1, 2)}, 1, extend=False)
    >>> print(format_choices([entry], {
    ...     'dense/rate=1,seed=0': {'validation/loss': 3.0},
    ...     'dense/rate=2,seed=0': {'validation/loss': 4.0}}))
    | arm | tried on seed 0 |
    | --- | --- |
    | dense | **rate 1: 3.0000**; rate 2: 4.0000 |
  """
  rows = []
  chosen = choose_all(entries, done)
  for entry in entries:
    best = chosen[entry.arm]
    if not entry.grid or best is None or entry.arm.rate_of is not None:
      continue
    cells = []
    for point in tried(entry, done):
      text = escape(
          f'{_text(point)}: {loss_of(entry.arm, point, done):.4f}'
      )
      cells.append(f'**{text}**' if point == best else text)
    rows.append([escape(entry.arm.name), '; '.join(cells)])
  return markdown_table(['arm', f'tried on seed {SELECTION_SEED}'], rows)


def _text(point: Mapping[str, Any]) -> str:
  return ', '.join(
      f'{name} {value:g}' if isinstance(value, float) else f'{name} {value}'
      for name, value in point.items()
  )


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
    title: Title of the report.
    facts: Facts about the machine and the runs, by name.
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
      'Differences are paired by seed, in nats (cosine distances for h, '
      f'perplexities for c-ppl). Verdicts are at level {LEVEL:g}, corrected by '
      'Holm within each family of claims; intervals are of 95 % and not '
      'corrected. A claim of which a gate fails gets no verdict.', '',
      *(f'* {name}: {value}' for name, value in facts.items()),
  ]
  for family in (PRIMARY, SECONDARY):
    members = [f for f in findings if f.claim.family == family]
    if members:
      lines += ['', f'## {family.capitalize()} claims', '',
                format_claims(members)]
  for heading, table in tables.items():
    lines += ['', f'## {heading}', '', table]
  return '\n'.join(lines) + '\n'
