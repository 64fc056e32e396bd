"""Reader and writer of a model's config.json."""

from collections.abc import Mapping
from typing import Any

from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models.decoder import DecoderConfig

_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu': 'gelu'}

_GPT_OPTIONS = {
    'add_cross_attention': False,
    'layer_norm_epsilon': 1e-5,
    'reorder_and_upcast_attn': False,
    'scale_attn_by_inverse_layer_idx': False,
    'scale_attn_weights': True,
}
_LLAMA_OPTIONS = {
    'attention_bias': False,
    'hidden_act': 'silu',
    'mlp_bias': False,
}
"""Options for which our models support only this value, the default."""

_LLAMA3 = {
    'low_freq_factor': 'rope_low_freq_factor',
    'high_freq_factor': 'rope_high_freq_factor',
    'original_max_position_embeddings': 'rope_original_length',
}
_ROTARY = {
    'default': {},
    'linear': {'factor': 'rope_factor'},
    'llama3': {'factor': 'rope_factor'} | _LLAMA3,
}
"""Fields of each type of rotary positions, with their names in `LlamaConfig`.
The names of the types are equal, except that `default` is our `none`."""


def read_config(fields: Mapping[str, Any]) -> GPTConfig | LlamaConfig:
  """Reads the fields of a config.json, as transformers 4 and 5 write them.

  Args:
    fields: Fields of the file.

  Returns:
    The config of our model, unscanned and with float32 computation.

  Raises:
    ValueError: the architecture is not GPT-2 or Llama, a field is missing, or
      our models do not support an option.

  Example:
    >>> read_config(dict(
    ...     model_type='gpt2', vocab_size=64, n_layer=2, n_head=2, n_embd=16,
    ...     n_positions=32, activation_function='gelu')).d_ff
    64
  """
  kind = fields.get('model_type')
  if kind not in _READERS:
    raise ValueError(
        f'model_type is {kind!r} in config.json; only '
        f'{" and ".join(map(repr, _READERS))} can be read.'
    )
  return _READERS[kind](fields)


def write_config(config: GPTConfig | LlamaConfig, dtype: str) -> dict[str, Any]:
  """Returns the config.json of a model, for transformers 4 and 5.

  Dropout is zero. The ids that begin and end a text are `None`, since they
  belong to the tokenizer.

  Args:
    config: Config of the model.
    dtype: Dtype of the tensors in the file, e.g. `'bfloat16'`.

  Returns:
    The fields, JSON-able.

  Raises:
    ValueError: the model has multipliers of muP, for which GPT-2 has no fields.

  Example:
    >>> config = GPTConfig(64, 2, 2, 16, 48, 32)
    >>> fields = write_config(config, 'float32')
    >>> fields['n_inner'], read_config(fields) == config
    (48, True)
  """
  write = _write_gpt if isinstance(config, GPTConfig) else _write_llama
  return write(config) | dict(
      bos_token_id=None,
      eos_token_id=None,
      torch_dtype=dtype,
      vocab_size=config.vocab_size,
  )


def _read_gpt(fields: Mapping[str, Any]) -> GPTConfig:
  _refuse_other_options(fields, _GPT_OPTIONS)
  activation = fields.get('activation_function', 'gelu_new')
  if activation not in _ACTIVATIONS:
    raise ValueError(
        f'activation_function is {activation!r} in config.json; only '
        f'{" and ".join(map(repr, _ACTIVATIONS))} can be computed.'
    )
  d_model = _required(fields, 'n_embd')
  return GPTConfig(
      vocab_size=_required(fields, 'vocab_size'),
      n_layers=_required(fields, 'n_layer'),
      n_heads=_required(fields, 'n_head'),
      d_model=d_model,
      d_ff=_or(fields.get('n_inner'), 4 * d_model),
      max_length=_required(fields, 'n_positions'),
      activation=_ACTIVATIONS[activation],
  )


