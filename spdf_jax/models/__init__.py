"""Flax models with masked Dense layers."""

from spdf_jax.models.gpt import GPT
from spdf_jax.models.gpt import GPTConfig
from spdf_jax.models.gpt import sparsifiable
from spdf_jax.models.layers import MaskedDense
from spdf_jax.models.presets import create_model
from spdf_jax.models.presets import PRESETS

__all__ = [
    'GPT',
    'PRESETS',
    'GPTConfig',
    'MaskedDense',
    'create_model',
    'sparsifiable',
]
