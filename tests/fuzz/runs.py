"""Fuzzing of runs: checkpoints, plans, metrics, mirrors, races, teachers."""

from collections.abc import Callable
import concurrent.futures
import contextlib
import json
import pathlib
import shutil
from unittest import mock

import etils.epath  # noqa: F401  # Its backend is chosen at import.
import numpy as np

from experiments.launch import config_file
from experiments.launch import mirror
from experiments.pool import worker as pool_worker
from spdf_jax.costs import plan_costs
from spdf_jax.files import seal
from spdf_jax.runs.read import read_run
from spdf_jax.training import initial_state
from spdf_jax.training import train
from spdf_jax.training.loop import metrics
from tests.experiments import race_test
from tests.fuzz import damage
from tests.tiny_run import make_config
from tests.tiny_run import make_run
from tests.tiny_run import run_of
from tests.training import distillation_test

Target = Callable[[np.random.Generator], str]


def outcome_by_state(sound: pathlib.Path) -> Callable[[pathlib.Path], str]:
  """Returns a function that opens a damaged run and names the outcome.

  Args:
    sound: Workdir of the sound run. Its last checkpoint is deleted.
  """
  states = {}
  for step in (14, 12):
    run = make_run().open(sound)
    states[step] = damage.bits_of(run.state)
    run.close()
    shutil.rmtree(sound / 'checkpoints/14', ignore_errors=True)

  def outcome(workdir):
    run = make_run().open(workdir)
    run.close()
    step = int(run.state.step)
    if damage.bits_of(run.state) != states.get(step):
      return 'silent'
    return 'same' if step == 14 else 'refused'

  return outcome


def fuzz_checkpoints(folder: pathlib.Path) -> Target:
  """Damages the latest of three checkpoints, and opens the run again."""
  train(make_run().open(folder / 'sound'))
  copy = shutil.copytree(folder / 'sound', folder / 'copy')
  outcome = outcome_by_state(folder / 'sound')

  def attack(rng):
    run = damage.copy_anew(copy, folder / 'run')
    damage.flip_any_bit(run / 'checkpoints/14', rng)
    if rng.random() < 0.1:
      damage.run_command('verify', f'--folder={run}')
    return outcome(run)

  return attack


def write_run(folder: pathlib.Path) -> None:
  """Trains a run in the subfolder `sound`, and writes its plan."""
  run = make_run().open(folder / 'sound')
  plan = plan_costs.describe_plan(run, 'sound') | {'bigram': None}
  (folder / 'sound' / 'plan.json').write_text(json.dumps(seal(plan), indent=2))
  train(run)


def copy_run(folder: pathlib.Path) -> pathlib.Path:
  """Copies the run without its checkpoints to the subfolder `run`."""
  shutil.rmtree(folder / 'run', ignore_errors=True)
  ignored = shutil.ignore_patterns('checkpoints')
  return shutil.copytree(folder / 'sound', folder / 'run', ignore=ignored)


def fuzz_runs(folder: pathlib.Path) -> Target:
  """Damages the plan or metrics of a finished run, and reads it."""
  write_run(folder)
  sound = read_run(folder / 'sound')
  names = 'plan.json', 'metrics.jsonl'

  def attack(rng):
    path = copy_run(folder) / rng.choice(names)
    if rng.random() < 0.5:
      damage.flip_bit(path, rng)
    else:
      lines = path.read_text().split('\n')
      name = str(damage.any_value(rng))
      line = json.dumps({name: damage.any_value(rng), 'step': 3})
      lines[rng.integers(len(lines))] = rng.choice([line, '[' * 10**5, ''])
      path.write_text('\n'.join(lines))
    with mock.patch.object(metrics.logger, 'warning') as warned:
      record = read_run(folder / 'run')
    if record == sound:
      return 'same'
    return 'accepted' if warned.called else 'silent'

  return attack


