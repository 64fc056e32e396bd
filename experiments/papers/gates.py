"""Gates: conditions under which differences between arms are meaningful.

G1: dense models beat a bigram and a trigram model of the tokens they read. G2:
a model of 99 % sparsity, at a tuned rate, is worse than a dense one. G3: every
chosen learning rate is inside its grid, not at an end. G4: at least 20 tokens
per parameter and at most 4 epochs. G6: a model of 99 % sparsity is worse than a
dense one after fine-tuning, too; it concerns claims of non-inferiority, which a
fine-tuning that makes all models equal would grant. If a gate fails, a small
difference between arms does not measure sparsity, and the claims that depend on
the gate get no verdict. (G5 was a gate of a protocol that is closed.)
"""

from collections.abc import Mapping, Sequence
import statistics
from typing import NamedTuple

from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.arms import TUNED
from experiments.papers.arms import with_parents
from experiments.papers.claims import Claim
from experiments.papers.claims import Measured
from experiments.papers.scale import EPOCHS
from experiments.papers.scale import Scale
from experiments.papers.scale import TOKENS_PER_PARAMETER
from experiments.pool import pool
from experiments.pool.pool import Done
from experiments.pool.pool import Entry

MARGIN, TUNED_MARGIN = 0.1, 0.15
"""Smallest differences in G1 and G2, and in G6, in nats."""

BASELINES = {'bigram': 'bigram/loss', 'trigram': 'trigram/loss'}
"""Metrics of the baselines of G1, measured by the runs of initial weights."""


class Gate(NamedTuple):
  """Condition of a gate, and the measured value.

  Attributes:
    key: `'G1'` to `'G4'`, or `'G6'`.
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


def arms_of_gates(scale: Scale, claims: Sequence[Claim]) -> list[Arm]:
  """Returns the arms that the gates of a scale's claims need.

  Example:
    >>> from experiments.papers.paper_claims import CLAIMS
    >>> from experiments.papers.scales import FAIR
    >>> [arm.name for arm in arms_of_gates(FAIR, [CLAIMS['c']])]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['init_large', 'dense_large', 'static-99_large', 'init_small',
     'dense_small', 'static-99_small']
  """
  arms = []
  for size in _sizes(scale, claims):
    arms += [
        Arm('init', size=size), _dense(scale, size), _control(scale, size)
    ]
  tasks = {
      arm.task for claim in claims if _is_non_inferiority(claim)
      for arm in claim.arms
  }
  for control in _tuned_controls(scale):
    if control.task in tasks:
      arms += [_dense(scale, control.size, control.task), control]
  return list(dict.fromkeys(arms))


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
    measured: Measurements on the evaluation seeds.

  Returns:
    G1 and G2 by size, G3 by arm, and G4; G6 by task, where the scale has a
    fine-tuned control.
  """
  seeds = {entry.arm: len(entry.evaluation_seeds) for entry in entries}
  measured = {
      arm: outcomes for arm, outcomes in measured.items()
      # An arm counts once all its runs have finished.
      if len(outcomes) == seeds[arm]
  }
  gates = []
  sizes = _sizes(scale, claims)
  for size in sizes:
    dense, init = _dense(scale, size), Arm('init', size=size)
    for name, metric in BASELINES.items():
      gates.append(_ahead(
          'G1', dense, f'{dense.name} beats the {name} of its tokens',
          _values(measured, init, metric),
          _values(measured, dense, PRETRAINED),
      ))
  chosen = pool.choose_all(entries, done)
  rates = [
      _inside(entry, chosen[entry.arm], done)
      for entry in {entry.arm: entry for entry in entries}.values()
      if entry.arm.rate_of is None and 'rate' in entry.grid
  ]
  ill_tuned = {gate.subject for gate in rates if not gate.passed}
  for size in sizes:
    control = _control(scale, size)
    gates.append(_beaten(
        'G2', control, _dense(scale, size), PRETRAINED, measured,
        control not in ill_tuned,
    ))
  gates += rates
  enough = scale.tokens_per_parameter >= TOKENS_PER_PARAMETER
  gates.append(Gate(
      'G4', None,
      f'at least {TOKENS_PER_PARAMETER} tokens per parameter, at most '
      f'{EPOCHS} epochs',
      f'{scale.tokens_per_parameter:g} tokens per parameter, '
      f'{scale.epochs} epochs at most',
      enough and scale.epochs <= EPOCHS,
  ))
  for control in _tuned_controls(scale):
    if control in seeds:
      gates.append(_beaten(
          'G6', control, _dense(scale, control.size, control.task), TUNED,
          measured, control not in ill_tuned,
      ))
  return gates


