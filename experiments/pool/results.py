"""Results of a pool: outcomes, findings on the claims, and a figure."""

from collections.abc import Mapping, Sequence
import contextlib
import pathlib
from typing import Any

from experiments.benchmarks.machine import describe_machine
from experiments.papers import arm_report
from experiments.papers import arms
from experiments.papers import claim_plots
from experiments.papers import claim_report
from experiments.papers import flops_scatter
from experiments.papers import gates
from experiments.papers import json_files
from experiments.papers import paper_claims
from experiments.papers.claims import judge
from experiments.papers.scale import Scale
from experiments.pool import identity as pool_identity
from experiments.pool import pool
from experiments.pool.pool import Done
from experiments.pool.pool import Entry
from experiments.pool.pool import Outcome
from spdf_jax import files
from spdf_jax.runs import style

_FILE = 'results.json'


def read_results(
    output: pathlib.Path, identity: Mapping[str, Any]
) -> dict[str, Outcome]:
  """Reads the outcomes of results that were written before.

  Args:
    output: Folder of results.
    identity: Result of `identify`.

  Returns:
    Outcomes by the names of runs; empty if there are no results.

  Raises:
    ValueError: the results are of another protocol, scale or data.
  """
  path = output / _FILE
  if not path.exists():
    return {}
  stored = json_files.read_json(path)
  if different := pool_identity.differences(identity, stored['identity']):
    raise ValueError(
        f'output {str(output)!r} has results of another scale, protocol or '
        f'other data: {", ".join(different)} differ; give another folder, or '
        'move them away.'
    )
  return stored['runs']


def join_outcomes(known: Done, on_disk: Done) -> dict[str, Outcome]:
  """Joins recorded outcomes with those of runs on disk.

  A recorded outcome stays. A run that is repeated for its weights on another
  kind of processor ends with another loss, since training amplifies rounding
  errors; that loss is added to the outcome as one of its `'repeats'`.

  Args:
    known: Recorded outcomes.
    on_disk: Outcomes of the runs on disk.

  Example:
    >>> join_outcomes({'a': {'validation/loss': 2.0}},
    ...               {'a': {'validation/loss': 2.1}})
    {'a': {'validation/loss': 2.0, 'repeats': [2.1]}}
  """
  joined = {**on_disk, **known}
  for name in known.keys() & on_disk.keys():
    losses = [known[name].get(arms.PRETRAINED), *known[name].get('repeats', ())]
    loss = on_disk[name].get(arms.PRETRAINED)
    if loss not in losses:
      joined[name] = {**known[name], 'repeats': [*losses[1:], loss]}
  return joined


def write_results(
    output: pathlib.Path,
    name: str,
    scale: Scale,
    entries: Sequence[Entry],
    identity: Mapping[str, Any],
    done: Done,
) -> str:
  """Judges the claims of a scale; writes table, numbers and figure.

  Without matplotlib no figure is written.

  Args:
    output: Folder of `table.md`, `results.json` and `claims.png`.
    name: Name of the scale.
    scale: The scale.
    entries: Entries of the scale's pool.
    identity: Result of `identify`.
    done: Outcomes of finished runs.

  Returns:
    The report in `table.md`.
  """
  claims = [paper_claims.CLAIMS[key] for key in scale.claims]
  measured = arm_report.measured(entries, done)
  checked = gates.check(scale, claims, entries, done, measured)
  seeds = {entry.arm: entry.seeds for entry in entries}
  findings = judge(
      claims, measured, gates.failures(scale, checked, claims),
      arm_report.measured(entries, done, again=True), seeds,
  )
  power = {}
  if any(claim.expected for claim in claims):
    power = {'Power': claim_report.format_power(claims, seeds)}
  machine = describe_machine()
  commit = pool_identity.protocol_commit(scale.protocol)
  table = arm_report.format_units(measured)
  units = {'Units of final masks': table} if table else {}
  report = claim_report.format_report(
      f"The papers' claims at scale {name}",
      _facts(name, commit, machine, entries, done),
      findings, power | {
          'Gates': claim_report.format_gates(checked),
          'Arms': arm_report.format_arms(entries, done, measured),
      } | units | {
          'Chosen by validation': arm_report.format_choices(entries, done),
      },
  )
  output.mkdir(parents=True, exist_ok=True)
  json_files.write_json(output / _FILE, {
      'scale': name, 'identity': identity, 'protocol_commit': commit,
      'tuning_seeds': scale.tuning_seeds, 'machine': machine,
      'gates': claim_report.describe_gates(checked),
      'claims': claim_report.describe_findings(findings), 'runs': dict(done),
  }, indent=1)
  files.write_atomically(output / 'table.md', report)
  with contextlib.suppress(ImportError):  # matplotlib is optional.
    figure = claim_plots.plot_claims(entries, measured, findings)
    style.save(figure, output / 'claims.png')
    if any(arm.flops_of for arm in measured):
      figure = flops_scatter.plot_flops(scale, measured)
      style.save(figure, output / 'flops.png')
  return report


def _facts(
    name: str, commit: str, machine: Mapping[str, Any],
    entries: Sequence[Entry], done: Done,
) -> dict[str, Any]:
  """Returns the facts about runs and machine in a report, by name."""
  expected = {job.name for job in pool.all_jobs(entries, done)}
  kernels = [o['kernels'] for o in done.values() if 'kernels' in o]
  repeats = [
      abs(loss - o[arms.PRETRAINED])
      for o in done.values() for loss in o.get('repeats', ())
  ]
  return {
      'scale': name,
      'protocol': f'commit {commit}',
      'runs': f'{len(expected & done.keys())} of {len(expected)} that are '
              'known to be needed',
      'core seconds of all runs': round(sum(
          outcome['seconds'] for outcome in done.values()
      )),
      'runs with native kernels': f'{sum(kernels)} of {len(kernels)}',
      'runs repeated for their weights': f'{len(repeats)}' + (
          f', with losses that differ by up to {max(repeats):.3f}'
          if repeats else ''
      ),
      'report written on': ', '.join(
          machine[name] for name in ('processor', 'device')
      ),
  } | {name: machine[name] for name in ('jax', 'python')}
