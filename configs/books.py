"""Variable SPDF on books and the papers' tasks, on two CPU cores.

  python -m experiments.prepare --input=books/ --tokenizer=bpe-4096 \
    --output=corpora/books
  python -m experiments.train --config=configs/books.py --workdir=runs/books
  python -m experiments.sweep --config=configs/books.py:task=e2e \
    --config.data.task_dir=e2e/ --workdir=sweeps/e2e --metric=target/loss \
    --grid=phases.finetune.learning_rate.peak=1e-3,2e-3,4e-3 \
    --test_tasks=e2e=e2e/ --meteor_jar=meteor-1.5.jar

A GPT of 4.3M parameters is pre-trained on books at 75 % sparsity of the hidden
matrices, and continues densely (Thangarasa et al., SPDF, 2023; Cerebras,
Variable SPDF, 2023). With a task (e2e, webnlg or dart_smoke) it is fine-tuned
densely from runs/books, as in Hu et al., LoRA, 2021, but for 400 steps only.

Expected: the results of these commands are in experiments/results/books.
"""

import ml_collections

from configs import common
from configs import quickstart

# Tokens of an example; longer contexts are truncated.
_LENGTHS = dict(e2e=160, webnlg=256, dart_smoke=256)


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; `arg` has `task`, `algorithm` and `sparsity`."""
  algorithm, given = common.parse_algorithm(
      arg, dict(name='static', sparsity=0.75), task=str
  )
  task = given.get('task', '')
  if task and task not in _LENGTHS:
    raise ValueError(
        f'config argument has task {task!r}; use one of '
        f'{", ".join(_LENGTHS)}, or none to pre-train.'
    )

  config = quickstart.get_config()
  config.model.update(
      vocab_size=4096, max_length=256, n_layers=4, n_heads=4, d_model=256,
      d_ff=1024,
  )
  config.data.update(corpus='./corpora/books', tokenizer='', task=task)
  config.phase_defaults.length = 256
  config.phase_defaults.learning_rate.peak = 2e-3
  config.evaluation.task_batches = 24
  if not task:
    config.phases.pretrain.algorithm.update(algorithm)
    config.phases.order = ('pretrain', 'continuation')
    return config
  config.phases.order = ('finetune',)
  config.phases.finetune.update(
      duration='400 steps', batch_size=8, length=_LENGTHS[task]
  )
  config.init_from = 'runs/books'
  config.loss.label_smoothing = 0.1
  config.evaluation.update(generations=64, max_new_tokens=64)
  return config
