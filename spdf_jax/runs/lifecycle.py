"""One run from config to finished workdir: train, evaluate, describe."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import json
import logging
import os
import pathlib
from typing import Any

import jax

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import training
from spdf_jax.costs.dry_run import describe_plan
from spdf_jax.runs.report import write_report
from spdf_jax.runs.workdirs import read_run
from spdf_jax.runs.workdirs import Run
from spdf_jax.training.metrics import write_atomically
from spdf_jax.training.processes import is_main_process

logger = logging.getLogger('spdf_jax')


def launch(
    config: Any,
    workdir: str | os.PathLike,
    writers: Sequence[Any] = (),
) -> Run:
  """Trains a config through all of its phases and writes the report.

  Given again after an interruption, it goes on where it was.

  Args:
    config: A ConfigDict, or mapping, as `configs/quickstart.py` documents it.
    workdir: Where checkpoints, metrics, generations and `report.md` go.
    writers: From `choose_writers`; they get the metrics too.

  Returns:
    The finished run. Without matplotlib there is no report, and the log says
    so.

  Raises:
    ValueError: something in the config cannot be, or the workdir belongs to
      another one.
    training.Interrupted: a signal came; everything is saved.
  """
  workdir = pathlib.Path(workdir)
  session = training.open_session(training.create_recipe(config), workdir)
  run(session, workdir.name, writers)
  finished = read_run(workdir)
  if is_main_process():
    try:
      write_report(workdir, {workdir.name: finished})
    except ImportError as error:
      logger.warning('there is no report: %s', error)
  return finished


def run(
    session: training.Session,
    name: str,
    writers: Sequence[Any] = (),
    profile: range = range(0),
    baseline: Callable[[training.Recipe], Any] | None = None,
) -> None:
  """Trains a session with every evaluation its config asks for.

  Args:
    session: From `training.open_session`; a killed run goes on.
    name: What reports call the run.
    writers: From `choose_writers`: they get the metrics too.
    profile: From `parse_window`: the steps to trace.
    baseline: What the plan states for comparison; `None`: `bigram_baseline`.

  Raises:
    training.Interrupted: a signal came; everything is saved.
  """
  recipe, workdir = session.recipe, session.workdir
  plan_path = workdir / 'plan.json'
  if plan_path.exists():
    bigram = json.loads(plan_path.read_text('utf-8')).get('bigram')
  else:
    bigram = (baseline or bigram_baseline)(recipe)

  def write_plan() -> None:
    plan = describe_plan(session.recipe, name) | {'bigram': bigram}
    if is_main_process():
      write_atomically(plan_path, json.dumps(plan, indent=2) + '\n')

  if not plan_path.exists():
    write_plan()
  every_time, at_phase_ends = evaluators(recipe, workdir)
  try:
    training.train(
        session,
        evaluators=every_time,
        phase_end_evaluators=at_phase_ends,
        writers=writers,
        profile=profile,
    )
  finally:
    if session.recipe is not recipe:
      write_plan()  # As it went: a phase has ended early.


def bigram_baseline(recipe: training.Recipe) -> dict[str, float] | None:
  """Scores a bigram model of the same tokens on the same validation text."""
  vocab_size = recipe.corpus.tokenizer.vocab_size
  if vocab_size > evaluation.LARGEST_VOCABULARY:
    return None
  loss = evaluation.bigram_loss(
      recipe.corpus.train.tokens, validation_batches(recipe), vocab_size
  )
  return {
      'validation/loss': loss.loss,
      'validation/perplexity': loss.perplexity,
  }


def validation_batches(recipe: training.Recipe) -> list[data.Batch]:
  """Returns the fixed batches of the corpus' validation split."""
  settings = recipe.config.evaluation
  length = max(
      (p.length for p in recipe.plan.phases if p.data == 'corpus'),
      default=recipe.model.config.max_length,
  )
  return list(data.evaluation_batches(
      data.Windows(recipe.corpus.validation),
      batch_size=settings.batch_size,
      length=length,
      max_batches=settings.corpus_batches,
  ))


def evaluators(
    recipe: training.Recipe, workdir: pathlib.Path
) -> tuple[list[Any], list[Any]]:
  """Builds what is measured during a run, and at phase ends only."""
  settings = recipe.config.evaluation
  tokenizer = recipe.corpus.tokenizer
  apply_fn = jax.jit(
      lambda params, tokens: recipe.model.apply({'params': params}, tokens)
  )
  validation = recipe.corpus.validation.description
  every_time = [
      evaluation.loss_evaluator(
          apply_fn,
          validation_batches(recipe),
          prefix='validation',
          tokens_per_byte=validation['tokens'] / validation['bytes'],
      )
  ]
  if recipe.task is None:
    return every_time, []
  length = max(
      (p.length for p in recipe.plan.phases if p.data == 'task'),
      default=recipe.model.config.max_length,
  )
  # Splits are ordered, by module, by input or by category.
  pairs = recipe.task.validation
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
  inputs = recipe.task.inputs_of('validation')
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
