"""`experiments.flops` prints tables and plans; bad flags get a sentence."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[1]


def run(*flags):
  environment = os.environ | {'PYTHONDONTWRITEBYTECODE': '1'}
  return subprocess.run(
      [sys.executable, '-m', 'experiments.flops', *flags],
      cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
  )


def test_a_table_is_printed_and_kept(tmp_path):
  done = run('--table=variable', f'--output={tmp_path / "new"}')
  assert done.returncode == 0, done.stderr
  assert '5 cells: 3 follow, 0 follow otherwise, 0 misprints, 2' in done.stdout
  with open(tmp_path / 'new' / 'variable.csv') as file:
    assert len(list(csv.DictReader(file))) == 5


def test_a_table_has_its_models_inference():
  text = run('--table=iterative', '--inference').stdout
  assert '4.34x' in text and 'verdict' not in text


def test_a_config_has_its_phases_and_the_share_of_fine_tuning():
  done = run('--config=configs/quickstart.py', '--trace')
  assert done.returncode == 0, done.stderr
  lines = [line.split() for line in done.stdout.splitlines()]
  total = next(line for line in lines if line[:1] == ['total'])
  flops_of = {
      line[0]: float(line[5]) for line in lines
      if len(line) == 7 and line[0] in ('pretrain', 'continuation', 'finetune')
  }
  assert float(total[-2]) == pytest.approx(sum(flops_of.values()), rel=1e-3)
  share = flops_of['finetune'] / (flops_of['pretrain'] +
                                  flops_of['continuation'])
  (printed,) = [line for line in lines if line[:2] == ['fine-tuning', 'is']]
  assert float(printed[2][:-1]) / 100 == pytest.approx(share, abs=2e-3)
  traced = [line for line in lines if len(line) == 6 and line[4] == '0.00%']
  assert [line[0] for line in traced] == list(flops_of)
  assert len(flops_of) == 3


@pytest.mark.parametrize('flags, message', [
    (['--table=spd'], "table 'spd' is unknown; did you mean 'spdf'?"),
    (['--table=spdf', '--trace'], '--trace needs --config'),
    (
        ['--config=configs/quickstart.py', '--output=x'],
        '--output needs --table',
    ),
    ([], 'give --table or --config'),
])
def test_what_cannot_be_printed_is_answered_in_a_sentence(flags, message):
  done = run(*flags)
  assert done.returncode and message in done.stdout + done.stderr
