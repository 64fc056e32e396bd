r"""Measures trained models on tasks, by the official definitions.

  python -m experiments.evaluate --workdir=runs/a \
    --tasks=validation,lambada=lambada.jsonl,wikitext=wiki.test.tokens

  python -m experiments.evaluate --hf=cerebras-gpt-111m/ --output=scores.json \
    --tasks=cerebras_gpt=tasks/,e2e=e2e/,webnlg=webnlg17/

  python -m experiments.evaluate --hf=compact/ --tasks=wikitext=wiki.test.tokens

A compact export of experiments.convert is evaluated with its matrices stored as
lists of kept weights, which are never expanded; so are other sparse models with
--listed.

A task is NAME, or NAME=PATH with the path of its files: validation (of the
run's corpus), lambada, wikitext, and the suites cerebras_gpt and open_llm of
EleutherAI's harness (extra harness; without a path they are downloaded).
Curation and the generation tasks e2e, e2e_csv, webnlg, dart, jsonl and
python-docstrings are scored on their test splits. The table has every score
with its protocol; --output writes it as JSON and as Markdown.
"""

import json
import pathlib

from absl import app
from absl import flags

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.scores import language_models
from experiments.scores import scoring_flags
from experiments.scores import sheets
from experiments.scores import task_scores
from spdf_jax import files

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
    'workdir', None,
    'Run to evaluate: WORKDIR, WORKDIR@PHASE or WORKDIR@PHASE:best.',
    flag_values=FLAGS,
)
_HF = flags.DEFINE_string(
    'hf', None,
    'Hugging Face directory to evaluate instead, with its tokenizer.',
    flag_values=FLAGS,
)
_LISTED = flags.DEFINE_bool(
    'listed', False,
    'Multiply by lists of the kept weights, where at least 70 % are pruned.',
    flag_values=FLAGS,
)
_TASKS = flags.DEFINE_list(
    'tasks', [],
    f'Tasks, separated by commas: {task_scores.describe_tasks()}.',
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'JSON file for the scores; table and answers are written beside it.',
    flag_values=FLAGS,
)
_SETTINGS = scoring_flags.define(FLAGS)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if bool(_WORKDIR.value) == bool(_HF.value):
    raise app.UsageError('give --workdir or --hf.')
  compilation_cache.prepare()
  return console.run(argv, _evaluate)


def _evaluate() -> str:
  """Scores the model on all tasks; returns the table.

  The file is written anew with each score, so that scores are kept if a later
  task fails.
  """
  if not _TASKS.value:
    raise ValueError(
        f'no task is given; set --tasks to {task_scores.describe_tasks()}.'
    )
  task_scores.parse_tasks(_TASKS.value)
  output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
  if output is not None:
    if output.suffix != '.json':
      raise ValueError(
          f'output is {str(output)!r}; give a name that ends in .json.'
      )
    output.parent.mkdir(parents=True, exist_ok=True)
  if _LISTED.value:
    open_model = language_models.open_listed
  elif _WORKDIR.value:
    open_model = language_models.open_run
  else:
    open_model = language_models.open_hf
  model = open_model(_WORKDIR.value or _HF.value)
  settings = _SETTINGS(
      output and output.with_suffix(''), model.module.config.max_length
  )
  scores: list[sheets.Score] = []
  for score in task_scores.score_tasks(model, _TASKS.value, settings):
    scores.append(score)
    if output is not None:
      files.write_atomically(
          output.with_suffix('.md'), sheets.format_scores(scores) + '\n'
      )
      entry = sheets.to_json(model.name, scores, settings)
      files.write_atomically(output, json.dumps(entry, indent=2) + '\n')
  return sheets.format_scores(scores)


if __name__ == '__main__':
  console.start(main, FLAGS)
