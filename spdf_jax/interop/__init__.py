# SPDX-License-Identifier: Apache-2.0
"""Conversion of weights to and from Hugging Face's formats."""

from spdf_jax.interop.agreement import check_hf
from spdf_jax.interop.exports import save_hf
from spdf_jax.interop.huggingface import HFModel
from spdf_jax.interop.huggingface import load_hf
from spdf_jax.interop.huggingface import load_listed
from spdf_jax.interop.layouts import stack_layers
from spdf_jax.interop.layouts import unstack_layers

__all__ = [
    'HFModel',
    'check_hf',
    'load_hf',
    'load_listed',
    'save_hf',
    'stack_layers',
    'unstack_layers',
]
