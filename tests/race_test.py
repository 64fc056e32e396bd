"""The race for equal seconds, and its table."""

import dataclasses

import pytest
from quickstart_runs import ROOT

pytestmark = [
    pytest.mark.papers,
    pytest.mark.skipif(
        not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
    ),
]

from experiments.papers import pace  # noqa: E402
from experiments.papers import race  # noqa: E402
from experiments.papers.arms import Arm  # noqa: E402
from experiments.papers.pace import Pace  # noqa: E402
from experiments.papers.pool import Entry  # noqa: E402
from experiments.papers.pool import Job  # noqa: E402
from experiments.papers.race_plots import plot_race  # noqa: E402
from experiments.papers.race_report import Leg  # noqa: E402
from experiments.papers.race_report import write_report  # noqa: E402
from experiments.papers.scales import DENSE  # noqa: E402
from experiments.papers.scales import SCALES  # noqa: E402
from experiments.papers.scales import STATIC_75  # noqa: E402
from experiments.papers.scales import VARIABLE  # noqa: E402

PACE = Pace(2, {'0': 0.08, '75': 0.05, '90': 0.04}, 'a processor, 2 cores')


def paced():
  return race._paced(race._scale(128, 20), PACE)


def test_an_arm_has_one_color_at_all_widths():
  pytest.importorskip('matplotlib')
  curves = [[(5.0, 3.0), (10.0, 2.0)]]
  found = {
      128: dict.fromkeys((DENSE, STATIC_75, VARIABLE), curves),
      256: dict.fromkeys((DENSE, VARIABLE), curves),
  }
  left, right = (
      {line.get_label(): line.get_color() for line in ax.lines}
      for ax in plot_race(found).axes
  )
  assert len(set(left.values())) == 3
  assert right.items() <= left.items() and len(right) == 2


def test_all_arms_take_the_same_seconds():
  scale = paced()
  budget = PACE.budget(scale)
  assert scale.steps(STATIC_75) * 0.05 == pytest.approx(budget, rel=1e-3)
  dense = scale.steps(VARIABLE) // 6
  sparse = scale.steps(VARIABLE) - dense
  assert sparse * 0.04 + dense * 0.08 == pytest.approx(budget, rel=1e-3)
  short = dataclasses.replace(STATIC_75, share=0.25)
  assert scale.steps(short) * 0.05 == pytest.approx(budget / 4, rel=1e-3)


def test_the_pace_is_measured_once_and_runs_of_another_are_refused(
    tmp_path, monkeypatch
):
  paces = iter([PACE])
  monkeypatch.setattr(race, 'measure_pace', lambda *_: next(paces))
  open_results = lambda name: race._Results(
      128, tmp_path / name, tmp_path / 'runs', {'protocol': '0'}
  )
  for name in 'ab':
    (tmp_path / name).mkdir()
  assert open_results('a').pace(None) == PACE
  assert open_results('b').pace(None) == PACE  # That of the runs.
  path = tmp_path / 'b' / 'width-128.json'
  path.write_text(path.read_text().replace('0.05', '0.06'))
  with pytest.raises(ValueError, match=': seconds differ; give another work'):
    open_results('b').pace(None)
  with pytest.raises(ValueError, match='is of a race of another protocol'):
    race._Results(128, path.parent, tmp_path / 'runs', {'protocol': '1'})


def test_the_wide_models_are_timed_on_less_than_an_epoch(tmp_path, monkeypatch):
  timed = []
  monkeypatch.setattr(
      race, 'measure_pace', lambda scale, _: timed.append(scale) or PACE
  )
  race._Results(256, tmp_path, tmp_path / 'runs', {}).pace(None)
  scale, = timed
  tokens = lambda scale: scale.steps(DENSE) * scale.batch_size * scale.length
  # Bytes of the books that a race was first given.
  assert tokens(scale) < 47_874_304 < tokens(race._scale(256, 20))


def test_the_table_has_losses_less_those_of_dense(tmp_path):
  entries, done = [Entry(Arm('init'), {}, 2)], {}
  for arm, loss in ((DENSE, 1.6), (STATIC_75, 1.5)):
    tuned = dataclasses.replace(arm, share=0.25)
    entries += [
        Entry(tuned, {'rate': (4e-3,)}, 0, extend=False),
        Entry(dataclasses.replace(arm, rate_of=tuned), {'rate': (4e-3,)}, 2),
    ]
    done[Job(tuned, {'rate': 4e-3}, 0).name] = {'validation/loss': 2.0}
    for seed in (1, 2):
      done[Job(arm, {'rate': 4e-3}, seed).name] = {
          'validation/loss': loss + 0.01 * seed, 'flops': 1e12, 'steps': 100,
          'training_seconds': 60.0 + (2.0 if seed == 1 else 0.0),
          'curve': [[50, 30.0, 2.0], [100, 60.0, loss]],
      }
  leg = Leg(128, 60.0, paced(), PACE, entries, done)
  table = write_report([leg], tmp_path)
  row, = (x for x in table.splitlines() if x.startswith('| static-75'))
  # 100 steps of 0.05 s on all cores, and the mean of what runs measured.
  assert '| 5 | 61 | 100 |' in row and '| -0.1000' in row
  curve = leg.curves()[STATIC_75][0]
  assert [seconds for seconds, _ in curve] == pytest.approx([2.5, 5.0])
  assert (tmp_path / 'race.png').stat().st_size


@pytest.mark.slow
def test_a_short_race_runs_to_its_end_and_is_not_run_again(
    tmp_path, monkeypatch, capsys
):
  smoke = SCALES['smoke']
  monkeypatch.setattr(race, 'FAIR', dataclasses.replace(
      smoke, sizes={'large': smoke.sizes['']}
  ))
  monkeypatch.setattr(race, '_WIDTHS', (16, 32))
  monkeypatch.setattr(race, '_SEEDS', 2)
  monkeypatch.setattr(pace, '_ROUNDS', 3)  # The plans are short.

  def run(name):
    (tmp_path / name).mkdir()
    return race.race('', tmp_path / name, tmp_path / 'results')

  report = run('runs')
  narrow, wide = report.split('## Width 32')
  for arm in ('dense', 'static-75', 'variable-90'):
    assert f'| {arm} | 0.0' in narrow
  assert '| static-75 |' not in wide and '| variable-90 |' in wide
  assert (tmp_path / 'results' / 'race.png').stat().st_size
  capsys.readouterr()
  assert run('others') == report  # From the outcomes and the pace.
  assert ' left, about ' not in capsys.readouterr().out
