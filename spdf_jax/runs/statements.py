# SPDX-License-Identifier: Apache-2.0
"""Statements of a report: sentences computed from runs."""

from collections.abc import Mapping, Sequence

from spdf_jax.runs import curves
from spdf_jax.runs import equal_cost
from spdf_jax.runs import markdown
from spdf_jax.runs import read
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord


def _last_in(
    run: RunRecord, phases: Sequence[PhaseRecord], key: str
) -> tuple[int, float] | None:
  """Returns the last step and value of `key` in phases, or None."""
  ends = [run.at_end(phase, key) for phase in phases]
  return next((end for end in reversed(ends) if end is not None), None)


def against_bigram(label: str, run: RunRecord) -> str | None:
  """Compares a run at the end of pre-training with the bigram baseline.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    A sentence; None without a baseline or an evaluation.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = ({'step': 4, 'validation/perplexity': 8.0},)
    >>> bigram = {'validation/perplexity': 40.0}
    >>> run = RunRecord('toy', (phase,), rows, bigram=bigram)
    >>> print(against_bigram('toy', run))  # doctest: +NORMALIZE_WHITESPACE
    toy ends pre-training at validation perplexity 8.00, below the bigram
    baseline's 40.00.
  """
  key = 'validation/perplexity'
  baseline = (run.bigram or {}).get(key)
  pretraining = read.pretraining_phases(run)
  before = _last_in(run, pretraining, key)
  if baseline is None or before is None:
    return None
  step, perplexity = before
  end = pretraining[-1].end
  place = 'ends pre-training'
  if step < end:
    place = f'is, {step:,} of {end:,} pre-training steps done,'
  side = 'below' if perplexity < baseline else 'above'
  return (
      f'{label} {place} at validation perplexity '
      f'{markdown.number(perplexity)}, '
      f"{side} the bigram baseline's {markdown.number(baseline)}."
  )


def best_steps(runs: Mapping[str, RunRecord]) -> list[str]:
  """Describes where phases with an early stop were best.

  Args:
    runs: Runs by label.

  Returns:
    A sentence for each phase that has logged its best evaluation.

  Example:
    >>> phase = PhaseRecord('tune', 0, 8, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 8, 'best/step': 4, 'best/target/loss': 2.0}]
    >>> best_steps({'toy': RunRecord('toy', (phase,), tuple(rows))})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['toy: tune was best at step 4 (target/loss 2.00) and ends with its weights
    at step 8.']
  """
  sentences = []
  for label, run in runs.items():
    for phase in run.phases:
      best = run.at_end(phase, 'best/step')
      if best is None:
        continue
      row = next(
          r for r in reversed(run.rows)
          if r['step'] == best[0] and 'best/step' in r
      )
      values = ', '.join(
          f'{name.removeprefix("best/")} {markdown.number(value)}'
          for name, value in row.items()
          if name.startswith('best/') and name != 'best/step'
      )
      end = f'ends with its weights at step {phase.end:,}' if (
          run.last_step >= phase.end
      ) else f'is at step {run.last_step:,}'
      sentences.append(
          f'{label}: {phase.name} was best at step {best[1]:,} ({values}) and '
          f'{end}.'
      )
  return sentences


def fine_tuning(label: str, run: RunRecord) -> str | None:
  """Describes the change of a run's target perplexity by fine-tuning.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    A sentence, or None without fine-tuning or its evaluations.

  Example:
    >>> phases = (
    ...     PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0),
    ...     PhaseRecord('tune', 4, 4, 2, 8, 'task', 0.0, 64, 9.0, 9.0))
    >>> rows = ({'step': 4, 'target/perplexity': 20.0},
    ...         {'step': 8, 'target/perplexity': 5.0})
    >>> print(fine_tuning('toy', RunRecord('toy', phases, rows)))
    Fine-tuning takes toy from target perplexity 20.00 to 5.00, 0.250 of it.
  """
  key = 'target/perplexity'
  pretraining = read.pretraining_phases(run)
  before = run.at_end(pretraining[-1], key) if pretraining else None
  after = run.at_end(run.phases[-1], key)
  if after is None or before == after:
    return None
  if not pretraining:
    return (
        f'Fine-tuning takes {label} to target perplexity '
        f'{markdown.number(after[1])}.'
    )
  if before is None:
    return None
  return (
      f'Fine-tuning takes {label} from target perplexity '
      f'{markdown.number(before[1])} '
      f'to {markdown.number(after[1])}, {after[1] / before[1]:.3f} of it.'
  )


