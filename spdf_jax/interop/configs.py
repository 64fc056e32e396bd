# SPDX-License-Identifier: Apache-2.0
"""Reader and writer of a model's config.json, with checked types."""

from collections.abc import Callable, Mapping
import logging
import reprlib
from typing import Any, TypeVar

from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models.decoder import DecoderConfig

logger = logging.getLogger('spdf_jax')

T = TypeVar('T')
Fields = Mapping[str, Any]

_LARGEST_SIZE = 2**24
_LARGEST_NUMBER = 3.4e38  # Close to the largest value of float32.

_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu': 'gelu'}

_GPT_OPTIONS = {
    'add_cross_attention': False,
    'layer_norm_epsilon': 1e-5,
    'reorder_and_upcast_attn': False,
    'scale_attn_weights': True,
    'tie_word_embeddings': True,
}
_LLAMA_OPTIONS = {
    'attention_bias': False,
    'hidden_act': 'silu',
    'mlp_bias': False,
}
_QWEN2_OPTIONS = {'hidden_act': 'silu', 'use_sliding_window': False}
_QWEN3_OPTIONS = _QWEN2_OPTIONS | {'attention_bias': False}
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


def read_config(fields: Fields) -> GPTConfig | LlamaConfig:
  """Reads the fields of a config.json, as transformers 4 and 5 write them.

  A field that is missing has its default in transformers.

  Args:
    fields: Fields of the file.

  Returns:
    The config of our model, unscanned, with float32 computation and without
    dropout, whatever the rates in the file are.

  Raises:
    ValueError: the architecture is not GPT-2, Llama, Mistral, Qwen2 or Qwen3, a
      field is missing or of another type, or our models do not support an
      option.

  Example:
    >>> read_config(dict(
    ...     model_type='gpt2', vocab_size=64, n_layer=2, n_head=2, n_embd=16,
    ...     n_positions=32, activation_function='gelu')).d_ff
    64
  """
  return _choice(fields, 'model_type', _READERS)(fields)


def read_end_of_text(
    fields: Fields, generation: Fields | None = None
) -> int | list[int] | None:
  """Returns the ids that end a text, or `None` if no file has one.

  Args:
    fields: Fields of config.json, which `read_config` can read.
    generation: Fields of generation_config.json, which may have more ends.

  Returns:
    One id or a list of them; without those outside the vocabulary, such as the
    default ids of transformers in models with a small vocabulary.

  Example:
    >>> read_end_of_text({'vocab_size': 64, 'eos_token_id': 3})
    3
  """
  ids: list[Any] = []
  for each in (fields, generation or {}):
    ids += _tokens(each, 'eos_token_id', fields['vocab_size'])
  ids = list(dict.fromkeys(ids))
  return ids[0] if len(ids) == 1 else ids or None


def read_begin_of_text(
    fields: Fields, generation: Fields | None = None
) -> int | None:
  """Returns the id that begins a text, or `None` if no file has one.

  Args:
    fields: Fields of config.json, which `read_config` can read.
    generation: Fields of generation_config.json, read if `fields` have none.

  Returns:
    The id, if it is in the vocabulary.

  Example:
    >>> read_begin_of_text({'vocab_size': 64, 'bos_token_id': 1})
    1
  """
  for each in (fields, generation or {}):
    for i in _tokens(each, 'bos_token_id', fields['vocab_size']):
      return i
  return None


def _tokens(fields: Fields, name: str, vocab_size: int) -> list[int]:
  """Returns the ids of a field that the vocabulary has."""
  ids = fields.get(name)
  ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
  outside = [i for i in ids if not _are_tokens([i], vocab_size)]
  if outside:
    logger.warning(
        'the files of the model name %s as %s, outside its vocabulary of %d '
        'tokens; they are left out', outside, name, vocab_size,
    )
  return [i for i in ids if i not in outside]


