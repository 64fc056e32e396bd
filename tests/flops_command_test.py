"""`experiments.flops` prints tables and plans; bad flags get a sentence."""

import csv

from absl.testing import flagsaver
import pytest
from quickstart_runs import small_config

from experiments import flops


@pytest.fixture
def command(capsys, caplog):
  def run(**values):
    flops.flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**values):
      status = flops.main([])
    return status, capsys.readouterr().out

  return run


def test_a_table_is_printed_and_kept(command, tmp_path):
  status, text = command(table='variable', output=str(tmp_path / 'new'))
  assert status == 0
  assert '5 cells: 3 follow, 0 follow otherwise, 0 misprints, 2' in text
  with open(tmp_path / 'new' / 'variable.csv') as file:
    assert len(list(csv.DictReader(file))) == 5


def test_a_table_has_its_models_inference(command):
  status, text = command(table='iterative', inference=True)
  assert status == 0 and '4.34x' in text and 'verdict' not in text


def test_a_config_has_its_phases_and_the_share_of_fine_tuning(command):
  config = small_config(model__preset='gpt-mini')
  status, text = command(config=config, trace=True)
  assert status == 0
  lines = [line.split() for line in text.splitlines()]
  total = next(line for line in lines if line[:1] == ['total'])
  flops_of = {
      line[0]: float(line[5]) for line in lines
      if len(line) == 7 and line[0] in ('pretrain', 'continuation', 'finetune')
  }
  assert float(total[-2]) == pytest.approx(sum(flops_of.values()), rel=1e-3)
  share = flops_of['finetune'] / (flops_of['pretrain'] +
                                  flops_of['continuation'])
  printed = next(x for x in text.splitlines() if x.startswith('fine-tuning is'))
  assert float(printed.split()[2][:-1]) / 100 == pytest.approx(share, abs=2e-3)
  traced = [line for line in lines if len(line) == 6 and line[4] == '0.00%']
  assert [line[0] for line in traced] == list(flops_of)
  assert len(flops_of) == 3


def test_what_cannot_be_printed_is_answered_in_a_sentence(command, caplog):
  for values, message in (
      (dict(table='spd'), "table 'spd' is unknown; did you mean 'spdf'?"),
      (dict(table='spdf', trace=True), '--trace is of a --config'),
      (dict(config=small_config(), output='x'), '--output is of a --table'),
  ):
    caplog.clear()
    status, text = command(**values)
    assert status == 1 and not text
    assert message in caplog.text
  with pytest.raises(flops.app.UsageError, match='give --table or --config'):
    command()