def cost(label: str, run: RunRecord) -> str:
  """Describes the FLOPs and seconds of a run, in pre-training and in all.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    A sentence.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> rows = ({'step': 4, 'time/seconds': 3.0},)
    >>> run = RunRecord('toy', (phase,), rows)
    >>> print(cost('toy', run))  # doctest: +NORMALIZE_WHITESPACE
    Pre-training of toy took 20 FLOPs (0.500 of those of the same steps dense)
    and 3.0 seconds.
  """
  planned = run.phases[-1].end
  name = label
  if run.last_step < planned:
    name += f' (unfinished, {run.last_step:,} of {planned:,} steps)'
  if run.before.source and run.before.is_recorded:
    name += f', with that of {run.before.source} before it,'
  pretraining = read.pretraining_phases(run)
  if not pretraining:
    spent = _spent(run, run.phases, run.last_step)
    return f'Fine-tuning of {name} took {spent}.'
  text = (
      f'Pre-training of {name} took '
      f'{_spent(run, pretraining, min(run.last_step, pretraining[-1].end))}'
  )
  if len(pretraining) < len(run.phases):
    text += f'; all training took {_spent(run, run.phases, run.last_step)}'
  return f'{text}.'


def _spent(run: RunRecord, phases: Sequence[PhaseRecord], step: int) -> str:
  """Formats FLOPs up to a step, and the seconds of phases and before them."""
  spent = curves.flops_at(run, step)
  dense = curves.dense_flops_at(run, step)
  seconds = read.seconds_of(run, phases, run.before)
  text = f'{spent:.3g} FLOPs'
  if dense and spent != dense:
    text += f' ({spent / dense:.3f} of those of the same steps dense)'
  if seconds is not None:
    text += f' and {markdown.number(seconds, 1)} seconds'
  return text


def against_budget(label: str, run: RunRecord) -> str | None:
  """Compares a plan with dense training for its first learning-rate schedule.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    A sentence; None if pre-training has one learning-rate schedule, or if the
    run is dense.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> total = dict(phases=['p', 'q'], against=['p'], of_dense=0.343,
    ...              of_dense_with_embedding=0.366, effective_sparsity=0.75)
    >>> run = RunRecord('toy', (phase,), (), totals=[total])
    >>> print(against_budget('toy', run))
    ... # doctest: +NORMALIZE_WHITESPACE
    Against dense training for the steps of p alone, pre-training of toy is
    planned at 0.343 of the FLOPs, 0.366 if the lookup of inputs is counted as a
    product; it saves 75% of the FLOPs of the sparsified matrices, its effective
    sparsity.
  """
  if not run.is_sparse:
    return None
  for total in run.totals:
    if total['phases'] != total['against']:
      sparsity = total['effective_sparsity']
      effective = '' if not 0 < sparsity < 1 else (
          f'; it saves {markdown.percent(sparsity)} of the FLOPs of the '
          'sparsified matrices, its effective sparsity'
      )
      return (
          'Against dense training for the steps of '
          f'{" and ".join(total["against"])} alone, pre-training of {label} is '
          f'planned at {total["of_dense"]:.3f} of the FLOPs, '
          f'{total["of_dense_with_embedding"]:.3f} if the lookup of inputs is '
          f'counted as a product{effective}.'
      )
  return None


def ending(label: str, run: RunRecord) -> str:
  """Describes loss, sparsity and seconds of a run at its last step.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    A line without a full stop.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> rows = ({'step': 4, 'train/loss': 2.5, 'validation/loss': 2.75,
    ...          'sparsity/sparsified': 0.75, 'time/seconds': 3.0},)
    >>> print(ending('toy', RunRecord('toy', (phase,), rows)))
    toy ends at step 4: validation loss 2.750, sparsity 75%, 3.0 s of training
  """
  last = run.phases[-1]
  losses = [
      f'{name} loss {value[1]:.3f}' for name in ('validation', 'target')
      if (value := run.at_end(last, f'{name}/loss')) is not None
  ]
  measured = run.at_end(last, 'sparsity/sparsified')
  zeros = [] if measured is None else [
      f'sparsity {markdown.percent(measured[1])}'
  ]
  seconds = read.seconds_of(run, run.phases)
  time = [] if seconds is None else [
      f'{markdown.number(seconds, 1)} s of training'
  ]
  values = ', '.join([*losses, *zeros, *time])
  return f'{label} ends at step {run.last_step:,}' + (values and f': {values}')


