"""Checkpoints are restored bit for bit, or refused in one sentence."""

import collections
import errno
import json
import logging
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.costs import plan_costs
from spdf_jax.sparsity.trees import by_name
from spdf_jax.training import find_checkpoint
from spdf_jax.training import initial_state
from spdf_jax.training import MismatchError
from spdf_jax.training import read_params
from spdf_jax.training import train
from spdf_jax.training.checkpoints import manager as checkpoints
from spdf_jax.training.checkpoints.files import read_checkpoint
from spdf_jax.training.checkpoints.files import read_masks
from spdf_jax.training.checkpoints.manager import Checkpoints
from spdf_jax.training.checkpoints.workdir import checkpoint_bytes
from spdf_jax.training.step.state import create_state
from tests.refusals import refuse
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import make_run

Usage = collections.namedtuple('Usage', 'total used free')


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A finished run of 14 steps, and its final state; not to be changed."""
  workdir = tmp_path_factory.mktemp('run') / 'a'
  return workdir, train(make_run().open(workdir))


@pytest.fixture
def workdir(trained, tmp_path):
  """A copy of the run, to be damaged."""
  return shutil.copytree(trained[0], tmp_path / 'copy')


def steps_in(workdir, folder='checkpoints'):
  path = pathlib.Path(workdir) / folder
  names = (p.name for p in path.iterdir()) if path.exists() else ()
  return sorted(int(name) for name in names if name.isdigit())


def files_in(checkpoint):
  return [p for p in checkpoint.rglob('*') if p.is_file()]


def truncate(path):
  data = path.read_bytes()
  path.write_bytes(data[:len(data) // 2])


def truncate_largest(checkpoint):
  truncate(max(files_in(checkpoint), key=lambda p: p.stat().st_size))


def truncate_state(checkpoint):
  folder = checkpoint / 'opt_state'
  truncate(max(files_in(folder), key=lambda p: p.stat().st_size))


def delete_arrays(checkpoint):
  for path in files_in(checkpoint / 'params'):
    if path.stat().st_size > 500:
      path.unlink()


def delete_item(checkpoint):
  shutil.rmtree(checkpoint / 'opt_state')


def delete_meta(checkpoint):
  (checkpoint / 'meta' / 'metadata').unlink()


def garble_meta(checkpoint):
  (checkpoint / 'meta' / 'metadata').write_bytes(b'\x00\xff{"config"')


def garble_data(checkpoint):
  (checkpoint / 'data' / 'metadata').write_text('{"step": ')


def empty_meta(checkpoint):
  (checkpoint / 'meta' / 'metadata').write_text('{}')


DAMAGES = (
    truncate_largest, truncate_state, delete_arrays, delete_item, delete_meta,
    garble_meta, garble_data, empty_meta,
)


def test_a_state_with_masks_is_restored_bit_for_bit(trained):
  workdir, state = trained
  restored = make_run().open(workdir).state
  assert_same_arrays(restored, state)
  mask = spdf.get_mask(restored.opt_state)
  assert mask['wte']['embedding'] is None
  assert mask['h_0']['mlp']['wi']['kernel'].dtype == bool


class Flags(NamedTuple):
  """State of a user's transformation, with booleans named as masks are."""

  mask: Any


def flags():
  return optax.GradientTransformation(
      lambda params: Flags(jax.tree.map(lambda p: p > 0, params)),
      lambda updates, state, params=None: (updates, state),
  )


def sparse(sparsity, inner=None):
  return spdf.sparsify(
      inner or optax.adam(0.1), spdf.static(sparsity), key=0
  )


NAMED_MASK = {
    'mask': {'kernel': jnp.ones((4, 8))},
    'h': {'mask': jnp.ones((8, 8)), 'w': jnp.ones((4, 4))},
    'b': jnp.ones(3),
}


@pytest.mark.parametrize('make', [
    lambda: sparse(0.5, optax.chain(flags(), optax.adam(0.1))),
    lambda: optax.partition(
        {'a/b': sparse(0.5), 'c': sparse(0.75), 'd': optax.sgd(0.1)},
        {'mask': 'a/b', 'h': {'mask': 'c', 'w': 'a/b'}, 'b': 'd'},
    ),
    lambda: optax.MultiSteps(optax.chain(flags(), sparse(0.5)), 2),
    lambda: optax.chain(sparse(0.5), sparse(0.75, optax.identity())),
])
def test_masks_are_read_wherever_the_optimizer_holds_them(make, tmp_path):
  state = create_state(NAMED_MASK, make(), None)
  saved = Checkpoints(
      tmp_path, phase_ends={}, keep=1, config=make_run().config,
      fingerprints={},
  )
  saved.save(state)
  saved.close()
  masks = read_masks(find_checkpoint(str(tmp_path)))
  want = by_name(spdf.get_mask(state.opt_state))
  assert sorted(want) == ['h/mask', 'h/w', 'mask/kernel'] == sorted(masks)
  for name, mask in want.items():
    np.testing.assert_array_equal(masks[name], mask)


