"""Runs whose layers have algorithms of their own, by the groups of a config."""

import jax
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import models
from spdf_jax.sparsity import statistics
from spdf_jax.training import initial_state
from spdf_jax.training import Run
from spdf_jax.training.step.optimizers import matrices
from tests.quickstart_runs import small_config
from tests.tiny_run import with_programs

pytestmark = pytest.mark.slow

TIMES = dict(update_every=3, update_until=12)
ATTENTION = {'static': (dict(name='static', sparsity=0.5), spdf.static(0.5)),
             'dense': (dict(name='dense'), spdf.dense())}


def make_run(attention, order=('pretrain', 'continuation'), **changes):
  """RigL on feed-forward layers for 15 steps, then a dense phase of 15."""
  rigl = dict(name='rigl', sparsity=0.8, **TIMES)
  config = small_config(data__task='', phases__order=order, **changes)
  with config.ignore_type():
    config.phases.pretrain.algorithm = dict(
        name='partition',
        groups=[['*/mlp/*', rigl], ['*/attn/*', ATTENTION[attention][0]]],
    )
  return Run.create(config)


def final_state(run):
  state = initial_state.create(run.programs)
  for i in range(run.plan.total_steps):
    state, _ = run.programs.step(state, run.programs.device_batch_at(i))
  return state


@pytest.mark.parametrize('attention', ATTENTION)
def test_a_run_on_text_has_the_masks_of_a_loop_with_partition(attention):
  run = make_run(attention, order=('pretrain',))
  algorithm = spdf.partition(
      {'mlp': spdf.rigl(0.8, **TIMES), 'attn': ATTENTION[attention][1]},
      [('*/mlp/*', 'mlp'), ('*', 'attn')],
  )
  by_hand = spdf.sparsify(
      optax.chain(
          optax.clip_by_global_norm(1.0),
          optax.scale_by_adam(0.9, 0.95, 1e-8),
          optax.add_decayed_weights(0.1, mask=matrices),
          optax.scale_by_learning_rate(run.plan.learning_rate),
      ),
      algorithm, where=models.sparsifiable,
      key=jax.random.fold_in(jax.random.key(0), 1), track=True,
  )
  actual = final_state(run)
  other = with_programs(run)
  vars(other.programs)['optimizer'] = by_hand
  want = final_state(other)
  masks = [spdf.get_mask(state.opt_state) for state in (actual, want)]
  jax.tree.map(np.testing.assert_array_equal, *masks)
  first = spdf.get_mask(initial_state.create(run.programs).opt_state)
  moved = statistics.mask_changes(
      first, masks[0], actual.params, where=models.sparsifiable
  )
  for name, change in moved.items():
    assert (change.grown > 0) == ('mlp' in name)
  assert run.plan.update_steps.tolist() == [3, 6, 9, 12]