def fuzz_plans(folder: pathlib.Path) -> Target:
  """Changes a field of plan.json or of a row of metrics; writes the report."""
  write_run(folder)

  def attack(rng):
    copy = copy_run(folder)
    if rng.random() < 0.7:
      damage.change_field(copy / 'plan.json', rng)
    else:
      path = copy / 'metrics.jsonl'
      lines = path.read_text().splitlines()
      number = rng.integers(len(lines))
      (copy / 'row').write_text(lines[number])
      damage.change_field(copy / 'row', rng)
      lines[number] = (copy / 'row').read_text()
      path.write_text('\n'.join(lines) + '\n')
    if rng.random() < 0.2:
      damage.run_command(
          'figures', '--figure=all', f'--runs={copy}',
          f'--output={copy / "out"}',
      )
    else:
      damage.run_command(
          'report', f'--runs={copy}', f'--output={copy / "out"}'
      )
    return 'accepted'

  return attack


def fuzz_mirrors(folder: pathlib.Path) -> Target:
  """Damages a file of a mirror, and continues its run on another machine."""
  bucket, url = folder / 'bucket', str(folder / 'run')
  with mirror.mirrored(folder / 'sound', str(bucket)):
    train(make_run().open(folder / 'sound'))
  outcome = outcome_by_state(folder / 'sound')

  def attack(rng):
    shutil.rmtree(folder / 'elsewhere', ignore_errors=True)
    damage.copy_anew(bucket, folder / 'run')
    manifest, = (folder / 'run/manifests').iterdir()
    others = sorted(p for p in (folder / 'run').rglob('*') if p.is_file())
    if rng.random() < 0.3:
      damage.change_field(manifest, rng, resealed=0)
    else:
      damage.damage(rng.choice([manifest, *others]), rng)
    with mirror.mirrored(folder / 'elsewhere', url):
      return outcome(folder / 'elsewhere')

  return attack


def fuzz_teachers(folder: pathlib.Path) -> Target:
  """Damages the teacher of a student between two launches."""
  distillation_test.write_model(folder / 'sound', distillation_test.TEACHER)
  config = make_config(
      loss__teacher=str(folder / 'run'), loss__temperature=1.0,
      loss__teacher_weight=0.5,
  )
  shutil.copytree(folder / 'sound', folder / 'run')

  def first_loss():
    programs = run_of(config).programs
    state = initial_state.create(programs)
    _, values = programs.step(state, programs.batch_at(0))
    return values['train/objective']

  loss = first_loss()

  def attack(rng):
    damage.copy_anew(folder / 'sound', folder / 'run')
    paths = sorted(p for p in (folder / 'run').rglob('*') if p.is_file())
    meta = folder / 'run/checkpoints/0/meta/metadata'
    if rng.random() < 0.3:
      damage.change_field(meta, rng)
    else:
      damage.damage(rng.choice(paths), rng)
    return 'same' if first_loss() == loss else 'silent'

  return attack


def fuzz_races(folder: pathlib.Path) -> Target:
  """Damages files of a race whose runs are finished, and writes its report."""
  configs = {
      'dense.py': race_test.small_config(0.5),
      'sparse.py:x=1,y=2': race_test.small_config(0.9),
  }
  flags = (
      f'--configs={",".join(configs)}', '--budget=1e10FLOPs', '--seeds=2',
      f'--workdir={folder / "run"}',
  )

  def outcome(run, workdir):
    loss = 2 + 0.01 * run.config.seed
    steps = run.plan.total_steps
    return {
        'validation/loss': loss, 'flops': 1e9, 'steps': steps,
        'curve': [[steps // 2, 1.0, 2.5], [steps, 2.0, loss]],
    }

  @contextlib.contextmanager
  def made_up():
    with (
        mock.patch.object(pool_worker, 'train', outcome),
        mock.patch.object(
            config_file.Parser, 'parse', lambda self, name: configs[name]
        ),
        mock.patch.object(
            concurrent.futures, 'ProcessPoolExecutor',
            lambda *args: concurrent.futures.ThreadPoolExecutor(1),
        ),
    ):
      yield

  def table():
    text = damage.run_command('race', *flags)
    return [line for line in text.splitlines() if line.startswith('|')]

  with made_up():
    sound = table()
  shutil.copytree(folder / 'run', folder / 'sound')

  def attack(rng):
    damage.copy_anew(folder / 'sound', folder / 'run')
    names = 'race.json', 'outcome.json'
    paths = sorted(
        p for p in (folder / 'run').rglob('*.json') if p.name in names
    )
    path = rng.choice(paths)
    if rng.random() < 0.5:
      damage.change_field(path, rng, resealed=0)
    else:
      damage.damage(path, rng)
    with made_up():
      return 'same' if table() == sound else 'silent'

  return attack
