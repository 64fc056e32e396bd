# SPDX-License-Identifier: Apache-2.0
"""Tasks of the harness over local files."""

from collections.abc import Callable
from collections.abc import Mapping
import os
from pathlib import Path
import re
from typing import Any


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
