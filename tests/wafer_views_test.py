"""Tables, traces, sweeps and the devices to compare with."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.accelerator.wafer.comparisons import comparison_table
from spdf_jax.accelerator.wafer.comparisons import GPUS
from spdf_jax.accelerator.wafer.comparisons import roofline_seconds
from spdf_jax.accelerator.wafer.cost import cost_of
from spdf_jax.accelerator.wafer.decoders import Decoder
from spdf_jax.accelerator.wafer.decoders import training_step
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.sweeps import sensitivities
from spdf_jax.accelerator.wafer.sweeps import sweep_densities
from spdf_jax.accelerator.wafer.sweeps import sweep_devices
from spdf_jax.accelerator.wafer.trace import format_report
from spdf_jax.accelerator.wafer.trace import write_trace
from spdf_jax.accelerator.wafer.work import Elementwise
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import Scores

DEVICE = create_device('cs2')
XL = Decoder(24, 2048, 8192, 16, 50257)
STEP = training_step(XL, 132, 2048, 0.25)


def test_a_trace_has_every_operation_one_after_another(tmp_path):
  report = report_on(STEP, DEVICE)
  path = write_trace(report, tmp_path / 'trace.json')
  events = json.loads(path.read_text())['traceEvents']
  track = [e for e in events if e['ph'] == 'X' and e['tid'] == 0]
  assert len(track) == len(report.rows)
  # To the last bit: viewers nest what overlaps, be it by rounding.
  for event, after in zip(track, track[1:]):
    assert event['ts'] + event['dur'] == after['ts']
  last = track[-1]
  assert (last['ts'] + last['dur']) / 1e6 == pytest.approx(report.seconds)
  for tid in (1, 2, 3):
    busy = [e for e in events if e['ph'] == 'X' and e['tid'] == tid]
    for event, after in zip(busy, busy[1:]):
      assert event['ts'] + event['dur'] <= after['ts']
  threads = {e['args']['name'] for e in events if e['name'] == 'thread_name'}
  assert threads == {'operation', 'core', 'fabric', 'io'}


def test_a_trace_too_long_for_viewers_is_refused(tmp_path):
  program = Program((Operation('h', 'dot', 'forward', Product(9, 9, 9)),))
  program = Program(program.operations * 100_000)
  with pytest.raises(ValueError, match='viewers take 200,000'):
    write_trace(report_on(program, DEVICE), tmp_path / 'trace.json')


def test_a_table_says_what_is_open_and_what_is_missing():
  f = lambda p, x: jax.lax.cond(p, lambda: x @ x, lambda: jnp.linalg.inv(x))
  x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  pred = jax.ShapeDtypeStruct((), bool)
  text = format_report(simulate(f, DEVICE)(pred, x))
  assert 'cond_0: ' in text and 'the costliest counts' in text
  text = format_report(simulate(jnp.linalg.inv, DEVICE)(x))
  assert 'NOT COSTED, no rule: lu x 1' in text


def test_layers_of_a_table_add_up_to_its_total():
  text = format_report(report_on(STEP, DEVICE), rows=2)
  shares = [float(w[:-1]) for w in text.split() if w.endswith('%')][1:]
  assert sum(shares) == pytest.approx(100, abs=0.2)
  assert '2 more' in text


def test_kinds_of_work_are_told_apart_whatever_their_numbers():
  works = Scores(1e12), Elementwise(1e12)
  both = Program(tuple(Operation('', '', 'forward', w) for w in works))
  cycles = [row.cost.cycles for row in report_on(both, DEVICE).rows]
  assert cycles == [cost_of(work, DEVICE).cycles for work in works]
  assert cycles[0] == 2 * cycles[1]


@pytest.mark.parametrize('gpu', GPUS)
def test_zeros_save_nothing_on_a_gpu_unless_they_are_two_of_four(gpu):
  dense = training_step(XL, 64, 2048)
  half = training_step(XL, 64, 2048, 0.5)
  seconds = roofline_seconds(dense, gpu)
  assert roofline_seconds(half, gpu) == seconds
  assert roofline_seconds(dense, gpu, two_of_four=True) == seconds
  structured = roofline_seconds(half, gpu, two_of_four=True)
  assert 0.5 < structured / seconds < 0.7  # Attention and the head are dense.
  assert roofline_seconds(dense, gpu, count=8) == pytest.approx(seconds / 8)


def test_the_comparison_shows_every_gpu():
  text = comparison_table(STEP, 8)
  assert all(gpu.name in text for gpu in GPUS.values())
  assert 'gain nothing' in text


def test_an_unknown_gpu_is_answered_with_the_nearest():
  with pytest.raises(ValueError, match="'h100'"):
    roofline_seconds(STEP, 'h1000')


def test_sweeps_are_the_points_one_by_one():
  densities = np.linspace(0.05, 1.0, 1000)
  found = sweep_densities(STEP, DEVICE, densities, systems=4)
  for i in (0, 400, 999):
    step = training_step(XL, 132, 2048, float(densities[i]))
    exact = report_on(step, DEVICE, 4).seconds
    assert found[i] == pytest.approx(exact, rel=1e-4)
  dispatch = np.linspace(0, 4, 1000)
  seconds = sweep_devices(STEP, DEVICE, {'dispatch': dispatch})
  for i in (0, 999):
    changed = create_device('cs2', dispatch=float(dispatch[i]))
    exact = report_on(STEP, changed).seconds
    assert seconds[i] == pytest.approx(exact, rel=1e-4)
  assert (np.diff(seconds) >= -1e-6 * seconds[0]).all()


def test_sweeps_refuse_what_cannot_be():
  with pytest.raises(ValueError, match="did you mean 'clock'"):
    sweep_devices(STEP, DEVICE, {'clok': np.ones(3)})
  with pytest.raises(ValueError, match='as many'):
    sweep_devices(STEP, DEVICE, {'clock': np.ones(3), 'sram': np.ones(2)})
  with pytest.raises(ValueError, match='above 0'):
    sweep_densities(STEP, DEVICE, np.linspace(0, 1, 3))


def test_a_number_is_worth_what_a_change_of_it_shows():
  found = sensitivities(STEP, DEVICE)
  # All time is cycles of the clock but for I/O, latency and hosts.
  report = report_on(STEP, DEVICE)
  fixed = report.total.host + report.total.latency
  assert found['clock'] == pytest.approx(-(1 - fixed / report.cycles), abs=0.02)
  assert found['efficiency'] < -0.5 and found['dispatch'] > 0
  assert found['power'] == 0
