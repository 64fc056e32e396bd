"""Models by name, in the sizes of the papers."""

import dataclasses
from typing import Any

from spdf_jax.models.gpt import GPT
from spdf_jax.models.gpt import GPTConfig
from spdf_jax.names import lookup

PRESETS = {
    # Ours: what two CPU cores train in minutes.
    'gpt-mini': GPTConfig(1024, 3, 4, 128, 512, 128),
    # SPDF, table 1 of the appendix.
    'gpt2-small': GPTConfig(50257, 12, 12, 768, 3072, 2048),
    'gpt3-xl': GPTConfig(50257, 24, 16, 2048, 8192, 2048),
}


def create_model(preset: str, **overrides: Any) -> GPT:
  """Builds a model by the name of its preset.

  Args:
    preset: A key of `PRESETS`.
    **overrides: Fields of `GPTConfig` to change; `None` keeps the preset's.

  Returns:
    The Flax module.

  Raises:
    ValueError: the preset or a field is unknown, or a size is impossible.

  Example:
    >>> create_model('gpt2-small', scan_layers=True).config.n_layers
    12
  """
  config = lookup('preset', preset, PRESETS)
  fields = {field.name: field.type for field in dataclasses.fields(config)}
  for name in overrides:
    lookup('model field', name, fields)
  given = {k: v for k, v in overrides.items() if v is not None}
  return GPT(dataclasses.replace(config, **given))
