"""Losses, gradients and weights that are not finite."""

import functools
import json
import logging
import math

import jax
import jax.numpy as jnp
import pytest

import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.training import initial_state
from spdf_jax.training.loop.metrics import MetricWriter
from tests import tiny_run


def damaged_run(steps, **changes):
  return tiny_run.damage_batches(tiny_run.make_run(**changes), steps)


@pytest.mark.ci
def test_steps_are_skipped_on_request_and_counted(tmp_path, caplog):
  run = damaged_run({3, 8, 9}, max_skipped_steps=2)
  with caplog.at_level(logging.WARNING, 'spdf_jax'):
    state = training.train(run.open(tmp_path / 'run'))
  assert int(state.step) == 14
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params))
  assert 'step 8' in caplog.text and '3 so far' in caplog.text
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  refuse = lambda name: pytest.fail(f'{name} is not JSON')
  rows = [json.loads(line, parse_constant=refuse) for line in lines]
  rows = {row['step']: row for row in rows if 'train/loss' in row}
  assert rows[8]['train/loss'] is None
  assert [rows[s]['train/skipped_steps'] for s in (2, 3, 8, 14)] == [0, 1, 2, 3]


@pytest.mark.ci
def test_skipping_can_be_switched_on_for_a_run_that_stopped(tmp_path):
  with pytest.raises(training.NotFinite):
    training.train(damaged_run({8}).open(tmp_path / 'run'))
  run = damaged_run({8}, max_skipped_steps=1)
  assert int(training.train(run.open(tmp_path / 'run')).step) == 14


def test_a_skipped_step_changes_masks_but_no_kept_weight():
  run = damaged_run({6}, max_skipped_steps=1)
  state = initial_state.create(run.programs)
  for step in range(5):
    state, _ = run.programs.step(state, run.programs.device_batch_at(step))
  before = jax.device_get(state)  # Copied, since the step donates the state.
  after, metrics = run.programs.step(state, run.programs.device_batch_at(5))
  assert math.isnan(metrics['train/loss'])
  tiny_run.assert_same_arrays(after.params, before.params)
  assert int(after.step) == 6
  # Step 6 is the first one of the dense continuation.
  assert not all(m.all() for m in masks_of(before))
  assert all(m.all() for m in masks_of(after))


def masks_of(state):
  return jax.tree.leaves(spdf.get_mask(state.opt_state))


def test_a_pruned_weight_that_was_nan_becomes_zero():
  run = tiny_run.make_run()
  state = initial_state.create(run.programs)
  masks = spdf.get_mask(state.opt_state)
  spoiled = jax.tree.map(
      lambda p, m: p if m is None else jnp.where(m, p, jnp.nan),
      state.params, masks, is_leaf=lambda x: x is None,
  )
  state = jax.jit(functools.partial(
      training.train_step, optimizer=run.programs.optimizer,
      apply_fn=lambda v, x: (
          run.model.apply(
              {'params': spdf.apply_mask(v['params'], masks)}, x
          )
      ), learning_rate=run.plan.learning_rate,
  ))(state.replace(params=spoiled), run.programs.device_batch_at(0))[0]
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_metrics_are_strict_json(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = MetricWriter(path, 0)
  writer.write_scalars(1, {'a': math.nan, 'b': math.inf, 'c': 1.5, 'd': 'x'})
  writer.close()
  assert path.read_text() == '{"step": 1, "a": null, "b": null, "c": 1.5, ' \
      '"d": "x"}\n'
