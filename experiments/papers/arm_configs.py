"""Configs of the runs of arms."""

from typing import Any

import ml_collections

from configs import common
from experiments.papers import arms
from experiments.papers.arms import Arm
from experiments.papers.scale import Scale
from experiments.pool.pool import Job


def create_config(
    job: Job, scale: Scale, corpus: str, tasks: str
) -> ml_collections.ConfigDict:
  """Builds the config of a run, without its `init_from`.

  Args:
    job: The run.
    scale: Scale of the run.
    corpus: Name or folder of the corpus.
    tasks: Folder that contains a folder for each task.

  Returns:
    The config.
  """
  arm = job.arm
  config = scale.base_config(arm.size, scale.tune_length if arm.task else None)
  config.seed = job.seed
  # Another number of micro-batches changes rounding errors and nothing else.
  config.micro_batches = 2 * scale.micro_batches if job.again else (
      scale.micro_batches
  )
  config.data.corpus = corpus
  config.data.tokenizer = '' if scale.corpus else scale.tokenizer
  # Each round of pruning begins an epoch with a permutation of its own, the
  # first that of the dense training.
  rounds = scale.rounds if arm.method in arms.ROUNDS else 1
  config.data.max_epochs.corpus = scale.epochs * rounds
  config.evaluation.update(
      corpus_batches=scale.batches, task_batches=scale.batches
  )
  if arm.task:
    config.data.update(task='jsonl', task_dir=f'{tasks}/{arm.task}')
    phases = {'finetune': _finetuning(scale, job)}
  else:
    config.phase_defaults.batch_size = scale.batch(arm.size)
    config.phase_defaults.learning_rate.peak = job.point.get('rate', 1.0)
    phases = _pretraining(scale, job)
  common.set_phases(config, **phases)
  return config


def _finetuning(scale: Scale, job: Job) -> dict[str, Any]:
  steps = scale.steps(job.arm)
  rate = dict(
      schedule='linear', peak=job.point['rate'], final_fraction=0.0,
      warmup=f'{_warmup(steps)} steps',
  )
  phase: dict[str, Any] = dict(
      duration=f'{steps} steps', data='task', batch_size=scale.tune_batch,
      learning_rate=rate, weight_decay=0.01,
  )
  if job.arm.sparse_tuning:
    # Pruned weights are zero, so magnitude recovers the mask of pre-training.
    phase['algorithm'] = dict(
        name='static', sparsity=job.arm.sparsity, init='magnitude'
    )
  return phase


def _pretraining(scale: Scale, job: Job) -> dict[str, dict[str, Any]]:
  """Returns the phases of an arm that reads the corpus, by name."""
  arm, steps = job.arm, scale.steps(job.arm)
  if arm.method == 'variable':
    return _variable(arm, steps, job.point['rate'], job.point['stage'])
  if arm.method in arms.ROUNDS:
    return _rounds(arm, scale)
  return {'pretrain': _of_length(steps, _algorithm(arm))}


_CHANGES: dict[str, dict[str, Any]] = {
    '': {},
    'balanced': dict(grow='balanced'),
    'skipped': dict(skip_gradient_step=True),
}
"""What the second part of a method's name changes in the first."""


def _algorithm(arm: Arm) -> dict[str, Any]:
  """Returns the algorithm of a pre-training phase."""
  if arm.method in ('init', 'dense'):
    return dict(name='dense')
  method, _, change = arm.method.partition('-')
  algorithm: dict[str, Any] = dict(name=method, sparsity=arm.sparsity)
  algorithm |= _CHANGES[change]
  if arm.method == 'gmp':
    # The schedule of Frantar et al. 2023, appendix A.
    rise = dict(
        schedule='cubic', initial=0.0, final=arm.sparsity, start='25%',
        steps='50%'
    )
    return dict(
        name='gmp', sparsity=rise, update_from='25%', update_until='75%'
    )
  if method == 'granet':
    # The post defines GraNet as RigL with rising sparsity.
    rise = dict(schedule='cubic', initial=0.5, final=arm.sparsity, steps='75%')
    return algorithm | dict(name='rigl', sparsity=rise)
  if arm.method == 'set':
    # In the post SET's drop fraction falls to 0, as RigL's does.
    fall = dict(schedule='cosine', initial=0.3, steps='75%')
    return algorithm | dict(drop_fraction=fall)
  return algorithm


def _variable(
    arm: Arm, steps: int, rate: float, stage: str | float
) -> dict[str, dict[str, Any]]:
  """Returns a sparse phase, and a dense phase for the last steps."""
  dense = int(steps * arm.dense_share)
  if stage == 'continue':
    dense_rate: dict[str, Any] = dict(schedule='continue')
  else:
    dense_rate = dict(peak=stage * rate, warmup=f'{_warmup(dense)} steps')
  static = dict(name='static', sparsity=arm.sparsity)
  return {
      'pretrain': _of_length(steps - dense, static),
      'dense': dict(duration=f'{dense} steps', learning_rate=dense_rate),
  }


def _rounds(arm: Arm, scale: Scale) -> dict[str, dict[str, Any]]:
  """Returns rounds of training, each after pruning a share of the kept weights.

  The method `'longer'` prunes nothing.
  """
  steps = round(scale.round_share * scale.steps(Arm('dense', size=arm.size)))
  algorithm: dict[str, Any] = dict(name='dense')
  if arm.method == 'pruned':
    share = round(1 - (1 - arm.sparsity) ** (1 / scale.rounds), 6)
    algorithm = dict(name='iterative', rounds=[
        dict(steps=steps, fraction=share)
    ] * scale.rounds)
  each = _of_length(steps, algorithm)
  each |= dict(reset_moments=True, new_epoch=True)
  return {f'round{i + 1}': each for i in range(scale.rounds)}


def _of_length(steps: int, algorithm: dict[str, Any]) -> dict[str, Any]:
  """Returns a phase that warms up for a fifteenth of its steps."""
  return dict(
      duration=f'{steps} steps', algorithm=algorithm,
      learning_rate=dict(warmup=f'{_warmup(steps)} steps'),
  )


def _warmup(steps: int) -> int:
  return max(steps // 15, 1)
