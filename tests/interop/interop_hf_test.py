"""Models of the library and of transformers agree, in both directions."""

import functools
import json
import pathlib
import zipfile

import jax
import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax import models
from spdf_jax.sparsity.trees import by_name
from spdf_jax.training import token_loss
from tests import command
from tests.hf_models import make_mask
from tests.hf_models import make_params
from tests.hf_models import masked
from tests.refusals import refuse

pytestmark = pytest.mark.slow
torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip(
    'transformers', reason='transformers is not installed'
)

V, L = 67, 24
GPT2 = dict(
    vocab_size=V, n_positions=L, n_embd=32, n_layer=3, n_head=4,
    initializer_range=0.15, bos_token_id=None, eos_token_id=None,
)
LLAMA = dict(
    vocab_size=V, max_position_embeddings=L, hidden_size=32,
    num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
    initializer_range=0.15, bos_token_id=None, eos_token_id=None,
)
LLAMA3 = dict(
    rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=12, rope_theta=500.0,
)
THEIRS = {
    'gpt2': ('gpt2', GPT2 | dict(activation_function='gelu_new')),
    'gpt2 exact': ('gpt2', GPT2 | dict(activation_function='gelu', n_inner=40)),
    'gpt2 by layer': ('gpt2', GPT2 | dict(
        activation_function='gelu_new', scale_attn_by_inverse_layer_idx=True,
    )),
    'llama': ('llama', LLAMA),
    'llama grouped': ('llama', LLAMA | dict(num_key_value_heads=2)),
    'llama tied': ('llama', LLAMA | dict(
        tie_word_embeddings=True, rms_norm_eps=1e-5
    )),
    'llama heads': ('llama', LLAMA | dict(head_dim=12, num_key_value_heads=1)),
    'llama linear': ('llama', LLAMA | dict(rope_parameters=dict(
        rope_type='linear', factor=4.0, rope_theta=1000.0
    ))),
    'llama 3': ('llama', LLAMA | dict(rope_parameters=LLAMA3)),
    'mistral': ('mistral', LLAMA | dict(
        num_key_value_heads=2, sliding_window=None
    )),
    'qwen2': ('qwen2', LLAMA | dict(
        num_key_value_heads=2, tie_word_embeddings=True
    )),
    'qwen3': ('qwen3', LLAMA | dict(num_key_value_heads=2, head_dim=12)),
}
gpt = functools.partial(models.GPTConfig, V, 3, 4, 32)
llama = functools.partial(models.LlamaConfig, V, 3, 4, 32, 48, L)
OURS = {
    'gpt2': gpt(128, L),
    'gpt2 exact': gpt(40, L, activation='gelu'),
    'gpt2 by layer': gpt(128, L, attention_by_layer=True),
    'llama': llama(norm_eps=1e-6),
    'llama grouped': llama(norm_eps=1e-6, n_kv_heads=2),
    'llama tied': llama(tied=True),
    'llama heads': llama(norm_eps=1e-6, n_kv_heads=1, head_dim=12),
    'llama linear': llama(
        norm_eps=1e-6, rope_scaling='linear', rope_factor=4.0,
        rope_theta=1000.0,
    ),
    'llama 3': llama(
        norm_eps=1e-6, rope_scaling='llama3', rope_factor=8.0,
        rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
        rope_original_length=12, rope_theta=500.0,
    ),
    'mistral': llama(norm_eps=1e-6, n_kv_heads=2),
    'qwen2': llama(norm_eps=1e-6, n_kv_heads=2, tied=True, qkv_bias=True),
    'qwen3': llama(norm_eps=1e-6, n_kv_heads=2, head_dim=12, qk_norm=True),
}
TOKENS = np.random.default_rng(7).integers(V, size=(3, L))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
RTOL = 1e-5


def make_theirs(name, seed=0):
  """A model of transformers of which no weight is zero or one."""
  kind, fields = THEIRS[name]
  torch.manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(kind, **fields)
  ).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.05 * torch.randn_like(parameter)
  return model


def load_theirs(directory):
  """Loads with transformers; asserts that every key is as it expects."""
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      directory, output_loading_info=True
  )
  assert {k: v for k, v in info.items() if v} == {}
  return model


def assert_same_logits(config, params, theirs):
  with torch.no_grad():
    want = theirs(torch.tensor(TOKENS)).logits.numpy()
  logits = models.model_of(config).apply({'params': params}, TOKENS)
  assert np.abs(logits - want).max() < RTOL * np.abs(want).max()


@pytest.mark.parametrize('name', THEIRS)
def test_models_saved_by_transformers_give_the_same_logits_here(name, tmp_path):
  theirs = make_theirs(name)
  theirs.save_pretrained(tmp_path)
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == OURS[name] and loaded.mask is None
  assert_same_logits(loaded.config, loaded.params, theirs)
  assert interop.check_hf(tmp_path, TOKENS) < 1e-3


