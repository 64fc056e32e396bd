"""A run gives the same results with every storage."""

import dataclasses
import functools
import logging
import types

import jax
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import models
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.sparsity.storage import kept_sizes
from spdf_jax.sparsity.storage import pack_state
from spdf_jax.sparsity.storage import unpack_state
from spdf_jax.training import Evaluators
from spdf_jax.training import initial_state
from spdf_jax.training.step.storage import bytes_per_weight
from spdf_jax.training.step.storage import check_storage
from spdf_jax.training.step.storage import compact_apply
from spdf_jax.training.step.storage import is_compact
from spdf_jax.training.step.storage import is_compact_at
from spdf_jax.training.step.storage import planned_state
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import make_config
from tests.tiny_run import make_dynamic_run
from tests.tiny_run import make_run
from tests.tiny_run import rows_in
from tests.tiny_run import run_of
from tests.tiny_run import static
from tests.tiny_run import Stopped
from tests.tiny_run import stopping_at
from tests.tiny_run import total


def trained(workdir, storage):
  run = make_run(storage=storage).open(workdir)
  return training.train(run, evaluators=Evaluators([total]))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Workdirs and final states of two runs, by storage."""
  folder = tmp_path_factory.mktemp('whole')
  return {
      storage: (folder / storage, trained(folder / storage, storage))
      for storage in ('dense', 'compact')
  }


def assert_close(actual, wanted):
  actual, wanted = map(jax.tree_util.tree_leaves_with_path, (actual, wanted))
  assert [path for path, _ in actual] == [path for path, _ in wanted]
  for (path, a), (_, b) in zip(actual, wanted):
    name = jax.tree_util.keystr(path)
    if 'wk' in name and 'bias' in name:
      continue  # Its gradient is only a rounding error, which Adam amplifies.
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.ci
def test_a_whole_run_has_the_same_losses_and_masks(whole):
  (one, dense), (other, compact) = whole['dense'], whole['compact']
  for a, b in zip(rows_in(one), rows_in(other)):
    assert a.keys() == b.keys()
    for name, value in a.items():
      if isinstance(value, float):
        np.testing.assert_allclose(b[name], value, rtol=1e-5, err_msg=name)
      else:
        assert b[name] == value
  assert jax.tree.structure(dense) == jax.tree.structure(compact)
  assert_same_arrays(
      spdf.get_mask(dense.opt_state), spdf.get_mask(compact.opt_state)
  )
  assert_close(compact, dense)


@pytest.mark.ci
@pytest.mark.parametrize('first, then', [
    ('compact', 'dense'),
    pytest.param('dense', 'compact', marks=pytest.mark.slow),
    pytest.param('compact', 'compact', marks=pytest.mark.slow),
])
def test_a_checkpoint_continues_with_either_storage(
    whole, tmp_path, caplog, first, then
):
  run = make_run(storage=first).open(tmp_path)
  with pytest.raises(Stopped):
    training.train(run, evaluators=stopping_at(3))
  run.close()
  with caplog.at_level(logging.INFO, logger='spdf_jax'):
    state = trained(tmp_path, then)
  message = f"run with storage '{first}'; it is converted to '{then}'"
  assert (message in caplog.text) == (first != then)
  assert rows_in(tmp_path)[-1]['step'] == 14
  if first == then:
    assert_same_arrays(state, whole[then][1])
  else:
    assert_close(state, whole[then][1])


def test_a_checkpoint_is_of_dense_arrays(whole):
  run = make_run()
  checkpoint = training.find_checkpoint(f'{whole["compact"][0]}@pretrain')
  params = training.read_params(checkpoint, run.programs.abstract_state.params)
  wanted = training.read_params(
      training.find_checkpoint(f'{whole["dense"][0]}@pretrain'),
      run.programs.abstract_state.params,
  )
  assert_close(params, wanted)


def test_only_steps_between_changes_of_the_mask_are_compact():
  # Phases are of 5 sparse steps, then 9 dense ones; step 5 changes the mask.
  plan = make_run().plan
  compact = [is_compact_at('compact', plan, step) for step in range(14)]
  assert compact == [True] * 5 + [False] * 9
  assert not any(is_compact_at('dense', plan, step) for step in range(14))
  sparser = plan.phases[0], *(
      dataclasses.replace(p, algorithm=static(0.5)) for p in plan.phases[1:]
  )
  changed = training.Plan(sparser)
  assert [
      step for step in range(14) if not is_compact_at('compact', changed, step)
  ] == [5]


def test_a_run_converts_there_and_back_bit_for_bit():
  run = make_run(storage='compact')
  state = initial_state.create(run.programs)
  step_fn, compact = run.programs.prepare_step(state, 0)
  assert step_fn is run.programs.compact_step and is_compact(compact)
  assert run.programs.prepare_step(compact, 1)[1] is compact
  assert_same_arrays(run.programs.to_dense(compact), state)
  step_fn, dense = run.programs.prepare_step(compact, 5)
  assert step_fn is run.programs.step
  assert_same_arrays(dense, state)
  shapes = lambda tree: [
      (x.shape, x.dtype) for x in jax.tree.leaves(tree)
  ]
  planned = planned_state(
      run.programs.abstract_state, run.plan, run.model.where, step=0
  )
  assert shapes(planned) == shapes(compact)
  assert 3 < bytes_per_weight(compact) == bytes_per_weight(planned) < 3.2
  assert bytes_per_weight(run.programs.abstract_state) == 13


@functools.cache
def steps_of(matmul='dense'):
  """Steps of a tiny model, not jitted, and their states, dense and packed."""
  # As wide as kernels are used for.
  model = models.create_model(
      'gpt-mini', vocab_size=16, n_layers=1, n_heads=2, d_model=64, d_ff=72,
      max_length=8, scan_layers=matmul == 'scanned',
  )
  optimizer = spdf.sparsify(
      optax.chain(optax.clip_by_global_norm(1e3), optax.adamw(1e-2)),
      spdf.static(0.75), where=models.sparsifiable, key=0,
  )
  batch = make_run().programs.batch_at(0)
  params = jax.jit(model.init)(jax.random.key(0), batch.inputs)['params']
  state = training.create_state(params, optimizer)
  sizes = kept_sizes(spdf.get_mask(state.opt_state))
  packed = state.replace(**dict(zip(
      ('params', 'opt_state'),
      pack_state(state.params, state.opt_state, sizes),
  )))
  step = functools.partial(
      training.train_step, optimizer=optimizer,
      learning_rate=optax.constant_schedule(1e-2),
  )
  sparse = training.sparse_steps(
      'native' if matmul == 'native' else 'dense', model, 128
  )
  steps = (
      functools.partial(step, apply_fn=model.apply, sparse_steps=sparse),
      functools.partial(step, apply_fn=compact_apply(model, sparse)),
  )
  return steps, batch, state, packed


def unpack(state):
  params, opt_state = unpack_state(state.params, state.opt_state)
  return state.replace(params=params, opt_state=opt_state)


@pytest.mark.slow
def test_op_by_op_a_step_is_that_of_dense_storage_bit_for_bit():
  (step, compact_step), batch, state, packed = steps_of()
  with jax.disable_jit():
    state, metrics = step(state, batch)
    packed, packed_metrics = compact_step(packed, batch)
  assert float(metrics['train/loss']) == float(packed_metrics['train/loss'])
  assert_same_arrays(unpack(packed), state)


@pytest.mark.parametrize('matmul', [
    pytest.param('scanned', marks=pytest.mark.slow),
    pytest.param('native', marks=pytest.mark.skipif(
        not native.is_available(), reason='no native kernels here'
    )),
])
def test_under_jit_compact_and_dense_steps_agree_up_to_rounding(matmul):
  steps, batch, state, packed = steps_of(matmul)
  step, compact_step = map(jax.jit, steps)
  for _ in range(2):
    state, metrics = step(state, batch)
    packed, packed_metrics = compact_step(packed, batch)
    assert metrics.keys() == packed_metrics.keys()
    for name, value in metrics.items():
      np.testing.assert_allclose(
          packed_metrics[name], value, rtol=1e-5 if matmul == 'native' else 1e-6
      )
  # Adam's first steps are of the learning rate's size, whatever the gradient.
  assert_close(unpack(packed).params, state.params)


def test_compact_storage_is_refused_where_it_is_not_supported():
  run = make_run(storage='compact')
  check_storage(run.config, run.plan, run.programs.mesh)
  moving = make_dynamic_run()
  check_storage(moving.config, moving.plan, run.programs.mesh)
  with pytest.raises(ValueError, match='the mesh has 8 devices'):
    check_storage(run.config, run.plan, types.SimpleNamespace(size=8))
  with pytest.raises(ValueError, match="'pretrain' has 5 steps with mask .*"
                     ".*rigl.*storage 'dense'"):
    check_storage(run.config, moving.plan, run.programs.mesh)


@pytest.mark.parametrize('changes, message', [
    (dict(optimizer=dict(name='lion', clip_norm=1.0)), "is 'lion', but"),
    (dict(phases__continuation__rewind_weights_to='2 steps'),
     "phase 'continuation' rewinds weights"),
    (dict(matmul='wafer', model__dtype='float16'), "is 'wafer', which"),
])
def test_parts_that_need_dense_arrays_are_named(changes, message):
  run = make_run(storage='compact', **changes)
  with pytest.raises(ValueError, match=f"storage is 'compact' and .*{message}"):
    check_storage(run.config, run.plan, run.programs.mesh)


@pytest.mark.skipif(not native.is_available(), reason='no native kernels')
@pytest.mark.parametrize('storage, changes', [
    ('compact', {}),
    ('compact', dict(phases__continuation__algorithm=static(0.95))),
    ('dense', dict(phases__continuation__algorithm=static(0.1))),
    ('dense', dict(phases__pretrain__algorithm__sparsity=0.1)),
    ('dense', dict(phases__pretrain__algorithm=dict(
        name='rigl', sparsity=0.95, update_every=1, update_until=4))),
    ('dense', dict(matmul='dense')),
    ('dense', dict(optimizer=dict(name='lion', clip_norm=1.0))),
    ('dense', dict(phases__continuation__rewind_weights_to='2 steps')),
])
def test_the_state_is_compact_where_kernels_skip_zeros(storage, changes):
  width = dict(
      model__d_model=64, phases__pretrain__batch_size=16,
      phases__continuation__batch_size=16,
  )
  sparse = dict(phases__pretrain__algorithm=static(0.95), matmul='auto')
  run = make_run(storage='auto', **width | sparse | changes)
  assert run.programs.storage == storage
  assert make_run(**width | sparse).programs.storage == 'dense'


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
@pytest.mark.parametrize('storage', ['dense', 'compact'])
def test_steps_of_dense_phases_have_no_kernels(storage):
  run = run_of(make_config(matmul='native', storage=storage))

  def has_kernels(step):
    state = initial_state.create(run.programs)
    jitted, state = run.programs.prepare_step(state, step)
    text = jitted.lower(state, run.programs.batch_at(step)).as_text()
    return 'spdf_packed_matmul' in text or 'spdf_sparse_matmul' in text

  assert has_kernels(0) and not has_kernels(run.plan.starts[1])


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
def test_compact_steps_use_kernels_even_if_masks_are_denser_than_planned():
  # Counts of blocks are rounded: 21 % of 16 blocks are 3, or 19 %.
  run = run_of(make_config(matmul='native', storage='compact'))
  steps = run.programs.sparse_steps._replace(crossover=0.99)
  vars(run.programs)['sparse_steps'] = steps
  jitted, state = run.programs.prepare_step(
      initial_state.create(run.programs), 0
  )
  text = jitted.lower(state, run.programs.batch_at(0)).as_text()
  assert 'spdf_packed_matmul' in text


def test_without_kernels_all_phases_have_one_step():
  run = make_run(matmul='dense')
  assert run.programs.dense_step is run.programs.step
