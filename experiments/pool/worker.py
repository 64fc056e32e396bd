"""One run of experiments.reproduce, in a worker process."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import logging
import math
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.launch import workers
from experiments.papers import arm_configs
from experiments.papers import arms
from experiments.papers import gates
from experiments.papers import json_files
from experiments.papers import subspaces
from experiments.papers.scale import Scale
from experiments.pool import trigram
from experiments.pool.pool import Job
from experiments.pool.pool import Outcome
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import files
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import read
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.configs import early_stop
from spdf_jax.training.loop import metrics

_AT_ONCE = 16
"""Sequences in a batch of another domain."""

OUTCOME = 'outcome.json'
"""File of the outcome in the folder of a finished run."""

_SPENT = 'spent.json'
"""File of the processor seconds of the last attempt and those before it."""


class Runner(NamedTuple):
  """Callable that runs the jobs of a scale; it is sent to worker processes.

  Attributes:
    scale: The scale.
    directory: Folder for the runs.
    corpus: Name or folder of the corpus.
    tasks: Folder that contains a folder for each task.
    domains: Bytes of the texts of other domains, by name.
  """

  scale: Scale
  directory: str
  corpus: str
  tasks: str
  domains: Mapping[str, bytes] = {}

  def __call__(self, job: Job) -> dict[str, Any]:
    """Runs or resumes a job; returns its outcome.

    Raises:
      FolderInUse: another process runs the job.
      InterruptedError: a signal arrived; everything is saved.
    """
    workdir = pathlib.Path(self.directory, job.name)
    return run_job(workdir, lambda workdir: self._run(job, workdir))

  def _run(self, job: Job, workdir: pathlib.Path) -> dict[str, Any]:
    run = self.create_run(job)
    if job.arm.method == 'init':
      return write_initial(run, workdir)
    outcome = train(run, workdir)
    if job.arm.task:
      return outcome
    if math.isnan(outcome[arms.PRETRAINED]):  # There may be no checkpoint.
      return outcome | {f'{name}/loss': math.nan for name in self.domains}
    return outcome | domain_losses(
        run, workdir, self.domains, self.scale.batches
    )

  def create_run(self, job: Job) -> training.Run:
    """Creates the run of a job."""
    config = arm_configs.create_config(job, self.scale, self.corpus, self.tasks)
    if job.parent is not None:
      config.init_from = str(pathlib.Path(self.directory, job.parent.name))
    return training.Run.create(config)

  def is_there(self, job: Job) -> bool:
    """Returns whether the weights of a finished run are on disk."""
    return pathlib.Path(self.directory, job.name, OUTCOME).exists()


def run_job(
    workdir: pathlib.Path, run: Callable[[pathlib.Path], dict[str, Any]]
) -> dict[str, Any]:
  """Runs or resumes one job of a pool, whose log is written beside it.

  Args:
    workdir: Folder of the run.
    run: Function of the workdir that returns the outcome.

  Returns:
    The outcome, which is written to the workdir too.

  Raises:
    FolderInUse: another process runs the job.
    InterruptedError: a signal arrived; everything is saved.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  release = files.lock_folder(workdir, 'workdir')
  try:
    if (workdir / OUTCOME).exists():  # Another machine has run it.
      return _read_outcome(workdir / OUTCOME)
    spent = workdir / _SPENT
    earlier = json_files.read_json(spent) if spent.exists() else 0.0
    # Processor time does not count the time that a process was suspended.
    started = time.process_time() - earlier
    try:
      with log_to(workdir / 'log.txt'):
        outcome = run(workdir)
    finally:
      seconds = round(time.process_time() - started, 1)
      json_files.write_json(spent, seconds, indent=0)
    # No other run uses the compiled programs, which would add up to gigabytes.
    jax.clear_caches()
    outcome['seconds'] = seconds
    json_files.write_json(workdir / OUTCOME, files.seal(outcome), indent=2)
    return outcome
  finally:
    release()


def write_initial(
    run: training.Run, workdir: pathlib.Path
) -> dict[str, Any]:
  """Writes the initial weights that all arms of a seed start from.

  Returns:
    The number of parameters, and for gate G1 the validation losses of a bigram
    and a trigram model of the tokens that a pre-training of this seed reads.
  """
  if not (workdir / 'checkpoints' / '0').exists():
    checkpoint_files.write_params(
        workdir, run.programs.init_params(), run.config.as_dict()
    )
  tokens = np.concatenate([
      run.programs.batch_at(step).inputs.ravel()
      for step in range(run.plan.total_steps)
  ])
  batches = lifecycle.validation_batches(run)
  vocab_size = run.model.config.vocab_size
  score = {
      'bigram': evaluation.bigram_loss, 'trigram': trigram.trigram_loss
  }
  return {'parameters': run.parameters} | {
      metric: score[name](tokens, batches, vocab_size).loss
      for name, metric in gates.BASELINES.items()
  }


