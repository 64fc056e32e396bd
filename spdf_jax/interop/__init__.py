# SPDX-License-Identifier: Apache-2.0
"""Weights in Hugging Face's formats, and the protocol of JaxPruner."""

from spdf_jax.interop.layouts import stack_layers
from spdf_jax.interop.layouts import unstack_layers
from spdf_jax.interop.read_hf import check_hf
from spdf_jax.interop.read_hf import HFModel
from spdf_jax.interop.read_hf import load_hf
from spdf_jax.interop.read_hf import load_listed
from spdf_jax.interop.read_hf import mask_of_zeros
from spdf_jax.interop.updater import Updater
from spdf_jax.interop.write_hf import save_hf

__all__ = [
    'HFModel',
    'Updater',
    'check_hf',
    'load_hf',
    'load_listed',
    'mask_of_zeros',
    'save_hf',
    'stack_layers',
    'unstack_layers',
]
