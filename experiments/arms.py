"""The arms of experiments.reproduce: from their names to runs' configs.

  dense static-50 set-90 rigl-90 granet-80    pre-training; the level in %
  variable-split variable-extended            90 %, then a dense stage
  pruned-75 longer                            rounds from dense, pruned or not
  NAME_small NAME_large                       at another width
  NAME+task NAME+hard NAME+tenth              fine-tuned densely from NAME
  NAME+task-sparse                            fine-tuned with NAME's zeros
  init init_small                             initial weights, for all of a seed
"""

from collections.abc import Sequence
from typing import Any

import ml_collections

from configs import claims as base
from configs import common
from experiments.scales import Scale
from spdf_jax.analysis.claims import PRETRAINED
from spdf_jax.analysis.claims import TUNED
from spdf_jax.analysis.paper_claims import CLAIMS
from spdf_jax.analysis.pool import Arm
from spdf_jax.analysis.pool import Job
from spdf_jax.names import lookup

_ROUNDS = ('pruned', 'longer')  # From a dense model.


def arms_of(claims: Sequence[str], scale: Scale) -> list[Arm]:
  """Lists the arms that claims need, each after the one it starts from.

  Args:
    claims: Letters.
    scale: How large.

  Returns:
    The arms.

  Raises:
    ValueError: a claim is unknown.

  Example:
    >>> from experiments.scales import SCALES
    >>> [arm.name for arm in arms_of(['a'], SCALES['tiny'])]
    ['init', 'static-75', 'static-75+task', 'static-75+task-sparse']
  """
  names: dict[str, None] = {}
  for key in claims:
    for name in lookup('claim', key, CLAIMS).arms:
      line = [name]
      while parent_of(line[0]):
        line.insert(0, parent_of(line[0]))
      names |= dict.fromkeys(line)
  return [
      Arm(
          name, _grid(name, scale), parent_of(name),
          TUNED if '+' in name else PRETRAINED,
      )
      for name in names
  ]


def parent_of(name: str) -> str:
  """Returns the arm that an arm starts from, `''` for initial weights.

  Example:
    >>> parent_of('static-75_large+task'), parent_of('pruned-75')
    ('static-75_large', 'dense')
    >>> parent_of('static-75_large'), parent_of('init')
    ('init_large', '')
  """
  if '+' in name:
    return name.partition('+')[0]
  recipe, width = _split(name)
  if recipe == 'init':
    return ''
  return ('dense' if recipe.startswith(_ROUNDS) else 'init') + width


def create_config(
    job: Job, scale: Scale, corpus: str, tasks: str
) -> ml_collections.ConfigDict:
  """Builds the config of a run, but for where it starts from.

  Args:
    job: The run.
    scale: Its scale.
    corpus: The name, or folder, of the corpus.
    tasks: The folder that holds those of the tasks.

  Returns:
    The config.
  """
  name, _, tuned = job.arm.partition('+')
  recipe, width = _split(name)
  config = base.get_config(
      f'width={scale.widths[width]},layers={scale.layers},'
      f'length={scale.length}'
  )
  config.seed = job.seed
  config.data.corpus = corpus
  config.data.tokenizer = '' if scale.corpus else scale.tokenizer
  vocabulary = scale.tokenizer.removeprefix('bpe-')
  config.model.vocab_size = 257 if vocabulary == 'bytes' else int(vocabulary)
  config.evaluation.update(
      corpus_batches=scale.batches, task_batches=scale.batches
  )
  phase = config.phases.pretrain.to_dict()
  if tuned:
    task, _, sparse = tuned.partition('-')
    config.data.update(task='jsonl', task_dir=f'{tasks}/{task}')
    phases = {'finetune': _finetuning(phase, scale, job)}
    if sparse:
      # The weights of largest magnitude are those that are not zero.
      phases['finetune']['sparsity'] = dict(
          algorithm='static', sparsity=_level(recipe), init='magnitude'
      )
  else:
    phases = _pretraining(phase, recipe, scale, job)
  config.phases = dict(order=tuple(phases), **phases)
  return config


def _split(name: str) -> tuple[str, str]:
  recipe, line, width = name.partition('_')
  return recipe, line + width


