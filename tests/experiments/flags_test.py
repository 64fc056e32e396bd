"""Flags of the commands: all can be imported together; help and fields."""

import importlib
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest

from experiments.launch import console
from experiments.scores import scoring_flags
from tests import command

pytestmark = pytest.mark.ci

COMMANDS = sorted(
    path.stem for path in (command.ROOT / 'experiments').glob('*.py')
    if path.stem != '__init__'
)
CONFIG = command.ROOT / 'configs' / 'base.py'
TEXTS = ('string', 'comma separated list of strings')


def word_for(flag):
  """Returns a word that a flag takes; none for numbers."""
  if flag.name == 'config':
    return str(CONFIG)
  if flag.flag_type() in TEXTS:
    return 'a,b'
  return next(iter(getattr(flag.parser, 'enum_values', ())), None)


def test_commands_imported_together_parse_their_own_flags(monkeypatch):
  modules = {
      name: importlib.import_module(f'experiments.{name}') for name in COMMANDS
  }
  for name, module in modules.items():
    own = {flag: module.FLAGS[flag] for flag in module.FLAGS}
    given = {
        flag: word for flag in own
        if own[flag].default is None and (word := word_for(own[flag]))
    }
    words = [name, *(f'--{flag}={word}' for flag, word in given.items())]
    monkeypatch.setattr(sys, 'argv', words)
    try:
      with flagsaver.flagsaver():
        console.register(module.FLAGS)
        assert flags.FLAGS(words) == [name]
        for flag in own:
          value = getattr(module.FLAGS, flag)
          if flag == 'config':
            assert value.phase_defaults.length
          elif flag not in given:
            assert value == own[flag].default
          else:
            assert value in (given[flag], given[flag].split(','))
    finally:
      module.FLAGS.unparse_flags()
  sizes = {
      name: modules[name].FLAGS['batch_size'].default
      for name in ('evaluate', 'simulate')
  }
  assert sizes == {'evaluate': 8, 'simulate': 1}


def test_a_config_field_can_be_set_in_two_commands_of_one_process():
  for seed in (3, 4):
    finished = command.run(
        'train', f'--config={CONFIG}', f'--config.seed={seed}',
        '--fields',
    )
    assert finished.status == 0
    assert f'--config.seed={seed}\n' in finished.output
  assert '--config.data.task=\'\'\n' in finished.output
  assert '--config.phase_defaults.algorithm.name=dense\n' in finished.output


def test_answers_fit_a_model_of_few_positions_unless_a_length_is_given():
  own = flags.FlagValues()
  settings = scoring_flags.define(own)
  own(['command'])
  lengths = [settings(None, n).max_new_tokens for n in (64, 128, 1024)]
  assert lengths == [32, 64, 64]
  own(['command', '--max_new_tokens=60'])
  assert settings(None, 64).max_new_tokens == 60


def help_of(name, word='--help'):
  return subprocess.run(
      [sys.executable, '-m', f'experiments.{name}', word], text=True,
      cwd=command.ROOT, stdout=subprocess.PIPE, check=True,
  ).stdout


@pytest.mark.process
@pytest.mark.parametrize('word', ['--help', '--helpfull'])
def test_help_ends_with_status_0_and_names_the_flag_that_lists_fields(word):
  text = help_of('train', word)
  assert '--[no]fields' in text and '--workdir' in text


@pytest.mark.process
def test_help_does_not_print_a_config():
  text = help_of('quickstart')
  assert '--config: ' in text and 'batch_size' not in text
  assert len(text.splitlines()) < 30
  assert max(map(len, text.splitlines())) <= 80
