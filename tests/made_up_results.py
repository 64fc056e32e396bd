"""Simulated results of the scale fair, shared by tests of claims."""

import functools
import json
import math
import os
import pathlib
from typing import NamedTuple
import zlib

import numpy as np

from experiments.papers import arm_report
from experiments.papers.claims import Finding
from experiments.papers.claims import judge
from experiments.papers.gates import check
from experiments.papers.gates import failures
from experiments.papers.gates import Gate
from experiments.papers.paper_claims import CLAIMS
from experiments.papers.scales import SCALES
from experiments.pool import pool
from experiments.pool.worker import OUTCOME
from experiments.reproduce import Reproduction

FAIR = SCALES['fair']

LOSSES = {'small': 2.0, '': 1.7, 'large': 1.5}
"""Losses of dense pre-trained models, by size."""

GAPS = {
    'static-50': 0.03, 'static-75': 0.08, 'static-90': 0.16, 'static-99': 0.4,
    'variable-90': 0.05, 'set-90': 0.12, 'rigl-90': 0.1,
    'pruned-75': -0.001, 'longer': 0.0,
    'static-75_small': 0.15, 'static-75_large': 0.04,
    'static-99_small': 0.3, 'static-99_large': 0.5,
    'static-50+task': 0.01, 'static-75+task': 0.03,
    'static-75+task-sparse': 0.2, 'variable-90+task': 0.015,
    'static-75+hard': 0.1, 'static-99+task': 0.3,
}
"""Losses less those of the dense arm, by folder: every claim is true."""


def outcome_of(job, gaps=GAPS, best=None, ngrams=None, scale=FAIR):
  """Returns the simulated outcome of a run.

  Args:
    job: The run.
    gaps: Differences to the dense arm by folder, such as `GAPS`.
    best: The best rate by folder; by default the middle of the grid.
    ngrams: The losses of the bigram and trigram by size; by default 2.4, 2.2.
    scale: Scale of the run.

  Returns:
    Losses: those of the best rate, more away from it, and a little noise.
  """
  arm = job.arm
  if arm.method == 'init':
    bigram, trigram = (ngrams or {}).get(arm.size, (2.4, 2.2))
    return {
        'parameters': 10, 'bigram/loss': bigram, 'trigram/loss': trigram,
        'seconds': 1.0,
    }
  rates = scale.tune_rates if arm.task else scale.sizes[arm.size].rates
  best_rate = (best or {}).get(arm.folder, rates[1])
  away = math.log2(job.point['rate'] / best_rate)
  noise = np.random.default_rng(
      [zlib.crc32(arm.folder.encode()), job.seed]
  ).normal()
  gap = gaps.get(arm.folder, 0.0)
  loss = gap + 0.01 * away**2 + 0.002 * noise
  loss += 0.05 * (job.point.get('stage', 'continue') != 'continue')
  loss += 1.0 if arm.task else LOSSES.get(arm.size, 1.7)
  distance = 0.1 + gap + 0.001 * noise
  return {
      'validation/loss': loss, 'validation/perplexity': math.exp(loss),
      'target/loss': loss, 'distance/wd': distance, 'distance/wo': distance,
      'flops': 1e9, 'seconds': 2.0, 'kernels': 'static' in arm.method,
  }


def finish(entries: list[pool.Entry], run=outcome_of, done=()) -> dict:
  """Runs a pool to its end, with all runs that are ready at a time."""
  results = dict(done)
  while ready := pool.next_jobs(entries, results):
    results |= {job.name: run(job) for job in ready}
  return results


class Runner(NamedTuple):
  """Replacement for `pool_worker.Runner` that simulates outcomes.

  Attributes:
    directory: Folder of the runs.
    killed_at: Name of the job at which the process ends, once.
  """

  directory: str
  killed_at: str = ''

  def __call__(self, job):
    workdir = pathlib.Path(self.directory, job.name)
    if job.name == self.killed_at and not workdir.exists():
      workdir.mkdir(parents=True)
      os._exit(9)
    assert job.parent is None or self.is_there(job.parent)
    workdir.mkdir(parents=True, exist_ok=True)
    outcome = outcome_of(job)
    (workdir / OUTCOME).write_text(json.dumps(outcome))
    return outcome

  def is_there(self, job):
    return pathlib.Path(self.directory, job.name, OUTCOME).exists()


class World(NamedTuple):
  """Simulated results of a scale, and their findings.

  Attributes:
    entries: Entries of the pool.
    done: Outcomes.
    measured: Outcomes of the evaluation seeds, by arm and seed.
    gates: The gates.
    findings: Findings by the keys of claims.
  """

  entries: list[pool.Entry]
  done: dict
  measured: dict
  gates: list[Gate]
  findings: dict[str, Finding]


def entries_of(scale=FAIR) -> list[pool.Entry]:
  """Returns the entries of a scale."""
  return Reproduction('', scale, pathlib.Path(), pathlib.Path()).entries


def look_at(scale, entries, done) -> World:
  """Judges the claims of a scale by outcomes."""
  claims = [CLAIMS[key] for key in scale.claims]
  measured = arm_report.measured(entries, done)
  repeated = arm_report.measured(entries, done, again=True)
  gates = check(scale, claims, entries, done, measured)
  failed = failures(scale, gates, claims)
  seeds = {entry.arm: entry.seeds for entry in entries}
  findings = judge(claims, measured, failed, repeated, seeds)
  return World(
      entries, done, measured, gates, {f.claim.key: f for f in findings}
  )


def world_of(scale=FAIR, **changes) -> World:
  """Runs and judges a scale whose outcomes are made up; see `outcome_of`."""
  entries = entries_of(scale)
  run = functools.partial(outcome_of, **changes)
  return look_at(scale, entries, finish(entries, run))
