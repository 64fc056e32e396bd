"""Fields of a Hugging Face config, as transformers reads and writes them."""

import dataclasses
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from spdf_jax.interop import configs
from spdf_jax.models import LlamaConfig
from tests.hf_models import CONFIGS
from tests.hf_models import GPT
from tests.refusals import refuse


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    groups=st.integers(1, 4),
    scaling=st.sampled_from(['none', 'linear', 'llama3']),
    theta=st.floats(1, 1e7),
    tied=st.booleans(),
    eps=st.floats(1e-9, 1e-3),
)
def test_llama_configs_are_restored(sizes, groups, scaling, theta, tied, eps):
  vocabulary, layers, d_ff, length = sizes
  stretch = {} if scaling == 'none' else dict(rope_factor=3.5)
  if scaling == 'llama3':
    stretch |= dict(rope_low_freq_factor=0.5, rope_original_length=77)
  config = LlamaConfig(
      vocabulary, layers, 4 * groups, 8 * groups, d_ff, length,
      n_kv_heads=groups, tied=tied, norm_eps=eps, rope_theta=theta,
      rope_scaling=scaling, **stretch,
  )
  fields = json.loads(json.dumps(configs.write_config(config, 'float32')))
  assert configs.read_config(fields) == config


LLAMA_FIELDS = dict(
    model_type='llama', vocab_size=23, num_hidden_layers=1, hidden_size=16,
    num_attention_heads=4, intermediate_size=24, max_position_embeddings=8,
)
LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0,
    original_max_position_embeddings=4,
)


@pytest.mark.parametrize('name, fields', [
    ('llama', {}),
    ('llama', dict(rope_theta=10000.0, rope_scaling=None)),
    ('llama', dict(rope_parameters=dict(rope_theta=1e4, rope_type='default'))),
    ('llama linear', dict(
        rope_theta=500.0, rope_scaling=dict(type='linear', factor=4.0)
    )),
    ('llama linear', dict(rope_parameters=dict(
        rope_theta=500.0, rope_type='linear', factor=4.0
    ))),
    ('llama 3', dict(
        rope_theta=5e5, rope_scaling=LLAMA3 | dict(rope_type='llama3')
    )),
    ('llama 3', dict(
        rope_parameters=LLAMA3 | dict(rope_type='llama3', rope_theta=5e5)
    )),
])
def test_both_spellings_of_rotary_positions_are_read(name, fields):
  want = dataclasses.replace(CONFIGS[name], n_layers=1, norm_eps=1e-6)
  assert configs.read_config(LLAMA_FIELDS | fields) == want


def test_a_missing_feed_forward_width_is_four_times_the_model_width():
  fields = configs.write_config(GPT, 'float32') | dict(n_inner=None)
  assert configs.read_config(fields).d_ff == 64


@pytest.mark.parametrize('kind, missing, n_kv_heads, head_dim', [
    # Defaults of transformers 5, configuration_KIND.py. Null is another value.
    ('llama', 'num_key_value_heads', None, None),
    ('mistral', 'num_key_value_heads', 8, None),
    ('qwen2', 'num_key_value_heads', 32, None),
    ('qwen3', 'num_key_value_heads', 32, 12),
    ('qwen3', 'head_dim', 2, 128),
    ('llama', 'head_dim', 2, None),
])
def test_a_missing_field_has_the_default_of_its_architecture(
    kind, missing, n_kv_heads, head_dim
):
  fields = dict(
      model_type=kind, vocab_size=64, num_hidden_layers=1, hidden_size=512,
      num_attention_heads=64, intermediate_size=8, max_position_embeddings=64,
      num_key_value_heads=2, head_dim=12 if missing != 'head_dim' else 8,
  )
  if kind != 'qwen3' and missing != 'head_dim':
    fields['head_dim'] = None
  null = configs.read_config(fields | {missing: None})
  del fields[missing]
  config = configs.read_config(fields)
  assert (config.n_kv_heads, config.head_dim) == (n_kv_heads, head_dim)
  assert getattr(null, 'n_kv_heads' if 'num' in missing else 'head_dim') is None


def test_a_mistral_without_a_window_in_its_config_has_the_default_one():
  fields = dict(
      model_type='mistral', vocab_size=64, num_hidden_layers=1, hidden_size=64,
      num_attention_heads=8, intermediate_size=8, max_position_embeddings=4097,
  )
  refuse('sliding_window is 4096; it must be nu', configs.read_config, fields)
  whole = configs.read_config(fields | {'sliding_window': None})
  assert whole.max_length == 4097
  fields['max_position_embeddings'] = 4096
  assert configs.read_config(fields).max_length == 4096
