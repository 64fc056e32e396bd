"""What is evaluated, exported and continued from is the optimizer's model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import training
from spdf_jax.training import Evaluators
from spdf_jax.training.step.optimizers import evaluation_params
from tests.tiny_run import make_config
from tests.tiny_run import run_of


def total(step, params):
  del step
  return [('validation/total', float(sum(
      jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(params)
  )))]


def test_a_schedule_free_run_is_evaluated_and_read_at_its_averages(tmp_path):
  run = run_of(make_config(
      optimizer=dict(name='schedule_free_adamw', clip_norm=1.0),
      storage='dense', eval_every=7,
  )).open(tmp_path)
  state = training.train(run, evaluators=Evaluators([total]))
  saved = training.read_params(
      training.find_checkpoint(str(tmp_path)),
      run.programs.abstract_state.params,
  )
  inner = next(
      x for x in jax.tree.leaves(
          state.opt_state,
          is_leaf=lambda x: isinstance(x, optax.contrib.ScheduleFreeState),
      ) if isinstance(x, optax.contrib.ScheduleFreeState)
  )
  b1 = float(inner.b1)
  averages = jax.tree.map(
      lambda y, z: (np.asarray(y) - (1 - b1) * np.asarray(z)) / b1,
      state.params, inner.z,
  )
  for x, want, y in zip(*map(jax.tree.leaves, (saved, averages, state.params))):
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)
    assert not y.any() or not np.array_equal(x, y)
  rows = training.loop.metrics.read_rows(tmp_path / 'metrics.jsonl')
  (_, want), = total(0, averages)
  assert np.isclose(rows[-1]['validation/total'], want, rtol=1e-5)


def test_other_optimizers_are_evaluated_at_their_parameters():
  params = {'w': jnp.ones(3)}
  assert evaluation_params(optax.adamw(0.1).init(params), params) is params
