"""Gates: conditions under which differences between arms are meaningful.

G1: dense models beat a bigram and a trigram model of the tokens they read. G2:
a model of 99 % sparsity, at a tuned rate, is worse than a dense one. G3: every
chosen learning rate is inside its grid, not at an end. G4: at least 20 tokens
per parameter and at most 4 epochs. G5: pre-training is long, or a control with
rotary positions leaves the plateau of the bigram within a tenth of it. G6: a
model of 99 % sparsity is worse than a dense one after fine-tuning, too. If a
gate fails, a small difference between arms does not measure sparsity, and the
claims that depend on the gate get no verdict.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import NamedTuple

from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.arms import SCORED
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

MARGIN = 0.1
"""Smallest difference in G1, G2, G5 and G6, in nats."""

UPDATES, SEQUENCES = 8000, 8
"""Steps and sequences in a batch of a pre-training that G5 calls long."""

BASELINES = {'bigram': 'bigram/loss', 'trigram': 'trigram/loss'}
"""Metrics of the baselines of G1, measured by the runs of initial weights."""


class Gate(NamedTuple):
  """Condition of a gate, and the measured value.

  Attributes:
    key: `'G1'` to `'G6'`.
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
    if 'G5' in scale.more_gates and not _is_long(scale, size):
      arms.append(_rotary(scale, size))
  if 'G6' in scale.more_gates:
    for size, task in _tunings(scale, claims):
      arms += [_dense(scale, size, task), _control(scale, size, task)]
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
    measured: Measurements on the judging seeds.

  Returns:
    G1 and G2 by size, G3 by arm, and G4; G5 by size and G6 by task, if the
    scale has them.
  """
  seeds = {entry.arm: entry.seeds for entry in entries}
  measured = {
      arm: outcomes for arm, outcomes in measured.items()
      if len(outcomes) == seeds[arm]  # Gates are not judged by a part of them.
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
  if 'G5' in scale.more_gates:
    gates += [_leaves_plateau(scale, size, measured) for size in sizes]
  if 'G6' in scale.more_gates:
    for size, task in _tunings(scale, claims):
      control = _control(scale, size, task)
      gates.append(_beaten(
          'G6', control, _dense(scale, size, task),
          SCORED if scale.scored else TUNED, measured,
          control not in ill_tuned,
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
    arms = set(with_parents(list(claim.arms)))
    names = [
        gate.key + (f' {gate.subject.name}' if gate.subject else '')
        for gate in gates if not gate.passed and _concerns(gate, scale, arms)
    ]
    if names:
      failed[claim.key] = ', '.join(dict.fromkeys(names))
  return failed


def _concerns(gate: Gate, scale: Scale, arms: set[Arm]) -> bool:
  """Returns whether a claim about arms, with their parents, needs a gate."""
  if gate.subject is None:
    return True
  if gate.key == 'G3':
    return gate.subject in arms
  if gate.key == 'G6' and not any(arm.task for arm in arms):
    return False
  return gate.subject.size in {scale.reference(arm.size) for arm in arms}


def _sizes(scale: Scale, claims: Sequence[Claim]) -> list[str]:
  return list(dict.fromkeys(
      scale.reference(a.size) for c in claims for a in c.arms
  ))


def _tunings(scale: Scale, claims: Sequence[Claim]) -> list[tuple[str, str]]:
  """Returns the sizes and tasks of claims that have a control."""
  found = dict.fromkeys(
      (scale.reference(a.size), a.task) for c in claims for a in c.arms
      if a.task
  )
  return [
      (size, task) for size, task in found
      if scale.find('static', scales.CONTROL.sparsity, size, task)
  ]


def _dense(scale: Scale, size: str, task: str = '') -> Arm:
  return scale.find('dense', 0.0, size, task) or scales.sized(
      scales.DENSE, size
  )


def _control(scale: Scale, size: str, task: str = '') -> Arm:
  found = scale.find('static', scales.CONTROL.sparsity, size, task)
  return found or scales.sized(scales.CONTROL, size)


def _rotary(scale: Scale, size: str) -> Arm:
  """Returns the dense arm with rotary positions at the width of a size."""
  width = scale.sizes[size].width
  return next(
      _dense(scale, name) for name, other in scale.sizes.items()
      if other.rotary and other.width == width
  )


def _is_long(scale: Scale, size: str) -> bool:
  return (
      scale.steps(_dense(scale, size)) >= UPDATES
      and scale.batch(size) >= SEQUENCES
  )


def _leaves_plateau(scale: Scale, size: str, measured: Measured) -> Gate:
  dense = _dense(scale, size)
  steps, batch = scale.steps(dense), scale.batch(size)
  if _is_long(scale, size):
    return Gate(
        'G5', dense, f'{dense.name} takes {UPDATES:,} steps of {SEQUENCES}',
        f'{steps:,} steps of {batch}', True,
    )
  rotary = _rotary(scale, size)
  early = {
      seed: min(
          (loss for step, _, loss in outcome.get('curve', ())
           if step <= steps / 10),
          default=math.inf,
      )
      for seed, outcome in measured.get(rotary, {}).items()
  }
  return _ahead(
      'G5', dense, f'{rotary.name} beats the bigram of its tokens within a '
      'tenth of its steps',
      _values(measured, Arm('init', size=rotary.size), BASELINES['bigram']),
      early,
  )


def _beaten(
    key: str, control: Arm, dense: Arm, metric: str, measured: Measured,
    is_tuned: bool,
) -> Gate:
  """Returns the gate of a control, which a bad rate makes worse, too."""
  gate = _ahead(
      key, control, f'{dense.name} beats {control.name}',
      _values(measured, control, metric), _values(measured, dense, metric),
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
    found = 'no rate is eligible' if pool.without_choice([entry], done) else ''
    return Gate('G3', entry.arm, text, found, False)
  rates = sorted(
      point['rate'] for point in pool.tried(entry, done)
      if point | {'rate': best['rate']} == best
      and pool.loss_of(entry, point, done) is not None
  )
  found = f'{best["rate"]:g} in {", ".join(f"{rate:g}" for rate in rates)}'
  return Gate(
      'G3', entry.arm, text, found, rates[0] < best['rate'] < rates[-1]
  )
