"""The pool of runs: the order of runs, without repetitions."""

import concurrent.futures
import dataclasses
import hashlib
import math
import subprocess
import sys
import threading
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from experiments.papers import arm_report
from experiments.papers import json_files
from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.scales import SCALES
from experiments.pool import data as pool_data
from experiments.pool import identity as pool_identity
from experiments.pool import processes as pool_processes
from experiments.pool import worker as pool_worker
from experiments.pool.identity import RESULTS
from experiments.pool.pool import all_jobs
from experiments.pool.pool import choose
from experiments.pool.pool import Entry
from experiments.pool.pool import next_jobs
from experiments.pool.pool import run_all
from experiments.pool.pool import tried
from tests.made_up_results import finish
from tests.real_data import data_path

pytestmark = pytest.mark.papers

DENSE, STATIC = Arm('dense'), Arm('static', 0.5)
TASK = Arm('static', 0.5, task='task')
INIT = Entry(Arm('init'), {}, 2)
ENTRIES = [
    INIT,
    Entry(DENSE, {'rate': (1.0, 2.0, 4.0)}, 2),
    Entry(STATIC, {'rate': (1.0, 2.0), 'stage': ('a', 0.3)}, 2),
    Entry(TASK, {'rate': (4.0, 8.0)}, 2),
]
BEST = {'dense': 2.0, 'static-50': 4.0, 'static-50+task': 2.0}


def measure(job):
  """Simulates a run; in two grids the best rate is one doubling beyond."""
  if job.arm.method == 'init':
    return {'seconds': 1}
  loss = abs(math.log2(job.point['rate'] / BEST[job.arm.folder]))
  loss += 0.1 * (job.point.get('stage') == 'a') + 0.01 * job.seed
  return {'validation/loss': loss, 'target/loss': loss}


ALL = finish(ENTRIES, measure)
TOTAL = len(ALL)


class Killed(Exception):
  """A worker that ends before its run does."""


def run_pool(run, done=(), workers=2, entries=ENTRIES):
  reported = []
  with concurrent.futures.ThreadPoolExecutor(workers) as executor:
    outcomes = run_all(
        lambda done: next_jobs(entries, done), run, dict(done), executor,
        workers, lambda job, done: reported.append((job, len(done))),
    )
  return outcomes, reported


def test_grids_are_run_on_one_seed_and_their_best_on_the_others():
  outcomes, _ = run_pool(measure)
  runs = arm_report.measured(ENTRIES, outcomes)
  assert {arm: sorted(seeds) for arm, seeds in runs.items()} == {
      entry.arm: [1, 2] for entry in ENTRIES
  }
  assert choose(ENTRIES[2], outcomes) == {'rate': 4.0, 'stage': 0.3}
  assert {name for name in outcomes if name.startswith('dense/')} == {
      'dense/rate=1.0,seed=0', 'dense/rate=2.0,seed=0', 'dense/rate=4.0,seed=0',
      'dense/rate=2.0,seed=1', 'dense/rate=2.0,seed=2',
  }
  table = arm_report.format_choices(ENTRIES, outcomes)
  assert '**rate 4, stage 0.3: 0.0000**' in table
  assert 'rate 1, stage a: 2.1000' in table
  assert '| rate 1: 1.0000; **rate 2: 0.0000**; rate 4: 1.0000 |' in table


def test_a_rate_whose_neighbours_diverge_is_inside_the_extended_grid():
  # The best rate is the highest that does not diverge; the next one has an
  # infinite loss.
  loss = lambda rate: math.nan if rate > 4 else 1 / rate
  entry = ENTRIES[1]
  outcomes = finish(
      [INIT, entry], lambda job: {PRETRAINED: loss(job.point.get('rate', 1))}
  )
  assert [point['rate'] for point in tried(entry, outcomes)] == [1, 2, 4, 8]
  assert choose(entry, outcomes) == {'rate': 4.0}


def test_an_arm_that_always_diverges_has_no_rate_and_no_other_seeds():
  entry = ENTRIES[1]
  outcomes = finish([INIT, entry], lambda job: {PRETRAINED: math.nan})
  assert choose(entry, outcomes) is None
  assert {n for n in outcomes if n.startswith('dense/')} == {
      f'dense/rate={rate:.1f},seed=0' for rate in (0.5, 1, 2, 4)
  }


