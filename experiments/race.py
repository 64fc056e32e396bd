r"""Trains configs for equal seconds or equal FLOPs, and compares their losses.

  python -m experiments.race --budget=30min --seeds=5 --workdir=runs/race \
    --configs=configs/quickstart.py:sparsity=0.5,configs/quickstart.py
  python -m experiments.race --budget=1e15FLOPs --rates=1e-3,2e-3,4e-3 \
    --configs=a.py,b.py --seeds=5 --workdir=runs/race

The durations and warm-ups of a config's phases, and the steps at which its
masks are updated, are multiplied by one factor, so that its training takes the
budget. Seconds are counted at a pace: steps of all configs are timed first, in
turn and on all cores, which should be idle. Runs are then trained one on each
core; if stopped or killed, the same command continues. Phases that read a task
are left out.

With --rates every config is tuned on seeds 101 to 103: it is trained at each of
these peak learning rates, and the rate of least mean loss is used for all
seeds; a later phase keeps its share of the first one's peak. Without, configs
have the rates that they state. table.md, results.json and race.png in the
workdir have the final validation losses, their differences from the first
config, paired by seed, with 95 % intervals, and the loss over the budget.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import statistics
from typing import Any, NamedTuple

from absl import app
from absl import flags
import ml_collections

from experiments.benchmarks import machine
from experiments.benchmarks import measuring
from experiments.launch import compilation_cache
from experiments.launch import config_file
from experiments.launch import console
from experiments.launch import grid as grids
from experiments.papers import arms
from experiments.papers import race_report
from experiments.papers.race_report import Budget
from experiments.papers.race_report import PhaseCost
from experiments.pool import identity as pool_identity
from experiments.pool import pool
from experiments.pool import processes as pool_processes
from experiments.pool import worker as pool_worker
from spdf_jax import files
from spdf_jax import training
from spdf_jax.costs import plan_costs
from spdf_jax.sparsity.algorithms import from_config
from spdf_jax.training import initial_state

FLAGS = flags.FlagValues()
_CONFIGS = flags.DEFINE_string(
    'configs', None, 'Config files with their arguments, separated by commas.',
    flag_values=FLAGS,
)
_BUDGET = flags.DEFINE_string(
    'budget', None, 'Seconds (90s, 30min, 2h) or FLOPs (1e15FLOPs) of a run.',
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 3, 'Number of runs of each config, with seeds 1, 2, …',
    lower_bound=1, upper_bound=100, flag_values=FLAGS,
)
_RATES = flags.DEFINE_list(
    'rates', [],
    'Peak learning rates to choose from on seeds 101 to 103, separated by '
    'commas.', flag_values=FLAGS,
)
_SPREAD = flags.DEFINE_float(
    'spread', 0.03,
    'With --rates: largest difference between the losses of seeds at the best '
    'rate, in nats.', lower_bound=0.0,
    flag_values=FLAGS,
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder for runs, table and figure.', flag_values=FLAGS
)

_RECORD = 'race.json'
"""File of a race's configs, data, budget and costs of steps."""

_EVALUATIONS = 20
_TUNING_SEEDS = 101, 102, 103  # Above those of --seeds, which are judged.
_TIMED_ROUNDS = 21
_SECONDS = {'s': 1, 'min': 60, 'h': 3600}


@dataclasses.dataclass(frozen=True)
class Racer:
  """A config in a race, as the pool of runs sees it: an arm without parent."""

  folder: str
  method: str = 'config'
  metric: str = arms.PRETRAINED
  task: str = ''
  parent: None = None
  rate_of: None = None


class Runner(NamedTuple):
  """Callable that runs the jobs of a race; it is sent to worker processes.

  Attributes:
    configs: Configs, with the durations of the race, by the folder of a racer.
    directory: Folder of the runs.
  """

  configs: Mapping[str, ml_collections.ConfigDict]
  directory: str

  def __call__(self, job: pool.Job) -> dict[str, Any]:
    """Runs or resumes a job; returns its outcome."""
    return pool_worker.run_job(
        pathlib.Path(self.directory, job.name),
        lambda workdir: pool_worker.train(
            training.Run.create(self.config(job)), workdir
        ),
    )

  def config(self, job: pool.Job) -> ml_collections.ConfigDict:
    """Returns the config of a run."""
    config = with_rate(self.configs[job.arm.folder], job.point.get('rate'))
    config.seed = job.seed
    return config

  def is_there(self, job: pool.Job) -> bool:
    """Returns whether a run is finished."""
    return pathlib.Path(self.directory, job.name, pool_worker.OUTCOME).exists()


