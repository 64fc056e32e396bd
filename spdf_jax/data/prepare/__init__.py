# SPDX-License-Identifier: Apache-2.0
"""Preparation of corpora: documents become token files."""

from spdf_jax.data.prepare.files import prepare_files
from spdf_jax.data.prepare.files import prepare_shard
from spdf_jax.data.prepare.shards import join_shards
from spdf_jax.data.prepare.state import PreparationProgress

__all__ = [
    'PreparationProgress', 'join_shards', 'prepare_files', 'prepare_shard',
]