def test_continued_training_does_not_change_a_checkpoint_being_saved(tmp_path):
  # The state is donated to the next step while it is still being written.
  run = make_run()
  run = run.open(tmp_path)
  state = run.state
  kept = {}
  for step in range(6):
    state, _ = run.programs.step(state, run.programs.batch_at(step))
    if step in (1, 5):
      kept[step + 1] = jax.tree.map(np.array, state)
      run.checkpoints.save(state)
  run.checkpoints.wait()
  for step, want in kept.items():
    restored = read_checkpoint(
        tmp_path / 'checkpoints' / str(step), run.programs.abstract_state,
        config=run.config, fingerprints=run.fingerprints,
    )
    assert_same_arrays(jax.tree.map(np.array, restored), want)


def test_checkpoints_at_phase_ends_are_kept(trained):
  assert steps_in(trained[0]) == [5, 10, 12, 14]  # Ends 5, 10, 14; latest 2.


def test_saving_a_step_again_changes_nothing(trained):
  workdir, state = trained
  before = {p: p.read_bytes() for p in files_in(workdir / 'checkpoints')}
  run = make_run().open(workdir)
  run.checkpoints.save(state)
  run.checkpoints.wait()
  after = {p: p.read_bytes() for p in files_in(workdir / 'checkpoints')}
  assert before == after


@pytest.mark.parametrize('changes, message', [
    (dict(seed=1), 'config: seed was 0 and is 1'),
    (dict(phases__order=['pretrain']), 'config: phases.order was .* and'),
    (dict(optimizer__b1=0.5), 'optimizer.b1 was 0.9 and is 0.5'),
])
def test_a_checkpoint_of_another_config_is_refused(trained, changes, message):
  run = make_run(**changes)
  with pytest.raises(MismatchError, match=message):
    read_checkpoint(
        find_checkpoint(trained[0]), run.programs.abstract_state,
        config=run.config, fingerprints=run.fingerprints,
    )


def test_paths_do_not_count_when_configs_are_compared(trained):
  run = make_run(data__cache_dir='elsewhere', init_from='b')
  assert int(run.open(trained[0]).state.step) == 14


def test_a_checkpoint_of_other_data_is_refused(workdir):
  message = "of another data: corpus was 'abc' and is 'xyz'"
  with pytest.raises(MismatchError, match=message):
    make_run(fingerprint='xyz').open(workdir)
  assert steps_in(workdir) == [5, 10, 12, 14]


def test_a_checkpoint_is_refused_rather_than_cast(trained):
  run = make_run()
  halved = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
      run.programs.abstract_state.params,
  )
  checkpoint = find_checkpoint(trained[0])
  message = (
      'of another model: params/h_0/attn/wd/bias was '
      r"'float32\[16\]' and is 'bfloat16\[16\]'.*and 17 more"
  )
  with pytest.raises(MismatchError, match=message):
    read_checkpoint(
        checkpoint, run.programs.abstract_state.replace(params=halved),
        config=run.config, fingerprints=run.fingerprints,
    )
  refuse('bfloat16', read_params, checkpoint, halved, error=MismatchError)


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_used(
    damage, workdir, caplog
):
  before = len(files_in(workdir / 'checkpoints' / '12'))
  damage(workdir / 'checkpoints' / '14')
  left = len(files_in(workdir / 'checkpoints' / '14'))
  with caplog.at_level(logging.WARNING, 'spdf_jax'):
    run = make_run().open(workdir)
  assert int(run.state.step) == 12
  assert 'checkpoint 14 cannot be read' in caplog.text
  assert 'the one before it is used' in caplog.text
  assert steps_in(workdir) == [5, 10, 12]
  aside = workdir / 'damaged_checkpoints' / '14'
  assert len(files_in(aside)) == left
  assert len(files_in(workdir / 'checkpoints' / '12')) == before


def test_a_run_continues_from_before_the_damage_bit_for_bit(trained, workdir):
  for _ in range(2):  # Damaged twice, both are kept.
    truncate_largest(workdir / 'checkpoints' / '14')
    state = train(make_run().open(workdir))
    assert_same_arrays(state, trained[1])
  kept = sorted(p.name for p in (workdir / 'damaged_checkpoints').iterdir())
  assert kept == ['14', '14.1']
  assert steps_in(workdir) == [5, 10, 12, 14]