def parse_budget(text: str) -> Budget:
  """Parses a budget.

  Raises:
    ValueError: the text is no positive number with a unit.

  Example:
    >>> parse_budget('30min'), parse_budget('1e16FLOPs')
    (Budget(amount=1800.0, unit='seconds'), Budget(amount=1e+16, unit='FLOPs'))
  """
  match = re.fullmatch(
      r'([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]+)?)(s|min|h|FLOPs)', text
  )
  if match is None or not float(match[1]) > 0:
    raise ValueError(
        f'budget is {text!r}; give seconds as 90s, 30min or 2h, or FLOPs as '
        '1e15FLOPs.'
    )
  if match[2] == 'FLOPs':
    return Budget(float(match[1]), 'FLOPs')
  return Budget(float(match[1]) * _SECONDS[match[2]], 'seconds')


def parse_rates(texts: Sequence[str]) -> tuple[float, ...]:
  """Parses peak learning rates.

  Raises:
    ValueError: a text is no positive number, or a number occurs twice.
  """
  try:
    rates = tuple(map(float, texts))
  except ValueError:
    rates = ()
  if (
      not rates or not all(0 < rate < math.inf for rate in rates)
      or len(set(rates)) < len(rates)
  ):
    raise ValueError(
        f"rates is {','.join(texts)!r}; give positive numbers, each once, "
        'separated by commas.'
    )
  return rates


def split_configs(text: str) -> list[str]:
  """Splits names of config files at commas that do not separate arguments.

  Example:
    >>> split_configs('a.py:x=1,y=2,b.py')
    ['a.py:x=1,y=2', 'b.py']
  """
  return re.split(r',(?=[^,=]*\.py\b)', text)


def racer_name(config: str) -> str:
  """Returns the name of a config in tables and folders.

  Example:
    >>> racer_name('configs/spdf.py:model=gpt3-xl,sparsity=0.75')
    'spdf-model=gpt3-xl,sparsity=0.75'
  """
  path, _, argument = config.partition(':')
  return '-'.join(filter(None, (pathlib.Path(path).stem, argument)))


def with_rate(
    config: ml_collections.ConfigDict, rate: float | None
) -> ml_collections.ConfigDict:
  """Returns a config whose first phase has a peak learning rate.

  Later phases keep their share of it; `None` changes nothing.
  """
  config = config.copy_and_resolve_references()
  if rate is not None:
    phases = [config.phases[name] for name in config.phases.order]
    factor = rate / phases[0].learning_rate.peak
    for phase in phases:
      phase.learning_rate.peak *= factor
  return config


def scaled(
    config: ml_collections.ConfigDict, factor: float
) -> ml_collections.ConfigDict:
  """Multiplies the times of a config.

  These are durations, warm-ups, mask updates and the steps to rewind to. Phases
  that read a task are left out.

  Raises:
    ValueError: no phase reads the corpus.
  """
  config = config.copy_and_resolve_references()
  order = tuple(
      name for name in config.phases.order
      if config.phases[name].data == 'corpus'
  )
  if not order:
    raise ValueError(
        'phases.order has no phase that reads the corpus; add one.'
    )
  phases = {}
  for name in order:
    phase = config.phases[name].to_dict()
    phase['duration'] = _times(phase['duration'], factor)
    phase['rewind_weights_to'] = _times(phase['rewind_weights_to'], factor)
    rate = phase['learning_rate']
    rate.update({k: _times(rate[k], factor) for k in ('warmup', 'to')})
    phase['algorithm'] = _scaled_steps(phase['algorithm'], factor)
    phases[name] = phase
  config.phases = dict(order=order, **phases)
  if config.revival_warmup:
    config.revival_warmup = max(round(config.revival_warmup * factor), 1)
  config.data.task = ''
  return config


def _times(duration: Any, factor: float) -> Any:
  match = re.fullmatch(r'\s*([0-9.]+)([^%]*)', str(duration))
  if match is None:
    return duration  # None, a fraction of the phase, or a function.
  number, unit = match.groups()
  amount = float(number) * factor
  if amount and unit.strip() in ('', 'step', 'steps'):
    amount = max(round(amount), 1)
  return f'{amount:.9g}{unit}'


