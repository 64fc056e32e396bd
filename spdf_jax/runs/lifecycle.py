# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of a run, from a config to a finished workdir with a report."""

from collections.abc import Callable, Mapping, Sequence
import functools
import json
import logging
import os
from typing import Any

import jax

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import files
from spdf_jax import training
from spdf_jax.costs import plan_costs
from spdf_jax.data import special_tokens
from spdf_jax.runs import curves
from spdf_jax.runs import read
from spdf_jax.runs import report
from spdf_jax.runs import statements
from spdf_jax.runs.read import RunRecord
from spdf_jax.runs.read import SpentBefore
from spdf_jax.training import Run
from spdf_jax.training.checkpoints.workdir import split_source
from spdf_jax.training.loop import processes
from spdf_jax.training.loop.evaluations import Evaluators
from spdf_jax.training.loop.writers import Open

logger = logging.getLogger('spdf_jax')

_MOST_COUNTED = 1 << 27  # Tokens of the bigram baseline.


def launch(
    config: Any,
    workdir: str | os.PathLike[str],
    writers: Sequence[Open] = (),
) -> RunRecord:
  """Trains all phases of a config and writes the report.

  A second call after an interruption resumes the run.

  Args:
    config: A ConfigDict or mapping with the fields of `configs/base.py`.
    workdir: Folder for checkpoints, metrics, generations and `report.md`.
    writers: Functions `(workdir, config, step)` that open additional writers of
      metrics, e.g. those of `training.loop.writers.choose_writers(['wandb'])`.

  Returns:
    The finished run. Without matplotlib a warning is logged and no report is
    written.

  Raises:
    ValueError: the config or its data is invalid, or the workdir belongs to
      another config or is in use by another process.
    OSError: the workdir cannot be written, or has too little space.
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  finish(training.Run.create(config, workdir).open(), writers)
  return read.read_run(workdir)


def finish(
    run: Run, writers: Sequence[Open] = (), profile: range = range(0)
) -> str | None:
  """Trains an open run to its end and writes the report.

  Args:
    run: The run, which continues from its latest checkpoint.
    writers: Additional writers of metrics, see `choose_writers`.
    profile: Steps to trace, see `parse_window`.

  Returns:
    Lines with the last loss, sparsity and seconds of the run, and with the path
    of the report unless matplotlib is missing; `None` in processes other than
    the main one.

  Raises:
    training.Interrupted: The process received a signal; a checkpoint is saved.
  """
  name = folder_name(run.workdir)
  training.train(run, **begin(run, name), writers=writers, profile=profile)
  if not processes.is_main_process():
    return None
  finished = read.read_run(run.workdir)
  ending = statements.ending(name, finished)
  try:
    path = report.write_report(run.workdir, {name: finished})
  # A run is complete without plots, so this is only a warning.
  except ImportError as error:
    logger.warning('there is no report: %s', error)
    return ending
  return f'{ending}\n{path} is written'


def folder_name(workdir: str | os.PathLike[str]) -> str:
  """Returns the name of a run in reports, that of its folder.

  Example:
    >>> folder_name('runs/a'), folder_name('runs/a/.')
    ('a', 'a')
  """
  return os.path.basename(os.path.abspath(workdir))


def begin(
    run: Run,
    name: str,
    baseline: Callable[[Run], dict[str, float] | None] | None = None,
) -> dict[str, Any]:
  """Writes the plan of an open run, and creates the evaluators of its config.

  Args:
    run: The run.
    name: Name of the run in reports.
    baseline: Function from the run to the baseline that `plan.json` records;
      `None`: `bigram_baseline`.

  Returns:
    The arguments `evaluators` and `on_early_end` of `training.train`.
  """
  path = run.workdir / 'plan.json'
  resumed = path.exists()
  if resumed:
    fix = 'delete it and repeat the command, which writes it again.'
    stored = files.read_object(path, fix)
    known = {key: stored.get(key) for key in ('bigram', 'before')}
  else:
    known = {
        'bigram': (baseline or bigram_baseline)(run),
        'before': spent_before(run)._asdict(),
    }

  def write_plan() -> Mapping[str, Any]:
    plan = plan_costs.describe_plan(run, name) | known
    if processes.is_main_process():
      text = json.dumps(files.seal(plan), indent=2)
      files.write_atomically(path, text + '\n')
    return plan

  for phase in write_plan()['phases']:
    for note in () if resumed else phase['notes']:
      logger.info('phase %r: %s', phase['name'], note)
  return {'evaluators': evaluators(run), 'on_early_end': write_plan}


def spent_before(run: Run) -> SpentBefore:
  """Returns the cost of other runs up to the checkpoint a run starts from."""
  config = run.config
  source = config.resume or config.init_from
  if not source:
    return read.FROM_SCRATCH
  workdir, _, _ = split_source(source)
  try:
    with files.reading(workdir, 'train its run anew.'):
      step = int(training.find_checkpoint(source).name)
      return curves.spent_before(
          source, read.read_run(workdir), step, resumed=bool(config.resume)
      )
  except (OSError, ValueError) as error:
    logger.info('the cost of %s is not counted: %s', source, error)
    seconds = None if config.resume else 0.0
    return SpentBefore(source, is_recorded=False, seconds=seconds)


def bigram_baseline(run: Run) -> dict[str, float] | None:
  """Evaluates a bigram of the training tokens on the validation batches.

  Of a long corpus it counts the first 134M tokens, which takes 20 seconds.

  Args:
    run: The run.

  Returns:
    Loss, perplexity and number of tokens by name; `None` if the vocabulary is
    too large.
  """
  vocab_size = run.corpus.tokenizer.vocab_size
  if vocab_size > evaluation.LARGEST_VOCABULARY:
    return None
  corpus, _ = run.real_data
  loss = evaluation.bigram_loss(
      corpus.train.tokens[:_MOST_COUNTED], validation_batches(run), vocab_size
  )
  return {
      'validation/loss': loss.loss,
      'validation/perplexity': loss.perplexity,
      'validation/tokens': float(loss.tokens),
  }


def validation_batches(run: Run) -> list[data.Batch]:
  """Returns the fixed batches of the corpus' validation split."""
  corpus, _ = run.real_data
  settings = run.config.evaluation
  return list(data.evaluation_batches(
      data.Windows(corpus.validation),
      batch_size=settings.batch_size,
      length=run.validation_length,
      max_batches=settings.corpus_batches,
  ))