def test_a_run_without_any_readable_checkpoint_is_refused(workdir):
  for step in steps_in(workdir):
    truncate_largest(workdir / 'checkpoints' / str(step))
  message = r'none of the checkpoints \[14, 12, 10, 5\] .* can be read'
  refuse(message, make_run().open, workdir)
  assert steps_in(workdir, 'damaged_checkpoints') == [5, 10, 12, 14]
  rows = (workdir / 'metrics.jsonl').read_text()
  refuse('has no checkpoint, and .* has those', make_run().open, workdir)
  assert (workdir / 'metrics.jsonl').read_text() == rows


@pytest.mark.parametrize('fault', [
    MemoryError('no memory'), OSError(errno.EIO, 'Input/output error'),
    OSError(errno.ESTALE, 'Stale file handle'), TimeoutError('timed out'),
    RuntimeError('RESOURCE_EXHAUSTED: Out of memory while allocating'),
    ValueError('anything about a sound checkpoint'),
], ids=lambda fault: type(fault).__name__)
def test_a_temporary_read_error_moves_no_checkpoint(
    fault, trained, workdir, monkeypatch
):
  def fail(*args, **kwargs):
    raise fault

  rows = (workdir / 'metrics.jsonl').read_text()
  with monkeypatch.context() as patched:
    patched.setattr(checkpoints.checkpoint_files, 'read_checkpoint', fail)
    for _ in range(2):
      with pytest.raises(type(fault), match=re.escape(str(fault))):
        make_run().open(workdir)
  assert steps_in(workdir) == [5, 10, 12, 14]
  assert not (workdir / 'damaged_checkpoints').exists()
  assert (workdir / 'metrics.jsonl').read_text() == rows
  assert_same_arrays(make_run().open(workdir).state, trained[1])


def test_too_little_free_space_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
  run = make_run()
  # 3 ends, 2 and 1 more.
  needed = 6 * checkpoint_bytes(run.programs.abstract_state)
  usage = lambda free: lambda path: Usage(10**12, 0, free)
  monkeypatch.setattr(shutil, 'disk_usage', usage(needed - 1))
  with pytest.raises(OSError, match='up to 6 more checkpoints.*free some'):
    run.open(tmp_path)
  assert not list(tmp_path.iterdir())
  monkeypatch.setattr(shutil, 'disk_usage', usage(needed))
  run.open(tmp_path)


def test_checkpoints_already_there_need_no_more_space(
    trained, tmp_path, monkeypatch
):
  workdir = tmp_path / 'copy'
  shutil.copytree(trained[0], workdir)
  run = make_run()
  missing = 6 - len(steps_in(workdir))
  free = missing * checkpoint_bytes(run.programs.abstract_state)
  monkeypatch.setattr(
      shutil, 'disk_usage', lambda path: Usage(10**12, 0, free)
  )
  assert missing < 6 and run.open(workdir)


def test_the_bytes_of_a_checkpoint_are_those_of_its_arrays(trained):
  state = trained[1]
  arrays = jax.tree.leaves(state)
  assert checkpoint_bytes(state) == sum(x.nbytes for x in arrays)


def test_a_workdir_names_its_latest_checkpoint(trained):
  workdir, _ = trained
  folder = workdir / 'checkpoints'
  assert find_checkpoint(str(workdir)) == folder / '14'
  for phase, step in (('pretrain', 5), ('continuation', 10), ('finetune', 14)):
    assert find_checkpoint(f'{workdir}@{phase}') == folder / str(step)


def test_an_unknown_phase_is_refused_with_those_that_ended(workdir):
  shutil.rmtree(workdir / 'checkpoints' / '14')
  for phase in ('finetune', 'tune'):
    with pytest.raises(ValueError, match=r"\['pretrain', 'continuation'\]"):
      find_checkpoint(f'{workdir}@{phase}')


def test_a_folder_without_checkpoints_is_refused(tmp_path):
  for source in (tmp_path, tmp_path / 'none', f'{tmp_path}@pretrain'):
    refuse('give the workdir of a run', find_checkpoint, str(source))


