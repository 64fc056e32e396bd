# SPDX-License-Identifier: Apache-2.0
"""Models by name, with the sizes of the papers."""

import dataclasses
from typing import Any

from spdf_jax import names
from spdf_jax.models import gpt
from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.gpt import GPTConfig
from spdf_jax.models.llama import Llama
from spdf_jax.models.llama import LlamaConfig


def _gpt(n_layers: int, n_heads: int, d_model: int, **fields: Any) -> GPTConfig:
  fields = dict(vocab_size=50257, max_length=2048, d_ff=4 * d_model) | fields
  return GPTConfig(
      n_layers=n_layers, n_heads=n_heads, d_model=d_model, **fields
  )


def _llama(
    n_layers: int, n_heads: int, d_model: int, d_ff: int, **fields: Any
) -> LlamaConfig:
  return LlamaConfig(32000, n_layers, n_heads, d_model, d_ff, 4096, **fields)


PRESETS = {
    # Ours, small enough to train on two CPU cores in minutes.
    'gpt-mini': GPTConfig(1024, 3, 4, 128, 512, 128),
    # SPDF, table 1 of the appendix; Brown et al., GPT-3, table 2.1.
    'gpt2-small': _gpt(12, 12, 768),
    'gpt3-xl': _gpt(24, 16, 2048),
    'gpt3-175b': _gpt(96, 96, 12288),
    # Iterative pruning, Cerebras, 2022.
    'gpt3-1.3b': _gpt(24, 16, 2048, vocab_size=50267),
    # Dey et al., Cerebras-GPT, table 1.
    'cerebras-gpt-111m': _gpt(10, 12, 768, activation='gelu'),
    'cerebras-gpt-256m': _gpt(14, 17, 1088, activation='gelu'),
    'cerebras-gpt-590m': _gpt(18, 12, 1536, activation='gelu'),
    'cerebras-gpt-1.3b': _gpt(24, 16, 2048, activation='gelu'),
    'cerebras-gpt-2.7b': _gpt(32, 32, 2560, activation='gelu'),
    'cerebras-gpt-6.7b': _gpt(32, 32, 4096, activation='gelu'),
    'cerebras-gpt-13b': _gpt(40, 40, 5120, activation='gelu'),
    # Dynamic sparsity, Cerebras, 2024: "Llama2 1.3B" without grouped queries.
    # Its sizes are our choice, since the post has them only in an image.
    'llama-1.3b': _llama(24, 16, 2048, 5504),  # our choice of sizes
    # Touvron et al., Llama 2, section 2.2, and Llama, table 2.
    'llama2-7b': _llama(32, 32, 4096, 11008),
}
"""Configs by name."""

_MODELS = {GPTConfig: gpt.GPT, LlamaConfig: Llama}


def create_model(preset: str, **overrides: Any) -> gpt.GPT | Llama:
  """Builds a model by the name of its preset.

  Args:
    preset: A key of `models.PRESETS`.
    **overrides: Values that replace those of fields of the preset, a
      `GPTConfig` or `LlamaConfig`; `None` keeps the preset's value.

  Returns:
    The Flax Linen module.

  Raises:
    ValueError: the preset or a field is unknown, or a value is not valid.

  Example:
    >>> create_model('gpt2-small', scan_layers=True).config.n_layers
    12
  """
  config = names.lookup('preset', preset, PRESETS)
  fields = {field.name: field.type for field in dataclasses.fields(config)}
  for name in overrides:
    names.lookup('model field', name, fields)
  given = {k: v for k, v in overrides.items() if v is not None}
  return model_of(dataclasses.replace(config, **given))


def model_of(config: DecoderConfig) -> gpt.GPT | Llama:
  """Builds the `GPT` of a `GPTConfig`, or the `Llama` of a `LlamaConfig`."""
  return _MODELS[type(config)](config)
