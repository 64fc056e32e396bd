"""Checkpoints with flipped bits, in the wrong place, or with code in them."""

import contextlib
import json
import logging
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import convert
from experiments import weight_sparse_study
from experiments.scores import ancestry
from experiments.scores import language_models
from experiments.verify import verify
from spdf_jax import training
from spdf_jax.files import seal
from spdf_jax.runs import lifecycle
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints.manager import Checkpoints
from spdf_jax.training.checkpoints.workdir import read_source
from spdf_jax.training.checkpoints.workdir import read_workdir_config
from spdf_jax.training.step import teacher
from tests import tiny_run
from tests.refusals import refuse
from tests.text_files import flip_bit


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A finished run of 14 steps, and its final state; not to be changed."""
  workdir = tmp_path_factory.mktemp('run') / 'a'
  run = tiny_run.make_run().open(workdir)
  return workdir, training.train(run)


@pytest.fixture
def workdir(trained, tmp_path):
  """A copy of the run, to be damaged."""
  return shutil.copytree(trained[0], tmp_path / 'copy')


def save_with_another_array(workdir, state):
  """Saves what nobody computed, under the digests of what was."""
  kernel = state.params['h_0']['mlp']['wi']['kernel']
  bits = np.asarray(kernel).copy()
  place = tuple(np.argwhere(bits)[0])
  bits.view(np.uint32)[place] ^= 1 << 12
  params = jax.tree.map(
      lambda x: jnp.asarray(bits) if x is kernel else x, state.params
  )
  checkpoint = workdir / 'checkpoints' / '14'
  run = tiny_run.make_run()
  saved = Checkpoints(
      workdir / 'other', phase_ends=run.plan.ends, keep=1,
      config=run.config, fingerprints=run.fingerprints,
  )
  saved.save(state.replace(params=params))
  saved.close()
  shutil.rmtree(checkpoint / 'params')
  shutil.move(workdir / 'other/checkpoints/14/params', checkpoint / 'params')
  return checkpoint


def test_an_array_that_is_not_what_was_saved_is_found(
    trained, workdir, caplog
):
  checkpoint = save_with_another_array(workdir, trained[1])
  name = 'params/h_0/mlp/wi/kernel'
  message = f'checkpoint {checkpoint} is damaged: array {name}'
  abstract = tiny_run.make_run().programs.abstract_state
  refuse(message, training.read_params, checkpoint, abstract.params)
  refuse(message, checkpoint_files.verify_checkpoint, checkpoint)
  refuse(f'14: .*{name}', list, verify(str(workdir)))
  with caplog.at_level(logging.WARNING, 'spdf_jax'):
    run = tiny_run.make_run().open(workdir)
  assert int(run.state.step) == 12
  assert name in caplog.text
  tiny_run.assert_same_arrays(training.train(run), trained[1])


@pytest.mark.parametrize('name', [
    'params/array_metadatas/process_0', 'params/_METADATA',
    'opt_state/manifest.ocdbt',
])
def test_a_checkpoint_with_half_a_file_is_left_for_the_one_before(
    name, workdir
):
  path = workdir / 'checkpoints/14' / name
  path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
  assert int(tiny_run.make_run().open(workdir).state.step) == 12


@pytest.mark.parametrize('item, place', [
    ('params', 0.15), ('opt_state', 0.5), ('data', 0.5), ('meta', 0.85),
])
def test_a_flipped_bit_is_found_or_changes_nothing(
    item, place, trained, workdir
):
  files = [
      path for path in (workdir / 'checkpoints/14' / item).rglob('*')
      if path.is_file()
  ]
  path = max(files, key=lambda path: path.stat().st_size)
  flip_bit(path, int(place * (path.stat().st_size - 1)), 2)
  state = tiny_run.make_run().open(workdir).state
  if int(state.step) == 14:
    tiny_run.assert_same_arrays(state, trained[1])
  else:
    assert int(state.step) == 12


def test_masks_are_verified_too(trained, workdir):
  checkpoint = workdir / 'checkpoints' / '5'
  assert checkpoint_files.read_masks(checkpoint)
  meta = checkpoint / 'meta' / 'metadata'
  fields = json.loads(meta.read_text())
  name = next(name for name in fields['digests'] if '/mask/' in name)
  fields['digests'][name] = '00000000'
  meta.write_text(json.dumps(seal(fields)))
  with pytest.raises(ValueError, match=f'array {name} is not what was saved'):
    checkpoint_files.read_masks(checkpoint)


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(workdir):
  (workdir / 'checkpoints' / '14').rename(workdir / 'checkpoints' / '99')
  run = tiny_run.make_run().open(workdir)
  assert int(run.state.step) == 12


def test_a_checkpoint_without_the_digest_of_its_metadata_is_not_used(workdir):
  path = workdir / 'checkpoints' / '14' / 'meta' / 'metadata'
  fields = json.loads(path.read_text())
  fields.pop('sha256')
  path.write_text(json.dumps(fields))
  assert int(tiny_run.make_run().open(workdir).state.step) == 12


@pytest.mark.parametrize('item', ['meta', 'data'])
@pytest.mark.parametrize('value', [3, 'x', [], {'a': 1}])
def test_changed_metadata_is_used_or_refused_by_name(workdir, item, value):
  path = workdir / 'checkpoints' / '14' / item / 'metadata'
  stored = json.loads(path.read_bytes())
  for name in sorted(set(stored) - {'sha256'}):
    path.write_text(json.dumps(seal(stored | {name: value})))
    try:
      tiny_run.make_run().open(workdir).close()
    except ValueError as error:
      assert str(workdir) in str(error) and '\n' not in str(error), name
    if not path.exists():  # It was moved aside.
      shutil.move(workdir / 'damaged_checkpoints/14', workdir / 'checkpoints')


def test_verify_accepts_undamaged_checkpoints(trained):
  lines = list(verify(str(trained[0])))
  assert [line.split(':')[0] for line in lines] == [
      f'checkpoint {step}' for step in (5, 10, 12, 14)
  ]


def with_config(workdir, change):
  """Changes the config in all files of a run, with digests that fit."""
  for path in (workdir / 'checkpoints').glob('*/meta/metadata'):
    fields = json.loads(path.read_text())
    change(fields['config'])
    path.write_text(json.dumps(seal(fields)))
  path = workdir / 'config.json'
  config = json.loads(path.read_text())
  change(config)
  path.write_text(json.dumps(config))


def test_code_named_in_a_checkpoint_is_not_run(workdir, tmp_path):
  ran = tmp_path / 'ran'

  def change(config):
    spec = {'name': 'subprocess:getoutput', 'cmd': f'touch {ran}'}
    groups = [['*/mlp/*', spec], ['*', {'name': 'os:abort'}]]
    config['phases']['pretrain']['algorithm'] = {
        'name': 'partition', 'groups': groups
    }

  with_config(workdir, change)
  source = f'{workdir}@pretrain'
  named = "algorithm 'subprocess:getoutput'"
  with pytest.raises(ValueError, match=f'{named}; read the .*--trust_code'):
    training.densify_checkpoint(source, tmp_path / 'dense')
  read_workdir_config(workdir)
  assert not ran.exists()
  # With trust it is run, and what it returns is refused.
  with pytest.raises(ValueError, match='let the function return'):
    training.densify_checkpoint(source, tmp_path / 'dense', trust_code=True)
  assert ran.exists()


RIGL = {
    'name': 'rigl', 'sparsity': 0.5, 'update_every': 2, 'update_until': 4
}
NAMES = {
    'model': lambda config, code: config['model'].update(preset=code),
    'optimizer': lambda config, code: config.update(
        optimizer=dict(name=code, clip_norm=1.0)
    ),
    'algorithm': lambda config, code: config['phases']['pretrain'].update(
        algorithm={'name': code}
    ),
    **{
        part: lambda config, code, part=part: config['phases'][
            'pretrain'
        ].update(algorithm=RIGL | {part: code})
        for part in (
            'distribution', 'structure', 'init', 'grow', 'update_every'
        )
    },
    'schedule': lambda config, code: config['phases']['pretrain'].update(
        algorithm=RIGL | {'drop_fraction': {'schedule': code}}
    ),
}
"""Functions that put the name of a function into a config, by field."""


@pytest.fixture
def ran(tmp_path, monkeypatch):
  """A file that modules of two names write when they are imported."""
  for name in ('evil', 'evil-mod', 'évil'):
    (tmp_path / f'{name}.py').write_text(
        f'open({str(tmp_path / "ran")!r}, "w")\ndef f(): raise ValueError\n'
    )
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path / 'ran'
  for name in ('evil', 'evil-mod', 'évil'):
    sys.modules.pop(name, None)


@pytest.mark.parametrize('change', NAMES.values(), ids=NAMES)
def test_code_of_a_densified_checkpoint_runs_with_trust_only(
    change, workdir, tmp_path, ran
):
  with_config(workdir, lambda config: change(config, 'evil:f'))
  with pytest.raises(ValueError, match="'evil:f'; read the .*--trust_code"):
    training.densify_checkpoint(f'{workdir}@pretrain', tmp_path / 'dense')
  assert not ran.exists()
  with pytest.raises(ValueError):
    training.densify_checkpoint(
        f'{workdir}@pretrain', tmp_path / 'dense', trust_code=True
    )
  assert ran.exists()


def test_functions_of_a_later_phase_are_not_imported(workdir, tmp_path, ran):
  def change(config):
    first, *_, last = config['phases']['order']
    assert first != last
    config['phases'][last]['algorithm'] = dict(
        name='static', sparsity=0.5, init='evil:f'
    )

  with_config(workdir, change)
  with pytest.raises(ValueError, match="'evil:f'; read the .*--trust_code"):
    training.densify_checkpoint(f'{workdir}@pretrain', tmp_path / 'dense')
  assert not (tmp_path / 'ran').exists()


def export(source, folder):
  convert.export_model(
      source, str(folder / 'hf'), format='dense', dtype='float32',
      vocab_size=None,
  )


# Functions of a workdir and another folder, by the module that reads it.
READERS = {
    'experiments/convert.py': [export],
    'experiments/weight_sparse_study.py': [
        lambda source, folder: weight_sparse_study._subject_of(
            pathlib.Path(source))],
    'experiments/scores/language_models.py': [
        lambda source, folder: language_models.open_run(source),
        lambda source, folder: language_models.open_listed(source),
        lambda source, folder: language_models.read_model(source)],
    'experiments/scores/ancestry.py': [
        lambda source, folder: ancestry.read_ancestry(source)],
    'spdf_jax/runs/lifecycle.py': [
        lambda source, folder: lifecycle.spent_before(
            tiny_run.make_run(init_from=source))],
    'spdf_jax/training/checkpoints/files.py': [
        lambda source, folder: checkpoint_files.verify_checkpoint(
            training.find_checkpoint(source)),
        lambda source, folder: checkpoint_files.read_masks(
            training.find_checkpoint(source)),
        lambda source, folder: list(verify(source))],
    'spdf_jax/training/checkpoints/manager.py': [
        lambda source, folder: tiny_run.make_run().open(source)],
    'spdf_jax/training/checkpoints/densified.py': [training.densify_checkpoint],
    'spdf_jax/training/step/teacher.py': [
        lambda source, folder: teacher.check_teacher(source, 64, 8)],
    'spdf_jax/training/initial_mask.py': [
        lambda source, folder: tiny_run.make_run(
            phases__pretrain__initial_mask=source).open(folder / 'a')],
    'spdf_jax/training/initial_state.py': [
        lambda source, folder: tiny_run.make_run(init_from=source).open(
            folder / 'b'),
        lambda source, folder: tiny_run.make_run(resume=source).open(
            folder / 'c')],
    'spdf_jax/training/checkpoints/workdir.py': [
        lambda source, folder: read_workdir_config(source)],
}


def test_every_module_that_reads_checkpoints_is_tested():
  root = pathlib.Path(__file__).parents[2]
  reads = re.compile(
      r'\b(find_checkpoint|read_source|read_workdir_config|read_meta)\('
  )
  assert set(READERS) == {
      str(path.relative_to(root)) for room in ('spdf_jax', 'experiments')
      for path in (root / room).rglob('*.py')
      # Studies read the runs of their own protocols.
      if not {'papers', 'pool'} & set(path.parts)
      and reads.search(path.read_text())
  }


SPELLINGS = (
    'evil:f', 'evil-mod:f', 'evil:', 'evil::f', 'évil:f', ' evil:f', 'evil: f'
)


def read_by_all(workdir, folder, ran, field, name):
  """Calls every reader on a run whose config names code in a field."""
  with_config(workdir, lambda config: NAMES[field](config, name))
  for module, readers in READERS.items():
    for read in readers:
      with contextlib.suppress(Exception):
        read(str(workdir), folder)
      assert not ran.exists(), module


@pytest.mark.parametrize('field, name', [
    ('init', 'evil:f'), ('model', 'evil-mod:f'), ('grow', 'évil:f'),
])
def test_no_reader_of_checkpoints_imports_what_they_name(
    field, name, workdir, tmp_path, ran
):
  read_by_all(workdir, tmp_path / 'out', ran, field, name)


@pytest.mark.ci
@pytest.mark.parametrize('field, name', [
    *((field, 'evil:f') for field in NAMES),
    *(('init', name) for name in SPELLINGS),
])
def test_no_reader_imports_a_name_of_any_field_or_spelling(
    field, name, workdir, tmp_path, ran
):
  read_by_all(workdir, tmp_path / 'out', ran, field, name)


def test_a_path_in_a_config_of_others_is_not_written_to(workdir, tmp_path):
  theirs = tmp_path / 'theirs'
  with_config(workdir, lambda c: c['data'].update(cache_dir=str(theirs)))
  assert read_workdir_config(workdir).data.cache_dir != str(theirs)
  theirs.mkdir()
  assert read_workdir_config(workdir).data.cache_dir != str(theirs)


@pytest.mark.ci
def test_a_checkpoint_that_its_run_replaces_is_read_from_the_next(workdir):
  folder = workdir / 'checkpoints'
  steps = sorted(int(path.name) for path in folder.iterdir())

  def read(checkpoint, deletions):
    if deletions:
      deletions.pop()
      step = int(checkpoint.name)
      shutil.copytree(checkpoint, folder / str(step + 1))
      shutil.rmtree(checkpoint)
    return checkpoint_files.read_masks(checkpoint), checkpoint.name

  source = str(workdir)
  for number in (0, 1, 3):
    step = training.find_checkpoint(source).name
    masks, name = read_source(source, lambda c, d=[0] * number: read(c, d))
    assert int(name) == int(step) + number and masks
  with pytest.raises(ValueError, match='its run deletes checkpoints faster'):
    read_source(source, lambda c, d=[0] * 9: read(c, d))
  assert len(list(folder.iterdir())) == len(steps)

  def fail(checkpoint):
    raise OSError('not its fault')

  refuse('OSError: not its fault', read_source, source, fail)
