"""Tables and traces show every operation of a report."""

import json

import jax
import jax.numpy as jnp
import pytest
from wafer_programs import GPT3_XL

from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.views import format_report
from spdf_jax.accelerator.wafer.views import write_trace
from spdf_jax.costs import training_step

DEVICE = create_device('cs2')
STEP = training_step(GPT3_XL, 132, 2048, 0.75)


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