def test_init_from_takes_parameters_and_nothing_else(trained, tmp_path):
  run = make_run(seed=1, init_from=f'{trained[0]}@continuation')
  state = run.open(tmp_path).state
  source = read_params(
      trained[0] / 'checkpoints' / '10', run.programs.abstract_state.params
  )
  mask = spdf.get_mask(state.opt_state)
  assert_same_arrays(state.params, spdf.apply_mask(source, mask))
  fresh = initial_state.create(run.programs).opt_state
  assert_same_arrays(state.opt_state.inner_state, fresh.inner_state)
  assert int(state.step) == 0
  # Trained weights are pruned by magnitude, unless the algorithm has an init.
  assert spdf.summarize(mask, state.params).sparsity == 0.75
  for m, w in zip(jax.tree.leaves(mask), jax.tree.leaves(
      spdf.map_masked(lambda m, w: jnp.abs(w), mask, source)
  )):
    assert w[m].min() >= w[~m].max()
  told = make_run(
      seed=1, init_from=f'{trained[0]}@continuation',
      phases__pretrain__algorithm__init='random',
  ).open(tmp_path / 'told')
  assert_same_arrays(spdf.get_mask(told.state.opt_state), fresh.mask)
  begins = f'starts from the weights of {trained[0]}@continuation'
  for described, made in ((run, 'magnitude'), (told, 'random')):
    plan = plan_costs.describe_plan(described, 'a')
    assert plan['phases'][0]['notes'] == [begins, f'initial mask: {made}']


def test_init_from_prunes_every_group_by_magnitude_by_default(
    trained, tmp_path
):
  told = dict(name='static', sparsity=0.5, init='random')
  groups = [['*/attn/*', told], ['*', dict(name='static', sparsity=0.5)]]
  run = make_run(
      init_from=f'{trained[0]}@continuation',
      phases__pretrain__algorithm=dict(name='partition', groups=groups),
  )
  source = read_params(
      trained[0] / 'checkpoints' / '10', run.programs.abstract_state.params
  )
  mask = spdf.get_mask(run.open(tmp_path).state.opt_state)
  weights = spdf.map_masked(lambda m, w: jnp.abs(w), mask, source)
  by_magnitude = {
      name: bool(w[m].min() >= w[~m].max())
      for (name, m), w in zip(by_name(mask).items(), jax.tree.leaves(weights))
  }
  assert by_magnitude == {name: 'attn' not in name for name in by_magnitude}
  assert len(set(by_magnitude.values())) == 2
  notes = plan_costs.describe_plan(run, 'a')['phases'][0]['notes']
  assert notes[-1] == 'initial mask: random, magnitude'


def test_resume_continues_from_another_workdir_bit_for_bit(trained, tmp_path):
  run = make_run(resume=f'{trained[0]}@pretrain')
  run = run.open(tmp_path)
  assert int(run.state.step) == 5
  assert_same_arrays(train(run), trained[1])


@pytest.mark.parametrize('start, changes, error, message', [
    ('init_from', dict(model__d_model=32), MismatchError,
     r'bias was .*\[16\].* is .*\[32\]'),
    ('resume', dict(seed=1), MismatchError, 'seed was 0 and is 1'),
    ('resume', {}, ValueError, 'resume: .*/14 is at step 14 of 14'),
])
def test_a_start_that_does_not_fit_is_refused(
    start, changes, error, message, trained, tmp_path
):
  run = make_run(**{start: str(trained[0])}, **changes)
  refuse(message, run.open, tmp_path, error=error)
  assert not (tmp_path / 'config.json').exists()


def test_the_own_workdir_comes_before_resume_and_init_from(workdir, tmp_path):
  run = make_run(resume=str(tmp_path), init_from=str(tmp_path))
  assert int(run.open(workdir).state.step) == 14


def test_a_continued_run_keeps_its_first_init_from(trained, tmp_path, caplog):
  source = f'{trained[0]}@continuation'
  train(make_run(seed=1, init_from=source).open(tmp_path))
  run = make_run(seed=1, init_from='b').open(tmp_path)
  run.close()
  assert run.config.init_from == source
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['init_from'] == source
  assert [r.message for r in caplog.records if r.levelname == 'WARNING'] == [
      f"init_from was '{source}' and is 'b', but workdir '{tmp_path}' goes on "
      'from its own checkpoint; give another workdir for another start.'
  ]


def test_a_checkpoint_stores_config_phase_ends_and_shapes(trained):
  meta = json.loads(
      (trained[0] / 'checkpoints' / '14' / 'meta' / 'metadata').read_text()
  )
  assert meta['config'] == make_run().config.as_dict()
  assert meta['phase_ends'] == {
      'pretrain': 5, 'continuation': 10, 'finetune': 14
  }
  assert meta['arrays']['params/wte/embedding'] == 'float32[16,16]'