@pytest.mark.parametrize('best, expected', [
    (2.0, [1, 2, 4]),
    (4.0, [1, 2, 4, 8]),
    (1e9, [1, 2, 4, 8, 16, 32]),
    (0.25, [1, 2, 4, 0.5, 0.25, 0.125]),
])
def test_a_grid_is_extended_until_its_best_is_inside_or_8_times_beyond(
    best, expected
):
  run = lambda job: {
      PRETRAINED: abs(math.log2(job.point.get('rate', best) / best))
  }
  entry = ENTRIES[1]
  outcomes = finish([INIT, entry], run)
  assert [point['rate'] for point in tried(entry, outcomes)] == expected
  nearest = min(expected, key=lambda rate: abs(math.log2(rate / best)))
  assert choose(entry, outcomes) == {'rate': nearest}


def test_a_grid_is_extended_at_the_best_stage_only():
  entry = ENTRIES[2]
  points = tried(entry, ALL)
  assert points[4:] == [
      {'rate': 4.0, 'stage': 0.3}, {'rate': 8.0, 'stage': 0.3}
  ]
  assert len(points) == 6


def test_a_grid_that_is_not_extended_stays_as_it_is():
  entry = ENTRIES[2]._replace(extend=False)
  assert tried(entry, finish([INIT, entry], measure)) == tried(entry, {})
  assert choose(entry, ALL) == {'rate': 2.0, 'stage': 0.3}


LOSS = st.one_of(st.floats(0, 10), st.just(math.nan))


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_what_is_run_does_not_depend_on_the_order_in_which_runs_finish(data):
  table = {}
  for folder in BEST:
    for rate in (2.0**k for k in range(-4, 8)):
      for stage in ('a', 0.3, None):
        table[folder, rate, stage] = data.draw(LOSS)

  def run(job):
    if job.arm.method == 'init':
      return {}
    return {job.arm.metric: table[
        job.arm.folder, job.point['rate'], job.point.get('stage')
    ] + job.seed}

  done = {}
  while ready := next_jobs(ENTRIES, done):
    job = ready[data.draw(st.integers(0, len(ready) - 1))]
    assert job.name not in done
    done[job.name] = run(job)
  expected = finish(ENTRIES, run)
  assert {name: repr(x) for name, x in done.items()} == {
      name: repr(x) for name, x in expected.items()
  }
  for entry in ENTRIES[1:]:
    assert tried(entry, done) == tried(entry, expected)
    best = choose(entry, done)
    if entry.arm is TASK and choose(ENTRIES[2], done) is None:
      # Its parent is not chosen yet.
      assert tried(entry, done) == tried(entry, {})
      continue
    if best is None:  # Half the lowest rate was tried, too.
      assert len(tried(entry, done)) == len(tried(entry, {})) + 1
      continue
    rates = [point['rate'] for point in tried(entry, done)]
    low, high = min(entry.grid['rate']), max(entry.grid['rate'])
    assert low / 8 <= min(rates) and max(rates) <= 8 * high
    same = [
        point['rate'] for point in tried(entry, done)
        if point.get('stage') == best.get('stage')
    ]
    assert (
        min(same) < best['rate'] < max(same)
        or best['rate'] in (low / 8, 8 * high)
    )
    # Other stages are tried at the rates of the initial grid only.
    assert len(rates) - len(same) in (0, 2)


def test_a_run_starts_from_the_chosen_run_of_its_own_seed():
  parents = {}

  def run(job):
    parents[job.name] = job.parent
    return measure(job)

  run_pool(run)
  for seed in range(3):
    parent = parents[f'static-50+task/rate=2.0,seed={seed}']
    assert parent.name == f'static-50/rate=4.0,stage=0.3,seed={seed}'
    assert parents[parent.name].name == f'init/seed={seed}'


TIED = Entry(
    Arm('dense', task='task', rate_of=TASK), {'rate': (4.0, 8.0)}, 2
)
TUNED = Entry(Arm('dense', task='task'), {'rate': (4.0, 8.0)}, 2)


@pytest.mark.parametrize('best', [2.0, 8.0])
def test_an_arm_with_a_given_rate_runs_only_what_is_not_there_yet(
    best
):
  def run(job):
    if job.arm.folder == 'dense+task':
      return {'target/loss': abs(math.log2(job.point['rate'] / best))}
    return measure(job)

  without = finish([*ENTRIES, TUNED], run)
  outcomes = finish([*ENTRIES, TUNED, TIED], run)
  tied = {f'dense+task/rate=2.0,seed={seed}' for seed in (1, 2)}
  assert outcomes.keys() - without.keys() == (set() if best == 2 else tied)
  alone = finish([*ENTRIES, TIED], run)
  assert alone.keys() - ALL.keys() == tied
  measured = arm_report.measured([*ENTRIES, TUNED, TIED], outcomes)
  assert (measured[TIED.arm] == measured[TUNED.arm]) == (best == 2)


