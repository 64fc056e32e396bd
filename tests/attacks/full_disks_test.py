"""Where files cannot grow, commands name them, and continue afterwards."""

import contextlib
import dataclasses

import pytest

from spdf_jax import interop
from tests import command
from tests.attacks.processes_test import files_in
from tests.hf_models import LLAMA
from tests.hf_models import make_params

pytest.importorskip('safetensors.numpy')
resource = pytest.importorskip('resource')

COMMANDS = {
    'convert': ('--model={0}/hf', '--to_hf={0}/x'),
    'prepare': (
        '--input={0}/a.txt', '--tokenizer=bytes', '--output={0}/x',
        '--shard=1/1', '--workers=1', '--validation=0.2', '--test=0.2',
    ),
}


@contextlib.contextmanager
def largest_file(size):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize('name', COMMANDS)
def test_a_file_that_cannot_grow_is_named_and_written_later(name, tmp_path):
  config = dataclasses.replace(LLAMA, vocab_size=257)
  params = make_params(config)
  interop.save_hf(tmp_path / 'hf', config, params)
  (tmp_path / 'a.txt').write_text('To be, or not to be.\n\n' * 4000)
  output = tmp_path / 'x'
  if name == 'convert':  # An earlier export stays until it is replaced.
    params['ln_f']['scale'] *= 2
    interop.save_hf(output, config, params)
  old = files_in(output) if output.exists() else {}
  arguments = [word.format(tmp_path) for word in COMMANDS[name]]
  with largest_file(1 << 14):
    done = command.run(name, *arguments)
  assert done.status == 1 and 'traceback' not in done.log
  assert f"File too large: '{output}" in done.log
  assert not old or files_in(output) == old
  done = command.run(name, *arguments)
  assert done.status == 0, done.log
  assert not old or files_in(output) == files_in(tmp_path / 'hf')