def other_texts(runs: Mapping[str, RunRecord]) -> str | None:
  """Warns of runs with losses on different tokens; `None` if there are none.

  Args:
    runs: Runs by label.

  Returns:
    A sentence, or None.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = ({'step': 4, 'validation/loss': 2.0},)
    >>> toy = lambda name: RunRecord(
    ...     'toy', (phase,), rows, data={'corpus': 'a', 'tokenizer': name})
    >>> print(other_texts({'a': toy('bytes'), 'b': toy('bpe-300')}))
    ... # doctest: +NORMALIZE_WHITESPACE
    Losses of other tokens are not compared: a has corpus 'a' in tokens of
    'bytes' in sequences of 8; b has corpus 'a' in tokens of 'bpe-300' in
    sequences of 8.
  """
  groups = equal_cost.by_text(runs)
  if len(groups) < 2:
    return None
  of_each = '; '.join(
      f'{", ".join(labels)} {"has" if len(labels) == 1 else "have"} {text}'
      for text, labels in groups.items()
  )
  return f'Losses of other tokens are not compared: {of_each}.'


def tasks(runs: Mapping[str, RunRecord]) -> str | None:
  """Warns of runs fine-tuned on different tasks; `None` if there are none."""
  by_label = {
      label: run.data['task'] for label, run in runs.items()
      if run.data.get('task')
  }
  if len(set(by_label.values())) < 2:
    return None
  of_each = ', '.join(f'{label}: {task}' for label, task in by_label.items())
  return (
      f'The tasks differ ({of_each}), so target perplexities and chrF are not '
      'comparable between them.'
  )


def describe_updates(label: str, run: RunRecord) -> str | None:
  """Describes survival and exploration of a run's mask updates.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    One or two sentences, or None if no mask is updated within a phase.
  """
  parts = []
  for phase in run.phases:
    updates = [
        update for update in read.mask_updates_in(run, phase)
        if update.step > phase.start
    ]
    if updates:
      mean = sum(u.survival for u in updates) / len(updates)
      planned = phase.updates_until(run.last_step)
      times = {1: 'once', 2: 'twice'}.get(planned, f'{planned} times')
      logged = '' if len(updates) >= planned else (
          f', of the {len(updates)} that are logged'
      )
      parts.append(
          f'{times} within {phase.name}, where {markdown.percent(mean)} of the '
          f'kept weights survive an update on average{logged}'
      )
  if not parts:
    return None
  text = f"{label}'s masks are updated {'; '.join(parts)}."
  steps, explored = run.series('sparsity/exploration')
  updated = [p for p in run.phases if sum(map(len, p.mask_updates)) > 1]
  end = updated[-1].end if updated else run.last_step
  before = [share for step, share in zip(steps, explored) if step <= end]
  if before and before[0] < 1:
    text += (
        f' By then {markdown.percent(before[-1])} of the sparsified weights '
        'have been kept at some step.'
    )
  return text


_OF_EACH = (
    against_bigram, describe_updates, fine_tuning, cost, against_budget,
)


def find(runs: Mapping[str, RunRecord]) -> list[str]:
  """Returns all statements about runs.

  Args:
    runs: Runs by label.

  Returns:
    Sentences: the baseline, masks, fine-tuning and cost of each run, then what
    the runs differ in that makes their losses incomparable.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> find({'toy': RunRecord('toy', (phase,), ({'step': 2},))})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['Pre-training of toy (unfinished, 2 of 4 steps) took 10 FLOPs (0.500 of
    those of the same steps dense).']
  """
  statements = [
      make(label, run)
      for make in _OF_EACH
      for label, run in runs.items()
  ]
  statements += [other_texts(runs), tasks(runs)]
  return [statement for statement in statements if statement]
