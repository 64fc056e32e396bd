"""Weights that travel: our models to Hugging Face's layout, and back."""

from spdf_jax.interop.agreement import check_hf
from spdf_jax.interop.huggingface import HFModel
from spdf_jax.interop.huggingface import load_hf
from spdf_jax.interop.huggingface import save_hf
from spdf_jax.interop.layer_names import stack_layers
from spdf_jax.interop.layer_names import unstack_layers

__all__ = [
    'HFModel',
    'check_hf',
    'load_hf',
    'save_hf',
    'stack_layers',
    'unstack_layers',
]
