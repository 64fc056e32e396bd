"""Bad configs are refused in a sentence, before data is read or written."""

import dataclasses
import functools
import json
import os
import shutil

import pytest

from tests import refusals
from tests.quickstart_runs import finish
from tests.quickstart_runs import ROOT
from tests.quickstart_runs import small_config
from tests.quickstart_runs import start_command
from tests.tiny_run import make_run

pytestmark = pytest.mark.skipif(
    not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
)

from experiments import preparation  # noqa: E402
from experiments.launch import config_file  # noqa: E402
from spdf_jax import data  # noqa: E402
from spdf_jax.runs import lifecycle  # noqa: E402
from spdf_jax.training import Run  # noqa: E402
from spdf_jax.training.configs.config import parse  # noqa: E402
from spdf_jax.training.configs.config import parse_mesh  # noqa: E402

refuse = functools.partial(refusals.refuse, error=(ValueError, OSError))

PRETRAIN = 'phases__pretrain__'
RATE = f'{PRETRAIN}learning_rate__'
WITHOUT_TASK = dict(data__task='', phases__order=('pretrain', 'continuation'))
RIGL = dict(name='rigl', sparsity=0.5, update_every=5, update_until=9)
STATIC = dict(name='static', sparsity=0.5)
groups = lambda *pairs: dict(name='partition', groups=pairs)
REWIND = dict(schedule='rewind', to='99 steps')


def make_config(**changes):
  """The small config; its fine-tuning has a length in epochs of its task."""
  config = small_config()
  epochs = dict(phases__finetune__duration='2 epochs')
  with config.ignore_type():
    config.update_from_flattened_dict({
        name.replace('__', '.'): value
        for name, value in (epochs | changes).items()
    })
  return config


@pytest.fixture
def no_data(monkeypatch):
  def read(*args, **kwargs):
    raise AssertionError('the data is read')

  for name in ('prepare_corpus', 'load_task'):
    monkeypatch.setattr(data, name, read)


def open_run(config, workdir):
  return Run.create(config, workdir).open()


@pytest.mark.parametrize('name, value, message', [
    ('seed', -1, r'seed is -1; give a whole number in \[0, 2\*\*32\)'),
    ('matmul', 'wafer', "'wafer' and model.dtype is 'float32'; the wafer "
     "computes in fp16, .*: set model.dtype to 'float16'"),
    ('loss__z_loss', float('nan'), "'loss.z_loss' is nan; it must be finite"),
    ('data__planned__tokens', -1.0, 'data.planned.tokens is -1.0; give 0 or'),
    ('phases__order', (3,), r"'phases.order' is \[3\]; set phases.order to a"),
    (f'{PRETRAIN}length', 30, 'lengths 30 and 32; choose lengths that divide'),
    (f'{PRETRAIN}algorithm', dict(name='iterative', rounds=3),
     "'pretrain': rounds is 3; give a list of Round"),
    (f'{RATE}final_fraction', -1.0, r'final_fraction is -1.0; .* in \[0, 1\]'),
])
def test_invalid_configs_are_refused_by_parse(
    name, value, message
):
  refuse(message, parse, make_config(**{name: value}))


@pytest.mark.parametrize('call, config, message', [
    (parse, None, 'config is None; give a ConfigDict or a mapping'),
    (parse, dict(seed=max), "'seed' is <built-in function max>, a builtin"),
    (parse_mesh, dict(mesh='text'), "'mesh' is"),
    (parse_mesh, dict(mesh=dict(data=None, fsdp=1, tensor=1)),
     "'mesh.data' is"),
])
def test_what_is_not_a_config_is_refused(call, config, message):
  refuse(message, call, config)