def _scaled_steps(value: Any, factor: float, name: str = '') -> Any:
  """Multiplies the steps in the settings of an algorithm."""
  if isinstance(value, dict):
    return {k: _scaled_steps(v, factor, k) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(_scaled_steps(v, factor, name) for v in value)
  if name not in from_config.TIMES or not value:
    return value
  if isinstance(value, str):
    return _times(value, factor)
  return max(round(value * factor), 1)


def race(
    configs: str, budget: str, seeds: int, rates: Sequence[str], spread: float,
    workdir: str,
) -> str:
  """Runs the unfinished runs of a race; returns its report.

  Raises:
    ValueError: a flag is not valid, configs differ in data or tokenizer or in
      nothing, the budget is too short, the seeds of a best rate spread too
      much, or the workdir has another race.
    InterruptedError: a signal arrived; everything is saved.
  """
  names = split_configs(configs or '')
  racers = [Racer(racer_name(name)) for name in names]
  if len(set(names)) < max(len(names), 2):
    raise ValueError(
        f'configs is {configs!r}; give two or more different ones, separated '
        'by commas.'
    )
  for i, racer in enumerate(racers):
    if racer in racers[:i]:
      first = names[racers.index(racer)]
      raise ValueError(
          f'configs has {first!r} and {names[i]!r}, which would both be named '
          f'{racer.folder!r}; rename one of the files.'
      )
  given = parse_budget(budget or '')
  grid = {'rate': parse_rates(rates)} if rates else {}
  loaded = {
      racer.folder: scaled(config_file.Parser().parse(name), 1.0)
      for racer, name in zip(racers, names)
  }
  check_data(loaded)
  grids.refuse_alike('configs', {
      name: training.parse(config) for name, config in loaded.items()
  })
  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  files.lock_folder(folder, 'workdir')  # Held until the process ends.
  runs = {
      name: training.Run.create(config) for name, config in loaded.items()
  }
  identity = _identity(loaded, runs, given, grid)
  costs, record = _costs(folder, identity, loaded, runs)
  ready: dict[str, ml_collections.ConfigDict] = {}
  phases, lengths = {}, {}
  for name, config in loaded.items():
    whole = sum(phase.steps * phase.cost for phase in costs[name])
    config = scaled(config, given.amount / whole)
    run = training.Run.create(config)
    plan, lengths[name] = run.plan, run.validation_length
    if plan.total_steps < _EVALUATIONS:
      raise ValueError(
          f'budget is {budget!r}, {plan.total_steps} steps of {name}, which '
          f'are fewer than its {_EVALUATIONS} evaluations; give more.'
      )
    config.eval_every = plan.total_steps // _EVALUATIONS
    ready[name] = config
    phases[name] = [
        PhaseCost(phase.steps, cost.cost)
        for phase, cost in zip(plan.phases, costs[name], strict=True)
    ]
  if len(set(lengths.values())) > 1:
    raise ValueError(
        f'phases have sequences of lengths {lengths}, so that losses are '
        'measured on different windows; give configs of one length.'
    )
  files.write_atomically(
      folder / _RECORD, json.dumps(files.seal(record), indent=1) + '\n'
  )
  runner = Runner(ready, str(folder / 'runs'))
  done = pool_worker.read_outcomes(folder / 'runs')
  cores = sorted(os.sched_getaffinity(0))
  tuning = _TUNING_SEEDS if grid else (1,)
  entry = lambda racer, count: pool.Entry(
      racer, grid, count, extend=False, tuning_seeds=tuning
  )
  if grid:
    tuned = [entry(racer, 0) for racer in racers]
    done = pool_processes.run_pool(runner, tuned, done, cores, len(cores))
    for arm in tuned:
      check_spread(arm, done, spread)
  entries = [entry(racer, seeds) for racer in racers]
  done = pool_processes.run_pool(runner, entries, done, cores, len(cores))
  with files.reading(
      folder / 'runs', f'delete the {pool_worker.OUTCOME} of runs of others.'
  ):
    return race_report.write_report(folder, given, entries, phases, done)


def check_data(configs: Mapping[str, ml_collections.ConfigDict]) -> None:
  """Raises ValueError if configs differ in what their losses are measured on.
  """
  first, *others = configs
  for name in others:
    for section, field in (
        ('data', 'corpus'), ('data', 'tokenizer'),
        ('evaluation', 'batch_size'), ('evaluation', 'corpus_batches'),
    ):
      values = [configs[n][section][field] for n in (first, name)]
      if values[0] != values[1]:
        raise ValueError(
            f'{section}.{field} is {values[0]!r} in {first} and {values[1]!r} '
            f'in {name}; losses compare on the same data and tokenizer only.'
        )


def check_spread(
    entry: pool.Entry, done: pool.Done, spread: float
) -> None:
  """Raises ValueError if the seeds of an entry's best rate differ too much."""
  best = pool.choose(entry, done)
  if best is None:
    raise ValueError(
        f'at all of the rates a loss of {entry.arm.folder} is not finite; give '
        'lower rates.'
    )
  losses = [
      done[pool.Job(entry.arm, best, seed).name][arms.PRETRAINED]
      for seed in entry.tuning_seeds
  ]
  difference = max(losses) - min(losses)
  if not difference <= spread:
    raise ValueError(
        f'at the best of its rates, {best["rate"]:g}, the losses of '
        f'{entry.arm.folder} spread over {difference:.3f} nats, more than '
        f'{spread:g}: too many to choose by; give lower rates.'
    )


def _identity(
    configs: Mapping[str, ml_collections.ConfigDict],
    runs: Mapping[str, training.Run], budget: Budget,
    grid: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
  """Returns what must be equal for runs to belong to one race, as JSON."""
  return json.loads(json.dumps({
      'budget': budget,
      'rates': grid,
      'configs': {
          name: hashlib.sha256(
              config.to_json_best_effort(sort_keys=True).encode()
          ).hexdigest()
          for name, config in configs.items()
      },
      'data': {
          name: run.fingerprints for name, run in runs.items()
      },
  }))


def _costs(
    folder: pathlib.Path, identity: Mapping[str, Any],
    configs: Mapping[str, ml_collections.ConfigDict],
    runs: Mapping[str, training.Run],
) -> tuple[dict[str, list[PhaseCost]], dict[str, Any]]:
  """Returns steps and costs of the phases of unscaled configs, measured once.

  Args:
    folder: Folder of the race.
    identity: Values that are equal for all runs of a race, see `_identity`.
    configs: The unscaled configs, by name.
    runs: Their runs.

  Returns:
    The phases by config, and the record of the race, which has them and the
    identity.
  """
  path = folder / _RECORD
  if path.exists():
    pool_identity.check_same(path, identity)
    fix = 'give another workdir.'
    record = files.unseal(files.read_object(path, fix), path, fix)
    with files.reading(path, fix):
      return {
          name: [PhaseCost(*phase) for phase in phases]
          for name, phases in record['phases'].items()
      }, record
  if (folder / 'runs').exists():
    raise ValueError(
        f'workdir {str(folder)!r} has runs and no {_RECORD}, so that their '
        'budget is not known; give another workdir.'
    )
  costs: dict[str, list[PhaseCost]] = {}
  timed = []
  for name, run in runs.items():
    described = plan_costs.describe_plan(run, name)['phases']
    costs[name] = [
        PhaseCost(phase['steps'], phase['flops_per_step'])
        for phase in described
    ]
    timed += [(name, i) for i in range(len(described))]
  if Budget(*identity['budget']).unit == 'seconds':
    steppers = [
        _Stepper(configs[name], configs[name].phases.order[i])
        for name, i in timed
    ]
    wall = measuring.interleave(steppers, _TIMED_ROUNDS, warmups=2).wall
    for (name, i), row in zip(timed, wall.tolist()):
      costs[name][i] = costs[name][i]._replace(cost=statistics.median(row))
  return costs, {
      **identity, 'phases': costs, 'machine': machine.describe_machine()
  }


class _Stepper:
  """Takes steps of one phase of a config, alone."""

  def __init__(self, config: ml_collections.ConfigDict, name: str):
    config = config.copy_and_resolve_references()
    phase = config.phases[name].to_dict()
    phase['learning_rate']['schedule'] = 'constant'
    config.phases = {'order': (name,), name: phase}
    self._run = training.Run.create(config)
    programs = self._run.programs
    self._state = initial_state.from_params(programs, programs.init_params())
    self._count = 0

  def __call__(self) -> Any:
    batch = self._run.programs.device_batch_at(self._count)
    self._count += 1
    self._state, metrics = self._run.programs.step(self._state, batch)
    return metrics, self._state.step


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  compilation_cache.prepare()
  if not _WORKDIR.value:
    raise app.UsageError('give --workdir.')
  return console.run(
      argv, race, _CONFIGS.value, _BUDGET.value, _SEEDS.value, _RATES.value,
      _SPREAD.value, _WORKDIR.value,
  )


if __name__ == '__main__':
  console.start(main, FLAGS)
