"""The pace of arms: interleaved timings, and their use in a race."""

import dataclasses
import functools

import pytest
from quickstart_runs import ROOT

pytestmark = [
    pytest.mark.papers,
    pytest.mark.skipif(
        not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
    ),
]

from experiments.papers import pace  # noqa: E402
from experiments.papers.pool_data import Prepared  # noqa: E402
from experiments.papers.scales import DENSE  # noqa: E402
from experiments.papers.scales import SCALES  # noqa: E402
from experiments.papers.scales import STATIC_75  # noqa: E402
from experiments.papers.scales import STATIC_90  # noqa: E402
from experiments.papers.scales import VARIABLE  # noqa: E402

SCALE = SCALES['fair']
PREPARED = Prepared('corpus', 'tasks', {})


@dataclasses.dataclass
class State:
  step: int


@dataclasses.dataclass
class Recipe:
  """Advances a clock instead of training, and records the steps it takes."""

  name: str
  seconds: float
  taken: list
  clock: list

  def init_params(self):
    return {'w': self.name}

  def state_from(self, params):
    assert params == {'w': self.name}
    return State(0)

  def device_batch_at(self, step):
    return step

  def step(self, state, batch):
    assert state.step == batch  # The next batch, from the last state.
    self.taken.append((self.name, batch))
    # Every fourth step is disturbed, which no median sees.
    self.clock.append(self.clock[-1] + self.seconds * (1 + 9 * (batch % 4 < 1)))
    return State(state.step + 1), {'train/loss': 1.0}


def test_steps_are_taken_in_turn_and_their_median_is_returned(monkeypatch):
  taken, jobs, clock = [], [], [0.0]
  seconds = {'dense': 4.0, 'static-75': 1.0}

  class Runner:
    def __init__(self, scale, directory, corpus, tasks):
      assert (scale, corpus) == (SCALE, 'corpus')

    def create_recipe(self, job):
      jobs.append(job)
      return Recipe(job.arm.name, seconds[job.arm.name], taken, clock)

  monkeypatch.setattr(pace, 'Runner', Runner)
  monkeypatch.setattr(pace.measuring, 'interleave', functools.partial(
      pace.measuring.interleave, wall=lambda: clock[-1]
  ))
  cases = [(SCALE, DENSE), (SCALE, STATIC_75)]
  assert pace.step_seconds(cases, PREPARED) == [4.0, 1.0]
  steps = len(taken) // 2
  assert steps > pace._ROUNDS  # Some come before, in which XLA compiles.
  assert taken == [(n, i) for i in range(steps) for n in seconds]
  rate = SCALE.sizes[''].rates[0]
  assert [job.point for job in jobs] == [{'rate': rate}] * 2


def test_the_pace_is_that_of_the_fastest_parts_of_a_dense_batch(monkeypatch):
  dense = {1: 0.09, 2: 0.08, 4: 0.1}
  share = {0.0: 1.0, 0.75: 0.625, 0.9: 0.5}

  def step_seconds(cases, prepared):
    assert prepared is PREPARED
    return [dense[s.micro_batches] * share[arm.sparsity] for s, arm in cases]

  monkeypatch.setattr(pace, 'step_seconds', step_seconds)
  found = pace.measure_pace(SCALE, PREPARED)
  assert (found.micro_batches, found.seconds) == (
      2, {'0': 0.08, '75': 0.05, '90': 0.04}
  )
  assert found.budget(SCALE) == SCALE.steps(DENSE) * 0.08


def test_an_arm_is_as_fast_as_its_mean_step():
  speeds = pace.Pace(2, {'0': 0.08, '75': 0.05, '90': 0.04}, '').speeds()
  assert speeds[STATIC_75.kind] == pytest.approx(1.6)
  # Five sixths of the steps of Variable SPDF are sparse.
  mean = (5 * 0.04 + 0.08) / 6
  assert speeds[VARIABLE.kind] == pytest.approx(0.08 / mean)
  assert STATIC_90.kind not in speeds
