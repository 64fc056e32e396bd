"""The pool of runs: what comes next, and nothing twice."""

import concurrent.futures
import threading
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from spdf_jax.analysis import claim_report
from spdf_jax.analysis.pool import Arm
from spdf_jax.analysis.pool import choose
from spdf_jax.analysis.pool import count_jobs
from spdf_jax.analysis.pool import next_jobs
from spdf_jax.analysis.pool import run_all

LOSS = 'validation/loss'
ARMS = [
    Arm('init', {}, '', LOSS),
    Arm('dense', {'rate': (1, 2, 3)}, 'init', LOSS),
    Arm('static', {'rate': (1, 2), 'stage': ('a', 0.3)}, 'init', LOSS),
    Arm('static+task', {'rate': (4, 5)}, 'static', 'target/loss'),
]
SEEDS = [1, 2]
TOTAL = sum(count_jobs(arm, SEEDS) for arm in ARMS)


def measure(job):
  """What a run finds: the best are rate 2, stage 0.3, and rate 5."""
  if job.arm == 'init':
    return {'seconds': 1}
  loss = abs(job.point['rate'] - (5 if '+' in job.arm else 2))
  loss += 0.1 * (job.point.get('stage') == 'a') + 0.01 * job.seed
  return {LOSS: loss, 'target/loss': loss}


class Killed(Exception):
  """A worker that ends before its run does."""


def run_pool(run, done=(), workers=2):
  reported = []
  with concurrent.futures.ThreadPoolExecutor(workers) as executor:
    found = run_all(
        lambda done: next_jobs(ARMS, SEEDS, 0, done), run, dict(done),
        executor, workers, lambda job, done: reported.append((job, len(done))),
    )
  return found, reported


def test_every_run_is_run_once_after_what_it_starts_from():
  order = []

  def run(job):
    if job.parent:
      assert job.parent in {other.name for other in finished}
    order.append(job)
    outcome = measure(job)
    finished.append(job)
    return outcome

  finished = []
  found, reported = run_pool(run, workers=3)
  assert len(order) == len({job.name for job in order}) == TOTAL
  assert set(found) == {job.name for job in order}
  assert [count for _, count in reported] == list(range(1, TOTAL + 1))


def test_grids_are_run_on_one_seed_and_their_best_on_the_others():
  found, _ = run_pool(measure)
  runs = claim_report.measured(ARMS, SEEDS, 0, found)
  assert {arm: sorted(seeds) for arm, seeds in runs.items()} == {
      arm.name: SEEDS for arm in ARMS
  }
  assert choose(ARMS[2], 0, found) == {'rate': 2, 'stage': 0.3}
  assert {name for name in found if name.startswith('dense/')} == {
      'dense/rate=1,seed=0', 'dense/rate=2,seed=0', 'dense/rate=3,seed=0',
      'dense/rate=2,seed=1', 'dense/rate=2,seed=2',
  }
  tried = claim_report.format_choices(ARMS, 0, found)
  assert '**rate 2, stage 0.3: 0.0000** (last of its grid)' in tried
  assert '**rate 2: 0.0000**;' in tried and 'rate 1, stage a: 1.1000' in tried


def test_a_rate_that_diverges_is_not_chosen():
  done = {f'dense/rate={rate},seed=0': {LOSS: loss} for rate, loss in (
      (1, float('nan')), (2, 3.0), (3, float('nan')),
  )}
  assert choose(ARMS[1], 0, done) == {'rate': 2}


def test_a_run_starts_from_the_chosen_run_of_its_own_seed():
  parents = {}

  def run(job):
    parents[job.name] = job.parent
    return measure(job)

  run_pool(run)
  for seed in (0, *SEEDS):
    name = f'static+task/rate=5,seed={seed}'
    assert parents[name] == f'static/rate=2,stage=0.3,seed={seed}'
    assert parents[parents[name]] == f'init/seed={seed}'


@given(st.integers(0, TOTAL - 1), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_a_pool_that_was_killed_goes_on_and_finds_the_same(after, workers):
  lock, ran, done = threading.Lock(), [], {}

  def run(job, limit):
    with lock:
      if len(ran) >= limit:
        raise Killed
      ran.append(job.name)
      done[job.name] = measure(job)
    return done[job.name]

  with pytest.raises(Killed):
    run_pool(lambda job: run(job, after), workers=workers)
  assert len(done) == after
  found, reported = run_pool(lambda job: run(job, TOTAL), done, workers)
  assert len(ran) == len(set(ran)) == TOTAL  # None a second time.
  assert len(reported) == TOTAL - after
  assert found == run_pool(measure)[0]


def test_no_more_runs_than_workers_at_a_time():
  running, most = set(), []

  def run(job):
    running.add(job.name)
    most.append(len(running))
    time.sleep(0.002)
    running.remove(job.name)
    return measure(job)

  run_pool(run, workers=2)
  assert max(most) <= 2


def test_more_seeds_go_on_with_the_same_pool():
  found, _ = run_pool(measure)
  more = next_jobs(ARMS, [1, 2, 3], 0, found)
  assert [job.name for job in more] == ['init/seed=3']


def test_judging_on_the_seed_of_the_grids_is_refused():
  with pytest.raises(ValueError, match='selection seed 0'):
    next_jobs(ARMS, [0, 1], 0, {})
