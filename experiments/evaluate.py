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

from absl import app
from absl import flags

from experiments import scoring
from experiments.launch import compilation_cache
from experiments.launch import console
from spdf_jax.runs import open_models

_WORKDIR = flags.DEFINE_string(
    'workdir', None,
    'Run to evaluate: WORKDIR, WORKDIR@PHASE or WORKDIR@PHASE:best.',
)
_HF = flags.DEFINE_string(
    'hf', None,
    'Hugging Face directory to evaluate instead, with its tokenizer.',
)
_LISTED = flags.DEFINE_bool(
    'listed', False,
    'Multiply by lists of the kept weights, where at least 70 % are pruned.',
)
_TASKS = flags.DEFINE_list(
    'tasks', None, 'Tasks, NAME or NAME=PATH, separated by commas.'
)
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'JSON file for the scores; table and answers are written beside it.',
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if bool(_WORKDIR.value) == bool(_HF.value):
    raise app.UsageError('give --workdir or --hf.')
  compilation_cache.prepare()
  return console.run(argv, _evaluate)


def _evaluate() -> str:
  open_model = open_models.open_run if _WORKDIR.value else open_models.open_hf
  if _LISTED.value:
    open_model = open_models.open_listed
  source = _WORKDIR.value or _HF.value
  return scoring.score(
      lambda: open_model(source), _TASKS.value, _OUTPUT.value
  )


if __name__ == '__main__':
  flags.adopt_module_key_flags(scoring)
  flags.mark_flag_as_required('tasks')
  console.start(main)
