# SPDX-License-Identifier: Apache-2.0
"""Flax models with masked Dense layers."""

from spdf_jax.models.attention import create_cache
from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.decoder import partition_spec
from spdf_jax.models.decoder import sparsifiable
from spdf_jax.models.gpt import GPT
from spdf_jax.models.gpt import GPTConfig
from spdf_jax.models.layers import MaskedDense
from spdf_jax.models.llama import Llama
from spdf_jax.models.llama import LlamaConfig
from spdf_jax.models.model import CACHE
from spdf_jax.models.model import Model
from spdf_jax.models.model import PACKED
from spdf_jax.models.model import READ_OUT
from spdf_jax.models.model import Sizes
from spdf_jax.models.presets import create_model
from spdf_jax.models.presets import model_of
from spdf_jax.models.presets import PRESETS
from spdf_jax.models.pruning import prune_blocks

__all__ = [
    'CACHE',
    'GPT',
    'PACKED',
    'PRESETS',
    'READ_OUT',
    'DecoderConfig',
    'GPTConfig',
    'Llama',
    'LlamaConfig',
    'MaskedDense',
    'Model',
    'Sizes',
    'create_cache',
    'create_model',
    'model_of',
    'partition_spec',
    'prune_blocks',
    'sparsifiable',
]