def evaluators(run: Run) -> Evaluators:
  """Returns the evaluators of a run's config."""
  settings = run.config.evaluation
  corpus, task = run.real_data
  tokenizer = corpus.tokenizer
  apply_fn = jax.jit(
      lambda params, tokens: run.model.apply({'params': params}, tokens)
  )
  validation = corpus.validation.description
  every_time = [
      evaluation.loss_evaluator(
          apply_fn,
          validation_batches(run),
          prefix='validation',
          tokens_per_byte=validation['tokens'] / validation['bytes'],
      )
  ]
  if task is None:
    return Evaluators(every_time)
  length = max(
      (p.length for p in run.plan.phases if p.data == 'task'),
      default=run.model.config.max_length,
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
    return Evaluators(every_time)
  inputs = task.inputs_of('validation')
  inputs = inputs[::-(-len(inputs) // count)]
  prompts = data.encode_pairs(
      [data.Pair(entry.context, entry.references[0]) for entry in inputs],
      tokenizer, length + 1,
  ).contexts
  return Evaluators(every_time, [
      evaluation.task_evaluator(
          functools.partial(
              evaluation.generate,
              evaluation.CachedModel(run.model),
              max_new_tokens=settings.max_new_tokens,
              end_of_text=special_tokens.special_of(tokenizer).ends,
              batch_size=min(count, settings.batch_size),
              length=run.model.config.max_length,
          ),
          prompts,
          [
              entry.references if len(entry.references) > 1
              else entry.references[0] for entry in inputs
          ],
          decode=tokenizer.decode,
          directory=run.workdir / 'generations',
      )
  ])
