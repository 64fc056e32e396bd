"""experiments.own_loop trains, keeps its zeros and continues bit for bit."""

import shutil

import numpy as np
import pytest

from experiments import own_loop

pytestmark = pytest.mark.ci


def test_a_loop_of_ones_own_continues_bit_for_bit(
    tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(own_loop, 'EVERY', 3)
  text = np.frombuffer(b'one two three four five six seven eight ' * 9, 'u1')
  arguments = dict(steps=9, sparsity=0.75, width=64)
  whole = own_loop.train(text, tmp_path / 'a', **arguments)
  zeros = [
      line for line in capsys.readouterr().out.splitlines()
      if line.startswith('sparsified layers')
  ]
  # Two thirds of the steps are sparse; the last checkpoint is dense.
  assert [line.split()[2] for line in zeros] == ['75.00%', '75.00%', '0.00%']
  shutil.rmtree(tmp_path / 'a' / '9')
  assert own_loop.train(text, tmp_path / 'a', **arguments) == whole
  assert whole[-1] < whole[0]
