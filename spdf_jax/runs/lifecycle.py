# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of a run, from a config to a finished workdir with a report."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import functools
import json
import logging
import os
import pathlib
import sys
from typing import Any

import jax

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import training
from spdf_jax.costs import plan_costs
from spdf_jax.runs import read
from spdf_jax.runs import report
from spdf_jax.runs.read import Run
from spdf_jax.training import metrics
from spdf_jax.training import processes
from spdf_jax.training import profiling
from spdf_jax.training.writers import choose_writers

logger = logging.getLogger('spdf_jax')


def launch(
    config: Any,
    workdir: str | os.PathLike[str],
    writers: Sequence[Any] = (),
) -> Run:
  """Trains all phases of a config and writes the report.

  A second call after an interruption resumes the run.

  Args:
    config: A ConfigDict or mapping with the fields of `configs/quickstart.py`.
    workdir: Folder for checkpoints, metrics, generations and `report.md`.
    writers: Additional writers of metrics, see `choose_writers`.

  Returns:
    The finished run. Without matplotlib a warning is logged and no report is
    written.

  Raises:
    ValueError: The config is invalid, or the workdir belongs to another config.
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  session, _, _ = open_run(config, workdir)
  finish(session, writers)
  return read.read_run(workdir)


def open_run(
    config: Any,
    workdir: str | os.PathLike[str],
    log_to: Sequence[str] = (),
    profile: str = '',
) -> tuple[training.Session, list[Any], range]:
  """Opens the session and the writers of a run, without training.

  Args:
    config: A ConfigDict or mapping, see `launch`.
    workdir: Folder of the run, see `launch`.
    log_to: Names of dashboards to which metrics are written too, see `WRITERS`.
    profile: Steps to trace, as `'FIRST:COUNT'`; `''`: none.

  Returns:
    The arguments of `finish`: session, writers and steps to trace.

  Raises:
    ValueError: The config is invalid, the workdir belongs to another config, or
      the steps to trace are not in the plan.
    ImportError: The library of a dashboard is not installed.
  """
  profiling.parse_window(profile, sys.maxsize)
  writers = choose_writers(log_to, workdir, training.parse(config).as_dict())
  recipe = training.create_recipe(config, workdir=workdir)
  steps = profiling.parse_window(profile, recipe.plan.total_steps)
  _check_validation(recipe)
  workdir = pathlib.Path(workdir)
  is_new = not workdir.exists()
  try:
    return training.open_session(recipe, workdir), writers, steps
  except BaseException:
    if is_new and processes.is_main_process():
      _remove_empty(workdir)
    raise


def _check_validation(recipe: training.Recipe) -> None:
  """Raises ValueError if a validation split has nothing to evaluate."""
  corpus, task = _read_data(recipe)
  length = _validation_length(recipe)
  if not data.Windows(corpus.validation).num_blocks(length):
    raise ValueError(
        f'corpus {corpus.name!r} has no row of {length} tokens in its '
        'validation split; prepare it with a larger one, or shorten the phases.'
    )
  if task is not None and not task.validation:
    raise ValueError(
        f'task {task.name!r} has no example in its validation split; '
        'add the file of that split to data.task_dir.'
    )


def _read_data(recipe: training.Recipe) -> tuple[data.Corpus, data.Task | None]:
  corpus, task = recipe.corpus, recipe.task
  if isinstance(corpus, data.PlannedCorpus) or isinstance(
      task, data.PlannedExamples
  ):
    raise ValueError(
        f'recipe has only planned sizes of corpus {corpus.name!r} or of its '
        'task; create it with planning=False, which reads them.'
    )
  return corpus, task


def _remove_empty(workdir: pathlib.Path) -> None:
  """Removes the workdir of a run that was refused, unless it holds files."""
  with contextlib.suppress(OSError):
    if (workdir / 'checkpoints').exists():
      (workdir / 'checkpoints').rmdir()
    (workdir / '.lock').unlink(missing_ok=True)
    workdir.rmdir()


def finish(
    session: training.Session,
    writers: Sequence[Any] = (),
    profile: range = range(0),
) -> str | None:
  """Trains a session to its end and writes the report.

  Args:
    session: Session that `training.open_session` returns; a killed run resumes.
    writers: Additional writers of metrics, see `choose_writers`.
    profile: Steps to trace, see `parse_window`.

  Returns:
    A sentence with the path of the report; `None` without matplotlib, after a
    warning, and in processes other than the main one.

  Raises:
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  name = run_name(session.workdir)
  run(session, name, writers, profile)
  if not processes.is_main_process():
    return None
  try:
    finished = {name: read.read_run(session.workdir)}
    path = report.write_report(session.workdir, finished)
  except ImportError as error:  # The run is complete without plots.
    logger.warning('there is no report: %s', error)
    return None
  return f'{path} is written'


def run_name(workdir: str | os.PathLike[str]) -> str:
  """Returns the name of a run in reports, that of its folder.

  Example:
    >>> run_name('runs/a'), run_name('runs/a/.')
    ('a', 'a')
  """
  return os.path.basename(os.path.abspath(workdir))