def train(run: training.Run, workdir: pathlib.Path) -> dict[str, Any]:
  """Trains a run to its end, and returns its outcome.

  Returns:
    Losses of the last evaluation; FLOPs, steps and seconds of the training;
    whether native kernels ran; if masks move, the last statistics of units; if
    there are several evaluations, the validation loss over steps and seconds;
    and for a fine-tuning, the cosine distances of the hidden matrices to those
    before, by module.
  """
  run = run.open(workdir)
  diverged: dict[str, Any] = {}
  try:
    training.train(
        run, **lifecycle.begin(run, workdir.name, baseline=lambda run: None)
    )
  except training.NotFinite:
    diverged = dict.fromkeys(early_stop.METRICS, math.nan)
  rows = metrics.read_rows(workdir / 'metrics.jsonl')
  outcome: dict[str, Any] = metrics.last_values(
      rows, (*early_stop.METRICS, *read.UNIT_STATISTICS)
  )
  curve, seconds = [], 0.0
  for row in rows:
    seconds += row.get('time/seconds', 0.0)
    if loss := metrics.last_values([row], [arms.PRETRAINED]):
      curve.append([row['step'], round(seconds, 2), *loss.values()])
  steps, flops = 0, 0.0
  if rows:  # A run may diverge before its first row.
    record = runs.read_run(workdir)
    steps = record.last_step
    # Reports add the runs that it starts from.
    flops = runs.flops_at(record, steps) - record.before.flops
  outcome |= {
      'flops': flops,
      'steps': steps,
      'training_seconds': round(seconds, 2),
      'kernels': run.programs.sparse_steps is not None,
  }
  if len(curve) > 1:
    outcome['curve'] = curve
  if run.task is not None:
    before = run.config.init_from
    by_module = distances(run, before if diverged else str(workdir))
    outcome |= dict.fromkeys(by_module, math.nan) if diverged else by_module
  return outcome | diverged


def domain_losses(
    run: training.Run, workdir: pathlib.Path, texts: Mapping[str, bytes],
    batches: int,
) -> dict[str, float]:
  """Evaluates a finished run on texts of other domains.

  Args:
    run: The run.
    workdir: Workdir of the run.
    texts: Texts by name; their tokens are their bytes.
    batches: Number of batches, of evenly spaced sequences.

  Returns:
    The loss of each text, in nats per byte, under `'NAME/loss'`.
  """
  if not texts:
    return {}
  params = training.read_params(
      training.find_checkpoint(str(workdir)),
      run.programs.abstract_state.params,
  )
  apply_fn = jax.jit(
      lambda params, tokens: run.model.apply({'params': params}, tokens)
  )
  length = run.validation_length
  losses = {}
  for name, text in texts.items():
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    starts = np.linspace(
        0, tokens.size - length - 1, batches * _AT_ONCE, dtype=np.int64
    )
    windows = tokens[starts[:, None] + np.arange(length + 1)]
    losses[f'{name}/loss'] = evaluation.evaluate_loss(apply_fn, params, [
        data.Batch(rows[:, :-1], rows[:, 1:], np.ones(rows[:, 1:].shape))
        for rows in windows.reshape(batches, _AT_ONCE, length + 1)
    ]).loss
  return losses


def distances(run: training.Run, end: str) -> dict[str, float]:
  """Returns the cosine distances of hidden matrices before and after a run."""
  shapes = run.programs.abstract_state.params
  per_matrix = subspaces.cosine_distances(*(
      training.read_params(training.find_checkpoint(source), shapes)
      for source in (run.config.init_from, end)
  ))
  means = subspaces.module_means(per_matrix)
  means['all'] = sum(means.values()) / len(means)
  return {f'distance/{name}': value for name, value in means.items()}


def read_outcomes(directory: pathlib.Path) -> dict[str, Outcome]:
  """Reads the outcomes of the finished runs of a pool, by the names of runs."""
  return {
      path.parent.relative_to(directory).as_posix(): _read_outcome(path)
      for path in sorted(directory.glob(f'*/*/{OUTCOME}'))
  }


def _read_outcome(path: pathlib.Path) -> Outcome:
  fix = 'delete it; the same command continues from the checkpoints beside it.'
  with files.reading(path, fix):
    outcome = json_files.read_json(path)
    # Pools that are finished have outcomes without a digest.
    sealed = 'sha256' in outcome
    return files.unseal(outcome, path, fix) if sealed else dict(outcome)


@contextlib.contextmanager
def log_to(path: pathlib.Path) -> Iterator[None]:
  """Redirects logging and stderr to a file, which is appended to."""
  with path.open('a', encoding='utf-8') as log, contextlib.redirect_stderr(log):
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(log)]
    try:
      yield
    finally:
      root.handlers = handlers


def start_worker(cores: Any, parent: int) -> None:
  """Initializes a worker process before it compiles anything.

  Args:
    cores: Queue with the core of each worker.
    parent: Id of the parent process; when it ends, so does the worker.
  """
  os.sched_setaffinity(0, {cores.get()})
  workers.start(sys.argv)
  workers.end_with(parent)