def _level(recipe: str) -> float:
  return int(recipe.rpartition('-')[2]) / 100


def _grid(name: str, scale: Scale) -> dict[str, Sequence[Any]]:
  if '+' in name:
    return {'rate': scale.tune_rates}
  if name.startswith('init'):
    return {}
  if name.startswith('variable'):
    return {'rate': scale.rates, 'stage': scale.stages}
  return {'rate': scale.rates}


def _finetuning(
    phase: dict[str, Any], scale: Scale, job: Job
) -> dict[str, Any]:
  steps = scale.tune_steps
  rate = dict(
      schedule='linear', peak=job.point['rate'], final_fraction=0.0,
      warmup=f'{_warmup(steps)} steps',
  )
  return phase | dict(
      duration=f'{steps} steps', data='task', batch_size=scale.tune_batch,
      learning_rate=rate, weight_decay=0.01,
  )


def _pretraining(
    phase: dict[str, Any], recipe: str, scale: Scale, job: Job
) -> dict[str, dict[str, Any]]:
  """Returns the phases of an arm that reads the corpus, by name."""
  phase = phase | dict(batch_size=scale.batch_size)
  rate = phase['learning_rate'] | dict(peak=job.point.get('rate', 1.0))
  if recipe.startswith('variable'):
    return _variable(phase, rate, recipe, scale, job.point['stage'])
  if recipe.startswith(_ROUNDS):
    return _rounds(phase, rate, recipe, scale)
  kind, _, level = recipe.partition('-')
  sparsity: Any = 0.0
  if kind == 'granet':
    # As the post has it: RigL, but for the level that rises.
    sparsity = common.sparsity_of('rigl', _level(recipe), scale.steps)
    sparsity['sparsity'] = dict(
        schedule='cubic', initial=0.5, final=_level(recipe),
        steps=sparsity['update_until'],
    )
  elif level:
    sparsity = common.sparsity_of(kind, _level(recipe), scale.steps)
  if kind == 'set':
    # As the post has it: what is dropped falls to 0 as RigL's does.
    sparsity['drop_fraction'] = dict(
        schedule='cosine', initial=0.3, steps=sparsity['update_until']
    )
  return {'pretrain': _lasting(phase, scale.steps, rate, sparsity=sparsity)}


def _variable(
    phase: dict[str, Any], rate: dict[str, Any], recipe: str, scale: Scale,
    stage: str | float,
) -> dict[str, dict[str, Any]]:
  """At 90 %, then dense: as many steps, or 15 % more."""
  if recipe == 'variable-split':
    dense = scale.steps // 6
    sparse = scale.steps - dense
  else:
    sparse, dense = scale.steps, round(0.15 * scale.steps)
  if stage == 'continue':
    dense_rate = rate | dict(schedule='continue')
  else:
    dense_rate = rate | dict(
        peak=stage * rate['peak'], warmup=f'{_warmup(dense)} steps'
    )
  return {
      'pretrain': _lasting(phase, sparse, rate, sparsity=0.9),
      'dense': _lasting(phase, dense, dense_rate) | dict(
          learning_rate=dense_rate
      ),
  }


def _rounds(
    phase: dict[str, Any], rate: dict[str, Any], recipe: str, scale: Scale
) -> dict[str, dict[str, Any]]:
  """Rounds that prune a share of what is left, or none, and train on."""
  sparsity: Any = 0.0
  if recipe != 'longer':
    share = round(1 - (1 - _level(recipe)) ** (1 / scale.rounds), 6)
    sparsity = dict(algorithm='iterative', rounds=[
        dict(steps=scale.round_steps, fraction=share)
    ] * scale.rounds)
  each = _lasting(phase, scale.round_steps, rate, sparsity=sparsity) | dict(
      restart=True, reshuffle=True
  )
  return {f'round{i + 1}': each for i in range(scale.rounds)}


def _lasting(
    phase: dict[str, Any], steps: int, rate: dict[str, Any], sparsity: Any = 0.0
) -> dict[str, Any]:
  warm = rate | dict(warmup=f'{_warmup(steps)} steps')
  return phase | dict(
      duration=f'{steps} steps', learning_rate=warm, sparsity=sparsity
  )


def _warmup(steps: int) -> int:
  return max(steps // 15, 1)