def test_an_arm_waits_until_the_rate_it_takes_is_chosen():
  done = {
      name: outcome for name, outcome in ALL.items()
      if name != 'static-50+task/rate=1.0,seed=0'
  }
  folders = {job.arm.folder for job in all_jobs([*ENTRIES, TIED], done)}
  assert 'dense+task' not in folders
  folders = {job.arm.folder for job in next_jobs([*ENTRIES, TIED], ALL)}
  assert folders == {'dense+task'}


@given(st.integers(0, TOTAL - 1), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_a_pool_that_was_killed_continues_and_finds_the_same(after, workers):
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
  outcomes, reported = run_pool(lambda job: run(job, TOTAL), done, workers)
  assert len(ran) == len(set(ran)) == TOTAL  # No job runs twice.
  assert len(reported) == TOTAL - after
  assert outcomes == ALL


def run_with_weights(entries, done, disk):
  """Runs a pool whose weights are those of `disk`; returns what was run."""
  order = []
  done = dict(done)
  while ready := next_jobs(entries, done, lambda job: job.name in disk):
    for job in ready:
      assert job.parent is None or job.parent.name in disk
      order.append(job.name)
      disk.add(job.name)
      done[job.name] = measure(job)
  assert done == finish(entries, measure)
  return order


def test_a_parent_whose_weights_are_missing_is_run_again_before_its_child():
  child = 'static-50+task/rate=2.0,seed=2'
  done = {name: x for name, x in ALL.items() if name != child}
  parent = 'static-50/rate=4.0,stage=0.3,seed=2'
  run = lambda disk: run_with_weights(ENTRIES, done, disk)
  assert run(set()) == ['init/seed=2', parent, child]
  assert run({'init/seed=2'}) == [parent, child]
  assert run({parent}) == [child]
  # Weights that nothing starts from are not trained again.
  assert run_with_weights(ENTRIES, ALL, set()) == []


def test_a_run_that_is_repeated_for_its_weights_keeps_its_first_outcome():
  known = {name: x for name, x in ALL.items() if '+task' not in name}
  disk = set()

  def run(job):
    disk.add(job.name)
    # Simulates another processor, on which losses differ.
    if job.name in known:
      return {name: 2 * value for name, value in measure(job).items()}
    return measure(job)

  with concurrent.futures.ThreadPoolExecutor() as executor:
    outcomes = run_all(
        lambda done: next_jobs(ENTRIES, done, lambda job: job.name in disk),
        run, known, executor, 2, lambda *_: None,
    )
  assert disk & known.keys() and outcomes == ALL


def test_runs_that_start_from_a_run_directly_follow_it():
  # With one worker, all runs of a parent end before the next parent is trained.
  done = {
      name: x for name, x in ALL.items()
      if not ('seed=0' not in name and name.startswith(('dense', 'static')))
  }
  outcomes, reported = run_pool(measure, done, workers=1)
  assert outcomes == ALL
  order = [job.name for job, _ in reported]
  for seed in (1, 2):
    parent = order.index(f'static-50/rate=4.0,stage=0.3,seed={seed}')
    assert order[parent + 1] == f'static-50+task/rate=2.0,seed={seed}'


@given(st.sets(st.sampled_from(sorted(ALL))), st.sets(
    st.sampled_from(sorted(ALL))
))
@settings(deadline=None, max_examples=50)
def test_any_remaining_outcomes_and_weights_lead_to_the_same_results(
    known, disk
):
  order = run_with_weights(
      ENTRIES, {name: ALL[name] for name in known}, known & disk
  )
  assert len(order) == len(set(order))


def test_seconds_of_interrupted_attempts_count(tmp_path):
  def work(workdir, end=None):
    until = time.process_time() + 0.3
    while time.process_time() < until:
      pass
    if end:
      raise end
    return {}

  with pytest.raises(InterruptedError):
    pool_worker.run_job(tmp_path, lambda workdir: work(
        workdir, InterruptedError()
    ))
  outcome = pool_worker.run_job(tmp_path, work)
  assert 0.5 < outcome['seconds'] < 5
  assert pool_worker.run_job(tmp_path, work) == outcome


@pytest.mark.parametrize('name', [
    name for name in SCALES
    if (RESULTS / f'claims-{name}' / 'results.json').exists()
])
def test_recorded_results_have_the_identity_of_their_scale(name):
  results = json_files.read_json(RESULTS / f'claims-{name}' / 'results.json')
  recorded = results['identity']
  identity = pool_identity.identify(SCALES[name], recorded['data'])
  assert pool_identity.differences(identity, recorded) == []


def test_a_protocol_that_is_moved_keeps_its_commit(tmp_path, monkeypatch):
  monkeypatch.setattr(pool_identity, 'RESULTS', tmp_path)
  git = lambda *words: subprocess.run(
      ['git', '-c', 'user.name=a', '-c', 'user.email=b', *words],
      cwd=tmp_path, check=True, capture_output=True, text=True,
  ).stdout.strip()
  git('init')
  (tmp_path / 'PROTOCOL.md').write_text('Claims hold if they do.\n')
  git('add', '.')
  git('commit', '-m', 'Register')
  registered = git('rev-parse', 'HEAD')
  (tmp_path / 'claims').mkdir()
  git('mv', 'PROTOCOL.md', 'claims/PROTOCOL.md')
  git('commit', '-m', 'Move')
  assert pool_identity.protocol_commit('claims/PROTOCOL.md') == registered


def test_a_folder_of_claims_has_the_protocol_that_judges_it():
  folders = [path.parent for path in RESULTS.glob('claims-*/results.json')]
  assert len(folders) > 5
  for folder in folders:
    (protocol,) = folder.glob('PROTOCOL*.md')
    digest = hashlib.sha256(protocol.read_bytes()).hexdigest()
    results = json_files.read_json(folder / 'results.json')
    assert results['identity']['protocol'] == digest, folder
    assert f']({protocol.name})' in (folder / 'README.md').read_text()
  for scale in SCALES.values():
    assert (RESULTS / scale.protocol).exists()


@pytest.mark.slow
def test_the_corpus_of_recorded_results_can_be_prepared_again(tmp_path):
  books = data_path('books')
  scale = dataclasses.replace(SCALES['fair'], tasks={})
  prepared = pool_data.prepare(scale, str(books.parent), tmp_path)
  recorded = {
      json_files.read_json(path)['identity']['data']['corpus']
      for path in RESULTS.glob('claims-*/results.json')
  }
  assert recorded == {prepared.fingerprints['corpus']}


def test_no_more_runs_than_workers_at_a_time():
  lock, running, most = threading.Lock(), set(), []

  def run(job):
    with lock:
      running.add(job.name)
      most.append(len(running))
    time.sleep(0.002)
    with lock:
      running.remove(job.name)
    return measure(job)

  run_pool(run, workers=2)
  assert max(most) <= 2


def test_after_an_error_the_runs_that_an_executor_has_queued_do_not_start():
  # Executors of several machines get all runs that can start.
  ran = []

  def run(job):
    ran.append(job.name)
    time.sleep(0.1)
    raise Killed

  with concurrent.futures.ThreadPoolExecutor(1) as executor:
    with pytest.raises(Killed):
      run_all(
          lambda done: next_jobs(ENTRIES, done), run, {}, executor,
          sys.maxsize, lambda job, done: None,
      )
  assert 3 == len(next_jobs(ENTRIES, {})) > len(ran)


def test_more_seeds_continue_with_the_same_pool():
  more = [entry._replace(seeds=3) for entry in ENTRIES]
  names = [job.name for job in next_jobs(more, ALL)]
  assert names == ['init/seed=3']
  outcomes = finish(more, measure, ALL)
  assert {name: outcomes[name] for name in ALL} == ALL
  assert {name.rpartition('=')[2] for name in outcomes.keys() - ALL.keys()} == {
      '3'
  }


def test_the_time_left_follows_the_work_of_arms_without_runs(capsys):
  entries = []
  for size in ('narrow', 'wide'):
    entries += [
        Entry(Arm('init', size=size), {}, 2),
        Entry(Arm('dense', size=size), {'rate': (1.0, 2.0)}, 2, extend=False),
    ]
  work = {'init_narrow': 0, 'init_wide': 0, 'dense_narrow': 1, 'dense_wide': 6}
  report = pool_processes.PoolProgress(
      entries, 2, lambda arm: work[arm.folder]
  )
  done = {f'init_{size}/seed={i}': dict(seconds=3.0)
          for size in ('narrow', 'wide') for i in range(3)}
  assert report.counts(done) == '6 of 14'
  job = next_jobs(entries, done)[0]
  report(job, done | {job.name: {'seconds': 20.0, PRETRAINED: 2.0}})
  # 3 of 20 seconds and 4 of 120, two at a time.
  assert '20 s; 7 left, about 4:30' in capsys.readouterr().out