@pytest.mark.parametrize('name, value, message', [
    (f'{PRETRAIN}duration', '0 steps', "'pretrain': duration '0 steps' is le"),
    (f'{PRETRAIN}duration', '9T steps', "'9T steps' is more than 2,147,483"),
    (f'{RATE}warmup', '99 steps', 'warm-up takes 99 of 30 steps'),
    ('phases__continuation__learning_rate', REWIND, 'rewinds to step 99 of a'),
    (f'{PRETRAIN}algorithm', RIGL | dict(update_until=99),
     'update_until is 99'),
    (f'{PRETRAIN}algorithm',
     dict(name='iterative', rounds=[dict(steps=9, fraction=0.5)]),
     "'pretrain' has 15 steps and iterative rounds of 9 = 9; make them equal"),
    (f'{PRETRAIN}algorithm',
     dict(name='static', sparsity=0.5,
          structure=dict(structure='block', inputs=7, outputs=7)),
     "'pretrain': block.7, 7. needs a multiple"),
    (f'{PRETRAIN}algorithm',
     dict(name='static', sparsity={'h_9': 0.5}, distribution='by_pattern'),
     "'pretrain': sparsity has the pattern 'h_9'"),
    (f'{PRETRAIN}algorithm',
     groups(('*/mlp/*', RIGL), ('*/attention/*', STATIC)),
     "'pretrain': no pattern matches the sparsified leaf 'h_0/attn/"),
    (f'{PRETRAIN}algorithm', groups(('h_9/*', RIGL), ('*', STATIC)),
     "'pretrain': the pattern 'h_9/.' matches none of the sparsified leaves"),
    (f'{PRETRAIN}algorithm', groups(('*', STATIC), ('*/mlp/*', RIGL)),
     "'pretrain': the patterns before './mlp/.' match all of its leaves; put"),
    (f'{PRETRAIN}algorithm', groups(('*', dict(name='rigle'))),
     "'pretrain': group '.': algorithm 'rigle' is unknown; did you mean"),
])
def test_a_plan_is_checked_before_data_is_read(no_data, name, value, message):
  refuse(message, Run.create, make_config(**{name: value}))


def test_compact_storage_is_checked_before_data_is_read(no_data):
  order = dict(phases__order=('pretrain', 'continuation'))
  changes = {f'{PRETRAIN}algorithm': RIGL, 'storage': 'compact'} | order
  refuse("storage is 'compact' and phase 'pretrain' has 15 steps with mask up",
         Run.create, make_config(**changes))


