"""Suites of the harness: tasks, shots and metrics of published tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

from experiments.scores.sheets import Score
from spdf_jax import evaluation
from spdf_jax import extras
from spdf_jax import names


class Measure(NamedTuple):
  """One number of a suite.

  Attributes:
    task: Name of the task in the harness.
    shots: Number of solved examples before each question.
    metric: Metric and filter of the harness.
    in_mean: Whether the task counts in the suite's mean.
  """

  task: str
  shots: int
  metric: str
  in_mean: bool = True


SUITES: Mapping[str, tuple[Measure, ...]] = {
    # Dey et al. 2023, "Cerebras-GPT", table 3: accuracy, without shots.
    'cerebras_gpt': tuple(
        Measure(task, 0, 'acc,none')
        for task in ('hellaswag', 'piqa', 'winogrande', 'lambada_openai',
                     'arc_easy', 'arc_challenge', 'openbookqa')
    ),
    # The first Open LLM Leaderboard; GSM8K is reported outside the mean.
    'open_llm': (
        Measure('arc_challenge', 25, 'acc_norm,none'),
        Measure('hellaswag', 10, 'acc_norm,none'),
        Measure('truthfulqa_mc2', 0, 'acc,none'),
        Measure('mmlu', 5, 'acc,none'),
        Measure('winogrande', 5, 'acc,none'),
        Measure('gsm8k', 5, 'exact_match,strict-match', in_mean=False),
    ),
}
"""Suites by name."""


def score_suite(
    subject: evaluation.Subject,
    suite: str,
    *,
    directory: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Iterator[Score]:
  """Evaluates a model on the tasks of a suite, one after another.

  Args:
    subject: Model to evaluate.
    suite: `'cerebras_gpt'` or `'open_llm'`.
    directory: Folder with the files of tasks, see `local_tasks`: nothing is
      downloaded, and tasks without a file are skipped. None: the tasks of the
      harness, which downloads them.
    limit: Maximum number of questions of each task, for a trial; None: all.

  Yields:
    The accuracy of each task, whose value is None where there is no file, and
    `'mean'` over those that count in the suite's mean, None unless all of them
    were measured.

  Raises:
    ImportError: lm-eval is not installed.
    ValueError: the suite is unknown.
  """
  measures = names.lookup('suite', suite, SUITES)
  evaluator = extras.require('lm_eval.evaluator', 'harness')
  manager = extras.require('lm_eval.tasks', 'harness').TaskManager(
      include_defaults=directory is None
  )
  tasks = None if directory is None else local_tasks(directory)
  model = evaluation.harness_model(subject)
  counted: list[float | None] = []
  for measure in measures:
    name = measure.task
    if tasks is not None and name not in tasks:
      note = f'{directory} has no file of {name}.'
      yield Score(name, suite, 'accuracy', None, note)
      counted += [None] * measure.in_mean
      continue
    results: dict[str, Any] = evaluator.simple_evaluate(
        model=model,
        tasks=[name if tasks is None else tasks[name]],
        num_fewshot=measure.shots,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
    )
    items = sum(count['effective'] for count in results['n-samples'].values())
    choices = [
        len(sample['arguments'])
        for task, samples in results['samples'].items() for sample in samples
        if _chooses(results['configs'][task])
    ]
    value = float(results['results'][name][measure.metric])
    chance = chance_level(choices) if len(choices) == items else None
    yield Score(name, suite, 'accuracy', value, f'{items:,} items', chance)
    counted += [value] * measure.in_mean
  measured = [value for value in counted if value is not None]
  mean = sum(measured) / len(counted) if measured == counted else None
  yield Score('mean', suite, 'accuracy', mean)


def chance_level(choices: Sequence[int]) -> float:
  """Returns the expected accuracy of random guessing.

  Args:
    choices: Number of answers to each question, one of them right.

  Returns:
    The mean of the inverse numbers, 0 to 1.

  Example:
    >>> chance_level([4, 4, 5, 2])
    0.3
  """
  return sum(1 / number for number in choices) / len(choices)


def _chooses(config: Mapping[str, Any]) -> bool:
  """Returns whether a task is multiple choice, scored by its one answer."""
  return (
      config['output_type'] == 'multiple_choice'
      and not config.get('process_results')
  )


def local_tasks(directory: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
  """Returns the configs of the tasks whose files are in a folder.

  The prompts are those of the harness; few-shot examples come from the same
  file, or from `gsm8k_train.jsonl` for GSM8K. Files: `arc_easy.jsonl`,
  `arc_challenge.jsonl`, `openbook_qa.jsonl`, `piqa.jsonl`, `winogrande.jsonl`,
  `copa.jsonl` and `lambada_openai.jsonl` as in MosaicML's llm-foundry,
  `hellaswag_val*.jsonl` and `gsm8k_test.jsonl` as their authors publish them.

  Args:
    directory: Folder with the files.

  Returns:
    Configs by the task names of the harness, for
    `lm_eval.simple_evaluate(tasks=[…])`.

  Raises:
    ValueError: `directory` has none of the files.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'arc_easy.jsonl').write_text('')
    >>> list(local_tasks(folder))
    ['arc_easy']
  """
  directory = Path(directory).expanduser()
  tasks = {}
  for name, (pattern, config) in _TASKS.items():
    files = sorted(directory.glob(pattern))
    if files:
      tasks[name] = {
          'task': name,
          'dataset_path': 'json',
          'dataset_kwargs': {
              'data_files': {'test': str(files[0].resolve())}
          },
          'test_split': 'test',
          'metadata': {'version': 1.0},
          **config,
      }
  train = directory / 'gsm8k_train.jsonl'
  if 'gsm8k' in tasks and train.exists():
    gsm8k = tasks['gsm8k']
    files = gsm8k['dataset_kwargs']['data_files']
    gsm8k['dataset_kwargs'] = {
        'data_files': files | {'train': str(train.resolve())}
    }
    gsm8k |= {'training_split': 'train', 'fewshot_split': 'train'}
  if not tasks:
    raise ValueError(
        f'directory={str(directory)!r} has none of the files'
        f' {", ".join(pattern for pattern, _ in _TASKS.values())}; give the'
        ' folder with the tasks.'
    )
  return tasks


def clean_hellaswag(text: str) -> str:
  """Removes WikiHow's markup from a text, as the harness does.

  Example:
    >>> clean_hellaswag('Cook [header] rice [title] Boil it')
    'Cook rice. Boil it'
  """
  text = text.strip().replace(' [title]', '. ')
  return re.sub(r'\[.*?\]', '', text).replace('  ', ' ')


def _hellaswag_documents(dataset: Any) -> Any:
  def document(row):
    context = f'{row["ctx_a"]} {row["ctx_b"].capitalize()}'
    return {
        'query': clean_hellaswag(f'{row["activity_label"]}: {context}'),
        'choices': [clean_hellaswag(ending) for ending in row['endings']],
        'gold': int(row['label']),
    }

  return dataset.map(document)


def _mean(*metrics: str) -> list[dict[str, Any]]:
  return [
      {'metric': name, 'aggregation': 'mean', 'higher_is_better': True}
      for name in metrics
  ]


def _choices(prompt: str, **more: str | Callable[..., Any]) -> dict[str, Any]:
  return {
      'output_type': 'multiple_choice',
      'doc_to_text': prompt,
      'doc_to_target': 'gold',
      'doc_to_choice': 'choices',
      'metric_list': _mean('acc', 'acc_norm'),
      **more,
  }


_LAMBADA = {
    'output_type': 'loglikelihood',
    'doc_to_text': '{{context}}',
    'doc_to_target': "{{' '+continuation}}",
    'metric_list': _mean('acc') + [{
        'metric': 'perplexity', 'aggregation': 'perplexity',
        'higher_is_better': False,
    }],
}
_GSM8K = {
    'output_type': 'generate_until',
    'doc_to_text': 'Question: {{question}}\nAnswer:',
    'doc_to_target': '{{answer}}',
    'generation_kwargs': {
        'until': ['Question:', '</s>', '<|im_end|>'], 'do_sample': False,
        'temperature': 0.0,
    },
    'metric_list': [{
        'metric': 'exact_match', 'aggregation': 'mean',
        'higher_is_better': True, 'ignore_case': True,
        'ignore_punctuation': False,
        'regexes_to_ignore': [',', r'\$', '(?s).*#### ', r'\.$'],
    }],
    'filter_list': [{
        'name': 'strict-match',
        'filter': [
            {'function': 'regex', 'regex_pattern': r'#### (\-?[0-9\.\,]+)'},
            {'function': 'take_first'},
        ],
    }],
}
# The harness scores the continuation under each of the two contexts.
_WINOGRANDE = _choices(
    'gold', doc_to_target='continuation', doc_to_choice='context_options'
) | {'metric_list': _mean('acc')}

_TASKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    'arc_easy': ('arc_easy.jsonl', _choices('{{query}}\nAnswer:')),
    'arc_challenge': ('arc_challenge.jsonl', _choices('{{query}}\nAnswer:')),
    'openbookqa': ('openbook_qa.jsonl', _choices('{{query}}')),
    'piqa': ('piqa.jsonl', _choices('{{query}}Answer:')),
    'copa': ('copa.jsonl', _choices('{{query}}')),
    'winogrande': ('winogrande.jsonl', _WINOGRANDE),
    'hellaswag': ('hellaswag_val*.jsonl', _choices(
        '{{query}}', process_docs=_hellaswag_documents
    )),
    'lambada_openai': ('lambada_openai.jsonl', _LAMBADA),
    'gsm8k': ('gsm8k_test.jsonl', _GSM8K),
}