def write_config(
    config: GPTConfig | LlamaConfig,
    dtype: str,
    end_of_text: int | list[int] | None = None,
    begin_of_text: int | None = None,
) -> dict[str, Any]:
  """Returns the config.json of a model, for transformers 4 and 5.

  Dropout rates are zero, whatever the model was trained with.

  Args:
    config: Config of the model.
    dtype: Dtype of the tensors in the file, e.g. `'bfloat16'`.
    end_of_text: Id or ids of the tokens that end a text. A single one also
      begins the texts of GPT-2, if they begin with no other.
    begin_of_text: Id of the token that begins a text; `None`: there is none.

  Returns:
    The fields, JSON-able.

  Raises:
    ValueError: the model has multipliers of muP, for which GPT-2 has no fields;
      or an id is not in the vocabulary.

  Example:
    >>> config = GPTConfig(64, 2, 2, 16, 48, 32)
    >>> fields = write_config(config, 'float32')
    >>> fields['n_inner'], read_config(fields) == config
    (48, True)
  """
  vocab_size = config.vocab_size
  if end_of_text is not None and not _are_tokens(end_of_text, vocab_size):
    raise ValueError(
        f'end_of_text is {end_of_text!r}; give an int or a list of ints from 0 '
        f'to {vocab_size - 1}, ids of tokens of the model.'
    )
  first = begin_of_text
  if isinstance(config, GPTConfig):
    fields = _write_gpt(config)
    if first is None and isinstance(end_of_text, int):
      first = end_of_text
  else:
    fields = _write_llama(config)
  return fields | dict(
      bos_token_id=first,
      eos_token_id=end_of_text,
      torch_dtype=dtype,
      vocab_size=vocab_size,
  )


def _read_gpt(fields: Fields) -> GPTConfig:
  _refuse_other_options(fields, _GPT_OPTIONS)
  d_model = _size(fields, 'n_embd')
  return GPTConfig(
      vocab_size=_size(fields, 'vocab_size'),
      n_layers=_size(fields, 'n_layer'),
      n_heads=_size(fields, 'n_head'),
      d_model=d_model,
      d_ff=_size(fields, 'n_inner', 4 * d_model),
      max_length=_size(fields, 'n_positions'),
      activation=_choice(
          fields, 'activation_function', _ACTIVATIONS, 'gelu_new'
      ),
      attention_by_layer=_flag(fields, 'scale_attn_by_inverse_layer_idx'),
  )


def _read_llama(
    fields: Fields, options: Fields = _LLAMA_OPTIONS, **own: Any
) -> LlamaConfig:
  _refuse_other_options(fields, options)
  sizes: dict[str, Any] = dict(
      vocab_size=_size(fields, 'vocab_size'),
      n_layers=_size(fields, 'num_hidden_layers'),
      n_heads=_size(fields, 'num_attention_heads'),
      d_model=_size(fields, 'hidden_size'),
      d_ff=_size(fields, 'intermediate_size'),
      max_length=_size(fields, 'max_position_embeddings'),
  )
  usual = DecoderConfig(**sizes)

  def unless(name, default):
    value = _size(fields, name, default)
    return None if value == default else value

  return LlamaConfig(
      **sizes,
      n_kv_heads=unless('num_key_value_heads', usual.kv_heads),
      head_dim=unless('head_dim', usual.head_size),
      norm_eps=_number(fields, 'rms_norm_eps', 1e-6),
      tied=_flag(fields, 'tie_word_embeddings'),
      **_read_rotary(fields),
      **own,
  )


def _read_mistral(fields: Fields) -> LlamaConfig:
  fields = {'num_key_value_heads': 8, 'sliding_window': 4096} | dict(fields)
  length = _size(fields, 'max_position_embeddings')
  window = _size(fields, 'sliding_window', length)
  if window < length:
    raise _wrong(
        'sliding_window', window, f'must be null or {length}, '
        'max_position_embeddings, as attention here has no window; within '
        f'{window} tokens it is the same, so lower max_position_embeddings'
    )
  return _read_llama(fields, {'hidden_act': 'silu'})


def _read_qwen2(fields: Fields) -> LlamaConfig:
  fields = {'num_key_value_heads': 32} | dict(fields)
  return _read_llama(fields, _QWEN2_OPTIONS, qkv_bias=True)


def _read_qwen3(fields: Fields) -> LlamaConfig:
  fields = {'num_key_value_heads': 32, 'head_dim': 128} | dict(fields)
  return _read_llama(fields, _QWEN3_OPTIONS, qk_norm=True)