def failures(
    scale: Scale, gates: Sequence[Gate], claims: Sequence[Claim]
) -> dict[str, str]:
  """Returns the failed gates of each claim, among those of its sizes and arms.

  Args:
    scale: The scale.
    gates: Result of `check`.
    claims: The claims.

  Returns:
    Names of the failed gates and of their arms, by the key of a claim; claims
    without a failed gate are left out.

  Example:
    >>> from experiments.papers.paper_claims import CLAIMS
    >>> gate = Gate('G4', None, '', '', False)
    >>> from experiments.papers.scales import FAIR
    >>> failures(FAIR, [gate], [CLAIMS['a']])
    {'a': 'G4'}
  """
  failed = {}
  for claim in claims:
    names = [
        gate.key + (f' {gate.subject.name}' if gate.subject else '')
        for gate in gates if not gate.passed and _concerns(gate, scale, claim)
    ]
    if names:
      failed[claim.key] = ', '.join(dict.fromkeys(names))
  return failed


def _concerns(gate: Gate, scale: Scale, claim: Claim) -> bool:
  """Returns whether a claim about arms, with their parents, needs a gate."""
  if gate.subject is None:
    return True
  if gate.key == 'G3':
    return gate.subject in with_parents(list(claim.arms))
  if gate.key == 'G6' and not (
      _is_non_inferiority(claim)
      and any(arm.task == gate.subject.task for arm in claim.arms)
  ):
    return False
  return gate.subject.size in {scale.reference(a.size) for a in claim.arms}


def _is_non_inferiority(claim: Claim) -> bool:
  return any(comparison.margin for comparison in claim.comparisons)


def _sizes(scale: Scale, claims: Sequence[Claim]) -> list[str]:
  return list(dict.fromkeys(
      scale.reference(a.size) for c in claims for a in c.arms
  ))


def _tuned_controls(scale: Scale) -> list[Arm]:
  """Returns the controls that a scale fine-tunes."""
  return [
      arm for block in scale.blocks for arm in block.arms
      if arm.task and arm.sparsity == scales.CONTROL.sparsity
  ]


def _dense(scale: Scale, size: str, task: str = '') -> Arm:
  return scale.find('dense', 0.0, size, task) or scales.sized(
      scales.DENSE, size
  )


def _control(scale: Scale, size: str) -> Arm:
  control = scale.find('static', scales.CONTROL.sparsity, size)
  return control or scales.sized(scales.CONTROL, size)


def _beaten(
    key: str, control: Arm, dense: Arm, metric: str, measured: Measured,
    is_tuned: bool,
) -> Gate:
  """Returns the gate that a control with a tuned rate is worse than dense."""
  gate = _ahead(
      key, control, f'{dense.name} beats {control.name}',
      _values(measured, control, metric), _values(measured, dense, metric),
      TUNED_MARGIN if control.task else MARGIN,
  )
  if is_tuned or not gate.found:
    return gate
  return gate._replace(
      found=f'{gate.found}; its rate is at an end of its grid', passed=False
  )


def _values(measured: Measured, arm: Arm, metric: str) -> dict[int, float]:
  return {
      seed: outcome[metric]
      for seed, outcome in measured.get(arm, {}).items() if metric in outcome
  }


def _ahead(
    key: str, subject: Arm, text: str, worse: Mapping[int, float],
    dense: Mapping[int, float], margin: float = MARGIN,
) -> Gate:
  text += f' by {margin} nats'
  seeds = worse.keys() & dense.keys()
  if not seeds:
    return Gate(key, subject, text, '', False)
  gap = statistics.fmean(worse[s] - dense[s] for s in seeds)
  value = f'{gap:+.3f} nats, {len(seeds)} seeds'
  return Gate(key, subject, text, value, gap >= margin)


def _inside(
    entry: Entry, best: Mapping[str, float] | None, done: Done
) -> Gate:
  text = f'the rate of {entry.arm.name} is inside its grid'
  if best is None:
    value = 'no rate is eligible' if pool.without_choice([entry], done) else ''
    return Gate('G3', entry.arm, text, value, False)
  rates = sorted(
      point['rate'] for point in pool.tried(entry, done)
      if point | {'rate': best['rate']} == best
      and pool.loss_of(entry, point, done) is not None
  )
  value = f'{best["rate"]:g} in {", ".join(f"{rate:g}" for rate in rates)}'
  return Gate(
      'G3', entry.arm, text, value, rates[0] < best['rate'] < rates[-1]
  )
