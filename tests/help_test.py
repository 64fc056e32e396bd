"""The help texts of the commands can be read and copied from."""

import ast
import pathlib
import subprocess
import sys

import command
import pytest

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = [
    path for path in sorted((ROOT / 'experiments').glob('*.py'))
    if 'console.start(main)' in path.read_text()
]


@pytest.mark.parametrize('path', COMMANDS, ids=[p.stem for p in COMMANDS])
def test_the_examples_of_a_command_can_be_copied(path):
  # A backslash at the end of a line of a docstring that is not raw joins the
  # lines: examples would run together and beyond the width of a terminal.
  lines = ast.get_docstring(ast.parse(path.read_text())).splitlines()
  assert max(map(len, lines)) <= 80
  examples = [i for i, x in enumerate(lines) if x.startswith('  python -m ')]
  assert any(f'experiments.{path.stem}' in lines[i] for i in examples)
  for first in examples:
    last = first
    while lines[last].endswith('\\'):
      last += 1
      assert lines[last].startswith('    ')


@pytest.mark.process
def test_help_does_not_print_a_config():
  done = subprocess.run(
      [sys.executable, '-m', 'experiments.quickstart', '--help'], cwd=ROOT,
      capture_output=True, text=True, check=False,
  )
  assert '--config: ' in done.stdout and 'batch_size' not in done.stdout
  assert len(done.stdout.splitlines()) < 30
  assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.ci
@pytest.mark.parametrize('words, message', [
    ('simulate --config=configs/quickstart.py --systems=0', '--systems=0'),
    ('simulate --figure=roofline', 'need --config'),
    ('simulate --audit --trace=a.json', 'need --config'),
    ('generate --model=none --seed=-1', '--seed=-1: -1 is not'),
    (f'generate --model=none --seed={2**63}', f'--seed={2**63}: {2**63} is'),
])
def test_flags_that_would_be_ignored_or_fail_later_are_refused(words, message):
  done = command.run(*words.split())
  assert done.status == 1 and message in done.log


@pytest.mark.process
def test_a_launcher_refuses_a_program_that_does_not_exist():
  done = subprocess.run(
      [sys.executable, '-m', 'experiments.launch.local', '--', 'no-program'],
      cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
  )
  assert done.returncode == 1 and "'no-program' is no program" in done.stderr
  assert 'Traceback' not in done.stderr