def _read_llama(fields: Mapping[str, Any]) -> LlamaConfig:
  _refuse_other_options(fields, _LLAMA_OPTIONS)
  sizes = dict(
      vocab_size=_required(fields, 'vocab_size'),
      n_layers=_required(fields, 'num_hidden_layers'),
      n_heads=_required(fields, 'num_attention_heads'),
      d_model=_required(fields, 'hidden_size'),
      d_ff=_required(fields, 'intermediate_size'),
      max_length=_required(fields, 'max_position_embeddings'),
  )
  usual = DecoderConfig(**sizes)
  unless = lambda value, default: None if value == default else value
  return LlamaConfig(
      **sizes,
      n_kv_heads=unless(fields.get('num_key_value_heads'), usual.kv_heads),
      head_dim=unless(fields.get('head_dim'), usual.head_size),
      norm_eps=fields.get('rms_norm_eps', 1e-6),
      tied=fields.get('tie_word_embeddings', False),
      **_read_rotary(fields),
  )


def _read_rotary(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Reads `rope_parameters` (transformers 5), or the earlier fields."""
  rope = _or(fields.get('rope_parameters'), fields.get('rope_scaling')) or {}
  given = dict(fields) | rope
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind not in _ROTARY:
    raise ValueError(
        f'rope_type is {kind!r} in config.json; only '
        f'{", ".join(map(repr, _ROTARY))} can be computed.'
    )
  _refuse_other_options(given, {'partial_rotary_factor': 1.0})
  scaling = {
      ours: _required(rope, theirs) for theirs, ours in _ROTARY[kind].items()
  }
  return scaling | dict(
      rope_theta=float(given.get('rope_theta', 10000.0)),
      rope_scaling='none' if kind == 'default' else kind,
  )


def _write_gpt(c: GPTConfig) -> dict[str, Any]:
  for name, neutral in (
      ('embeddings_scale', 1.0),
      ('logits_scale', 1.0),
      ('attention_by_size', False),
  ):
    value = getattr(c, name)
    if value != neutral:
      raise ValueError(
          f'{name} is {value}, a multiplier of muP for which GPT-2 has no '
          f'field; only models where it is {neutral} can be exported.'
      )
  names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  return _GPT_OPTIONS | dict(
      model_type='gpt2',
      architectures=['GPT2LMHeadModel'],
      activation_function=names[c.activation],
      n_layer=c.n_layers,
      n_head=c.n_heads,
      n_embd=c.d_model,
      n_inner=c.d_ff,
      n_positions=c.max_length,
      tie_word_embeddings=True,
      attn_pdrop=0.0,
      embd_pdrop=0.0,
      resid_pdrop=0.0,
  )


def _write_llama(c: LlamaConfig) -> dict[str, Any]:
  kind = c.rope_scaling
  # Written in the fields that transformers 4 and 5 both read.
  scaling = None if kind == 'none' else dict(rope_type=kind) | {
      theirs: getattr(c, ours) for theirs, ours in _ROTARY[kind].items()
  }
  return _LLAMA_OPTIONS | dict(
      model_type='llama',
      architectures=['LlamaForCausalLM'],
      num_hidden_layers=c.n_layers,
      num_attention_heads=c.n_heads,
      num_key_value_heads=c.kv_heads,
      head_dim=c.head_size,
      hidden_size=c.d_model,
      intermediate_size=c.d_ff,
      max_position_embeddings=c.max_length,
      rms_norm_eps=c.norm_eps,
      tie_word_embeddings=c.tied,
      rope_theta=c.rope_theta,
      rope_scaling=scaling,
      attention_dropout=0.0,
  )


_READERS = {'gpt2': _read_gpt, 'llama': _read_llama}


def _or(value: Any, default: Any) -> Any:
  return default if value is None else value


def _required(fields: Mapping[str, Any], name: str) -> Any:
  if fields.get(name) is None:
    raise ValueError(
        f'{name} is missing in config.json; add it, or fetch the file again.'
    )
  return fields[name]


def _refuse_other_options(
    fields: Mapping[str, Any], computed: Mapping[str, Any]
) -> None:
  for name, value in computed.items():
    found = _or(fields.get(name), value)
    if found != value:
      raise ValueError(
          f'{name} is {found!r} in config.json; only models where it is '
          f'{value!r} can be read.'
      )