def test_lengths_in_epochs_are_not_refused_before_data_is_read(no_data):
  iterative = dict(name='iterative', rounds=[dict(steps=9, fraction=0.5)])
  for changes in (
      {f'{PRETRAIN}duration': '1 epoch', f'{PRETRAIN}algorithm': iterative},
      {f'{PRETRAIN}duration': '1 epoch', f'{RATE}warmup': '999 steps'},
      {f'{RATE}warmup': '0.001 epochs'},
  ):
    with pytest.raises(AssertionError, match='the data is read'):
      Run.create(make_config(**changes))


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A workdir with checkpoints of 30 steps of pre-training."""
  workdir = tmp_path_factory.mktemp('trained') / 'run'
  run = open_run(make_config(**WITHOUT_TASK), workdir)
  run.checkpoints.save(run.state)
  run.close()
  return workdir


@pytest.mark.parametrize('changes, message', [
    (dict(init_from='{old}_'), "init_from: '.*_' names no checkpoint: .* hol"),
    (dict(resume='{old}_'), "resume: '.*_' names no checkpoint: .* holds none"),
    (dict(init_from='{old}@end'), "init_from: '.*@end' names no checkpoint: "),
    (dict(init_from='{old}', model__d_model=32),
     'is of another model: model.d_model was 16 and is 32;'),
    ({f'{PRETRAIN}algorithm__name': 'static',
      f'{PRETRAIN}algorithm__init': 'nonzero'},
     'initial weights have none; name the weights by init_from, or use init='),
    (dict(resume='{old}', seed=3), 'another config: seed was 0 and is 3'),
])
def test_where_a_run_starts_is_checked_before_data_is_read(
    no_data, trained, tmp_path, changes, message
):
  changes = {
      k: v.format(old=trained) if isinstance(v, str) else v
      for k, v in changes.items()
  }
  config = make_config(**WITHOUT_TASK | changes)
  refuse(message, open_run, config, tmp_path / 'run')
  assert not os.listdir(tmp_path)


def test_a_damaged_start_is_named(no_data, trained, tmp_path):
  shutil.copytree(trained, tmp_path / 'old')
  for path in (tmp_path / 'old').glob('checkpoints/*/meta/metadata'):
    path.write_text('{')
  config = make_config(init_from=str(tmp_path / 'old'), **WITHOUT_TASK)
  refuse('init_from: .* cannot be read', open_run, config, tmp_path / 'a')
  assert os.listdir(tmp_path) == ['old']


def test_a_workdir_is_checked_before_data_is_read(no_data, trained, tmp_path):
  config = make_config(**WITHOUT_TASK)
  other = make_config(seed=1, **WITHOUT_TASK)
  (tmp_path / 'file').touch()
  for place in ('file', 'file/below'):
    refuse("cannot be written, since .*file' is a file; give a writable",
           open_run, config, tmp_path / place)
  before = sorted(trained.rglob('*'))
  refuse('belongs to another config: seed was 0 and is 1; give another',
         open_run, other, trained)
  assert sorted(trained.rglob('*')) == before


def test_a_run_refused_for_its_size_leaves_no_workdir(tmp_path):
  config = make_config(checkpoints__keep=10**10, **WITHOUT_TASK)
  refuse('GiB free and the plan writes', open_run, config,
         tmp_path / 'run')
  assert not os.listdir(tmp_path)


def prepare(folder, documents, validation):
  """Prepares a corpus of short documents; returns a config without a task."""
  texts = [json.dumps(dict(text=f'Text {i}.')) for i in range(documents)]
  (folder / 'a.jsonl').write_text('\n'.join(texts))
  preparation.prepare_files(
      folder / 'a.jsonl', tokenizer='bytes', output=folder / 'corpus',
      validation=validation, test=0.002, workers=1,
  )
  return make_config(**WITHOUT_TASK | dict(
      data__corpus=str(folder / 'corpus'), data__tokenizer='',
      data__max_epochs__corpus=99,
  ))


@pytest.mark.parametrize('share, warns', [(0.1, True), (0.9, False)])
def test_a_small_validation_split_gives_a_warning(
    share, warns, tmp_path, caplog
):
  Run.create(prepare(tmp_path, 1500, share))
  messages = [m for m in caplog.messages if 'the validation split of' in m]
  assert bool(messages) is warns
  if warns:
    assert "'corpus' has " in messages[0]
    assert 'fewer than 10000, so' in messages[0]


def test_validation_splits_without_a_row_are_refused(tmp_path):
  refuse('no row of 32 tokens in its validation split; prepare it',
         open_run, prepare(tmp_path, 1000, 0.002), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('changes, message', [
    (dict(data__corpus='./none'), "corpus='./none' is not a folder; prepare"),
    (dict(data__tokenizer='byte'), "tokenizer='byte' is unknown; use 'bytes'"),
    (dict(data__cache_dir=__file__), 'cache_dir=.* cannot hold the corpus'),
    (dict(data__task='docstrings'), "task 'docstrings'.*'python-docstrings'"),
    (dict(data__task='e2e'), "data.task is 'e2e' and data.task_dir '': "),
    (dict(data__task='e2e', data__task_dir='./none'),
     "data.task is 'e2e' and data.task_dir './none': .* is not a folder"),
    (dict(model__vocab_size=256), 'ids up to 256 and the model a vocabulary '
     'of 256; set model.vocab_size '),
    ({f'{PRETRAIN}duration': '9B tokens'}, 'but max_epochs allows 1'),
    ({f'{PRETRAIN}batch_size': 10**6}, 'one batch of 1000000; use'),
])
def test_data_that_a_config_cannot_train_on_are_named(changes, message):
  refuse(message, Run.create, make_config(**WITHOUT_TASK | changes))


def refuse_file(message, path):
  """Asserts that a file is refused on one line, maybe of the system."""
  with pytest.raises(ValueError, match=message) as caught:
    config_file.Parser().parse(path)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('text, message', [
    ('def get_config(:\n', r'SyntaxError: invalid syntax .*line 1'),
    ('def get_config():\n  return x\n', "NameError in line 2: name 'x' is not"),
    ('a = 1\n', 'it has no function get_config; define one'),
    ('def get_config():\n  pass\n', 'returns None; let it return a ConfigDict'),
    ('def get_config():\n  open("none")\n', "No such file .*: 'none'"),
    ('from configs import quickstart\n'
     'def get_config():\n'
     '  config = quickstart.get_config().lock()\n'
     '  config.colour = 1\n', 'AttributeError in line 4: .*colour'),
])
def test_a_mistake_in_a_config_file_is_reported_in_one_sentence(
    text, message, tmp_path
):
  path = tmp_path / 'file.py'
  path.write_text(text)
  refuse_file(message, str(path))


@pytest.mark.parametrize('name, message', [
    ('none.py', "No such file or directory: '.*configs/none.py'"),
    ('quickstart.py:algorithm=regl',
     "algorithm 'regl'; use one of dense, static, set, rigl"),
    ('quickstart.py:level=0.9',
     "is 'level=0.9'; write name=value, .* algorithm, sparsity"),
    ('quickstart.py:sparsity=much', "argument is 'sparsity=much'; write"),
    ('quickstart.py:rigl', "argument is 'rigl'; write"),
    ('spdf.py:nonsense', "config argument is 'nonsense'; write name="),
    ('spdf.py:model=gpt-5', "model 'gpt-5'; use one of gpt2-small"),
    ('spdf.py:algorithm=iterative', "'iterative'; use one of dense, static"),
    ('spdf.py:rate=1', 'names algorithm, sparsity, model'),
    ('books.py:task=dart', "'dart'; use one of e2e, webnlg, dart_"),
    ('finetune.py:task=e2', "task 'e2'; use one of e2e, webnlg"),
    ('iterative_pruning.py:rounds=3', 'names algorithm, sparsity, stop_at'),
    ('variable_spdf.py:sparsity=0.5', 'above the effective 0.75'),
])
def test_a_wrong_config_argument_is_reported_in_one_sentence(
    name, message, monkeypatch
):
  monkeypatch.chdir(ROOT)
  refuse_file(message, f'configs/{name}')


@pytest.mark.process
@pytest.mark.parametrize('words, message', [
    (('configs/none.py', '--config.seed=1'), "configs/none.py'"),
    (('configs/quickstart.py', '--config.optimizer.esp=1e-6'),
     "config field 'optimizer.esp' is unknown; did you mean 'optimizer.eps'"),
    (('configs/quickstart.py', '--config.phases.order[9]=a'),
     "'phases.order[9]' is unknown; did you mean 'phases.order'"),
])
def test_a_command_refuses_a_config_without_a_traceback(
    words, message, tmp_path
):
  workdir = tmp_path / 'run'
  child = start_command(
      'experiments.train', f'--config={words[0]}', *words[1:],
      f'--workdir={workdir}',
  )
  output = finish(child, status=1)
  assert 'Traceback' not in output and message in output
  assert not workdir.exists()


def test_planned_data_is_not_evaluated():
  planned = data.PlannedCorpus('pile', 1000, data.PlannedTokenizer(8))
  run = dataclasses.replace(make_run(), corpus=planned)
  for call in (lifecycle.bigram_baseline, lifecycle.validation_batches):
    refuse("with planning=True, so the data, of corpus 'pile'", call, run)
