r"""Compares one-shot pruning of a trained model, and training after it.

  python -m experiments.one_shot --model=runs/dense@pretrain \
    --workdir=runs/one_shot

Prunes the model by magnitude, Wanda and SparseGPT to several sparsities, over
the first sequences of its corpus. Each result is then trained for some steps
with its mask, without and with distillation from the model; so is the model
itself. table.md, results.json and perplexity.png in the workdir have the
perplexities on the validation split. If stopped, the same command continues,
also with more sparsities; other flags need another workdir.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import pathlib
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.papers import json_files
from experiments.scores import language_models
from spdf_jax import evaluation
from spdf_jax import extras
from spdf_jax import files
from spdf_jax import models
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.runs import markdown
from spdf_jax.runs import style
from spdf_jax.sparsity import one_shot
from spdf_jax.training.checkpoints import files as checkpoint_files

FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    'model', None, 'WORKDIR or WORKDIR@PHASE.', required=True, flag_values=FLAGS
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of runs and results.',
    required=True, flag_values=FLAGS,
)
_SPARSITIES = flags.DEFINE_list(
    'sparsities', ['0.5', '0.6', '0.75'], 'Fractions of zeros.',
    flag_values=FLAGS,
)
_SEQUENCES = flags.DEFINE_integer(
    'sequences', 128, 'Number of sequences to calibrate with.', lower_bound=1,
    flag_values=FLAGS,
)
_STEPS = flags.DEFINE_integer(
    'steps', 200, 'Steps of training.', lower_bound=1, flag_values=FLAGS
)
_RATE = flags.DEFINE_float(
    'rate', 1e-3, 'Peak learning rate.', flag_values=FLAGS
)

_DENSE = 'dense'
_STAGES = ('pruned', 'trained', 'distilled')
_NAMES = {'magnitude': 'Magnitude', 'wanda': 'Wanda', 'sparsegpt': 'SparseGPT'}
_TITLES = ('after pruning', 'after {} steps', 'after {} steps, distilled')


def compare() -> Iterator[str]:
  """Prunes and trains; yields the rows of the table as they are measured."""
  extras.require('matplotlib', 'viz')
  folder, steps = pathlib.Path(_WORKDIR.value), _STEPS.value
  sparsities = _parse_sparsities(_SPARSITIES.value)
  path = folder / 'results.json'
  results = json_files.read_json(path) if path.exists() else []
  same = dict(
      model=_MODEL.value, steps=steps, rate=_RATE.value,
      sequences=_SEQUENCES.value,
  )
  json_files.check_same('workdir', folder, results, **same)
  model = language_models.open_run(_MODEL.value)
  cases = [(_DENSE, 0.0)] + [
      (method, sparsity) for sparsity in sparsities
      for method in one_shot.PRUNERS
  ]
  for method, sparsity in cases:
    if [method, sparsity] in [[r['method'], r['sparsity']] for r in results]:
      continue
    start = folder / f'{method}-{sparsity:g}'
    config = _config_of(model, start, sparsity)
    run = training.Run.create(config['trained'])
    measure = functools.partial(
        evaluation.evaluate_loss,
        lambda params, tokens, run=run: run.model.apply(
            {'params': params}, tokens
        ),
        batches=lifecycle.validation_batches(run),
    )
    params = _prune(model, run, method, sparsity)
    if not training.checkpoints.workdir.saved_steps(start):
      checkpoint_files.write_params(start, params, {
          'model': model.config.model.as_dict()
      })
    row = dict(method=method, sparsity=sparsity)
    row['pruned'] = measure(params).perplexity
    for stage in _STAGES[1:]:
      run = training.Run.create(config[stage], folder / f'{start.name}-{stage}')
      row[stage] = measure(training.train(run.open()).params).perplexity
    results.append(row | same)
    json_files.write_json(path, results, 2)
    yield ', '.join(
        f'{k} {v:.4g}' if isinstance(v, float) else str(v)
        for k, v in row.items()
    )
  files.write_atomically(folder / 'table.md', table(results, steps) + '\n')
  style.save(plot(results, steps), folder / 'perplexity.png')
  yield f'{folder}/table.md and perplexity.png are written'


def _parse_sparsities(words: Sequence[str]) -> list[float]:
  try:
    sparsities = [float(word) for word in words]
  except ValueError:
    sparsities = []
  if not sparsities or not all(0 < sparsity < 1 for sparsity in sparsities):
    raise ValueError(
        f'sparsities is {",".join(words)!r}; give fractions of zeros above 0 '
        'and below 1, e.g. 0.5,0.75.'
    )
  return sparsities


def _prune(
    model: language_models.LanguageModel,
    run: training.Run,
    method: str,
    sparsity: float,
) -> Any:
  """Returns the parameters, pruned over the first sequences of the corpus."""
  sequences, length = _SEQUENCES.value, run.validation_length
  corpus, _ = run.real_data
  tokens = np.asarray(corpus.train.tokens[:sequences * length], np.int32)
  if tokens.size < sequences * length:
    raise ValueError(
        f'sequences is {sequences}, and the corpus has '
        f'{tokens.size // length} of {length} tokens; give at most these.'
    )
  params = dict(jax.tree.map(np.asarray, model.params))
  if method == _DENSE:
    return params
  for block in models.prune_blocks(
      model.module.config, params, tokens.reshape(sequences, length),
      one_shot.PRUNERS[method](), sparsity,
  ):
    params[block.name] = block.params
  return params


def _config_of(
    model: language_models.LanguageModel,
    start: pathlib.Path,
    sparsity: float,
) -> dict[str, dict[str, Any]]:
  """Returns the configs of both ways to train from a pruned model."""
  config, steps = model.config.as_dict(), _STEPS.value
  phase = next(p for p in model.config.phases if p.data == 'corpus').name
  algorithm: dict[str, Any] = dict(name='dense')
  if sparsity:
    algorithm = dict(name='static', sparsity=sparsity, init='nonzero')
  tuned = config['phases'][phase] | dict(
      duration=f'{steps} steps', algorithm=algorithm, reset_moments=False,
      learning_rate=dict(
          schedule='cosine', peak=_RATE.value, warmup='5%', final_fraction=0.1
      ),
  )
  config |= dict(
      phases=dict(order=['tune'], tune=tuned), init_from=str(start), resume='',
      eval_every=steps, checkpoints=dict(every=steps, keep=1),
  )
  teacher = dict(teacher=_MODEL.value, temperature=1.0, teacher_weight=0.5)
  return {
      'trained': config,
      'distilled': config | dict(loss=config['loss'] | teacher),
  }


def table(results: Sequence[Mapping[str, Any]], steps: int) -> str:
  """Formats perplexities by sparsity and method as a Markdown table."""
  header = ['sparsity', 'method', *(title.format(steps) for title in _TITLES)]
  return markdown.markdown_table(header, [
      [f'{r["sparsity"]:.0%}', r['method']]
      + [f'{r[stage]:.2f}' for stage in _STAGES]
      for r in results
  ], numbers=[header[0], *header[2:]])


def plot(results: Sequence[Mapping[str, Any]], steps: int) -> Any:
  """Draws perplexity over sparsity, a panel for each stage."""
  figure = style.new_figure(9, 3.2)
  panels = figure.subplots(1, len(_STAGES), sharey=True)
  dense = next(r for r in results if r['method'] == _DENSE)
  for ax, stage, title in zip(panels, _STAGES, _TITLES):
    for i, method in enumerate(one_shot.PRUNERS):
      rows = [dense, *sorted(
          (r for r in results if r['method'] == method),
          key=lambda r: r['sparsity'],
      )]
      ax.plot(
          [100 * r['sparsity'] for r in rows], [r[stage] for r in rows],
          label=_NAMES[method], **style.line_style(i),
      )
    ax.set_yscale('log')
    ax.yaxis.set_major_formatter('{x:g}')
    ax.yaxis.set_minor_formatter('{x:g}')
    ax.set_title(
        title.format(steps).capitalize(), loc='left', fontweight='bold',
        fontsize=10,
    )
    ax.set_xlabel('Zeros in hidden matrices (%)')
    style.polish(ax)
  panels[0].set_ylabel('Validation perplexity')
  panels[0].legend(frameon=False, fontsize=8)
  return figure


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  compilation_cache.prepare()
  return console.run(argv, compare)


if __name__ == '__main__':
  console.start(main, FLAGS)
