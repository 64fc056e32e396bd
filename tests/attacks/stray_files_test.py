"""Broken configs and stray names in workdirs are named or ignored."""

import pytest

from spdf_jax.training.checkpoints import workdir
from tests.tiny_run import make_run


@pytest.mark.parametrize('text', [
    b'', b'{"seed": 0, "mod', b'\xff\xfe', b'[1]', b'[' * 200_000,
])
def test_a_broken_config_is_named(tmp_path, text):
  path = tmp_path / 'config.json'
  path.write_bytes(text)
  config = make_run().config
  for read in (
      lambda: workdir.read_workdir_config(tmp_path),
      lambda: workdir.check_workdir(tmp_path, config),
  ):
    with pytest.raises(ValueError, match='config.json .*; delete it') as error:
      read()
    assert str(path) in str(error.value)
    assert 'delete it and repeat the command' in str(error.value)


def test_stray_files_among_checkpoints_are_ignored(tmp_path):
  for name in ('²', '٣', '007', '-1', '1.5', 'x', '3', '12', '0'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert workdir.saved_steps(tmp_path) == [0, 3, 12]
  assert workdir.find_checkpoint(f'{tmp_path}').name == '12'
