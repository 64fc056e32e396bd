"""The harness gives what its own class for Hugging Face models gives."""


import numpy as np
import pytest

from experiments.scores import language_models
from experiments.scores import suites
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import models
from tests.data.special_tokens_test import write_llama
from tests.hf_models import make_params
from tests.real_data import data_path

pytestmark = pytest.mark.slow
torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip(
    'transformers', reason='transformers is not installed'
)
pytest.importorskip('lm_eval', reason='lm-eval is not installed')

LENGTH, LIMIT, RTOL = 192, 6, 1e-5
FAST = dict(
    tokenizer_class='PreTrainedTokenizerFast', bos_token='<s>',
    eos_token='</s>',
)
PAIRS = [
    ('The sky is', ' blue'), ('One two ', 'three'), ('é' * 200, ' end'),
    ('', ' to be or not'), ('🦜 漢字', ' e\u0301😀'), ('<s>to be', ' or'),
]
TEXTS = ['to be or not', 'All work and no play. ' * 60, '🦜 漢字 e\u0301', '']


class Request:
  """Request of the harness to a model."""

  def __init__(self, *args):
    self.args = args


def write_gpt2(folder):
  """Writes a GPT-2 of ours with a tokenizer of ours."""
  folder.mkdir()
  tokenizer = data.train_bpe(['to be or not to be, that is it'] * 3, 270)
  config = models.GPTConfig(270, 2, 2, 16, 24, LENGTH)
  interop.save_hf(
      folder, config, make_params(config), end_of_text=tokenizer.end_of_text,
  )
  data.export_tokenizer(folder / 'tokenizer.json', tokenizer)


def write_a_llama(folder):
  """Writes a Llama of transformers that adds `<s>` and has three ends."""
  write_llama(folder, tokenizer_config=FAST)
  (percent,) = data.open_tokenizer(folder).encode('%')
  torch.manual_seed(0)
  transformers.LlamaForCausalLM(transformers.LlamaConfig(
      vocab_size=270, max_position_embeddings=LENGTH, hidden_size=32,
      num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
      initializer_range=0.15, bos_token_id=1,
      eos_token_id=[2, 3, percent],  # It generates a per cent sign.
  )).save_pretrained(folder)


@pytest.fixture(scope='module', params=[write_gpt2, write_a_llama])
def both(request, tmp_path_factory):
  """The harness' own model of a directory, and ours."""
  from lm_eval.models import huggingface
  datasets = pytest.importorskip('datasets')
  folder = tmp_path_factory.mktemp('models') / 'model'
  request.param(folder)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('HF_HUB_OFFLINE', '1')
    patch.setenv('HF_DATASETS_OFFLINE', '1')
    patch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(folder / 'cache'))
    theirs = huggingface.HFLM(
        pretrained=str(folder), device='cpu', batch_size=4, dtype='float32'
    )
    ours = evaluation.harness_model(language_models.open_hf(folder).subject)
    yield theirs, ours


def answers(model, task):
  """The answers of a model to the questions of a task, and its metrics."""
  from lm_eval import evaluator
  from lm_eval import tasks
  evaluated = evaluator.simple_evaluate(
      model=model, tasks=[task], num_fewshot=0, limit=LIMIT,
      task_manager=tasks.TaskManager(include_defaults=False),
      bootstrap_iters=0, log_samples=True,
  )
  (samples,) = evaluated['samples'].values()
  (results,) = evaluated['results'].values()
  numbers = {k: x for k, x in results.items() if isinstance(x, float)}
  return [sample['resps'] for sample in samples], numbers


@pytest.mark.parametrize(
    'task', [measure.task for measure in suites.SUITES['cerebras_gpt']]
)
def test_answers_to_the_tasks_agree_with_the_harness_on_transformers(
    both, task
):
  folder = data_path('lm_eval_tasks/data')
  (want, metrics), (replies, ours) = (
      answers(model, suites.local_tasks(folder)[task]) for model in both
  )
  logs, others = (
      [np.array([float(r[0][0]) for r in row]) for row in rows]
      for rows in (want, replies)
  )
  for one, other in zip(logs, others):
    np.testing.assert_allclose(other, one, rtol=RTOL)
  assert [[r[0][1] for r in row] for row in replies] == [
      [r[0][1] for r in row] for row in want
  ]
  assert ours == pytest.approx(metrics, rel=RTOL)


def test_likelihoods_of_texts_agree(both):
  theirs, ours = (
      model.loglikelihood([Request(*pair) for pair in PAIRS], disable_tqdm=True)
      for model in both
  )
  assert [x[0] for x in ours] == pytest.approx([x[0] for x in theirs], rel=RTOL)
  assert [x[1] for x in ours] == [x[1] for x in theirs]


def test_rolling_likelihoods_agree(both):
  theirs, ours = (
      model.loglikelihood_rolling([Request(text) for text in TEXTS])
      for model in both
  )
  assert ours == pytest.approx(theirs, rel=RTOL)


@pytest.mark.parametrize('settings', [
    dict(until=[]), dict(until=['o', 'to']), dict(until='\n'),
    dict(until=[], max_new_tokens=9), dict(until=[], max_tokens=9),
    dict(until=['be'], do_sample=False, temperature=0.7),
])
def test_generated_texts_agree(both, settings):
  settings = dict(max_gen_toks=40) | settings if (
      not any(name.startswith('max_') for name in settings)
  ) else settings
  theirs, ours = (
      model.generate_until([
          Request(text, dict(settings))
          for text in ('to be', 'or not 🦜', 'x' * 300)
      ]) for model in both
  )
  assert ours == theirs and any(theirs)


def test_generated_answers_of_gsm8k_agree(both):
  task = suites.local_tasks(data_path('lm_eval_tasks/data'))['gsm8k']
  kwargs = task['generation_kwargs'] | dict(max_gen_toks=60)
  task = task | dict(generation_kwargs=kwargs)
  theirs, ours = (answers(model, task) for model in both)
  assert ours == theirs
