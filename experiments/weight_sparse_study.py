r"""Trains weight-sparse GPTs and finds circuits: --study=NAME --output=DIR.

  python -m experiments.weight_sparse_study --study=losses --output=DIR
  python -m experiments.weight_sparse_study --study=speed --output=DIR
  python -m experiments.weight_sparse_study --study=circuit --output=DIR \
    --runs=width64-kept4-0 --target=0.3

losses: trains configs/weight_sparse.py at every width and kept fraction, and
two of these with three seeds, in folders of --workdir; writes the validation
loss of each run as it ends to losses.json, and its plot over the kept weights
to losses.png. The same command goes on: runs in losses.json are not trained
again, also on another machine, and a run that was stopped continues from its
checkpoint.

speed: times steps of hard_threshold and of a static mask at 1/64 kept, against
dense training at the same width, alternately; prints a table, speed.json.

circuit: for each run of --runs, scores the tasks of weight_sparse/tasks.py and
finds few nodes that solve --task at the loss --target, by learned masks, with
all other nodes at their mean; adds each run to circuits.json, where it replaces
the same run with the same task and target, and writes a drawing, RUN.png. A run
that does not reach the loss with all its nodes has no circuit.
"""

from collections import Counter
from collections.abc import Iterator
import dataclasses
import itertools
import pathlib
import re
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import numpy as np

from configs import weight_sparse
from experiments.benchmarks import machine
from experiments.benchmarks import measuring
from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.papers import json_files
from experiments.weight_sparse import circuits
from experiments.weight_sparse import figures
from experiments.weight_sparse import model as models
from experiments.weight_sparse import tasks
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import markdown
from spdf_jax.runs import style
from spdf_jax.training import initial_state