def run(
    session: training.Session,
    name: str,
    writers: Sequence[Any] = (),
    profile: range = range(0),
    baseline: Callable[[training.Recipe], Any] | None = None,
) -> None:
  """Trains a session with all evaluations of its config.

  Args:
    session: Session that `training.open_session` returns; a killed run resumes.
    name: Name of the run in reports.
    writers: Additional writers of metrics, see `choose_writers`.
    profile: Steps to trace, see `parse_window`.
    baseline: Function from the recipe to the baseline that `plan.json` records;
      `None`: `bigram_baseline`.

  Raises:
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  recipe, workdir = session.recipe, session.workdir
  plan_path = workdir / 'plan.json'
  if plan_path.exists():
    bigram = json.loads(plan_path.read_text('utf-8')).get('bigram')
  else:
    bigram = (baseline or bigram_baseline)(recipe)

  def write_plan() -> None:
    plan = plan_costs.describe_plan(session.recipe, name) | {'bigram': bigram}
    if processes.is_main_process():
      metrics.write_atomically(plan_path, json.dumps(plan, indent=2) + '\n')

  write_plan()
  every_time, at_phase_ends = evaluators(recipe, workdir)
  training.train(
      session,
      evaluators=every_time,
      phase_end_evaluators=at_phase_ends,
      writers=writers,
      profile=profile,
      on_early_end=write_plan,
  )


def bigram_baseline(recipe: training.Recipe) -> dict[str, float] | None:
  """Evaluates a bigram of the training tokens on the validation batches.

  Args:
    recipe: Recipe of the run.

  Returns:
    Loss and perplexity by name; `None` if the vocabulary is too large.
  """
  vocab_size = recipe.corpus.tokenizer.vocab_size
  if vocab_size > evaluation.LARGEST_VOCABULARY:
    return None
  corpus, _ = _read_data(recipe)
  loss = evaluation.bigram_loss(
      corpus.train.tokens, validation_batches(recipe), vocab_size
  )
  return {
      'validation/loss': loss.loss,
      'validation/perplexity': loss.perplexity,
  }


def validation_batches(recipe: training.Recipe) -> list[data.Batch]:
  """Returns the fixed batches of the corpus' validation split."""
  corpus, _ = _read_data(recipe)
  settings = recipe.config.evaluation
  return list(data.evaluation_batches(
      data.Windows(corpus.validation),
      batch_size=settings.batch_size,
      length=_validation_length(recipe),
      max_batches=settings.corpus_batches,
  ))


def _validation_length(recipe: training.Recipe) -> int:
  return max(
      (p.length for p in recipe.plan.phases if p.data == 'corpus'),
      default=recipe.model.config.max_length,
  )


def evaluators(
    recipe: training.Recipe, workdir: pathlib.Path
) -> tuple[list[Any], list[Any]]:
  """Returns the evaluators of a run, and those for ends of phases only."""
  settings = recipe.config.evaluation
  corpus, task = _read_data(recipe)
  tokenizer = corpus.tokenizer
  apply_fn = jax.jit(
      lambda params, tokens: recipe.model.apply({'params': params}, tokens)
  )
  validation = corpus.validation.description
  every_time = [
      evaluation.loss_evaluator(
          apply_fn,
          validation_batches(recipe),
          prefix='validation',
          tokens_per_byte=validation['tokens'] / validation['bytes'],
      )
  ]
  if task is None:
    return every_time, []
  length = max(
      (p.length for p in recipe.plan.phases if p.data == 'task'),
      default=recipe.model.config.max_length,
  )
  # Splits are sorted by module, input or category, so a stride samples evenly.
  pairs = task.validation
  most = settings.task_batches * settings.batch_size
  examples = data.encode_pairs(
      pairs[::max(len(pairs) // most, 1)], tokenizer, length + 1
  )
  every_time.append(
      evaluation.loss_evaluator(
          apply_fn,
          list(data.evaluation_batches(
              examples,
              batch_size=settings.batch_size,
              length=length,
              max_batches=settings.task_batches,
          )),
          prefix='target',
      )
  )
  count = settings.generations
  if not count:
    return every_time, []
  inputs = task.inputs_of('validation')
  inputs = inputs[::-(-len(inputs) // count)]
  prompts = data.encode_pairs(
      [data.Pair(entry.context, entry.references[0]) for entry in inputs],
      tokenizer, length + 1,
  ).contexts
  return every_time, [
      evaluation.task_evaluator(
          functools.partial(
              evaluation.generate,
              evaluation.CachedModel(recipe.model),
              max_new_tokens=settings.max_new_tokens,
              end_of_text=tokenizer.end_of_text,
              batch_size=min(count, settings.batch_size),
              length=recipe.model.config.max_length,
          ),
          prompts,
          [
              entry.references if len(entry.references) > 1
              else entry.references[0] for entry in inputs
          ],
          decode=tokenizer.decode,
          directory=workdir / 'generations',
      )
  ]