@pytest.mark.parametrize('name, sparse', [
    *((name, True) for name in OURS), ('gpt2', False), ('llama 3', False),
])
def test_our_exports_give_the_same_logits_in_transformers(
    name, sparse, tmp_path
):
  config = OURS[name]
  params = make_params(config)
  mask = make_mask(params) if sparse else None
  interop.save_hf(tmp_path, config, params, mask)
  if sparse:
    params = masked(params, mask)
  theirs = load_theirs(tmp_path)
  assert theirs.dtype == torch.float32
  assert_same_logits(config, params, theirs)


@pytest.mark.parametrize('name', THEIRS)
def test_gradient_norms_equal_those_of_transformers(name, tmp_path):
  theirs = make_theirs(name)
  theirs.save_pretrained(tmp_path)
  config, params, _ = interop.load_hf(tmp_path)
  logits = theirs(torch.tensor(INPUTS)).logits
  torch.nn.functional.cross_entropy(
      logits.reshape(-1, V), torch.tensor(TARGETS).reshape(-1)
  ).backward()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.copy_(parameter.grad)
  # Saved as if they were weights, gradients are converted to our layout.
  theirs.save_pretrained(tmp_path / 'gradients')
  want = by_name(interop.load_hf(tmp_path / 'gradients').params)

  @jax.jit
  @jax.grad
  def gradient(params):
    logits = models.model_of(config).apply({'params': params}, INPUTS)
    weights = np.ones(TARGETS.shape, np.float32)
    return token_loss(logits, TARGETS, weights)

  grads = by_name(gradient(params))
  assert grads.keys() == want.keys()
  largest = max(np.linalg.norm(x) for x in want.values())
  for path, x in want.items():
    norm, expected = np.linalg.norm(grads[path]), np.linalg.norm(x)
    is_gpt = isinstance(config, models.GPTConfig)
    if is_gpt and path.endswith('attn/wk/bias'):
      # Without rotary positions a bias of all keys does not change the softmax.
      assert max(norm, expected) < 1e-5 * largest
      continue
    assert norm == pytest.approx(expected, rel=RTOL), path


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_transformers_loads_exports_in_smaller_types(dtype, tmp_path):
  config = OURS['llama grouped']
  interop.save_hf(tmp_path, config, make_params(config), dtype=dtype)
  assert load_theirs(tmp_path).dtype == getattr(torch, dtype)
  assert interop.check_hf(tmp_path, TOKENS) < 1e-3


@pytest.mark.parametrize('name, sharded', [
    ('gpt2', False), ('llama grouped', True),
])
def test_files_of_torch_save_are_read(name, sharded, tmp_path):
  theirs = make_theirs(name)
  theirs.config.save_pretrained(tmp_path)
  tensors = theirs.state_dict()
  if sharded:
    shards = {name: f'part-{i % 2}.bin' for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
      part = {k: x.bfloat16() for k, x in tensors.items() if shards[k] == shard}
      torch.save(part, tmp_path / shard)
    index = tmp_path / transformers.utils.WEIGHTS_INDEX_NAME
    index.write_text(json.dumps({'weight_map': shards}))
  else:
    torch.save(tensors, tmp_path / 'pytorch_model.bin')
  embedding = interop.load_hf(tmp_path).params['wte']['embedding']
  want = theirs.get_input_embeddings().weight.detach()
  want = (want.bfloat16().float() if sharded else want).numpy()
  np.testing.assert_array_equal(embedding, want)


def test_a_torch_file_of_more_than_weights_is_refused(tmp_path):
  make_theirs('gpt2').config.save_pretrained(tmp_path)
  torch.save({'w': pathlib.PurePath}, tmp_path / 'pytorch_model.bin')
  refuse('cannot be read .Unpickling', interop.load_hf, tmp_path)


def test_a_torch_file_that_expands_is_refused_before_it_does(tmp_path):
  theirs = make_theirs('gpt2')
  theirs.config.save_pretrained(tmp_path)
  path, tensors = tmp_path / 'pytorch_model.bin', theirs.state_dict()
  for name in ('extra', 'transformer.wte.weight'):
    # A view with strides 0: 2^40 elements of one number in memory.
    expanded = torch.zeros(1).expand(1 << 20, 1 << 20)
    torch.save({**tensors, name: expanded}, path)
    refuse(f"fewer elements of '{name}' than", interop.load_hf, tmp_path)
  torch.save(tensors, path)
  with zipfile.ZipFile(path) as stored:
    contents = {name: stored.read(name) for name in stored.namelist()}
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as compressed:
    for name, content in contents.items():
      compressed.writestr(name, content)
  refuse('is compressed, which torch.save does', interop.load_hf, tmp_path)


def test_the_command_compares_logits(tmp_path):
  make_theirs('llama 3').save_pretrained(tmp_path / 'hf')
  done = command.run(
      'convert', '--check', f'--model={tmp_path / "hf"}',
      f'--to={tmp_path / "run"}',
  )
  assert done.status == 0, done.log
  last = done.output.splitlines()[-1]
  words = 'logits differ from those of transformers by '
  assert last.startswith(words) and float(last.removeprefix(words)) < 1e-3
