"""The command: sizes of tasks, corpora to train on, one sentence otherwise."""

import json
import os
import subprocess
import sys

import pytest

from spdf_jax.data import open_corpus
from spdf_jax.training import Run
from tests import command
from tests.quickstart_runs import ROOT
from tests.quickstart_runs import small_config
from tests.real_data import data_path

pytestmark = pytest.mark.ci


def run(*arguments):
  return command.run('prepare', *arguments)


@pytest.fixture
def books(tmp_path):
  path = tmp_path / 'books.jsonl'
  path.write_text(''.join(
      json.dumps({'text': f'Chapter {i}. ' * 40}) + '\n' for i in range(60)
  ))
  return path


@pytest.mark.process
def test_workers_of_a_script_without_a_guard_end_in_one_sentence(
    books, tmp_path
):
  script = tmp_path / 'script.py'
  call = (
      f'preparation.prepare_files({str(books)!r}, tokenizer="bytes", '
      f'output={str(tmp_path / "out")!r}, validation=0.1, workers=2)\n'
  )
  guard = "if __name__ == '__main__':\n  "
  for text, status in ((call, 1), (guard + call, 0)):
    script.write_text(f'from experiments import preparation\n{text}')
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True,
        env=os.environ | {'PYTHONPATH': str(ROOT)}, check=False, text=True,
    )
    assert done.returncode == status, done.stderr
    last = done.stderr.splitlines()[-1:]
    assert status == 0 or last[0].startswith(
        'ChildProcessError: one of workers=2 processes has ended. In a script, '
        "prepare under `if __name__ == '__main__':`"
    )


def test_sizes_of_a_task_are_printed():
  done = run('--task=e2e', f'--input={data_path("e2e")}', '--dry_run')
  assert done.status == 0, done.log
  rows = [line.split() for line in done.output.splitlines()[1:]]
  assert rows == [
      ['train', '42,061', '4,862'], ['validation', '4,672', '547'],
      ['test', '4,693', '630'],
  ]


def test_a_corpus_is_written_and_can_be_trained_on(books, tmp_path):
  output = tmp_path / 'corpora' / 'books'
  done = run(f'--input={books}', '--tokenizer=bpe-270', f'--output={output}',
             '--validation=0.2', '--test=0.2', '--workers=2')
  assert done.status == 0, done.log
  corpus = open_corpus(output)
  assert corpus.fingerprint in done.output
  assert 'documents' in done.output
  changes = dict(
      data__corpus=str(output), data__tokenizer='', data__task='',
      phases__order=('pretrain', 'continuation'),
  )
  recipe = Run.create(small_config(**changes, model__vocab_size=270))
  assert recipe.fingerprints['corpus'] == corpus.train.fingerprint
  with pytest.raises(ValueError, match='token ids up to 269 and the model a'):
    Run.create(small_config(**changes, model__vocab_size=269))


def test_shards_are_prepared_and_joined_by_their_commands(books, tmp_path):
  settings = (f'--output={tmp_path / "out"}', f'--input={books}',
              '--tokenizer=bytes', '--validation=0.2', '--test=0.2')
  first = run(*settings, '--shard=1/2')
  assert 'shard 1/2 is prepared; 2/2 to go' in first.output, first.log
  joined = run('--join', settings[0])
  assert joined.status == 1 and 'has no shard 2/2' in joined.log
  assert 'join the shards' in run(*settings, '--shard=2/2').output
  joined = run('--join', settings[0])
  assert open_corpus(tmp_path / 'out').fingerprint in joined.output
  assert 'is prepared already' in run(*settings, '--shard=2/2').output
