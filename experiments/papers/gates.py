"""Gates: conditions under which differences between arms are meaningful.

G1: dense models beat a bigram and a trigram model of the tokens they read. G2:
a model of 99 % sparsity is worse than a dense one. G3: every chosen learning
rate is inside its grid, not at an end. G4: at least 20 tokens per parameter and
at most 4 epochs. If a gate fails, a small difference between arms does not
measure sparsity, and the claims that depend on the gate get no verdict.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import statistics
from typing import NamedTuple

from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.arms import with_parents
from experiments.papers.claims import Claim
from experiments.papers.claims import Measured
from experiments.papers.pool import choose_all
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import loss_of
from experiments.papers.pool import tried
from experiments.papers.scales import CONTROL
from experiments.papers.scales import DENSE
from experiments.papers.scales import EPOCHS
from experiments.papers.scales import Scale
from experiments.papers.scales import sized
from experiments.papers.scales import TOKENS_PER_PARAMETER

MARGIN = 0.1
"""Smallest difference in G1 and G2, in nats."""

BASELINES = {'bigram': 'bigram/loss', 'trigram': 'trigram/loss'}
"""Metrics of the baselines of G1, measured by the runs of initial weights."""


class Gate(NamedTuple):
  """Condition of a gate, and the measured value.

  Attributes:
    key: `'G1'` to `'G4'`.
    subject: Arm that the condition is about; `None`: all.
    text: The condition in words.
    found: The measured value in words; empty before the runs.
    passed: Whether the condition holds.
  """

  key: str
  subject: Arm | None
  text: str
  found: str
  passed: bool


def arms_of_gates(claims: Sequence[Claim]) -> list[Arm]:
  """Returns the arms that the gates of claims need.

  Example:
    >>> from experiments.papers.paper_claims import CLAIMS
    >>> [arm.name for arm in arms_of_gates([CLAIMS['c']])]
    ['dense_large', 'static-99_large', 'dense_small', 'static-99_small']
  """
  return [
      sized(arm, size) for size in _sizes(claims) for arm in (DENSE, CONTROL)
  ]


def check(
    scale: Scale,
    claims: Sequence[Claim],
    entries: Sequence[Entry],
    done: Done,
    measured: Measured,
) -> list[Gate]:
  """Computes all gates of a scale's claims.

  Args:
    scale: The scale.
    claims: Claims of the scale.
    entries: Entries of the pool.
    done: Outcomes of finished runs.
    measured: Measurements on the judging seeds.

  Returns:
    G1 and G2 by size, G3 by arm, and G4.
  """
  gates = []
  for size in _sizes(claims):
    dense, init = sized(DENSE, size), Arm('init', size=size)
    for name, metric in BASELINES.items():
      gates.append(_ahead(
          'G1', dense, f'{dense.name} beats the {name} of its tokens',
          _values(measured, init, metric),
          _values(measured, dense, PRETRAINED),
      ))
  for size in _sizes(claims):
    control, dense = sized(CONTROL, size), sized(DENSE, size)
    gates.append(_ahead(
        'G2', control, f'{dense.name} beats {control.name}',
        _values(measured, control, PRETRAINED),
        _values(measured, dense, PRETRAINED),
    ))
  chosen = choose_all(entries, done)
  for entry in entries:
    if entry.arm.rate_of is None and 'rate' in entry.grid:
      gates.append(_inside(entry, chosen[entry.arm], done))
  enough = scale.tokens_per_parameter >= TOKENS_PER_PARAMETER
  gates.append(Gate(
      'G4', None,
      f'at least {TOKENS_PER_PARAMETER} tokens per parameter, at most {EPOCHS} '
      'epochs',
      f'{scale.tokens_per_parameter:g} tokens per parameter, '
      f'{scale.epochs} epochs at most',
      enough and scale.epochs <= EPOCHS,
  ))
  return gates


def failures(
    gates: Sequence[Gate], claims: Sequence[Claim]
) -> dict[str, str]:
  """Returns the failed gates of each claim, among those of its sizes and arms.

  Args:
    gates: Result of `check`.
    claims: The claims.

  Returns:
    Names of the failed gates and of their arms, by the key of a claim; claims
    without a failed gate are left out.

  Example:
    >>> from experiments.papers.paper_claims import CLAIMS
    >>> gate = Gate('G4', None, '', '', False)
    >>> failures([gate], [CLAIMS['a']])
    {'a': 'G4'}
  """
  failed = {}
  for claim in claims:
    arms = set(with_parents(list(claim.arms)))
    sizes = {arm.size for arm in arms}
    names = [
        gate.key + (f' {gate.subject.name}' if gate.subject else '')
        for gate in gates
        if not gate.passed and (
            gate.subject is None
            or (gate.subject in arms if gate.key == 'G3'
                else gate.subject.size in sizes)
        )
    ]
    if names:
      failed[claim.key] = ', '.join(dict.fromkeys(names))
  return failed


def _sizes(claims: Sequence[Claim]) -> list[str]:
  return list(dict.fromkeys(a.size for c in claims for a in c.arms))


def _values(measured: Measured, arm: Arm, metric: str) -> dict[int, float]:
  return {
      seed: outcome[metric]
      for seed, outcome in measured.get(arm, {}).items() if metric in outcome
  }


def _ahead(
    key: str, subject: Arm, text: str, worse: Mapping[int, float],
    dense: Mapping[int, float],
) -> Gate:
  text += f' by {MARGIN} nats'
  seeds = worse.keys() & dense.keys()
  if not seeds:
    return Gate(key, subject, text, '', False)
  gap = statistics.fmean(worse[s] - dense[s] for s in seeds)
  found = f'{gap:+.3f} nats, {len(seeds)} seeds'
  return Gate(key, subject, text, found, gap >= MARGIN)


def _inside(
    entry: Entry, best: Mapping[str, float] | None, done: Done
) -> Gate:
  text = f'the rate of {entry.arm.name} is inside its grid'
  if best is None:
    return Gate('G3', entry.arm, text, '', False)
  rates = sorted(
      point['rate'] for point in tried(entry, done)
      if point | {'rate': best['rate']} == best
      and loss_of(entry.arm, point, done) is not None
  )
  found = f'{best["rate"]:g} in {", ".join(f"{rate:g}" for rate in rates)}'
  inside = rates[0] < best['rate'] < rates[-1] and math.isfinite(
      loss_of(entry.arm, best, done)
  )
  return Gate('G3', entry.arm, text, found, inside)