def _read_rotary(fields: Fields) -> dict[str, Any]:
  """Reads `rope_parameters` (transformers 5), or the earlier fields."""
  rope = _given(fields, 'rope_parameters', fields.get('rope_scaling') or {})
  if not isinstance(rope, dict):
    name = 'rope_scaling'
    if fields.get('rope_parameters') is not None:
      name = 'rope_parameters'
    raise _wrong(name, rope, 'must be a JSON object')
  every = dict(fields) | rope
  kinds = {kind: kind for kind in _ROTARY}
  earlier = _choice(rope, 'type', kinds, 'default')
  kind = _choice(rope, 'rope_type', kinds, earlier)
  _refuse_other_options(every, {'partial_rotary_factor': 1.0})
  scaling = {
      ours: (_size if ours == 'rope_original_length' else _number)(rope, theirs)
      for theirs, ours in _ROTARY[kind].items()
  }
  return scaling | dict(
      rope_theta=_number(every, 'rope_theta', 10000.0),
      rope_scaling='none' if kind == 'default' else kind,
  )


def _refuse_multipliers(c: DecoderConfig, kind: str) -> None:
  for name, neutral in (
      ('embeddings_scale', 1.0),
      ('logits_scale', 1.0),
      ('attention_by_size', False),
  ):
    value = getattr(c, name)
    if value != neutral:
      raise ValueError(
          f'{name} is {value}, a multiplier of muP for which {kind} has no '
          f'field; only models where it is {neutral} can be exported.'
      )


def _write_gpt(c: GPTConfig) -> dict[str, Any]:
  _refuse_multipliers(c, 'GPT-2')
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
      scale_attn_by_inverse_layer_idx=c.attention_by_layer,
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
  kind, options, name = 'llama', _LLAMA_OPTIONS, 'Llama'
  if c.qk_norm:
    kind, options, name = 'qwen3', _QWEN3_OPTIONS, 'Qwen3'
  elif c.qkv_bias:
    kind, options, name = 'qwen2', _QWEN2_OPTIONS, 'Qwen2'
  _refuse_multipliers(c, name)
  return options | dict(
      model_type=kind,
      architectures=[f'{name}ForCausalLM'],
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


_READERS: dict[str, Callable[[Fields], GPTConfig | LlamaConfig]] = {
    'gpt2': _read_gpt,
    'llama': _read_llama,
    'mistral': _read_mistral,
    'qwen2': _read_qwen2,
    'qwen3': _read_qwen3,
}


def _are_tokens(ids: Any, vocab_size: int) -> bool:
  """Returns whether the argument is an id or a list of ids."""
  ids = ids if isinstance(ids, list) else [ids]
  return bool(ids) and all(
      type(x) is int and 0 <= x < vocab_size for x in ids
  )


# Fields of files of others, read with checked types; all functions raise
# ValueError for a field that is missing or of another type.


def _given(fields: Fields, name: str, default: Any = None) -> Any:
  """Returns a field, or the default if it is missing or null."""
  value = fields.get(name)
  value = default if value is None else value
  if value is None:
    raise ValueError(f'{name} is missing; add it, or fetch the file again.')
  return value


def _size(fields: Fields, name: str, default: int | None = None) -> int:
  """Returns a field with a positive integer."""
  value = _given(fields, name, default)
  if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
    raise _wrong(name, value, f'must be an integer from 1 to {_LARGEST_SIZE}')
  return value


def _number(fields: Fields, name: str, default: float | None = None) -> float:
  """Returns a field with a positive number."""
  value = _given(fields, name, default)
  if type(value) not in (int, float) or not 0 < value <= _LARGEST_NUMBER:
    raise _wrong(name, value, 'must be a positive number that fits float32')
  return float(value)


def _flag(fields: Fields, name: str) -> bool:
  """Returns a field with a boolean, `False` if it is missing."""
  value = _given(fields, name, False)
  if type(value) is not bool:
    raise _wrong(name, value, 'must be true or false')
  return value


def _choice(
    fields: Fields,
    name: str,
    known: Mapping[str, T],
    default: str | None = None,
) -> T:
  """Returns the value in a table of the name in a field."""
  value = _given(fields, name, default)
  if not isinstance(value, str) or value not in known:
    names = ' or '.join(map(repr, known))
    raise _wrong(name, value, f'must be {names}')
  return known[value]


def _refuse_other_options(fields: Fields, computed: Fields) -> None:
  """Raises ValueError unless optional fields have the only supported values."""
  for name, value in computed.items():
    actual = _given(fields, name, value)
    if actual != value:
      raise _wrong(
          name, actual, f'must be {value!r}, the only value that is supported'
      )


def _wrong(name: str, value: Any, demand: str) -> ValueError:
  # reprlib shortens values, which may be long or deeply nested.
  return ValueError(f'{name} is {reprlib.repr(value)}; it {demand}.')
