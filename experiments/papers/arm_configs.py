"""Configs of the runs of arms."""

from typing import Any

import ml_collections

from configs import common
from experiments.papers import arms
from experiments.papers.arms import Arm
from experiments.papers.pool import Job
from experiments.papers.scales import Scale

TUNING_EVALUATIONS = 8
"""Evaluations of a fine-tuning, of which the best decides its checkpoint."""


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
  config = scale.base_config(arm.size)
  config.seed = job.seed
  config.matmul = scale.matmul
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
  phase = config.phases.pretrain.to_dict()
  if arm.task:
    config.data.update(task='jsonl', task_dir=f'{tasks}/{arm.task}')
    phases = {'finetune': _finetuning(phase, scale, job)}
    if scale.scored:
      config.eval_every = max(scale.steps(arm) // TUNING_EVALUATIONS, 1)
  else:
    phases = _pretraining(phase, scale, job)
    if scale.sizes[arm.size].rotary:
      config.eval_every = max(scale.steps(arm) // 10, 1)  # for gate G5
  config.phases = dict(order=tuple(phases), **phases)
  return config


def _finetuning(
    phase: dict[str, Any], scale: Scale, job: Job
) -> dict[str, Any]:
  steps = scale.steps(job.arm)
  rate = dict(
      schedule='linear', peak=job.point['rate'], final_fraction=0.0,
      warmup=f'{_warmup(steps)} steps',
  )
  sparsity: Any = 0.0
  if job.arm.sparse_tuning:
    # Pruned weights are zero, so magnitude recovers the mask of pre-training.
    sparsity = dict(
        algorithm='static', sparsity=job.arm.sparsity, init='magnitude'
    )
  best = dict(early_stop=common.early_stop(arms.TUNED)) if scale.scored else {}
  return phase | best | dict(
      duration=f'{steps} steps', data='task', batch_size=scale.tune_batch,
      learning_rate=rate, weight_decay=0.01, sparsity=sparsity,
  )


def _pretraining(
    phase: dict[str, Any], scale: Scale, job: Job
) -> dict[str, dict[str, Any]]:
  """Returns the phases of an arm that reads the corpus, by name."""
  arm, steps = job.arm, scale.steps(job.arm)
  phase = phase | dict(batch_size=scale.batch(arm.size))
  rate = phase['learning_rate'] | dict(peak=job.point.get('rate', 1.0))
  if arm.method == 'variable':
    return _variable(phase, rate, arm, steps, job.point['stage'])
  if arm.method in arms.ROUNDS:
    return _rounds(phase, rate, arm, scale)
  return {'pretrain': _of_length(phase, steps, rate, _sparsity(arm, steps))}


def _sparsity(arm: Arm, steps: int) -> Any:
  """Returns the sparsity of a pre-training phase."""
  if arm.method in ('init', 'dense'):
    return 0.0
  if arm.method == 'granet':
    # The post defines GraNet as RigL with rising sparsity.
    sparsity = common.sparsity_of('rigl', arm.sparsity, steps)
    return sparsity | dict(sparsity=dict(
        schedule='cubic', initial=0.5, final=arm.sparsity,
        steps=sparsity['update_until'],
    ))
  sparsity = common.sparsity_of(arm.method, arm.sparsity, steps)
  if arm.method == 'set':
    # In the post SET's drop fraction falls to 0, as RigL's does.
    sparsity['drop_fraction'] = dict(
        schedule='cosine', initial=0.3, steps=sparsity['update_until']
    )
  return sparsity


def _variable(
    phase: dict[str, Any], rate: dict[str, Any], arm: Arm, steps: int,
    stage: str | float,
) -> dict[str, dict[str, Any]]:
  """Returns a sparse phase of 5/6 of the steps and a dense phase."""
  dense = steps // 6
  if stage == 'continue':
    dense_rate = rate | dict(schedule='continue')
  else:
    dense_rate = rate | dict(
        peak=stage * rate['peak'], warmup=f'{_warmup(dense)} steps'
    )
  return {
      'pretrain': _of_length(phase, steps - dense, rate, arm.sparsity),
      'dense': phase | dict(
          duration=f'{dense} steps', learning_rate=dense_rate
      ),
  }


def _rounds(
    phase: dict[str, Any], rate: dict[str, Any], arm: Arm, scale: Scale
) -> dict[str, dict[str, Any]]:
  """Returns rounds of training, each after pruning a share of the kept weights.

  The method `'longer'` prunes nothing.
  """
  steps = round(scale.round_share * scale.steps(Arm('dense', size=arm.size)))
  sparsity: Any = 0.0
  if arm.method == 'pruned':
    share = round(1 - (1 - arm.sparsity) ** (1 / scale.rounds), 6)
    sparsity = dict(algorithm='iterative', rounds=[
        dict(steps=steps, fraction=share)
    ] * scale.rounds)
  each = _of_length(phase, steps, rate, sparsity)
  each |= dict(reset_moments=True, new_epoch=True)
  return {f'round{i + 1}': each for i in range(scale.rounds)}


def _of_length(
    phase: dict[str, Any], steps: int, rate: dict[str, Any], sparsity: Any
) -> dict[str, Any]:
  warm = rate | dict(warmup=f'{_warmup(steps)} steps')
  return phase | dict(
      duration=f'{steps} steps', learning_rate=warm, sparsity=sparsity
  )


def _warmup(steps: int) -> int:
  return max(steps // 15, 1)