FLAGS = flags.FlagValues()
_STUDY = flags.DEFINE_enum(
    'study', None, ['losses', 'speed', 'circuit'], 'The study.', required=True,
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder of tables and figures.', required=True,
    flag_values=FLAGS,
)
_WORKDIR = flags.DEFINE_string(
    'workdir', 'runs/weight_sparse', 'Folder of runs.', flag_values=FLAGS
)
_WIDTHS = flags.DEFINE_list(
    'widths', ['32', '64', '128'], 'd_model of losses and speed.',
    flag_values=FLAGS,
)
_KEPT = flags.DEFINE_list(
    'kept', ['1', '4', '16', '64', '256'],
    'Weights of which one is kept, of losses.', flag_values=FLAGS,
)
_REPEATED = flags.DEFINE_list(
    'repeated', ['64/1', '64/64'], 'WIDTH/KEPT of losses with all seeds.',
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 3, 'Runs of each of --repeated.', 1, flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer(
    'steps', 2000, 'Steps of losses.', 10, flag_values=FLAGS
)
_RUNS = flags.DEFINE_list(
    'runs', [], 'Names of runs of losses, for circuit.',
    flag_values=FLAGS,
)
_TASK = flags.DEFINE_enum(
    'task', 'quote', list(tasks.TASKS), 'The task of circuit.',
    flag_values=FLAGS,
)
_TARGET = flags.DEFINE_float(
    'target', 0.15,
    'Loss of the task, in nats, that a circuit reaches; a guess has 0.69.',
    0, 0.6, flag_values=FLAGS,
)


_TIMED = 5  # Steps that are timed together.
# Tokens and words of the prompts that circuits are found on.
_LENGTH, _WORDS = 10, 192


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  try:
    points = _points()
  except ValueError as error:
    raise app.UsageError(
        f'--widths, --kept and --repeated are whole numbers ({error}).'
    ) from error
  compilation_cache.prepare()
  studies = dict(losses=_losses, speed=_speed, circuit=_circuits)
  output = pathlib.Path(_OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  return console.run(argv, studies[_STUDY.value], output, points)


def _points() -> list[tuple[int, int, int]]:
  """Returns width, kept weights as one of so many, and seed of all runs."""
  points = [
      (width, kept, 0) for width, kept in itertools.product(
          map(int, _WIDTHS.value), map(int, _KEPT.value)
      )
  ]
  for pair in _REPEATED.value:
    width, kept = map(int, pair.split('/'))
    points += [(width, kept, seed) for seed in range(1, _SEEDS.value)]
  return points


def config_of(width: int, kept: int, seed: int, steps: int) -> Any:
  """Returns the config of a point."""
  config = weight_sparse.get_config(f'kept=1/{kept},width={width}')
  config.seed = seed
  config.phases.pretrain.duration = f'{steps} steps'
  config.eval_every = max(steps // 4, 1)
  config.checkpoints.every = max(steps // 20, 1)
  return config


def _losses(
    output: pathlib.Path, points: list[tuple[int, int, int]]
) -> Iterator[str]:
  path, steps = output / 'losses.json', _STEPS.value
  rows = json_files.read_json(path) if path.exists() else []
  json_files.check_same('output', output, rows, steps=steps)
  done = [(row['width'], row['kept'], row['seed']) for row in rows]
  for width, kept, seed in points:
    if (width, kept, seed) in done:
      continue
    run = training.Run.create(
        config_of(width, kept, seed, steps), _folder(width, kept, seed)
    )
    corpus = run.corpus.fingerprint
    json_files.check_same('output', output, rows, corpus=corpus)
    lifecycle.finish(run.open())
    finished = runs.read_run(run.workdir)
    rows.append(dict(
        width=width, kept=kept, seed=seed,
        kept_weights=round(
            finished.sparsified_parameters
            * (1 - finished.phases[-1].sparsity)
        ),
        loss=finished.rows[-1]['validation/loss'], steps=steps, corpus=corpus,
        processor=machine.describe_machine()['processor'],
    ))
    json_files.write_json(path, rows, indent=1)
    done.append((width, kept, seed))
    trained = sum(point in done for point in points)
    yield (
        f'{trained} of {len(points)}: width {width}, 1/{kept} kept, seed '
        f'{seed}: {rows[-1]["loss"]:.3f}'
    )
  style.save(figures.plot_losses(rows), output / 'losses.png')
  yield f'{path} and losses.png are written'


def _folder(width: int, kept: int, seed: int) -> pathlib.Path:
  """Returns the folder of a run."""
  return pathlib.Path(_WORKDIR.value, f'width{width}-kept{kept}-{seed}')


def _speed(
    output: pathlib.Path, points: list[tuple[int, int, int]]
) -> Iterator[str]:
  rows = []
  rng = np.random.default_rng(0)
  for width in dict.fromkeys(width for width, _, _ in points):
    config = config_of(width, 64, 0, 100)
    # Uses the final sparsity from the first step on.
    for _, rule in config.phases.pretrain.algorithm.groups:
      rule.update(sparsity=rule['sparsity']['end_value'])
    static = config_of(width, 1, 0, 100)
    static.phases.pretrain.algorithm.update(name='static', sparsity=63 / 64)
    calls = {
        'dense': _stepper(config_of(width, 1, 0, 100)),
        'hard_threshold': _stepper(config), 'static': _stepper(static),
    }
    timings = measuring.interleave(list(calls.values()), repeats=9)
    for i, name in enumerate(calls):
      ratios = timings.wall[i] / timings.wall[0]
      ratio, low, high = measuring.median_interval(ratios, rng)
      rows.append(dict(
          width=width, step=name, ratio=ratio, low=low, high=high,
          milliseconds=1e3 * float(np.median(timings.wall[i])) / _TIMED,
      ))
  json_files.write_json(output / 'speed.json', rows, indent=1)
  yield markdown.markdown_table(
      ['width', 'step', 'ms', 'over dense', '95 %'],
      [
          [
              str(r['width']), r['step'], f'{r["milliseconds"]:.0f}',
              f'{r["ratio"]:.2f}', f'{r["low"]:.2f} to {r["high"]:.2f}',
          ] for r in rows
      ],
      numbers=['width', 'ms', 'over dense'],
  )


def _stepper(config: Any) -> Any:
  """Returns a function that takes `_TIMED` steps of a config."""
  run = training.Run.create(config)
  programs = run.programs
  state = [initial_state.create(programs)]
  batch = programs.device_batch_at(0)

  def take():
    for _ in range(_TIMED):
      step, dense = programs.prepare_step(state[0], 0)
      state[0], metrics = step(dense, batch)
    return metrics

  return take


def _circuits(output: pathlib.Path, points: list[Any]) -> Iterator[str]:
  del points
  if not _RUNS.value:
    raise ValueError('--runs is empty; give names of trained runs.')
  for workdir in (pathlib.Path(_WORKDIR.value, run) for run in _RUNS.value):
    model, params, prompts, corpus, decode = _subject_of(workdir)
    scores = {}
    for name, (_, test) in prompts.items():
      loss, right = circuits.solved(model, params, test)
      scores[name] = dict(loss=loss, accuracy=right)
      yield f'{workdir.name}, {name}: loss {loss:.3f}, {right:.0%} right'
    train, test = prompts[_TASK.value]
    started = time.process_time()
    circuit = circuits.find(model, params, corpus, train, test, _TARGET.value)
    record_circuit(output / 'circuits.json', dict(
        run=workdir.name, task=_TASK.value, target=_TARGET.value,
        loss=runs.read_run(workdir).rows[-1]['validation/loss'], tasks=scores,
        circuit=circuit and dataclasses.asdict(circuit) | dict(
            size=circuit.size
        ),
        processor_seconds=round(time.process_time() - started, 1),
    ))
    if circuit is None:
      yield f'This does not reach {_TARGET.value:g}: there is no circuit.'
      continue
    path = output / f'{workdir.name}.png'
    style.save(
        figures.plot_circuit(model, params, circuit, test, decode), path
    )
    yield (
        f'{circuit.size} nodes and {circuit.edges} weights reach '
        f'{circuit.loss:.3f}, {circuit.accuracy:.0%} right; {path} is written.'
    )


def record_circuit(path: pathlib.Path, row: dict[str, Any]) -> None:
  """Adds a record of a circuit to a file.

  It replaces the one of the same run, task and target.

  Args:
    path: File of the records, which need not exist.
    row: The record.
  """
  rows = json_files.read_json(path) if path.exists() else []
  rows = [
      other for other in rows
      if any(other[name] != row[name] for name in ('run', 'task', 'target'))
  ]
  json_files.write_json(path, [*rows, row], indent=1)


class _Subject(NamedTuple):
  """A trained model, and what its circuits are found with."""

  model: models.WeightSparseGPT
  params: Any
  prompts: dict[str, list[tasks.Prompts]]
  corpus: np.ndarray
  decode: Any


def _subject_of(workdir: pathlib.Path) -> _Subject:
  """Returns the model and parameters of a run, prompts and text of its corpus.

  Words of the prompts are frequent ones of the text; every other word is for
  learning, the others are for comparing.
  """
  name = re.fullmatch(r'width(\d+)-kept(\d+)-(\d+)', workdir.name)
  if not name:
    raise ValueError(
        f'--runs has {workdir.name}, which --study=losses has not written; '
        'give names of its runs, such as width64-kept4-0.'
    )
  run = training.Run.create(config_of(*map(int, name.groups()), _STEPS.value))
  model, _ = models.make_model(**run.config.model.sizes.arguments)
  params = training.read_params(
      training.find_checkpoint(str(workdir)), run.programs.abstract_state.params
  )
  tokenizer = run.corpus.tokenizer
  corpus = np.concatenate(
      [batch.inputs for batch in lifecycle.validation_batches(run)[:4]]
  )
  text = tokenizer.decode(corpus.ravel().tolist())
  words = [
      word for word, _ in
      Counter(re.findall('[a-z]{3,9}', text)).most_common(_WORDS)
  ]
  prompts = {
      name: [
          tasks.make_prompts(task, tokenizer.encode, words[i::2], _LENGTH)
          for i in range(2)
      ] for name, task in tasks.TASKS.items()
  }
  return _Subject(model, params, prompts, corpus, tokenizer.decode)


if __name__ == '__main__':
  console.start(main, FLAGS)
